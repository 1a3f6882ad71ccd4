"""The logits of given ids, beside all other numbers, and the gradients of all of them at once, against float64."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cce_jax.core import statistics
from cce_jax.plans import Core
from cce_kernels import given_ids
from cce_kernels.device import local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs
from cce_kernels.selections import NOTHING, Asked
from tests.cases import DTYPES
from tests.core_numbers import of_kept
from tests.test_structure import arrays, equations
from tests.tolerance import assert_close, assert_reference, error

BUDGETS = (0, 2**40)
IMPLS = ("chunked",)
HIGHEST = Head(precision="highest")


class Drawn(NamedTuple):
    """A call of the core, and the cotangents of its numbers. None: the call does not ask for the number."""

    inputs: Inputs
    of: Cotangents
    head: Head

    def core(self, impl: str, memory_budget: int = 0) -> Core:
        asked = self.of.sum is not None, self.of.mean is not None
        return Core(self.head, asked[0], impl, memory_budget, local_gpu(), with_mean=asked[1])  # type: ignore[arg-type]

    def with_(self, **arrays: Any) -> "Drawn":
        return self._replace(inputs=self.inputs._replace(**arrays))


def made(
    tokens=37,
    width=16,
    vocabulary=203,
    ids=5,
    dtype="float32",
    *,
    head=HIGHEST,
    bias=False,
    scale=False,
    temperature=True,
    weighted=False,
    mean=True,
    size=1.0,
    ignored=0.2,
    seed=0,
) -> Drawn:
    """Of the ids a fifth names no column, and some are repeated, or are the token's target."""
    rng = np.random.default_rng(seed)
    e = (size * rng.standard_normal((tokens, width))).astype(DTYPES[dtype])
    c = (rng.standard_normal((vocabulary, width)) * 3 / width**0.5).astype(DTYPES[dtype])
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    targets[rng.uniform(size=tokens) < ignored] = -1
    targets[-1] = vocabulary  # names no column
    columns = rng.integers(0, vocabulary, (tokens, ids)).astype(np.int32)
    columns[:, -1] = np.where(rng.uniform(size=tokens) < 0.5, columns[:, 0], targets)
    nowhere = np.int32([-1, -100, vocabulary, 2**31 - 1])
    columns = np.where(rng.uniform(size=columns.shape) < 0.2, nowhere[rng.integers(0, 4, columns.shape)], columns)
    inputs = Inputs(
        e,
        c if head.vocab_axis == 0 else c.T,
        rng.standard_normal(vocabulary).astype(DTYPES[dtype]) if bias else None,
        targets,
        rng.uniform(size=vocabulary).astype(np.float32) if weighted else None,
        np.full(1, 1.3, np.float32) if scale else None,
        rng.uniform(0.3, 2.5, tokens).astype(np.float32) if temperature else None,
        columns,
    )
    lse, target, total, of_mean = rng.standard_normal((4, tokens)).astype(np.float32)
    of_ids = rng.standard_normal((tokens, ids)).astype(np.float32)
    of = Cotangents(lse, target, total / vocabulary if weighted else None, of_mean if mean else None, of_ids)
    return Drawn(inputs, of, head)  # type: ignore[arg-type]


def truth(x: Drawn) -> dict[str, np.ndarray]:
    """The numbers of kept tokens, the ids of all, and the gradients of Σ of · numbers over the kept tokens."""
    e, c, bias, targets, weights, scale, inverse, ids = (None if y is None else np.float64(y) for y in x.inputs)
    c, kept = c if x.head.vocab_axis == 0 else c.T, targets >= 0
    scale, inverse = 1.0 if scale is None else scale[0], 1.0 if inverse is None else inverse[:, None]
    e, columns = np.where(kept[:, None], e, 0), np.arange(c.shape[0])
    y = scale * (e @ c.T + (0 if bias is None else bias))
    softcap = x.head.softcap
    capped = y if softcap is None else softcap * np.tanh(y / softcap)
    slope = inverse * scale * (1.0 if softcap is None else 1 - (capped / softcap) ** 2)
    z = capped * inverse
    lse = np.logaddexp.reduce(z, axis=1)
    p = np.exp(z - lse[:, None])
    mean = (p * z).sum(1)
    found = {"lse": lse[kept], "target": np.where(targets[:, None] == columns, z, 0).sum(1)[kept]}
    a, t, s, mu = (None if y is None else np.float64(y)[:, None] for y in x.of[:4])
    dz = p * a + t * (targets[:, None] == columns)
    if mu is not None:
        dz += p * mu * (1 + z - mean[:, None])
        found["mean"] = mean[kept]
    if s is not None:
        dz += s * weights
        found["sum"] = ((lse[:, None] - z) @ weights)[kept]
    found["ids"] = np.zeros(ids.shape)
    for k, own in enumerate(ids.T):
        is_id = (own[:, None] == columns) & kept[:, None]
        found["ids"][:, k] = np.where(is_id, z, 0).sum(1)
        dz += x.of.ids[:, k, None] * is_id
    dz = np.where(kept[:, None], dz * slope, 0)
    dc = dz.T @ e
    found |= {"e": dz @ c, "c": dc if x.head.vocab_axis == 0 else dc.T}
    return found | ({} if bias is None else {"bias": dz.sum(0)})


def objective(x: Drawn, numbers, of: Cotangents, kept) -> jax.Array:
    """Σ of · numbers over the kept tokens, and of the ids over all tokens."""
    named = [(y, z) for y, z in zip(of[:4], Cotangents.of(numbers)[:4], strict=True) if y is not None]
    found = sum(jnp.sum(jnp.where(kept, y * z, 0)) for y, z in named)
    return found if of.ids is None else found + jnp.sum(of.ids * numbers.ids)  # type: ignore[return-value]


def results(x: Drawn, numbers, gradients) -> dict[str, np.ndarray]:
    kept = np.asarray(x.inputs.targets) >= 0
    named = of_kept(numbers, kept, x.inputs.weights, x.head.vocabulary(x.inputs.c))
    return named | {"ids": np.asarray(numbers.ids)} | {k: np.asarray(v) for k, v in gradients.items()}


def ours(x: Drawn, core: Core, asked: Asked = NOTHING) -> dict[str, np.ndarray]:
    leaves = {k: v for k, v in zip(("e", "c", "bias"), x.inputs[:3], strict=True) if v is not None}

    @jax.jit
    def run(leaves: dict[str, Any], inputs: Inputs, of: Cotangents):
        def of_leaves(leaves):
            numbers, _ = statistics(inputs._replace(**leaves), core, None, asked)
            return objective(x, numbers, of, inputs.targets >= 0), numbers

        return jax.grad(of_leaves, has_aux=True)(leaves)

    gradients, numbers = run(leaves, *jax.tree.map(jnp.asarray, (x.inputs, x.of)))
    return results(x, numbers, gradients)


def held(x: Drawn, found: dict[str, np.ndarray]) -> None:
    exact, reference = truth(x), ours(x, x.core("reference"))
    assert set(found) == set(reference) == set(exact)
    for name, value in found.items():
        assert_reference(reference[name], exact[name], name)
        assert_close(value, exact[name], reference[name], name)


@st.composite
def calls(draw) -> Drawn:
    head = Head(draw(st.sampled_from([None, 5.0])), draw(st.integers(0, 1)), "highest")
    flags = {name: draw(st.booleans()) for name in ("bias", "scale", "temperature", "weighted", "mean")}
    return made(
        draw(st.integers(2, 60)),
        16,
        draw(st.integers(2, 300)),
        draw(st.sampled_from([1, 2, 7, 256])),
        draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        head=head,
        size=draw(st.sampled_from([0.1, 1.0, 5.0])),
        ignored=draw(st.sampled_from([0.0, 0.5, 0.9])),
        seed=draw(st.integers(0, 99)),
        **flags,
    )


@settings(max_examples=10)
@given(calls(), st.sampled_from(IMPLS), st.sampled_from(BUDGETS))
@example(made(bias=True, scale=True, weighted=True, head=Head(5.0, 1, "highest")), "chunked", 0)
@example(made(70, 16, 2500, 9, "bfloat16", bias=True, mean=False, temperature=False), "chunked", 0)
@example(made(40, 16, 203, 3, "float16", bias=True), "chunked", 0)
def test_numbers_and_gradients(x, impl, memory_budget):
    held(x, ours(x, x.core(impl, memory_budget)))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("bfloat16", {"bias": True}),
        ("float16", {"bias": True}),
        ("float16", {"head": Head(5.0, 1, "highest")}),
    ],
    ids=str,
)
def test_by_kernels(dtype, options):
    """Enough tokens that those which are kept are moved to the front; and columns for two groups."""
    x = made(260, 32, 1100, 4, dtype, mean=False, temperature=False, ignored=0.5, **options)
    held(x, ours(x, x.core("cce")))


@pytest.mark.parametrize("impl", [*IMPLS, "cce"])
def test_a_confident_token_keeps_its_digits(impl):
    """The gradient of −log p of an id is p − 1, here 2⁻¹⁰ and less, which a rounding of p to bfloat16 would swallow."""
    x = made(40, 16, 64, 1, "bfloat16", mean=False, temperature=False, ignored=0.0)
    e, c, columns = np.zeros((40, 16)), np.zeros((64, 16)), np.arange(40, dtype=np.int32)
    c[:, :8] = np.random.default_rng(0).standard_normal((64, 8)) * 0.01
    c[:40, 8] = 1
    e[:, 8] = 11
    c[np.arange(64) != 3, 8] = 0
    x = x.with_(e=e.astype("bfloat16"), c=c.astype("bfloat16"), ids=np.full((40, 1), 3, np.int32), targets=columns)
    x = x._replace(of=Cotangents(np.ones(40, np.float32), np.zeros(40, np.float32), None, None, -np.ones((40, 1), "f")))
    exact = truth(x)
    found = ours(x, x.core(impl))
    assert np.abs(exact["c"][3]).max() < 11 * 40 * 2**-9
    assert error(found["c"][3], exact["c"][3]) < 2**-7


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_a_bad_row_that_is_ignored_reaches_nothing(impl):
    x = made(dtype="bfloat16", ignored=0.0)
    e, targets, inverse = (np.array(y) for y in (x.inputs.e, x.inputs.targets, x.inputs.inverse_temperature))
    targets[3] = -1
    exact = truth(x.with_(targets=targets))
    e[3], inverse[3] = np.nan, np.nan
    found = ours(x.with_(e=e, targets=targets, inverse_temperature=inverse), x.core(impl))
    assert not found["ids"][3].any()
    for name in ("e", "c", "ids"):
        assert error(found[name], exact[name]) < 0.02


@pytest.mark.parametrize("size", [1e-3, 10.0])
def test_float16_has_room_for_the_cotangents_of_repeated_ids(size):
    """256 times the same id: their cotangents add to one element of dz."""
    x = made(20, 16, 203, 256, "float16", bias=True)
    x = x.with_(ids=np.repeat(x.inputs.ids[:, :1], 256, 1))
    of = x.of._replace(ids=np.full((20, 256), size, np.float32), lse=x.of.lse * 0, mean=x.of.mean * 0)
    x = x._replace(of=of)
    held(x, ours(x, x.core("chunked")))


def test_the_same_call_gives_the_same_bits():
    x = made(64, 16, 20, 64, "bfloat16", bias=True)
    first, second = (ours(x, x.core("chunked")) for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


def test_in_chunks_of_tokens(monkeypatch):
    """The last chunk overlaps its neighbour."""
    x = made(37, 16, 203, 5, bias=True)
    whole = ours(x, x.core("chunked", 2**40))
    monkeypatch.setattr(given_ids, "CHUNK_BYTES", 10 * 5 * 16 * 8)
    np.testing.assert_array_equal(ours(x, x.core("chunked", 2**39))["ids"], whole["ids"])


N, D, V, K = 1024, 24, 99_968, 256
BUDGET = 2**26


@pytest.mark.parametrize("impl", [*IMPLS, "cce"])
def test_no_buffer_of_the_size_of_the_logits(impl):
    inputs = Inputs(
        jax.ShapeDtypeStruct((N, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((V, D), jnp.bfloat16),
        None,
        jax.ShapeDtypeStruct((N,), jnp.int32),
        ids=jax.ShapeDtypeStruct((N, K), jnp.int32),
    )
    of = Cotangents(*[jax.ShapeDtypeStruct((N,), jnp.float32)] * 2, None, None, jax.ShapeDtypeStruct((N, K), "f"))
    x = Drawn(inputs, of, Head())  # type: ignore[arg-type]

    def loss(e, c, inputs, of):
        numbers = statistics(inputs._replace(e=e, c=c), x.core(impl, BUDGET), None)[0]
        return objective(x, numbers, of, inputs.targets >= 0)

    run, shapes = jax.grad(loss, (0, 1)), (inputs.e, inputs.c, inputs, of)
    jaxpr = jax.make_jaxpr(run)(*shapes).jaxpr
    assert not [s for s in arrays(jaxpr) if s[1] >= N * V]
    gathered = [x.outvars[0].aval.size for x in equations(jaxpr) if x.primitive.name == "gather"]
    if impl != "cce":  # on a GPU XLA makes one kernel of the gather and the sum: tests/test_held.py
        assert max(gathered) * 2 <= BUDGET // given_ids.BUDGET_SHARE < 2 * N * K * D
    if impl == "chunked":
        held = jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        assert held < BUDGET + 4 * V * D, "on a CPU XLA widens c"
