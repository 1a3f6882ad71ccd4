"""What drawn calls (tests/search) of cce_torch.linear_log_probs do not ask: graphs, programs, operators, errors."""

import contextlib
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from cce_torch import linear_log_probs
from cce_torch.call import Call, Operands
from cce_torch.in_torch import blocks, largest, reference, rule
from cce_torch.on_jax import bridge, programs
from tests.call_torch import small_blocks
from tests.test_log_probs import COLD, cold, held_cold
from tests.test_structure import flops

IGNORED = -100


def made(tokens=(3, 7), width=16, vocabulary=83, dtype=torch.float32, ignored=0.3) -> dict[str, Any]:
    """The tensors of a call."""
    rng = np.random.default_rng(0)
    e, c, bias = (
        torch.tensor(rng.standard_normal(shape), dtype=torch.float32)
        for shape in ((*tokens, width), (vocabulary, width), (vocabulary,))
    )
    targets = torch.tensor(rng.integers(0, vocabulary, tokens))
    targets[torch.tensor(rng.uniform(size=tokens)) < ignored] = IGNORED
    return {"e": e.to(dtype), "c": (c * 3 / width**0.5).to(dtype), "bias": bias.to(dtype), "targets": targets}


@pytest.mark.parametrize(("impl", "frozen"), [("cce", None), ("chunked", "c"), ("torch_compile", None)])
def test_a_detached_entropy(impl, frozen, monkeypatch):
    """It has no gradient, and the backward pass no mean. What is saved is what is without an entropy.

    That is exponentials, or m where the gradient of e alone is wanted. Also where a profiler looks on.
    """
    means, left, program, run = [], [], programs._gradients_program, programs.gradients
    monkeypatch.setattr(programs, "_gradients_program", lambda k, *x: means.append(k.call.with_mean) or program(k, *x))

    def recorded(k, given, numbers, saved, *x):
        left.append([y for y in saved.residuals if y is not None])
        return run(k, given, numbers, saved, *x)

    monkeypatch.setattr(programs, "gradients", recorded)
    x, found = made((40,), 20, 232, torch.bfloat16), []
    for entropy, profiled in ((False, False), ("detached", False), ("detached", True)):
        own = {k: x[k].clone().requires_grad_(k != frozen) for k in ("e", "c")}
        with small_blocks():
            of = linear_log_probs(**own, targets=x["targets"], entropy=entropy, impl=impl, memory_budget="all")
            assert not entropy or not of.entropy.requires_grad
            with torch.autograd.profiler.profile() if profiled else contextlib.nullcontext():
                found.append(torch.autograd.grad(of.log_probs.sum(), [y for y in own.values() if y.requires_grad]))
    assert impl == "torch_compile" or ([len(y) for y in left], set(means)) == ([1, 1, 1], {False})
    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0])


E, C, T = torch.ones(2, 3, 4), torch.ones(9, 4), torch.zeros(2, 3, dtype=torch.int64)


COUNTED = (blocks, "product"), (largest.Largest, "add")


def test_the_smallest_budget_does_not_mean_one_token_and_one_column_at_a_time():
    """Which would be 40,000 products of matrices here, or as many blocks whose largest logits are looked for."""
    operands = Operands(torch.randn(20, 16), torch.randn(2000, 16), None, torch.zeros(20), None)
    counted = [mock.patch.object(x, n, autospec=True, side_effect=getattr(x, n)) for x, n in COUNTED]
    with counted[0] as products, counted[1] as looks:
        blocks.numbers(operands, Call(top_k=3, memory_budget=0), 1.0)
    assert 1 <= products.call_count <= 4
    assert 1 <= looks.call_count <= 4


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_of_equal_logits_the_lowest_ids_come_first(vocabulary, k, dtype, seed):
    k, rng = min(k, vocabulary), np.random.default_rng(seed)
    z = torch.tensor(rng.integers(-2, 3, (7, vocabulary)) * rng.choice([0.0, -0.0, 1.0, np.inf], (1, vocabulary)))
    z = torch.where(z.isnan(), 0, z).to(dtype)
    values, ids = torch.sort(z, dim=1, descending=True, stable=True)
    found = largest.merged(*largest._largest(z, k), k)
    assert torch.equal(found[1], ids[:, :k])
    assert torch.equal(found[0], values[:, :k])


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_equal_rows_of_the_classifier(impl, monkeypatch):
    """Over windows of the vocabulary, one token after another, too."""
    monkeypatch.setattr(largest, "ROOM", 1)
    with small_blocks(), mock.patch.object(blocks, "_windows", lambda e, c, _: blocks.runs(len(c), 3)):
        found = linear_log_probs(E, C, T, predicted=True, top_k=5, impl=impl)
    assert (found.predicted == 0).all()
    assert (found.top_ids == torch.arange(5)).all()


@pytest.mark.parametrize("of", [rule, reference])
def test_the_logit_of_no_id_is_0(of):
    """Else processes that share the vocabulary, each with ids of its own, would add others' logits to an id's."""
    x = made()
    ids = torch.full((21, 2), -1, dtype=torch.int32)
    columns = torch.zeros(21, dtype=torch.int32)
    operands = Operands(x["e"].flatten(0, 1), x["c"], x["bias"], columns, None, None, ids)
    more = ("linear_log_probs",) if of is rule else ()  # the public function
    with small_blocks():
        found = of.numbers(operands, Call(ids=2), 1.0, *more).statistics
    assert not found[3:5].any()
    assert found[2].all()


@pytest.mark.parametrize("impl", ["torch_compile", "reference", "chunked"])
@pytest.mark.parametrize("temperature", COLD)
def test_small_temperatures_keep_the_digits(impl, temperature):
    arrays, want = cold(temperature)
    e, c, targets = (torch.tensor(x) for x in arrays)
    for of_kind in (temperature, torch.full((24,), temperature)):
        options: Any = {"temperature": of_kind, "entropy": True, "impl": impl, "ids": torch.arange(3).expand(24, 3)}
        with small_blocks():
            numbers = linear_log_probs(e.requires_grad_(), c.requires_grad_(), targets, **options)
            of_e, of_c = torch.autograd.grad(-numbers.log_probs.sum(), (e, c))
        found = {"log_probs": numbers.log_probs, "entropy": numbers.entropy, "ids": numbers.id_log_probs}
        held_cold({name: x.detach().numpy() for name, x in {**found, "e": of_e, "c": of_c}.items()}, want)


@pytest.fixture
def products(monkeypatch) -> list[float]:
    """How many products of e and c each JAX program does, in turn."""
    found, run = [], bridge.run

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype)[6:]) if isinstance(x, torch.Tensor) else x

    def counted(program, inputs, outputs, scratch=()):
        jaxpr = jax.make_jaxpr(program)(*map(shape, (*scratch, *outputs, *inputs))).jaxpr
        found.append(flops(jaxpr) / (2.0 * 40 * 24 * 600))
        return run(program, inputs, outputs, scratch)

    monkeypatch.setattr(bridge, "run", counted)
    return found


@pytest.mark.parametrize("impl", ["cce", "chunked"])
def test_one_product_gives_all_numbers(impl, products):
    """And the backward pass takes three: the logits, de and dc."""
    x = made((40,), 24, 600)
    leaves, options = [x[name].requires_grad_() for name in ("e", "c")], {"top_k": 5, "predicted": True}
    with FlopCounterMode(display=False) as in_torch:
        found = linear_log_probs(*leaves, x["targets"], impl=impl, mean_logit=True, entropy=impl != "cce", **options)
    assert in_torch.get_total_flops() == 0
    assert products == [pytest.approx(1)]
    if impl == "chunked":  # products of kernels are not counted
        torch.autograd.grad(found.log_probs.sum(), leaves)
        assert products == [pytest.approx(1), pytest.approx(3)]
