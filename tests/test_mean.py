"""The mean of the logits under the softmax, from which the entropy follows, and temperatures, against float64."""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cce_jax.core import statistics
from cce_jax.plans import Core, plan_for
from cce_kernels import in_forward as ways
from cce_kernels.call import Call
from cce_kernels.device import H200, local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Wanted
from cce_kernels.plan import choose
from cce_kernels.plan.plan import InForward, Recomputed, Saved
from tests.cases import DTYPES
from tests.core_numbers import of_kept
from tests.tolerance import assert_close, assert_reference, bound, error, roundoff

BUDGETS = (0, 2**40)
IMPLS = ("chunked", "cce")


class Drawn(NamedTuple):
    """A call of the core; the cotangents of its numbers, (4, N): of lse, target, sum and mean."""

    inputs: Inputs
    of: np.ndarray
    head: Head
    with_sum: bool = False
    with_mean: bool = True

    def core(self, impl: str, memory_budget: int = 0) -> Core:
        return Core(self.head, self.with_sum, impl, memory_budget, local_gpu(), with_mean=self.with_mean)  # type: ignore[arg-type]


def made(
    tokens=37,
    width=16,
    vocabulary=203,
    dtype="float32",
    *,
    head=None,
    bias=False,
    scale=False,
    temperature=True,
    with_sum=False,
    with_mean=True,
    size=1.0,
    ignored=0.2,
    seed=0,
) -> Drawn:
    rng, head = np.random.default_rng(seed), head or Head(precision="highest")
    e = (size * rng.standard_normal((tokens, width))).astype(DTYPES[dtype])
    c = (rng.standard_normal((vocabulary, width)) * 3 / width**0.5).astype(DTYPES[dtype])
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    targets[rng.uniform(size=tokens) < ignored] = -1
    targets[-1] = vocabulary  # names no column
    inputs = Inputs(
        e,
        c if head.vocab_axis == 0 else c.T,
        rng.standard_normal(vocabulary).astype(DTYPES[dtype]) if bias else None,
        targets,
        None,
        np.full(1, 1.3, np.float32) if scale else None,
        rng.uniform(0.3, 1.5, tokens).astype(np.float32) if temperature else None,
    )
    of = rng.standard_normal((4, tokens)).astype(np.float32)
    of[2] /= vocabulary
    return Drawn(inputs, of, head, with_sum, with_mean)  # type: ignore[arg-type]


def truth(x: Drawn) -> dict[str, np.ndarray]:
    """The numbers of kept tokens, and the gradients of Σ of · numbers over them."""
    e, c, bias, targets, _, scale, inverse, *_ = (None if y is None else np.float64(y) for y in x.inputs)
    c, kept, of = c if x.head.vocab_axis == 0 else c.T, targets >= 0, np.float64(x.of)
    scale, inverse = 1.0 if scale is None else scale[0], 1.0 if inverse is None else inverse[:, None]
    e = np.where(kept[:, None], e, 0)
    y = scale * (e @ c.T + (0 if bias is None else bias))
    softcap = x.head.softcap
    capped = y if softcap is None else softcap * np.tanh(y / softcap)
    slope = inverse * scale * (1.0 if softcap is None else 1 - (capped / softcap) ** 2)
    z, is_target = capped * inverse, targets[:, None] == np.arange(c.shape[0])
    lse = np.logaddexp.reduce(z, axis=1)
    p = np.exp(z - lse[:, None])
    mean = (p * np.where(p == 0, 0, z)).sum(1)
    a, t, s, mu = (part[:, None] for part in of)
    s, mu = s * x.with_sum, mu * x.with_mean
    with np.errstate(invalid="ignore"):
        dz = p * (a + mu * np.where(p == 0, 0, 1 + z - mean[:, None])) + t * is_target + s
    dz = np.where(kept[:, None], dz * slope, 0)
    dc = dz.T @ e
    # A rounding of the exponentials to bfloat16 moves their logarithms, all independently.
    moved = (np.where(kept[:, None], roundoff("bfloat16") / 2 * mu * p * slope, 0)) ** 2
    found = {
        "moved": {"e": moved @ c**2, "c": moved.T @ e**2, "bias": moved.sum(0)},
        "lse": lse[kept],
        "target": np.where(is_target, z, 0).sum(1)[kept],
        "e": dz @ c,
        "c": dc if x.head.vocab_axis == 0 else dc.T,
    }
    found |= {} if bias is None else {"bias": dz.sum(0)}
    found |= {"mean": mean[kept]} if x.with_mean else {}
    return found | ({"sum": (lse[:, None] - z).sum(1)[kept]} if x.with_sum else {})


def ours(x: Drawn, core: Core, names: tuple[str, ...] = ("e", "c", "bias")) -> dict[str, np.ndarray]:
    """names: what is differentiated."""
    kept = np.asarray(x.inputs.targets) >= 0
    leaves = {k: v for k, v in x.inputs._asdict().items() if k in names and v is not None}

    @jax.jit
    def run(leaves: dict[str, Any], inputs: Inputs, of: jax.Array):
        def objective(leaves):
            numbers = statistics(inputs._replace(**leaves), core, None)[0]
            named = zip(Cotangents.of(numbers), of, strict=False)
            return sum(jnp.sum(jnp.where(kept, y * x, 0)) for x, y in named if x is not None), numbers

        return jax.grad(objective, has_aux=True)(leaves)

    gradients, numbers = run(leaves, jax.tree.map(jnp.asarray, x.inputs), jnp.asarray(x.of))
    named = of_kept(numbers, kept, vocabulary=x.head.vocabulary(x.inputs.c))
    return named | {k: np.asarray(v) for k, v in gradients.items()}


def check(
    x: Drawn, impl: str, memory_budget: int = 0, names: tuple[str, ...] = ("e", "c", "bias"), run=ours, reference=None
) -> None:
    """reference: of the same call, where a test has it: it takes a compile of its own."""
    exact, reference = truth(x), reference or ours(x, x.core("reference"))
    moved = exact.pop("moved") if x.with_mean and x.inputs.e.dtype == "bfloat16" and memory_budget else {}
    exact.pop("moved", None)
    found = run(x, x.core(impl, memory_budget), names)
    assert set(reference) == set(exact)
    assert set(found) == set(exact) - ({"e", "c", "bias"} - set(names))
    for name, value in found.items():
        assert_reference(reference[name], exact[name], name)
        if name in moved:
            expected = np.sqrt(moved[name].sum())
            allowed = bound(reference[name], exact[name]) * np.linalg.norm(exact[name]) + 2 * expected
            assert np.linalg.norm(np.float64(value) - exact[name]) <= allowed, name
        else:
            assert_close(value, exact[name], reference[name], name)
    if not x.with_mean:
        return
    entropy, true = found["lse"] - found["mean"], exact["lse"] - exact["mean"]
    largest = max(1.0, np.abs(exact["lse"]).max(initial=0), np.abs(exact["mean"]).max(initial=0))
    assert np.abs(entropy - true).max(initial=0) <= 16 * roundoff("float32") * largest


@st.composite
def calls(draw) -> Drawn:
    head = Head(draw(st.sampled_from([None, 5.0])), draw(st.integers(0, 1)), "highest")
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    flags = {name: draw(st.booleans()) for name in ("bias", "scale", "temperature", "with_sum", "with_mean")}
    return made(
        draw(st.integers(2, 60)),
        16,
        draw(st.integers(2, 300)),
        dtype,
        head=head,
        size=draw(st.sampled_from([0.1, 1.0, 2.0])),
        ignored=draw(st.sampled_from([0.0, 0.5, 0.9])),
        seed=draw(st.integers(0, 99)),
        **flags,
    )


@settings(max_examples=5)
@given(calls(), st.sampled_from(IMPLS), st.sampled_from(BUDGETS))
@example(made(bias=True, scale=True, with_sum=True, head=Head(5.0, 1, "highest")), "chunked", 0)
@example(made(70, 16, 2500, "bfloat16", temperature=False), "chunked", 0)
@example(made(dtype="bfloat16", with_mean=False, head=Head(5.0), scale=True), "cce", 2**40)
@example(made(dtype="bfloat16", with_mean=False, with_sum=True, bias=True), "cce", 2**40)
def test_numbers_and_gradients(x, impl, memory_budget):
    check(x, impl, memory_budget)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_logit_of_minus_infinity_has_no_share(impl):
    """As a mask of the vocabulary gives them, here for most of the columns, the target's own among them."""
    x = made(bias=True, temperature=False)
    bias = np.where(np.arange(203) % 64 < 50, -np.inf, np.asarray(x.inputs.bias)).astype(np.float32)
    found = ours(
        x._replace(inputs=x.inputs._replace(bias=bias), of=x.of * np.float32([[1], [0], [0], [1]])), x.core(impl)
    )
    kept = np.flatnonzero(bias > -np.inf)
    lost = np.flatnonzero(bias == -np.inf)
    of_kept = np.searchsorted(kept, np.asarray(x.inputs.targets))
    alone = x.inputs._replace(c=x.inputs.c[kept], bias=bias[kept], targets=np.where(x.inputs.targets < 0, -1, of_kept))
    exact = truth(x._replace(inputs=alone, of=x.of * np.float32([[1], [0], [0], [1]])))
    for name in ("lse", "mean", "e"):
        assert error(found[name], exact[name]) < 1e-5, name
    assert error(found["c"][kept], exact["c"]) < 1e-5
    assert not found["c"][lost].any()
    assert not found["bias"][lost].any()


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_stays_a_bad_row(impl, bad):
    """Its numbers are NaN or infinite as lse is; if it is ignored, nothing of it gets out."""
    x = made(dtype="bfloat16", ignored=0.0)
    e = np.array(x.inputs.e)
    e[3] = bad
    found = ours(x._replace(inputs=x.inputs._replace(e=e)), x.core(impl))
    bad_rows = ~np.isfinite(np.float32(found["mean"]))
    assert bad_rows[3]
    assert bad_rows.sum() == 1
    targets = np.array(x.inputs.targets)
    targets[3] = -1
    inverse = np.array(x.inputs.inverse_temperature)
    inverse[3] = bad
    hidden = x.inputs._replace(e=e, targets=targets, inverse_temperature=inverse)
    found = ours(x._replace(inputs=hidden), x.core(impl))
    clean = x.inputs._replace(targets=targets)
    exact = truth(x._replace(inputs=clean))
    for name in ("e", "c"):
        assert np.isfinite(np.float32(found[name])).all()
        assert error(found[name], exact[name]) < 0.02


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_float16_has_room_for_the_cotangent_of_the_mean(impl, size):
    x = made(dtype="float16", ignored=0.0)
    check(x._replace(of=x.of * np.float32([[0], [0], [0], [size]])), impl)


def test_another_temperature_compiles_nothing():
    x = made()
    core = x.core("chunked")
    run = jax.jit(lambda inputs: statistics(inputs, core, None)[0])
    for k in range(2):
        inverse = x.inputs.inverse_temperature * (k + 1)
        run(jax.tree.map(jnp.asarray, x.inputs._replace(inverse_temperature=inverse)))
    assert run._cache_size() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("above", [83.0, 87.0, 120.0])
def test_the_mean_is_rescued_with_the_log_sum_exp(dtype, above):
    """Other logits are so far above the target's that the sum for the mean overflows float32, or both sums."""
    x = made(ignored=0.3, temperature=False)
    e, c = np.zeros((2, 37, 16), np.float32)[0], np.array(x.inputs.c)
    e[:, 0], e[:, 1:3] = 1.0, x.inputs.e[:, 1:3]
    c[:, 0] = 0.0
    c[60:190, 0] = above + np.linspace(0, 3, 130)  # the maximum rises from tile to tile
    c[:, 3:] = 0.0
    targets = np.where(x.inputs.targets < 0, -1, np.arange(37))
    inputs = x.inputs._replace(e=e.astype(DTYPES[dtype]), c=c.astype(DTYPES[dtype]), targets=targets.astype(np.int32))
    x = x._replace(inputs=inputs)
    exact, found = truth(x), ours(x, x.core("cce"))
    for name in ("lse", "mean"):
        np.testing.assert_allclose(found[name], exact[name], rtol=1e-5)
    assert error(found["c"], exact["c"]) < (2e-2 if dtype == "bfloat16" else 3e-5)


@pytest.mark.parametrize("tokens", [64, 97])
def test_evaluation_with_scattered_tokens(tokens):
    """Nothing is gathered: kernels look up each token's row of e, but not of its temperature."""
    x = made(tokens, 16, 300, "bfloat16", ignored=0.4)
    kept, exact = x.inputs.targets >= 0, truth(x)
    for impl in IMPLS:
        core = x.core(impl)
        run = jax.jit(lambda inputs, core=core: statistics(inputs, core, None)[0])
        found = run(jax.tree.map(jnp.asarray, x.inputs))
        for name, value in of_kept(found, kept).items():
            assert error(value, exact[name]) < 2e-6, (impl, name)


@pytest.mark.parametrize("head", [Head(), Head(5.0, 1)], ids=str)
def test_de_for_any_cotangents_has_the_temperature(head):
    x = made(dtype="bfloat16", head=head, with_mean=False, scale=True)
    with mock.patch.object(choose, "_is_fastest_in_forward", return_value=True):
        choose.plan_of.cache_clear()
        shapes = jax.tree.map(jnp.asarray, x.inputs)
        assert plan_for(shapes, x.core("cce", 2**40), Wanted(True, False, False)).saves_de
        check(x, "cce", 2**40, ("e",))
    choose.plan_of.cache_clear()


def in_forward(x: Drawn, core: Core, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """`ours`, with the gradients formed in the forward pass."""
    inputs, kept = jax.tree.map(jnp.asarray, x.inputs), np.asarray(x.inputs.targets) >= 0
    wanted = Wanted(*(name in names and getattr(inputs, name) is not None for name in ("e", "c", "bias")))
    lse, target, total, mean = jnp.where(kept, x.of, 0)
    of = Cotangents(lse, target, total if x.with_sum else None, mean)

    with mock.patch.object(choose, "_is_fastest_in_forward", return_value=True):
        choose.plan_of.cache_clear()
        plan = plan_for(inputs, core, wanted, one_factor=True)
    choose.plan_of.cache_clear()

    def run(inputs: Inputs):
        numbers, formed = ways.begin(inputs, of, lambda numbers, of: of, plan)
        return numbers, ways.finish(formed, jnp.float32(1), inputs.targets >= 0, plan)

    numbers, gradients = jax.jit(run)(inputs)
    named = of_kept(numbers, kept, vocabulary=x.head.vocabulary(x.inputs.c))
    return named | {k: np.asarray(v) for k, v in gradients._asdict().items() if v is not None}


@pytest.mark.parametrize(
    "x",
    [
        made(300, dtype="bfloat16", ignored=0.5, head=Head(vocab_axis=1)),
        made(260, vocabulary=330, dtype="bfloat16", bias=True, scale=True, size=2.0, with_sum=True),
        made(dtype="bfloat16", size=0.01, temperature=False),
        made(dtype="bfloat16", size=20.0, ignored=0.0),
    ],
    ids=["many are ignored", "with a weighted sum", "about equal logits", "confident tokens"],
)
def test_gradients_from_exponentials(x):
    reference = ours(x, x.core("reference"))
    check(x, "cce", 2**40, reference=reference)
    check(x, "cce", 2**30, run=in_forward, reference=reference)


WAYS = {
    (Head(), False, True): InForward,
    (Head(), False, False): Saved,
    (Head(5.0), False, True): Recomputed,
    (Head(5.0), False, False): Recomputed,
    (Head(5.0), True, True): InForward,
    (Head(5.0), True, False): Saved,
}


@pytest.mark.parametrize(("head", "detached", "one_factor"), WAYS, ids=str)
def test_the_way_of_a_call_with_the_mean(head, detached, one_factor):
    """A softcap's slope is multiplied into the exponentials: the logits cannot be found from these."""
    call = Call(8192, 4096, 131072, "bfloat16", head, False, False, Wanted(True, True, False), 2**30)
    call = replace(call, with_mean=True, mean_is_detached=detached, one_factor=one_factor)
    call = call if one_factor else replace(call, memory_budget=2**32)
    assert isinstance(choose.plan_of(call, H200, "auto").gradients, WAYS[head, detached, one_factor])
