"""What drawn calls (tests/search) of cce_torch.linear_log_probs do not ask: graphs, programs, operators, errors."""

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cce_torch import linear_log_probs
from cce_torch.call import Call, Operands
from cce_torch.in_torch import blocks, largest, reference, rule
from cce_torch.on_jax import programs
from cce_torch.operators import flat
from tests.call_torch import small_blocks
from tests.test_log_probs import COLD, cold, held_cold

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IGNORED = -100


class Drawn(NamedTuple):
    """The tensors of a call, its options, and the cotangents of log_probs, lse and entropy, (3, ...)."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    of: torch.Tensor


def made(
    tokens=(3, 7), width=16, vocabulary=83, dtype="float32", *, bias=False, temperature="none", ignored=0.3, **options
) -> Drawn:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    c = (normal(vocabulary, width) * 3 / width**0.5).to(TYPES[dtype])
    found: dict[str, Any] = {"e": normal(*tokens, width).to(TYPES[dtype]), "c": c}
    found["bias"] = normal(vocabulary).to(TYPES[dtype]) if bias else None
    found["targets"] = torch.tensor(rng.integers(0, vocabulary, tokens))
    found["targets"][torch.tensor(rng.uniform(size=tokens)) < ignored] = IGNORED
    options |= {"temperature": 0.7} if temperature == "number" else {}
    return Drawn(found, options, normal(3, *tokens[:-1], tokens[-1] - options.get("shift", 0)))


@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_a_detached_entropy_has_no_gradient_and_its_backward_pass_no_mean(impl, monkeypatch):
    run, seen = programs._gradients_program, []
    monkeypatch.setattr(programs, "_gradients_program", lambda k, *x: (seen.append(k.call.with_mean), run(k, *x))[1])
    x = made(dtype="bfloat16")
    with small_blocks():
        for entropy in ("detached", True):
            leaves = {k: y.clone().requires_grad_() for k, y in x.tensors.items() if k in ("e", "c")}
            found = linear_log_probs(*leaves.values(), x.tensors["targets"], impl=impl, entropy=entropy)
            assert found.entropy.requires_grad == (entropy is True)
            torch.autograd.grad((found.log_probs + (found.entropy if entropy is True else 0)).sum(), leaves.values())
    if impl == "chunked":
        assert seen == [False, True]


@pytest.mark.parametrize(("impl", "frozen"), [("cce", None), ("chunked", "c")])
def test_what_is_saved_with_a_detached_entropy(impl, frozen, monkeypatch):
    """As without one: exponentials, or m where the gradient of e alone is wanted. Also where a profiler looks on."""
    left, run = [], programs.gradients
    monkeypatch.setattr(
        programs,
        "gradients",
        lambda k, given, numbers, saved, *x: (
            left.append([y for y in saved.residuals if y is not None]),
            run(k, given, numbers, saved, *x),
        )[1],
    )
    x, found = made((200,), dtype="bfloat16", vocabulary=256, width=64), []
    for entropy, profiled in ((False, False), ("detached", False), ("detached", True)):
        own = {k: x.tensors[k].clone().requires_grad_(k != frozen) for k in ("e", "c")}
        numbers = linear_log_probs(**own, targets=x.tensors["targets"], entropy=entropy, impl=impl, memory_budget="all")
        with torch.autograd.profiler.profile() if profiled else contextlib.nullcontext():
            found.append(torch.autograd.grad(numbers.log_probs.sum(), [y for y in own.values() if y.requires_grad]))
    assert [len(y) for y in left] == [1, 1, 1]
    for gradients in found[1:]:
        for y, z in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(y, z)


def test_new_temperatures_compile_nothing_and_1_is_none(monkeypatch):
    x, made_programs = made(entropy=True), []
    jitted = programs.jitted
    monkeypatch.setattr(programs, "jitted", lambda *y: (made_programs.append(y[0].__name__), jitted(*y))[1])

    def run(temperature):
        e = x.tensors["e"].clone().requires_grad_()
        found = linear_log_probs(e, x.tensors["c"], x.tensors["targets"], temperature=temperature, impl="chunked")
        return found.log_probs.detach(), torch.autograd.grad(found.log_probs.sum(), e)[0]

    programs._loss_program.cache_clear()
    programs._gradients_program.cache_clear()
    plain = run(1.0)
    assert len(made_programs) == 2
    assert all(map(torch.equal, plain, run(1)))
    assert len(made_programs) == 2
    for temperature in (0.5, 0.7, torch.tensor(0.9), torch.rand(7) + 0.5, torch.rand(3, 1) + 0.5):
        run(temperature)
        assert len(made_programs) == 4
    torch.testing.assert_close(run(torch.ones(3, 7)), plain)


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_torch_compile_makes_one_graph_for_all_temperatures(impl):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    x = made(entropy=True, shift=1)

    def run(e, c, targets, temperature):
        found = linear_log_probs(e, c, targets, entropy=True, shift=1, temperature=temperature, impl=impl)
        return found, (found.log_probs + 0.1 * found.entropy).sum()

    compiled, graphs = torch.compile(run, fullgraph=True, backend="aot_eager"), []
    with small_blocks():
        for k in range(3):
            results = []
            for call in (compiled, run):
                leaves = [x.tensors[name].clone().requires_grad_() for name in ("e", "c")]
                found, total = call(*leaves, x.tensors["targets"], 0.5 + 0.1 * k)
                results.append([found.log_probs, found.entropy, *torch.autograd.grad(total, leaves)])
            for y, z in zip(*results, strict=True):
                torch.testing.assert_close(y, z)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1] <= 2  # torch.compile takes a number for a constant until it changes


E, C, T = torch.ones(2, 3, 4), torch.ones(9, 4), torch.zeros(2, 3, dtype=torch.int64)


def test_the_smallest_budget_does_not_mean_one_token_and_one_column_at_a_time():
    """Which would be 40,000 products of matrices here."""
    operands = Operands(torch.randn(20, 16), torch.randn(2000, 16), None, torch.zeros(20), None)
    with mock.patch.object(blocks, "product", mock.Mock(side_effect=blocks.product)) as products:
        largest.largest_logits.function(operands, Call(top_k=3, memory_budget=0), 1.0)
    assert 1 <= products.call_count <= 4


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
    """Over windows of the vocabulary too."""
    monkeypatch.setattr(largest, "MOST_COLUMNS", 3)
    found = linear_log_probs(E, C, T, predicted=True, top_k=5, impl=impl)
    assert (found.predicted == 0).all()
    assert (found.top_ids == torch.arange(5)).all()


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_ids_of_ignored_tokens_and_negative_ids_get_no_gradient(impl):
    x = made(ignored=0.5)
    e = x.tensors["e"].clone()
    ignored = x.tensors["targets"] == IGNORED
    e[ignored] = torch.nan
    ids = torch.zeros(3, 7, 2, dtype=torch.int64)
    ids[..., 1] = -1
    leaves = [y.clone().requires_grad_() for y in (e, x.tensors["c"])]
    found = linear_log_probs(*leaves, x.tensors["targets"], ids=ids, top_k=2, impl=impl)
    assert not found.id_log_probs[ignored].any()
    assert not found.top_log_probs[ignored].any()
    assert (found.id_log_probs[~ignored][:, 1] == -torch.inf).all()
    de, dc = torch.autograd.grad(torch.logsumexp(found.id_log_probs, -1).sum(), leaves)
    assert not de[ignored].any()
    assert de[~ignored].any()
    assert dc.isfinite().all()


@pytest.mark.parametrize("of", [rule, reference])
def test_the_logit_of_no_id_is_0(of):
    """Else processes that share the vocabulary, each with ids of its own, would add others' logits to an id's."""
    x = made(bias=True)
    ids = torch.full((21, 2), -1, dtype=torch.int32)
    columns = torch.zeros(21, dtype=torch.int32)
    operands = Operands(x.tensors["e"].flatten(0, 1), x.tensors["c"], x.tensors["bias"], columns, None, None, ids)
    more = ("linear_log_probs",) if of is rule else ()  # the public function
    found = of.statistics(operands, Call(ids=2), 1.0, *more)
    assert not found[3:5].any()
    assert found[2].all()


def test_the_operator_of_the_largest_logits_is_what_it_says():
    x = made(bias=True, dtype="bfloat16")
    given = x.tensors["e"].flatten(0, 1), x.tensors["c"], x.tensors["bias"], torch.zeros(21, dtype=torch.int32), None
    operands, call = Operands(*given, torch.rand(21) + 0.5), Call(5.0, 2**28, top_k=3)
    torch.library.opcheck(torch.ops.cce_torch.largest_logits.default, tuple(flat(operands, call, 1.3)))


def test_no_tensor_has_the_size_of_the_logits(monkeypatch):
    class Largest(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            new = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.largest = max(self.largest, *(x.nbytes for x in new if not func.is_view), 0)
            return result

    kept = torch.zeros(2000, dtype=torch.int32)
    operands = Operands(torch.randn(2000, 8), torch.randn(3000, 8), None, kept, None)
    monkeypatch.setattr(largest, "LEAST_ROOM", 0)
    with Largest() as seen:
        largest.largest_logits.function(operands, Call(memory_budget=2**20, top_k=4), 1.0)
    assert 0 < seen.largest < 2**20 < 4 * 2000 * 3000


@pytest.mark.parametrize("impl", ["torch_compile", "reference", "chunked"])
@pytest.mark.parametrize("temperature", COLD)
@pytest.mark.parametrize("each", [False, True])
def test_small_temperatures_keep_the_digits(impl, temperature, each):
    arrays, want = cold(temperature)
    e, c, targets = (torch.tensor(x) for x in arrays)
    of_kind = torch.full((24,), temperature) if each else temperature
    options: Any = {"temperature": of_kind, "entropy": True, "impl": impl, "ids": torch.arange(3).expand(24, 3)}
    with contextlib.nullcontext() if temperature == COLD[2] else small_blocks():  # one of them is compiled
        found = linear_log_probs(e.requires_grad_(), c.requires_grad_(), targets, **options)
        assert found.log_probs is not None
        of_e, of_c = torch.autograd.grad(-found.log_probs.sum(), (e, c))
    tensors = {"log_probs": found.log_probs, "entropy": found.entropy, "ids": found.id_log_probs, "e": of_e, "c": of_c}
    held_cold({name: x.detach().numpy() for name, x in tensors.items()}, want)  # type: ignore[union-attr]
