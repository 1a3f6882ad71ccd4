"""cce_torch with saved exponentials: cce_jax's bits, nothing saved in vain, and every way to run a backward pass."""

import gc
from functools import lru_cache
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch

import cce_torch
from cce_kernels.exponentials import saved_shape
from cce_torch import linear_cross_entropy
from cce_torch.on_jax import bridge, kinds, programs
from tests import call, call_torch
from tests.call_torch import assert_same_bits, tensor
from tests.cases import Case, Inputs, inputs
from tests.test_budget import ALL, TOKENS, D, V

COLUMNS = saved_shape(1, V)[1]  # of saved exponentials
EACH = {"reduction": "none", "return_lse": True}


def some(arrays=(), options=None, seed=0) -> Inputs:
    given = inputs(Case("", (TOKENS,), D, V, arrays, 0.0, options or {}), "bfloat16", seed)
    given.targets[::5] = -100
    return given


def example():
    given = some()
    return tensor(given.e).requires_grad_(), tensor(given.c).requires_grad_(), tensor(given.targets)


def loss(e, c, t, budget=ALL):
    return linear_cross_entropy(e, c, t, impl="cce", memory_budget=budget, reduction="none")


def gradients(value, *leaves, **more):
    return torch.autograd.grad(value, leaves, torch.ones_like(value), **more)


@pytest.fixture
def saved(monkeypatch) -> list[tuple[int, int] | None]:
    """The shape of what each forward pass saves; None if it saves nothing."""
    shapes, real = [], programs.loss

    def recorded(*arguments, **options):
        result = real(*arguments, **options)
        left = [x for x in result.residuals if x is not None]
        shapes.append(tuple(left[0].shape) if left else None)
        return result

    monkeypatch.setattr(programs, "loss", recorded)
    return shapes


@pytest.mark.parametrize("budget", [0, ALL])
def test_the_bits_are_those_of_cce_jax(budget, saved):
    given = some(("bias",), EACH)
    theirs, ours = (run(given, EACH, "cce", memory_budget=budget) for run in (call.run, call_torch.run))
    assert saved == [(TOKENS, COLUMNS) if budget else None]
    np.testing.assert_array_equal(theirs[0], ours[0])
    np.testing.assert_array_equal(theirs[1], ours[1])
    for name, gradient in ours[2].items():
        np.testing.assert_array_equal(gradient, theirs[2][name], err_msg=name)


def test_a_graph_knows_to_which_size_it_was_padded_when_its_programs_have_been_freed(monkeypatch):
    for name in ("_loss_program", "_gradients_program", "handover_of"):
        monkeypatch.setattr(programs, name, lru_cache(getattr(programs, name).__wrapped__))
    monkeypatch.setattr(kinds, "_kinds", WeakValueDictionary())
    monkeypatch.setattr(kinds, "SMALLEST", 16)
    monkeypatch.setattr(kinds, "EXACT", 0)
    e, c, t = example()
    value = loss(e, c, t)
    expected = gradients(value, e, c, retain_graph=True)
    for name in ("_loss_program", "_gradients_program", "handover_of"):
        getattr(programs, name).cache_clear()
    gc.collect()
    monkeypatch.setattr(kinds, "EXACT", 4)  # another Kind would not pad
    (kind,) = kinds._kinds.values()
    assert kind.sizes(TOKENS) > TOKENS
    assert_same_bits(gradients(value, e, c), expected)
    del value, kind
    gc.collect()
    programs._gradients_program.cache_clear()
    programs.handover_of.cache_clear()
    assert not kinds._kinds


def test_only_what_a_backward_pass_will_read_is_saved(saved):
    e, c, t = example()
    expected = loss(e, c, t).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(loss(e, c, t), expected)
    loss(e.detach(), c.detach(), t)
    weight = torch.rand(TOKENS, requires_grad=True)
    options = dict(impl="cce", memory_budget=ALL, reduction="none")
    linear_cross_entropy(e.detach(), c.detach(), t, token_weight=weight, **options).sum().backward()
    loss(e.detach(), c, t)
    loss(e, c.detach(), t)
    assert saved == [(TOKENS, COLUMNS)] + 4 * [None] + 2 * [(TOKENS, COLUMNS)]
    *_, left = (x for x in loss(e, c, t).grad_fn.saved_tensors if x is not None)
    assert left.shape == (TOKENS, COLUMNS)


def test_compiled_code_and_func_grad_save_nothing_and_are_right(saved):
    e, c, t = example()
    expected = gradients(loss(e * 2, c, t, 0), e, c)
    step = torch.compile(lambda e, c, t: loss(e * 2, c, t), fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients(step(e, c, t), e, c), expected)
    assert torch.equal(torch.func.grad(lambda e: loss(e * 2, c.detach(), t).sum())(e), expected[0])
    assert saved == [None, None, None]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_small_call_is_one_program_and_pytorch_multiplies(device, monkeypatch):
    """In float32, rounded once. A cotangent of 0.3 that was rounded to the gradients' type first is 2.6e-3 off."""
    names, run = [], bridge.run
    monkeypatch.setattr(bridge, "run", lambda program, *x: (names.append(program.__name__), run(program, *x))[1])
    e, c, t = (x.detach().to(device) for x in example())
    e, c, weight = e.requires_grad_(), c.requires_grad_(), torch.rand(TOKENS, device=device)
    options = dict(impl="cce", memory_budget=ALL)
    value = 0.3 * linear_cross_entropy(e, c, t, token_weight=weight.clone(), **options)
    others = 0.3 * linear_cross_entropy(e, c, t, token_weight=weight.requires_grad_(), **options)
    first = [x.clone() for x in torch.autograd.grad(value, (e, c), retain_graph=True)]
    with torch.autograd.profiler.profile():  # which sees operators, and so they run
        assert_same_bits(torch.autograd.grad(value, (e, c), retain_graph=True), first)
    assert_same_bits(torch.autograd.grad(value, (e, c)), first)
    assert names == 2 * ["torch_at_once"]
    *again, of_weight = torch.autograd.grad(others, (e, c, weight))
    assert_same_bits(again, first)
    assert names == [*2 * ["torch_at_once"], "torch_finish"]
    exact = [x.detach().double().requires_grad_() for x in (e, c, weight)]
    each = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, t.long(), reduction="none")
    value = 0.3 * (exact[2] * each).sum() / (exact[2] * (t != -100)).sum()
    for x, y in zip((*first, of_weight), torch.autograd.grad(value, exact), strict=True):
        x = x.double()
        assert abs((x * y).sum() / (y * y).sum() - 1) < 1.5e-3
        assert (x - y).norm() < 4e-3 * y.norm()


def test_a_small_call_is_two_programs_where_its_float32_gradients_do_not_fit(monkeypatch):
    """The bytes are those that explain tells."""
    names, run = [], bridge.run
    monkeypatch.setattr(bridge, "run", lambda program, *x: (names.append(program.__name__), run(program, *x))[1])
    e, c, t = example()
    held = cce_torch.explain(e, c, impl="cce", memory_budget=ALL).held
    assert held > 4 * (e.numel() + c.numel())
    for memory_budget in (held, held - 1):
        linear_cross_entropy(e, c, t, impl="cce", memory_budget=memory_budget).backward()
    assert names == ["torch_at_once", "torch_loss", "torch_gradients"]
