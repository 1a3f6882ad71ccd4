"""Divergences from a teacher: numbers and gradients against float64, and what the programs hold and multiply."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import cce_jax.divergence as public
from cce_jax import linear_divergence
from cce_kernels.block_floats import block_of
from cce_kernels.call import Call
from cce_kernels.device import H200, Gpu
from cce_kernels.divergence import Divergence, Given, Side, formed
from cce_kernels.engines.hopper import HOPPER, MOSAIC
from cce_kernels.gradients import divided, multiplied
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted
from cce_kernels.plan import budget, plan_of
from tests import lowering
from tests.test_plan import drawn
from tests.tolerance import RELIABLE, error, roundoff

KINDS = "forward_kl", "reverse_kl", "jsd"
STUDENT = "e", "c", "bias"
DRAWN = 30


@dataclass(frozen=True)
class Drawn:
    """A call. arrays: those of linear_divergence by name; options: the numbers."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    of_tokens: Any  # the cotangents of the losses, for reduction="none"

    @property
    def of_scalar(self) -> float:
        return 0.7


@dataclass(frozen=True)
class Ranges:
    """From what a call is drawn: fewer tokens than `tokens`; widths and vocabularies from and below two numbers."""

    tokens: int
    width: tuple[int, int]
    vocabulary: tuple[int, int]
    multiple: int  # two thirds of the widths and vocabularies are rounded up to multiples of it
    of_c: tuple[float, float]  # standard deviations of a classifier
    impls: tuple[str, ...]
    budgets: tuple[Any, ...]


IMPLS, BUDGETS = ("auto", "chunked", "cce", "reference"), (None, 0, 10**5, "all")
SMALL = Ranges(80, (8, 40), (40, 300), 1, (0.2, 0.5), IMPLS, BUDGETS)


def draw(seed: int, ranges: Ranges = SMALL) -> Drawn:
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    shape = pick((int(rng.integers(1, ranges.tokens)),), (2, int(rng.integers(1, ranges.tokens // 2))))
    sizes = rng.integers(*zip(ranges.width, ranges.width, ranges.vocabulary, strict=True))
    width, other, vocabulary = (int(n) + (-int(n) % ranges.multiple if n % 3 else 0) for n in sizes)
    dtype, of_teacher = pick("float32", "bfloat16", "float16"), pick("float32", "bfloat16", "float16")
    of_c = "float32" if rng.random() < 0.25 else dtype

    def normal(*size, dtype):
        return rng.normal(size=size).astype(jnp.dtype(dtype))

    def side(width: int, dtype: str, of_c: str, prefix: str):
        axis, found = int(rng.integers(2)), {f"{prefix}e": normal(*shape, width, dtype=dtype)}
        c = normal(vocabulary, width, dtype=of_c) * pick(*ranges.of_c)
        found[f"{prefix}c"] = (c if axis == 0 else c.T).astype(jnp.dtype(of_c))
        if rng.random() < 0.5:
            found[f"{prefix}bias"] = normal(vocabulary, dtype=of_c)
        cap, scale = pick(None, None, 4.0), pick(None, None, -1.3)
        return found, {f"{prefix}vocab_axis": axis, f"{prefix}softcap": cap, f"{prefix}logit_scale": scale}

    arrays, options = side(width, dtype, of_c, "")
    more = side(other, of_teacher, of_teacher, "teacher_")
    arrays, options = arrays | more[0], options | more[1]
    if rng.random() < 0.7:
        weight = rng.uniform(0, 2, shape) * (rng.random(shape) < 0.7)
        arrays["token_weight"] = weight.astype(jnp.dtype(pick("float32", "bfloat16")))
        out = arrays["token_weight"] == 0
        for name in ("e", "teacher_e"):
            arrays[name][out] = np.nan
    kind = pick("numbers", "token", "one", "none")
    if kind == "numbers":
        options["temperature"] = 1.7
    elif kind != "none":
        size = shape if kind == "token" else (1,)
        arrays["temperature"] = rng.uniform(0.5, 2, size).astype(np.float32)
    options |= {"divergence": pick(*KINDS), "beta": pick(0.1, 0.5, 0.9), "reduction": pick("mean", "sum", "none")}
    if options["reduction"] == "mean" and rng.random() < 0.3:
        options["num_items"] = 12.5
    options |= {"return_entropy": bool(rng.random() < 0.5), "impl": pick(*ranges.impls)}
    options["memory_budget"] = pick(*ranges.budgets)
    options["precision"] = "highest" if "float32" in (dtype, of_teacher) else None
    return Drawn(jax.device_put(arrays), options, jax.device_put(normal(*shape, dtype="float32")))


def truth(x: Drawn) -> dict[str, np.ndarray]:
    """The results in float64, by the textbook's derivatives and the whole Jacobian of the softmax."""
    of = x.options

    def side(prefix: str):
        arrays = {name: x.arrays.get(prefix + name) for name in STUDENT}
        rounded = arrays["e"].dtype
        e, c, b = (None if a is None else np.asarray(a.astype(rounded), np.float64) for a in arrays.values())
        e = np.where(weight[..., None] == 0, 0, e).reshape(-1, e.shape[-1])  # type: ignore[union-attr]
        c = c if of[f"{prefix}vocab_axis"] == 0 else c.T  # type: ignore[union-attr]
        scale, cap = of[f"{prefix}logit_scale"] or 1.0, of[f"{prefix}softcap"]
        y = scale * (e @ c.T + (0 if b is None else b))
        z, slope = (y, np.ones_like(y)) if cap is None else (cap * np.tanh(y / cap), 1 - np.tanh(y / cap) ** 2)
        z = z / temperature
        p = np.exp(z - z.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True), scale * slope / temperature, e, c

    tokens = x.arrays["e"].shape[:-1]
    weight = np.asarray(x.arrays.get("token_weight", np.ones(tokens)), np.float64)
    temperature = np.asarray(x.arrays.get("temperature", of.get("temperature", 1.0)), np.float64)
    temperature = np.broadcast_to(temperature, tokens).reshape(-1, 1)
    (s, slope, e, c), t, beta = side(""), side("teacher_")[0], of["beta"]
    m = beta * t + (1 - beta) * s
    if of["divergence"] == "forward_kl":
        total, g = np.sum(t * np.log(t / s), axis=1), -t / s
    elif of["divergence"] == "reverse_kl":
        total, g = np.sum(s * np.log(s / t), axis=1), np.log(s / t) + 1
    else:
        total = np.sum(beta * t * np.log(t / m) + (1 - beta) * s * np.log(s / m), axis=1)
        g = -beta * (1 - beta) * t / m + (1 - beta) * (np.log(s / m) + 1 - (1 - beta) * s / m)
    flat, items = weight.reshape(-1), of.get("num_items", weight.sum())
    if of["reduction"] == "none":
        value, factor = (flat * total).reshape(tokens), flat * np.asarray(x.of_tokens, np.float64).reshape(-1)
    else:
        items = items if of["reduction"] == "mean" else 1.0
        value, factor = (flat @ total) / (items or 1), x.of_scalar * flat / (items or 1)
    jacobian = np.einsum("nu,uv->nuv", s, np.eye(s.shape[1])) - np.einsum("nu,nv->nuv", s, s)
    dz = factor[:, None] * slope * np.einsum("nu,nuv->nv", g, jacobian)
    dc = dz.T @ e
    found = {"value": value, "e": (dz @ c).reshape(x.arrays["e"].shape), "c": dc if of["vocab_axis"] == 0 else dc.T}
    if "bias" in x.arrays:
        found["bias"] = dz.sum(0)
    if of["return_entropy"]:
        found["entropy"] = np.where(weight == 0, 0, -np.sum(s * np.log(s), axis=1).reshape(tokens))
    return found


def ours(x: Drawn, **others) -> dict[str, np.ndarray]:
    own = {name: x.arrays[name] for name in STUDENT if name in x.arrays}
    rest = {name: y for name, y in x.arrays.items() if name not in own} | x.options | others

    def objective(own):
        found = linear_divergence(**own, **rest)
        value, entropy = found if rest["return_entropy"] else (found, None)
        weighted = value * x.of_scalar if value.ndim == 0 else jnp.sum(value * x.of_tokens)
        return weighted + (0 if entropy is None else jnp.sum(entropy)), (value, entropy)  # entropy has no gradient

    gradients, (value, entropy) = jax.grad(objective, has_aux=True)(own)
    for name, gradient in gradients.items():
        assert gradient.dtype == own[name].dtype
    assert value.dtype == jnp.float32
    found = {**gradients, "value": value} | ({} if entropy is None else {"entropy": entropy})
    return {name: np.asarray(y, np.float64) for name, y in found.items()}


def held(x: Drawn, found: dict[str, np.ndarray], want: dict[str, np.ndarray] | None = None, times: float = 2) -> None:
    """Two roundings of a gradient: of dz, and of the result, to e's type. Those of few tokens may all fall together.

    want: the truth, where it is known. times: by how much the error of a gradient exceeds that of one rounding.
    """
    want, e = want or truth(x), x.arrays["e"]
    kept = np.sum(np.asarray(x.arrays.get("token_weight", jnp.ones(e.shape[:-1]))) != 0)
    floor = RELIABLE * roundoff(np.float32) + roundoff(e.dtype) * (kept < 16)
    vocabulary = x.arrays["c"].shape[x.options["vocab_axis"]]
    of_numbers = (48 + vocabulary**0.5) * roundoff(np.float32)  # tests/tolerance.py, for a sum of so many terms
    assert found.keys() == want.keys()
    for name, y in want.items():
        rounded = np.asarray(jnp.asarray(y, e.dtype), np.float64) if name in STUDENT else y
        allowed = times * error(rounded, y) + (floor if name in STUDENT else of_numbers)
        assert error(found[name], y) <= allowed, f"{name}: {error(found[name], y):.3g} > {allowed:.3g}, {x.options}"


@pytest.fixture
def few_logits(monkeypatch):
    """few_logits(most): a chunk's logits are held of so many tokens at a time, where dz is stored."""

    def of(most: int) -> None:
        monkeypatch.setattr(budget, "MOST_LOGITS", (most,))
        plan_of.cache_clear()

    yield of
    plan_of.cache_clear()


@pytest.mark.parametrize("seed", range(DRAWN))
def test_against_float64(seed, few_logits):
    few_logits(1 + seed)
    x = draw(seed)
    held(x, ours(x))


@pytest.mark.parametrize("impl", ["chunked", "cce"])
def test_a_large_column_of_the_gradient_does_not_make_the_others_coarser(impl):
    """de waits for its factor in integers, of which only those of the same 256 columns share a step."""
    rng, (tokens, width, vocabulary) = np.random.default_rng(0), (48, 512, 90)
    large = np.where(np.arange(width) == 0, 2.0**12, 1)
    shapes = {"e": (tokens, width), "c": (vocabulary, width), "teacher_e": (tokens, 8), "teacher_c": (vocabulary, 8)}
    arrays = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    arrays |= {"e": arrays["e"] / large, "c": arrays["c"] * large}
    of_side = {"vocab_axis": 0, "softcap": None, "logit_scale": None}
    options = of_side | {f"teacher_{name}": value for name, value in of_side.items()}
    options |= {"divergence": "jsd", "beta": 0.5, "reduction": "mean", "return_entropy": False}
    x = Drawn({k: jnp.asarray(y, "bfloat16") for k, y in arrays.items()}, options, jnp.ones(tokens))
    found, want = (of["e"][:, 256:] for of in (ours(x, impl=impl), truth(x)))
    assert error(found, want) <= 2 * error(np.asarray(jnp.asarray(want, "bfloat16"), np.float64), want)


@pytest.mark.parametrize("seed", range(12))
def test_de_of_any_width_waits_for_any_factor(seed):
    """It is off by half a step of its block, and by the rounding of the result."""
    rng = np.random.default_rng(seed)
    tokens, width, dtype = int(rng.integers(1, 9)), int(rng.integers(1, 1200)), ("bfloat16", "float16")[seed % 2]
    both = Wanted(e=True, c=True, bias=False)
    call = Call(tokens, width, 50, dtype, Head(), False, False, both, 0, one_factor=True, teacher_width=8)
    de = np.float32(rng.normal(size=(tokens, width)) * 10 ** rng.uniform(-3, 1, width))
    factor = np.float32(rng.uniform(-2, 2, tokens))
    found = multiplied(divided(jnp.asarray(de), call), jnp.asarray(factor), call)
    assert found.dtype == dtype
    want, first = np.float64(factor)[:, None] * de, np.arange(0, width, block_of(width))
    steps = np.maximum.reduceat(np.abs(want), first, axis=1)[:, np.arange(width) // block_of(width)] / 32766
    rounding = np.maximum(np.abs(want), 2.0**-14) * roundoff(dtype)
    assert (np.abs(np.float64(found) - want) <= 0.51 * (steps + rounding)).all()


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


def test_everything_is_drawn():
    cases = [draw(seed) for seed in range(DRAWN)]
    found = {(c.options["divergence"], c.options["reduction"]) for c in cases if c.options["impl"] != "reference"}
    assert len(found) == 9
    assert any("token_weight" in c.arrays and c.options["impl"] == "reference" for c in cases)


FIXED = Drawn(
    {
        "e": jnp.asarray(np.random.default_rng(0).normal(size=(40, 16)), "float32"),
        "c": jnp.asarray(np.random.default_rng(1).normal(size=(90, 16)), "float32"),
        "teacher_e": jnp.asarray(np.random.default_rng(2).normal(size=(40, 24)), "float32"),
        "teacher_c": jnp.asarray(np.random.default_rng(3).normal(size=(90, 24)), "float32"),
    },
    {"divergence": "jsd", "beta": 0.3, "memory_budget": 0, "impl": "chunked"},
    None,
)


def loss(x: Drawn = FIXED, **others):
    return linear_divergence(**{**x.arrays, **x.options, **others})


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_no_divergence_and_near_ones_a_positive_one(kind):
    """Sums of terms of both signs would leave ±1e-7, and more than all of a divergence of near distributions."""
    e, c = FIXED.arrays["e"], FIXED.arrays["c"]
    equal = partial(loss, teacher_e=e, teacher_c=c, divergence=kind)
    value, gradient = jax.value_and_grad(lambda e: equal(e=e))(e)
    assert value == 0
    assert jnp.max(jnp.abs(gradient)) < 1e-9
    for apart, most, rounding in ((1e-3, 1e-4, 2e-2), (0.1, 1.0, 1e-3)):
        near = e + apart * FIXED.arrays["teacher_e"][:, :16]
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


BETAS = 1e-12, 1e-6, 0.5, 1 - 1e-6


def jsd(beta: float) -> tuple[float, np.ndarray]:
    """The jsd of FIXED in float64 and its gradient by e, without differences of numbers of the size of 1."""
    e, c, *teacher = (np.float64(x) for x in FIXED.arrays.values())
    logs = [z - np.logaddexp.reduce(z, axis=1, keepdims=True) for z in (e @ c.T, teacher[0] @ teacher[1].T)]
    s, t = np.exp(logs)
    of_s = -np.log1p(beta * np.expm1(logs[1] - logs[0]))
    of_t = -np.log1p((1 - beta) * np.expm1(logs[0] - logs[1]))
    of_student = np.sum(s * of_s, axis=1)
    total = beta * np.sum(t * of_t, axis=1) + (1 - beta) * of_student
    dz = (1 - beta) * s * (of_s - of_student[:, None])
    return total.mean(), dz @ c / len(e)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("impl", ["reference", "chunked", "cce"])
def test_a_jsd_keeps_its_digits_as_beta_goes_to_0_or_1(impl, beta):
    """It goes to 0 itself."""
    value, gradient = jax.value_and_grad(lambda e: loss(e=e, beta=beta, impl=impl))(FIXED.arrays["e"])
    want, of_e = jsd(beta)
    np.testing.assert_allclose(value, want, rtol=2e-6)
    assert error(gradient, of_e) < 1e-5


def test_a_jsd_close_to_0_keeps_its_digits_in_float16():
    """dz is divided by the size of what it can be, which goes to 0 with beta."""
    e, c, *teacher = (x.astype(jnp.float16) for x in FIXED.arrays.values())

    def gradient(beta: float, impl: str) -> np.ndarray:
        loss = partial(linear_divergence, divergence="jsd", beta=beta, num_items=min(beta, 1 - beta), impl=impl)
        return np.asarray(jax.grad(lambda c: loss(e, c, *teacher))(c), np.float64)

    for beta in BETAS[1:]:
        assert error(gradient(beta, "chunked"), gradient(beta, "reference")) < 2 * roundoff(np.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [40.0, 3000.0])
def test_far_distributions_are_finite(kind, size):
    """And equal to the limits: with logits far apart both distributions are one id each."""
    c = jnp.eye(8) * size
    e, teacher_e = jnp.eye(8)[:4], jnp.eye(8)[4:]
    value, gradient = jax.value_and_grad(lambda e: linear_divergence(e, c, teacher_e, c, divergence=kind, beta=0.3))(e)
    want = size if kind != "jsd" else -0.3 * np.log(0.3) - 0.7 * np.log(0.7)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert np.isfinite(gradient).all()


def test_ids_that_neither_has_count_nothing():
    bias = jnp.zeros(90).at[80:].set(-jnp.inf)
    few = {"c": FIXED.arrays["c"][:80], "teacher_c": FIXED.arrays["teacher_c"][:80]}
    for kind in KINDS:
        run = jax.value_and_grad(lambda e, kind=kind, **more: loss(e=e, divergence=kind, **more))
        found, want = run(FIXED.arrays["e"], bias=bias, teacher_bias=bias), run(FIXED.arrays["e"], **few)
        np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
        np.testing.assert_allclose(found[1], want[1], rtol=1e-4, atol=1e-6)
        for of_teacher in (None, bias) if kind != "forward_kl" else (bias,):  # it would be infinite
            of = {"bias": bias, "teacher_bias": of_teacher}
            found, want = (run(FIXED.arrays["e"], **of, impl=impl) for impl in ("reference", "chunked"))
            np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
            np.testing.assert_allclose(found[1], want[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_tokens(reduction):
    """No tokens, and tokens whose weights are all 0: the loss and its gradients are 0."""
    for tokens in (0, 5):
        weight = jnp.zeros(tokens)
        e, teacher_e = jnp.full((tokens, 16), jnp.nan), jnp.full((tokens, 24), jnp.nan)
        given = {"teacher_e": teacher_e, "token_weight": weight, "return_entropy": True, "reduction": reduction}

        def summed(e, c, given=given):
            value, entropy = loss(e=e, c=c, **given)
            return jnp.sum(value), entropy

        (value, entropy), found = jax.value_and_grad(summed, (0, 1), has_aux=True)(e, FIXED.arrays["c"])
        assert value == 0
        assert entropy.shape == (tokens,)
        assert not any(np.any(x) for x in (entropy, *found))


def test_nothing_but_the_student_has_a_gradient():
    names = "teacher_e", "teacher_c", "token_weight", "temperature"
    arrays = FIXED.arrays | {"token_weight": jnp.ones(40), "temperature": jnp.ones(40)}

    def run(given):
        return loss(**{**arrays, **given})

    for impl in ("chunked", "reference"):
        found = jax.grad(lambda given, impl=impl: loss(**{**arrays, **given, "impl": impl}))(
            {name: arrays[name] for name in names}
        )
        assert not any(np.any(x) for x in found.values())


def test_a_new_temperature_or_beta_compiles_nothing():
    loss(temperature=1.1)
    before = public._divergence._cache_size()
    loss(temperature=1.2, beta=0.4)
    assert public._divergence._cache_size() == before


def test_inside_vmap():
    e, teacher_e = (FIXED.arrays[name].reshape(2, 20, -1) for name in ("e", "teacher_e"))
    value, found = jax.vmap(jax.value_and_grad(lambda e, t: loss(e=e, teacher_e=t, reduction="sum")))(e, teacher_e)
    want, of_e = jax.value_and_grad(lambda e: loss(e=e, reduction="sum"))(FIXED.arrays["e"])
    np.testing.assert_allclose(jnp.sum(value), want, rtol=1e-5)
    np.testing.assert_allclose(found.reshape(40, 16), of_e, rtol=1e-4, atol=1e-6)


BAD = [
    ({"divergence": "kl"}, ValueError, "divergence='kl' must be one of 'forward_kl', 'reverse_kl', 'jsd'"),
    ({"beta": 0.0}, ValueError, "beta=0.0 .* divergence='forward_kl' .* divergence='reverse_kl'"),
    ({"beta": 1}, ValueError, "beta=1 must be above 0 and below 1"),
    ({"beta": jnp.ones(())}, TypeError, "beta must be a Python number"),
    ({"reduction": "max"}, ValueError, "reduction='max'"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items"),
    ({"temperature": 0.0}, ValueError, "temperature=0.0 must be finite and positive"),
    ({"token_weight": jnp.ones(3)}, ValueError, r"token_weight \(3,\) and e \(40, 16\)"),
    ({"token_weight": jnp.ones(40, jnp.complex64)}, TypeError, "token_weight must be real"),
    ({"teacher_e": jnp.ones((39, 24))}, ValueError, r"teacher_e \(39, 24\) and e \(40, 16\)"),
    ({"teacher_e": jnp.ones((40, 25))}, ValueError, r"teacher_e \(40, 25\) and teacher_c \(90, 24\)"),
    ({"teacher_c": jnp.ones((91, 24))}, ValueError, r"teacher_c \(91, 24\) .* and c \(90, 16\)"),
    ({"teacher_c": jnp.ones((24, 90))}, ValueError, "teacher_vocab_axis=1"),
    ({"teacher_c": jnp.ones((90, 24), jnp.bfloat16)}, TypeError, r"teacher_c\.astype\(teacher_e\.dtype\)"),
    ({"teacher_e": [1.0]}, TypeError, r"teacher_e must be an array, got list: write jnp.asarray\(teacher_e\)"),
    ({"teacher_bias": jnp.ones(3)}, ValueError, r"teacher_bias must have shape \(V,\) = \(90,\)"),
    ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap=-1.0"),
    ({"teacher_logit_scale": "x"}, TypeError, "teacher_logit_scale must be a Python number"),
    ({"teacher_vocab_axis": 2}, ValueError, "teacher_vocab_axis=2"),
    ({"c": jnp.ones((90, 17))}, ValueError, r"e \(40, 16\) and c \(90, 17\)"),
    ({"e": jnp.ones((40, 16), jnp.int32)}, TypeError, "e must be one of"),
    ({"bias": jnp.ones(91)}, ValueError, "bias must have shape"),
    ({"softcap": 0.0}, ValueError, "softcap=0.0"),
    ({"impl": "fast"}, ValueError, "impl='fast'"),
    ({"memory_budget": -1}, ValueError, "memory_budget=-1"),
    ({"return_entropy": "yes"}, ValueError, "return_entropy='yes'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        loss(**change)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize(
    ("dtype", "reduction", "products"), [("float32", "mean", 4), ("bfloat16", "mean", 8), ("bfloat16", "none", 10)]
)
def test_what_a_program_multiplies_and_holds(dtype, reduction, products):
    """Three matmuls of the student and one of the teacher in a chunk, and no logits of all tokens.

    In bfloat16 the last chunk is apart, and "none" computes the two logits first, and again.
    """
    tokens, vocabulary = 320, 200
    of = jax.ShapeDtypeStruct
    e, c, teacher = (
        of((tokens, 16), dtype),
        of((vocabulary, 16), dtype),
        (of((tokens, 8), dtype), of((vocabulary, 8), dtype)),
    )

    def objective(e, c, teacher):
        return jnp.sum(linear_divergence(e, c, *teacher, impl="chunked", memory_budget=0, reduction=reduction))

    traced = jax.make_jaxpr(jax.grad(objective, (0, 1)))(e, c, teacher).jaxpr
    found = list(equations(traced))
    assert sum(x.primitive.name == "dot_general" for x in found) == products
    shapes = {y.aval.shape for x in found for y in x.outvars if hasattr(y.aval, "shape")}
    assert not any(tokens * vocabulary <= np.prod(shape) for shape in shapes)


def test_a_frozen_argument_costs_no_matmul():
    for names, products in (((0,), 3), ((1,), 3), ((), 2)):
        e, c = FIXED.arrays["e"], FIXED.arrays["c"]
        run = jax.grad(lambda e, c: loss(e=e, c=c), names) if names else lambda e, c: loss(e=e, c=c)
        found = [x for x in equations(jax.make_jaxpr(run)(e, c).jaxpr) if x.primitive.name == "dot_general"]
        assert len(found) == products


def given_of(call: Call, of_teacher: Head, seed: int = 0, make: Any = None) -> Given:
    rng = np.random.default_rng(seed)
    make = make or (lambda shape, dtype: jnp.asarray(rng.normal(size=shape) * 0.4, dtype))

    def side(width: int, axis: int):
        c = (call.vocabulary, width) if axis == 0 else (width, call.vocabulary)
        return Side(make((call.tokens, width), call.dtype), make(c, call.dtype))

    student, teacher = side(call.width, call.head.vocab_axis), side(call.teacher_width, of_teacher.vocab_axis)
    weight = jnp.asarray(rng.uniform(size=call.tokens) * (rng.random(call.tokens) < 0.8), "float32")
    return Given(student, teacher, weight, None, jnp.float32([0.3, 0.7]))


def test_the_function_for_other_frameworks():
    """It is the mean if the weights are divided by the number of items."""
    call = Call(
        40, 16, 90, "bfloat16", Head(), False, False, Wanted(True, True, False), 0, one_factor=True, teacher_width=24
    )
    given = given_of(call, Head())
    items = jnp.sum(given.weight)
    of = Divergence("jsd", Head(), entropy=True)
    found = formed(given._replace(weight=given.weight / items), of, plan_of(call, None, "chunked"))
    student, teacher = given.student, given.teacher

    def mean(e, c):
        return linear_divergence(
            e, c, teacher.e, teacher.c, divergence="jsd", beta=0.3, token_weight=given.weight, return_entropy=True
        )

    (value, entropy), (de, dc) = jax.value_and_grad(mean, (0, 1), has_aux=True)(student.e, student.c)
    for x, y in zip((found.loss, found.entropy, found.de, found.dc), (value, entropy, de, dc), strict=True):
        assert x.dtype == y.dtype
        assert error(x, y) < 6e-3
    assert found.dbias is None
    each = linear_divergence(*student[:2], *teacher[:2], divergence="jsd", beta=0.3, reduction="none")
    np.testing.assert_allclose(found.total, jnp.where(given.weight == 0, 0, each), rtol=1e-5)


@pytest.mark.skipif(not MOSAIC, reason="kernels for Hopper need JAX 0.11")
@pytest.mark.parametrize(("kind", "teacher_width"), [("forward_kl", 64), ("jsd", 128)])
def test_kernels_for_hopper_multiply_dz(kind, teacher_width, few_logits):
    """In the interpreter, in several chunks, with columns that are padded to whole tiles.

    A teacher of 64 columns is too narrow for the kernel of the logits.
    """
    head, vocabulary = Head(), 632
    wanted = Wanted(True, True, True)
    call = Call(
        *(560, 128, vocabulary, "bfloat16", head, False, False, wanted, 2 * 2**20),
        one_factor=True,
        teacher_width=teacher_width,
    )
    given, of = given_of(call, Head()), Divergence(kind, Head(), True)
    few_logits(100)
    plan = plan_of(call, Gpu("9.0", 4, interpreted=True), "cce")
    way = plan.in_forward
    assert way is not None
    assert way.logits_of(way.chunks.size) < way.chunks.size
    assert way.dc.engine is HOPPER
    assert way.de is not None
    assert way.chunks.whole + (way.chunks.last > 0) > 1
    found, want = formed(given, of, plan), formed(given, of, plan_of(call, None, "chunked"))
    for x, y in zip(found, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or error(x, y) < 6e-3


def beside_a_teacher(rng: np.random.Generator) -> tuple[Call, Gpu | None, Literal["auto", "cce", "chunked"]]:
    call, gpu, impl = drawn(rng)
    call = replace(call, with_sum=False, with_mean=False, ids=0, one_factor=True, gradient_tolerance=0.0)
    return replace(call, with_temperature=False, teacher_width=int(2 ** rng.uniform(4, 14))), gpu, impl  # type: ignore[return-value]


def test_drawn_plans_take_chunks_of_all_tokens_within_the_budget():
    rng, over, by_kernels = np.random.default_rng(0), 0, 0
    for _ in range(400):
        call, gpu, impl = beside_a_teacher(rng)
        plan = plan_of(call, gpu, impl)
        way = plan.in_forward
        assert way is not None
        chunks = way.chunks
        assert (
            chunks.rows >= call.tokens > (chunks.whole - 1) * chunks.size
            if chunks.whole
            else chunks.last >= call.tokens
        )
        assert plan.held <= max(call.memory_budget, plan.least)
        logits = 2 * call.sum_itemsize * way.logits_of(max(chunks.size, chunks.last)) * call.vocabulary
        assert plan.held >= logits
        over, by_kernels = over + (plan.held > call.memory_budget), by_kernels + (way.de is not None)
    assert 20 < over < 380
    assert by_kernels > 20


@pytest.mark.skipif(not MOSAIC, reason="JAX 0.10 lowers no kernels for Hopper")
def test_a_program_for_an_h200_has_kernels_for_the_gradients_and_no_logits_of_all_tokens():
    call = Call(
        8192,
        512,
        32768,
        "bfloat16",
        Head(),
        False,
        False,
        Wanted(True, True, False),
        2**28,
        one_factor=True,
        teacher_width=256,
    )
    given = given_of(call, Head(), make=jax.ShapeDtypeStruct)
    plan = plan_of(call, H200, "auto")
    run = partial(formed, of=Divergence("jsd", Head()), plan=plan)
    assert set(lowering.for_hopper(run, given)) == {"whole_logits", "de", "dc_sum"}
    text = str(jax.jit(run).trace(given).jaxpr)
    assert "cce_divergence" in text
    assert "8192,32768" not in text
