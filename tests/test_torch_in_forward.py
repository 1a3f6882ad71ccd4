"""cce_torch with gradients that the forward pass forms: what runs, what is held, bits. Its numbers: test_calls.py."""

import gc
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cce_jax import plans
from cce_kernels.plan import residuals
from cce_torch import (
    LinearCrossEntropy,
    LinearCrossEntropyHead,
    linear_cross_entropy,
    linear_divergence,
    linear_token_loss,
    ops,
)
from cce_torch.call import Residuals
from cce_torch.on_jax import bridge, kinds, programs
from tests.call_torch import assert_same_bits
from tests.test_in_forward import in_forward as on  # noqa: F401  # for all tests of this file

DTYPES = torch.float32, torch.bfloat16, torch.float16
ONCE = ["torch_begin", "torch_finish"]  # the programs of a step
AGAIN = ["torch_loss", "torch_gradients"]
TOLERANCE = 2.0**-7


@pytest.fixture(autouse=True, scope="module")
def decided_again(on):  # noqa: F811
    programs.handover_of.cache_clear()
    yield
    programs.handover_of.cache_clear()
    ops._traced.clear()


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The names of the programs that ran."""
    names, real = [], bridge.run

    def recorded(program, *arguments, **options):
        names.append(program.__wrapped__.__name__)
        return real(program, *arguments, **options)

    monkeypatch.setattr(bridge, "run", recorded)
    return names


def left(value: torch.Tensor) -> list[torch.Tensor]:
    """What the forward pass left for the gradients of the loss."""
    return [x for x in value.grad_fn.saved_tensors[-len(Residuals._fields) :] if x is not None]


def example(tokens=600, width=40, vocabulary=300, dtype=torch.bfloat16, seed=0, ignored=0.2, wide=False, axis=0):
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    c = torch.randn(vocabulary, width, generator=generator).to(torch.float32 if wide else dtype)
    c = (c.T.contiguous().T if axis else c).requires_grad_()
    t = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return e, c, torch.where(torch.rand(tokens, generator=generator) < ignored, -100, t)


def loss(e, c, t, **options):
    return linear_cross_entropy(e, c, t, **{"impl": "chunked", "precision": "highest", **options})


def gradients(value, *leaves, **more):
    return torch.autograd.grad(value, leaves, **more)


# Of tensors e, c, t: losses whose gradients the forward pass forms, and multiplies in the backward pass.
FORMED = {
    "loss": loss,
    "token loss": lambda e, c, t: linear_token_loss(e, c, t, lambda x: x.log_probs**2, impl="chunked"),
    "divergence": lambda e, c, t: linear_divergence(e, c, -e.detach(), c.detach(), impl="chunked"),
    "divergence in PyTorch": lambda e, c, t: linear_divergence(e, c, -e.detach(), c.detach(), impl="torch_compile"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMED)
def test_batched_cotangents_have_the_bits_of_one_after_another(name, dtype):
    """None is rounded twice, and the last one finds what was left as it was."""
    e, c, t = example(70, dtype=dtype)
    value, factors = FORMED[name](e, c, t), torch.tensor([1.0, 3e-4, -700.0])
    each = [gradients(value, e, c, grad_outputs=x, retain_graph=True) for x in factors]
    found = gradients(value, e, c, grad_outputs=factors, is_grads_batched=True)
    for x, *want in zip(found, *each, strict=True):
        assert_same_bits(x.unbind(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_again_over_a_kept_graph(dtype, ran):
    """The last backward pass gives the memory of what was formed to the gradients, which may be changed in place."""
    e, c, t = example(dtype=dtype, axis=dtype == torch.bfloat16)
    expected, twice = gradients(loss(e, c, t), e, c), gradients(2 * loss(e, c, t), e, c)
    ran.clear()
    value = loss(e, c, t)
    formed = [x.data_ptr() for x in left(value)[:2]]
    assert_same_bits(gradients(value, e, c, retain_graph=True), expected)
    assert_same_bits(gradients(value, e, retain_graph=True), expected[:1])
    assert_same_bits(gradients(value, c, retain_graph=True), expected[1:])
    kept, found = gradients(2 * value, e, c, retain_graph=True), gradients(value, e, c)
    assert_same_bits([*kept, *found], [*twice, *expected])
    assert [x.data_ptr() for x in found] == formed
    assert not {x.data_ptr() for x in kept}.intersection(formed)
    for x in (*kept, *found):
        x *= 2  # no view that autograd forbids to change
    assert ran == ["torch_begin"] + 5 * ["torch_finish"]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(value, e, c)
    de, dc = gradients(loss(e, c, t) * torch.inf, e, c)
    assert not de[t == -100].any()
    assert not de[t != -100].isfinite().any(1).all()
    assert not dc.isfinite().any(1).all()
    assert not torch.stack(gradients(loss(e, torch.zeros_like(c), t) * 0.0, e)).any()


def test_grads_of_padded_tokens_may_be_changed_in_place(monkeypatch):
    monkeypatch.setattr(kinds, "EXACT", 0)
    monkeypatch.setattr(kinds, "_kinds", {})
    e, c, t = example(tokens=530)
    expected = gradients(loss(e, c, t), e, c)
    for k in (1, 2):
        loss(e, c, t).backward()
        assert_same_bits([e.grad, c.grad], [k * x for x in expected])
    for x, y in zip((e, c), expected, strict=True):
        x.grad *= 3
        assert torch.equal(x.grad, 6 * y)


def test_a_loss_used_twice_and_two_pending_losses():
    e, c, t = example(dtype=torch.float32)
    first, second = gradients(loss(e, c, t), e, c), gradients(loss(e, c, t.flip(0)), e, c)
    one, other = loss(e, c, t), loss(e, c, t.flip(0))
    found = gradients(one + 2 * other + 3 * one, e, c)
    for x, y, z in zip(found, first, second, strict=True):
        torch.testing.assert_close(x, 4 * y + 2 * z)


@pytest.mark.parametrize("done", [False, True])
def test_what_was_formed_is_freed(done):
    """With the graph, or by the backward pass, even if the loss is kept for a log."""
    e, c, t = example()
    value = loss(e, c, t)
    formed = [weakref.ref(x) for x in left(value)]
    assert len(formed) == 3, "de, dc and its steps"
    if done:
        gradients(value, e, c)
    else:
        del value
    gc.collect()
    assert all(x() is None for x in formed)


def test_what_was_formed_is_used_where_lse_has_no_cotangent(ran):
    e, c, t = example()
    value, lse = loss(e, c, t, return_lse=True)
    gradients(value - lse.sum(), e, c)
    assert ran == ["torch_begin", "torch_gradients"]
    ran.clear()
    value, _ = loss(e, c, t, return_lse=True)
    assert_same_bits(gradients(value, e, c), gradients(loss(e, c, t), e, c))
    assert ran == ONCE + ONCE


def test_only_what_is_wanted_is_formed(ran):
    e, c, t = example()
    b = torch.zeros(300, dtype=e.dtype, requires_grad=True)

    def formed(*leaves):
        return [x.shape for x in left(loss(*leaves[:2], t, bias=leaves[2]))]

    found = formed(e, c, b)
    assert [*found[:2], found[3]] == [e.shape, c.shape, b.shape]
    assert formed(e, c.detach(), b.detach()) == [e.shape]
    assert formed(e.detach(), c, None)[0] == c.shape
    assert formed(e.detach(), c.detach(), b) == [b.shape]
    ran.clear()
    weight = torch.rand(600, requires_grad=True)
    gradients(loss(e.detach(), c.detach(), t, token_weight=weight), weight)
    with torch.no_grad():
        loss(e, c, t)
    with torch.inference_mode():
        loss(e, c, t)
    assert ran == ["torch_loss", "torch_gradients", "torch_loss", "torch_loss"]


def test_what_a_hook_keeps_stays_as_it_is():
    e, c, t = example()
    expected = gradients(loss(e, c, t), e, c)
    kept, copies = [], []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or copies.append(x.clone()) or x, lambda x: x
    ):
        value = loss(e, c, t)
    assert_same_bits(gradients(value, e, c), expected)
    assert_same_bits(kept, copies)


def test_checkpoints():
    """In one step: test_torch_calls.py. A graph that is kept, and selective checkpoints."""
    e, c, t = example()
    expected = gradients(loss(e * 2, c, t), e, c)
    kept = checkpoint(lambda e: loss(e * 2, c, t), e, use_reentrant=False)
    for _ in range(2):
        assert_same_bits(gradients(kept, e, c, retain_graph=True), expected)
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        contexts = partial(create_selective_checkpoint_contexts, lambda *_, policy=policy, **__: policy)
        value = checkpoint(lambda e: loss(e * 2, c, t), e, use_reentrant=False, context_fn=contexts)
        assert_same_bits(gradients(value, e, c), expected)


NEAR = partial(torch.testing.assert_close, rtol=2**-6, atol=2**-12)


def test_compiled_code(ran):
    """With static shapes, and a budget that holds de and dc besides a chunk. Each tolerance is a constant of it."""
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def run(e, c, t, tolerance):
        return 3 * loss(e * 2, c, t, gradient_tolerance=tolerance)

    step, seen = torch.compile(run, fullgraph=True, backend=counted), []
    for tokens, tolerance in ((600, 0.0), (600, TOLERANCE), (600, 0.0), (600, TOLERANCE), (610, 0.0), (620, 0.0)):
        e, c, t = example(tokens)
        ran.clear()
        found = gradients(step(e, c, t, tolerance), e, c)
        assert ran == (ONCE if tokens == 600 else AGAIN)
        NEAR(found, gradients(run(e, c, t, 0.0), e, c))
        seen.append(len(graphs))
    assert seen[0] < seen[1] == seen[3], "nothing is compiled again for a tolerance that came before"


@pytest.mark.parametrize("more", [{"memory_budget": 100000}, {"return_lse": True}, {"reduction": "none"}])
def test_compiled_code_that_computes_the_logits_again(more, ran):
    torch._dynamo.reset()
    e, c, t = example()

    def step(e, c, t):
        found = loss(e, c, t, **more)
        return (found[0] if isinstance(found, tuple) else found).sum()

    expected = gradients(step(e, c, t), e, c)
    ran.clear()
    NEAR(gradients(torch.compile(step, fullgraph=True, backend="aot_eager")(e, c, t), e, c), expected)
    assert ran == AGAIN


@pytest.mark.parametrize(("impl", "dtype"), [*(("chunked", x) for x in DTYPES), ("cce", torch.bfloat16)])
def test_on_a_cpu_a_tolerance_leaves_out_nothing(impl, dtype, ran):
    """The bits are those of the exact gradients."""
    e, c, t = example(*((70, 20, 90) if impl == "cce" else (600, 40, 300)), dtype=dtype)
    bias = torch.zeros(len(c), dtype=dtype, requires_grad=True)
    exact, value = (loss(e, c, t, bias=bias, impl=impl, gradient_tolerance=x) for x in (0.0, TOLERANCE))
    assert Residuals._fields == residuals.Residuals._fields
    assert_same_bits([value, *gradients(value, e, c, bias)], [exact, *gradients(exact, e, c, bias)])
    assert ran[:2] == ["torch_begin"] * 2 or impl == "cce"


def test_modules_take_a_tolerance():
    e, c, t = example()
    options = {"impl": "chunked", "precision": "highest", "gradient_tolerance": TOLERANCE}
    head = LinearCrossEntropyHead(40, 300, bias=False, dtype=torch.bfloat16, **options)
    for run in (lambda: LinearCrossEntropy(**options)(e, c, t), lambda: head(e, t)):
        programs.handover_of.cache_clear()
        with mock.patch.object(plans, "plan_of", wraps=plans.plan_of) as planned:
            run()
        assert {x.args[0].gradient_tolerance for x in planned.call_args_list} == {TOLERANCE}
