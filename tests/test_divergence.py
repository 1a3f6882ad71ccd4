"""Divergences from a teacher: what drawn calls (tests/search) do not see, and what programs hold and multiply."""

from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_divergence, prepare
from cce_kernels.block_floats import block_of
from cce_kernels.device import H200, Gpu
from cce_kernels.engines.hopper import MOSAIC
from cce_kernels.gradients import divided, multiplied
from cce_kernels.head import Head
from cce_kernels.numbers import NO_OTHERS, Wanted
from cce_kernels.plan import plan_of
from cce_kernels.request import Request
from tests import lowering
from tests.search.calls import DIVERGENCES
from tests.test_plan import drawn
from tests.test_structure import equations
from tests.tolerance import error, roundoff


@pytest.mark.parametrize("impl", ["chunked", "cce"])
def test_a_large_column_of_the_gradient_does_not_make_the_others_coarser(impl):
    """de waits for its factor in integers, of which only those of the same 256 columns share a step."""
    rng, (tokens, width, vocabulary) = np.random.default_rng(0), (48, 512, 90)
    large = np.where(np.arange(width) == 0, 2.0**12, 1)
    shapes = {"e": (tokens, width), "c": (vocabulary, width), "teacher_e": (tokens, 8), "teacher_c": (vocabulary, 8)}
    arrays = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    arrays |= {"e": arrays["e"] / large, "c": arrays["c"] * large}
    arrays = {name: jnp.asarray(x, "bfloat16") for name, x in arrays.items()}

    def gradient(impl: str, dtype: str) -> np.ndarray:
        e, *others = (x.astype(dtype) for x in arrays.values())
        loss = partial(linear_divergence, divergence="jsd", impl=impl)
        return np.asarray(jax.grad(lambda e: loss(e, *others))(e), np.float64)[:, 256:]

    with jax.enable_x64(True):
        want = gradient("reference", "float64")
    rounded = np.asarray(jnp.asarray(want, "bfloat16"), np.float64)
    assert error(gradient(impl, "bfloat16"), want) <= 2 * error(rounded, want)


@pytest.mark.parametrize("seed", range(6))
def test_de_of_any_width_waits_for_any_factor(seed):
    """It is off by half a step of its block, and by the rounding of the result."""
    rng = np.random.default_rng(seed)
    tokens, width, dtype = int(rng.integers(1, 9)), int(rng.integers(1, 1200)), ("bfloat16", "float16")[seed % 2]
    both = Wanted(e=True, c=True, bias=False)
    request = Request(tokens, width, 50, dtype, Head(), False, both, 0, one_factor=True, teacher_width=8)
    de = np.float32(rng.normal(size=(tokens, width)) * 10 ** rng.uniform(-3, 1, width))
    factor = np.float32(rng.uniform(-2, 2, tokens))
    found = multiplied(divided(jnp.asarray(de), request), jnp.asarray(factor), request)
    assert found.dtype == dtype
    want, first = np.float64(factor)[:, None] * de, np.arange(0, width, block_of(width))
    steps = np.maximum.reduceat(np.abs(want), first, axis=1)[:, np.arange(width) // block_of(width)] / 32766
    rounding = np.maximum(np.abs(want), 2.0**-14) * roundoff(dtype)
    assert (np.abs(np.float64(found) - want) <= 0.51 * (steps + rounding)).all()


SHAPES = {"e": (40, 16), "c": (90, 16), "teacher_e": (40, 24), "teacher_c": (90, 24)}
FIXED = {
    name: jnp.asarray(np.random.default_rng(k).normal(size=shape), "float32")
    for k, (name, shape) in enumerate(SHAPES.items())
}
OPTIONS = {"divergence": "jsd", "beta": 0.3, "memory_budget": 0, "impl": "chunked"}


def loss(**others):
    return linear_divergence(**{**FIXED, **OPTIONS, **others})


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_distributions_have_no_divergence_and_near_ones_a_positive_one(kind):
    """Sums of terms of both signs would leave ±1e-7, and more than all of a divergence of near distributions."""
    e, c = FIXED["e"], FIXED["c"]
    equal = partial(loss, teacher_e=e, teacher_c=c, divergence=kind)
    value, gradient = jax.value_and_grad(lambda e: equal(e=e))(e)
    assert value == 0
    assert jnp.max(jnp.abs(gradient)) < 1e-9
    for apart, most, rounding in ((1e-3, 1e-4, 2e-2), (0.1, 1.0, 1e-3)):
        near = e + apart * FIXED["teacher_e"][:, :16]
        each = np.asarray(equal(e=near, reduction="none"), np.float64)
        z, y = (np.asarray(x, np.float64) @ np.asarray(c, np.float64).T for x in (near, e))
        s, t = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (z, y))
        m = 0.3 * t + 0.7 * s
        want = {
            "forward_kl": t * np.log(t / s),
            "reverse_kl": s * np.log(s / t),
            "jsd": 0.3 * t * np.log(t / m) + 0.7 * s * np.log(s / m),
        }[kind].sum(1)
        assert want.max() < most
        np.testing.assert_allclose(each, want, rtol=rounding)


def test_a_jsd_close_to_0_keeps_its_digits_in_float16():
    """dz is divided by the size of what it can be, which goes to 0 with beta."""
    e, c, *teacher = (x.astype(jnp.float16) for x in FIXED.values())

    def gradient(beta: float, impl: str) -> np.ndarray:
        loss = partial(linear_divergence, divergence="jsd", beta=beta, num_items=min(beta, 1 - beta), impl=impl)
        return np.asarray(jax.grad(lambda c: loss(e, c, *teacher))(c), np.float64)

    for beta in (1e-9, 1e-6, 0.5, 1 - 1e-6):
        assert error(gradient(beta, "chunked"), gradient(beta, "reference")) < 2 * roundoff(np.float16)


def test_the_reference_does_not_round_the_gradient_of_a_wide_classifier_to_the_type_of_e():
    """In float16 all of it would be 0 here."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"e": (16, 8), "c": (50, 8), "teacher_e": (16, 6), "teacher_c": (50, 6)}
    e, c, *teacher = (jax.random.normal(k, shape) for k, shape in zip(keys, shapes.values(), strict=True))

    def gradient(impl: str) -> np.ndarray:
        loss = partial(linear_divergence, e.astype(jnp.float16), num_items=1e9, impl=impl)
        return np.asarray(jax.grad(lambda c: loss(c, *teacher))(c), np.float64)

    exact = gradient("chunked")
    assert 0 < np.abs(exact).max() < 2**-25, "half of the least number of float16"
    assert error(gradient("reference"), exact) < 2 * roundoff(np.float16)


def test_nothing_but_the_student_has_a_gradient():
    others = {name: FIXED[name] for name in ("teacher_e", "teacher_c")}
    others |= dict.fromkeys(("token_weight", "temperature"), jnp.ones(40))
    for impl in ("chunked", "reference"):
        found = jax.grad(lambda given, impl=impl: loss(**given, impl=impl))(others)
        assert not any(np.any(x) for x in found.values())


@pytest.mark.parametrize(
    ("wanted", "reduction", "products"),
    [((0, 1), "mean", 4), ((0,), "mean", 3), ((1,), "mean", 3), ((), "mean", 2), ((0, 1), "none", 6)],
)
def test_what_a_program_multiplies_and_holds(wanted, reduction, products):
    """Three matmuls of the student and one of the teacher in a chunk, and no logits of all tokens.

    "none" computes the two logits first, and again. What is frozen costs no matmul.
    """
    shapes = (jax.ShapeDtypeStruct(x, "bfloat16") for x in ((320, 16), (200, 16), (320, 8), (200, 8)))

    def objective(*given):
        return jnp.sum(linear_divergence(*given, impl="chunked", memory_budget=0, reduction=reduction))

    traced = jax.make_jaxpr(jax.grad(objective, wanted) if wanted else objective)(*shapes).jaxpr
    found = list(equations(traced))
    assert sum(x.primitive.name == "dot_general" for x in found) == products
    assert max(y.aval.size for x in found for y in x.outvars if hasattr(y.aval, "size")) < 320 * 200


def beside_a_teacher(rng: np.random.Generator) -> tuple[Request, Gpu | None, Literal["auto", "cce", "chunked"]]:
    request, gpu, impl = drawn(rng)
    request = replace(request, numbers=NO_OTHERS, ids=0, one_factor=True, gradient_tolerance=0.0)
    return replace(request, with_temperature=False, teacher_width=int(2 ** rng.uniform(4, 14))), gpu, impl  # type: ignore[return-value]


def test_drawn_plans_take_chunks_of_all_tokens_within_the_budget():
    rng, over, by_kernels = np.random.default_rng(0), 0, 0
    for _ in range(400):
        request, gpu, impl = beside_a_teacher(rng)
        plan = plan_of(request, gpu, impl)
        way = plan.in_forward
        assert way is not None
        chunks = way.chunks
        assert chunks.rows >= request.tokens > (chunks.count - 1) * chunks.size
        assert plan.held <= max(request.memory_budget, plan_of(replace(request, memory_budget=0), gpu, impl).held)
        logits = 2 * request.sum_itemsize * way.most_logits * request.vocabulary
        assert plan.held >= logits
        over, by_kernels = over + (plan.held > request.memory_budget), by_kernels + (way.products is not None)
    assert 20 < over < 380
    assert by_kernels > 20


@pytest.mark.skipif(not MOSAIC, reason="JAX 0.10 lowers no kernels for Hopper")
def test_a_program_for_an_h200_has_kernels_for_the_gradients_and_no_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr(prepare, "local_gpu", lambda: H200)
    shapes = (8192, 512), (32768, 512), (8192, 256), (32768, 256)
    given = [jax.ShapeDtypeStruct(x, "bfloat16") for x in shapes]
    run = jax.grad(partial(linear_divergence, divergence="jsd", memory_budget=2**28), (0, 1))
    assert set(lowering.for_hopper(run, *given)) == {"whole_logits", "de", "dc_sum"}
    text = str(jax.jit(run).trace(*given).jaxpr)
    assert "cce_divergence" in text
    assert "8192,32768" not in text
