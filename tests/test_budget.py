"""Saved exponentials and skipped tokens, where the random search (tests/search) does not reach or hits too rarely."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy
from cce_kernels import backward, forward
from cce_kernels import numbers as core
from cce_kernels.call import Call
from cce_kernels.device import INTERPRETER
from cce_kernels.engines.xla import XLA
from cce_kernels.head import Head
from cce_kernels.plan import plan_of
from tests.call import run
from tests.cases import ARRAYS, DTYPES, Case, Inputs, inputs
from tests.tolerance import assert_rounded, error
from tests.truth import truth

V, D = 232, 20  # no multiple of any tile; V is one of 8, as XLA's matmuls with what is saved want
ODD = 229
ALL = 2**40  # bytes: all exponentials are saved, if that serves the call
FEW_TOKENS, TOKENS = 24, 40  # below and above the number from which on kept tokens are moved together


@dataclass(frozen=True)
class Way:
    """A program: its static options, and its budget: 0 or ALL."""

    budget: int
    tokens: int
    dtype: str = "bfloat16"
    arrays: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = V

    def __str__(self) -> str:
        size = f"{self.tokens} tokens of {self.vocabulary}"
        return ", ".join(["all" if self.budget else "none", size, self.dtype, *self.arrays, *map(str, self.options)])

    def inputs(self, seed: int = 0) -> Inputs:
        return inputs(Case("", (self.tokens,), D, self.vocabulary, self.arrays, 0.0, self.options), self.dtype, seed)


EACH = {"reduction": "none", "return_lse": True}
BIAS = Way(ALL, TOKENS, arrays=("bias",), options=EACH | {"vocab_axis": 1})


def ignored(tokens: int) -> dict[str, np.ndarray]:
    """Which tokens are ignored: none, few and most of them, those also in runs, all; and up to the edge of a tile."""
    draw, place = np.random.default_rng(1).uniform(size=tokens), np.arange(tokens)
    return {
        "none": place < 0,
        "few": draw < 0.1,
        "most": draw < 0.75,
        "in runs": place % 16 < 12,
        "but 16": place < tokens - 16,
        "but 5": place < tokens - 5,
        "all": place >= 0,
    }


def with_odd_cotangents(given: Inputs) -> Inputs:
    """Tokens whose loss, or lse, or both, have no cotangent; and with the lse that enters the loss none in all."""
    of_loss, of_lse = given.of_loss.copy(), given.of_lse.copy()
    if of_loss.ndim:
        of_loss[[1, 2]], of_lse[[2, 4]] = 0, 0
        of_lse[[3, 7, 17]] = -of_loss[[3, 7, 17]]
    return replace(given, of_loss=of_loss, of_lse=of_lse)


def check(given: Inputs, way: Way, hidden: np.ndarray, impl: str = "cce") -> tuple[tuple, tuple]:
    """Compare with float64, and return both. hidden: tokens that are ignored, and hold NaN."""
    given = replace(given, targets=np.where(hidden, -100, given.targets))
    dirty = replace(given, e=np.where(hidden[:, None], np.nan, given.e).astype(given.e.dtype))
    loss, lse, gradients = exact = truth(given, {k: v for k, v in way.options.items() if k != "vocab_axis"})
    reference = run(given, way.options, "reference")
    actual = run(dirty, way.options, impl, memory_budget=way.budget)
    roundings = 3 if way.dtype == "bfloat16" and way.budget else 2
    assert_rounded(actual[0], loss, reference[0], "loss", roundings=2)
    assert_rounded(actual[1], lse, reference[1], "lse", roundings=2)
    for name, gradient in actual[2].items():
        assert_rounded(gradient, gradients[name], reference[2][name], f"gradient of {name}", roundings=roundings)
    assert not np.float32(actual[2]["e"][hidden]).any()
    return actual, exact


def test_saved_exponentials_are_right_whichever_tokens_are_ignored():
    """Where XLA multiplies all rows, those that nothing wrote too: for a vocabulary of a multiple of 256."""
    way = Way(ALL, TOKENS, options=EACH, vocabulary=256)
    for seed, (what, hidden) in enumerate(ignored(way.tokens).items()):
        try:
            check(with_odd_cotangents(way.inputs(seed)), way, hidden)
        except AssertionError as failed:
            raise AssertionError(f"{what} ignored: {failed}") from None


PADDED = [
    Way(0, TOKENS, "float32", ("bias",), EACH | {"softcap": 4.0, "logit_scale": 1.3}),
    Way(0, TOKENS, "float16", ARRAYS, {"label_smoothing": 0.2, "vocab_axis": 1}),
    Way(0, TOKENS, "bfloat16", ("bias", "token_weight"), EACH | {"vocab_axis": 1}, vocabulary=ODD),
]


@pytest.fixture
def padded_rows(monkeypatch):
    """As on a GPU, where XLA would else pad."""
    monkeypatch.setattr(type(XLA), "rows", lambda self, call, gpu: call.tokens + 7)
    plan_of.cache_clear()
    jax.clear_caches()
    yield
    plan_of.cache_clear()
    jax.clear_caches()


@pytest.mark.parametrize("way", PADDED, ids=str)
@pytest.mark.usefixtures("padded_rows")
def test_rows_that_are_appended_for_xla_change_no_gradient(way):
    for what in ("none", "most", "all"):
        check(with_odd_cotangents(way.inputs()), way, ignored(way.tokens)[what], impl="chunked")


@pytest.mark.parametrize("options", [EACH, EACH | {"label_smoothing": 0.2}], ids=str)
def test_evaluation_has_the_bits_of_training(options):
    """Which copies e with the kept tokens first, where evaluation looks up those that are scattered."""
    given = Way(0, TOKENS, arrays=("bias",)).inputs()
    call = partial(linear_cross_entropy, bias=given.optional["bias"], impl="cce", memory_budget=0, **options)
    evaluate = jax.jit(call)
    train = jax.jit(lambda *arrays: jax.vjp(lambda e: call(e, *arrays[1:]), arrays[0])[0])
    for what, hidden in ignored(TOKENS).items():
        e = np.where(hidden[:, None], np.nan, given.e).astype(given.e.dtype)
        arrays = e, given.c, np.where(hidden, -100, given.targets)
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=what), evaluate(*arrays), train(*arrays))


def test_evaluation_rescues_what_overflows_wherever_its_row_lies():
    """Also rows of blocks that are read at once, or looked up because their tokens do not lie side by side in e."""
    given = Way(0, TOKENS).inputs()
    e = (10 * np.float32(given.e)).astype(given.e.dtype)
    z = np.float64(e) @ np.float64(given.c).T
    targets, exact = z.argmin(1), np.logaddexp.reduce(z, axis=1)
    assert (exact - z.min(1) > 90).all()
    evaluate = jax.jit(partial(linear_cross_entropy, impl="cce", memory_budget=0, reduction="none"))
    for what in ("few", "in runs", "but 5"):
        hidden = ignored(TOKENS)[what]
        found = evaluate(e, given.c, np.where(hidden, -100, targets))
        np.testing.assert_allclose(found, np.where(hidden, 0, exact - z.min(1)), rtol=1e-5, err_msg=what)


def test_dbias_of_saved_tokens_has_their_factor_to_16_bits():
    """With logits of 0 saved exponentials are 1, and dbias is the sum of r, 1 + 2⁻⁸ of each of three tokens.

    bfloat16 would round that to 1, and the sum to 3.
    """
    e, c, targets = (np.zeros(s, DTYPES["bfloat16"]) for s in ((FEW_TOKENS, D), (V, D), (FEW_TOKENS,)))
    of_lse = np.where(np.arange(FEW_TOKENS) < 3, V * (1 + 2.0**-8), 0).astype(np.float32)

    def objective(bias):
        options = {"reduction": "none", "return_lse": True, "impl": "cce", "memory_budget": ALL}
        return jnp.sum(of_lse * linear_cross_entropy(e, c, targets.astype(np.int32), bias=bias, **options)[1])

    found = jax.grad(objective)(jnp.zeros(V, jnp.bfloat16))
    np.testing.assert_array_equal(found, np.full(V, 3 * (1 + 2.0**-8)).astype(found.dtype))


FAR = [
    BIAS,
    Way(ALL, TOKENS, arrays=("bias",), options=EACH, vocabulary=ODD),
    Way(ALL, TOKENS, arrays=("bias",), options=EACH | {"label_smoothing": 0.1}),
    Way(ALL, TOKENS, arrays=("bias",), options=EACH | {"softcap": 60.0}),
]


@pytest.mark.parametrize("softcap", [0.5, 40.0])
def test_saved_exponentials_of_logits_that_reach_the_softcap(softcap):
    """The slope 1 − (z/κ)² of such a logit is small. From a rounded exponential it would be wrong by 2⁻⁹·2/κ."""
    way = Way(ALL, TOKENS, options=EACH | {"softcap": softcap, "logit_scale": softcap})
    given = way.inputs()
    e = np.float64(given.e)
    e *= 4 / np.abs(e @ np.float64(given.c).T).min(axis=1, keepdims=True).clip(0.5)
    check(replace(given, e=e.astype(given.e.dtype)), way, np.zeros(TOKENS, bool))


@pytest.mark.parametrize("hide", ["none", "most"])
@pytest.mark.parametrize("way", FAR, ids=str)
def test_rows_whose_largest_logit_is_far_above_their_targets(way, hide):
    """By more than 30 nats, from where on exponentials are relative to lse; and by 90, where they overflow."""
    given = with_odd_cotangents(way.inputs())
    kind = np.arange(way.tokens) % 4
    e = np.float64(given.e) * np.array([1, 4, 10, 4])[kind][:, None]
    z = e @ np.float64(given.c).T + np.float64(given.optional["bias"])
    targets = np.where(kind == 3, z.argmax(1), np.where(kind > 0, z.argmin(1), given.targets))
    gap = z.max(1) - z[np.arange(way.tokens), targets]
    assert ((gap > 46) & (gap < 86)).sum() >= 5
    assert (gap > 90).sum() >= 8
    assert (gap < 20).sum() >= 8
    given = replace(given, e=e.astype(given.e.dtype), targets=targets.astype(np.int32))
    hidden = ignored(way.tokens)[hide]
    found, exact = check(given, way, hidden)
    for k in range(4):  # each kind on its own, lest another's larger gradients hide it
        rows = (kind == k) & ~hidden
        assert error(found[2]["e"][rows], exact[2]["e"][rows]) < 3 * 2.0**-8


@pytest.mark.parametrize("way", FAR[:2], ids=str)
def test_a_bias_of_minus_infinity_removes_a_class(way):
    given = with_odd_cotangents(way.inputs())
    results = []
    for low in (-np.inf, -1e4):  # of which both exponentials are 0
        bias = np.where(np.arange(way.vocabulary) % 5 == 2, low, given.optional["bias"]).astype(given.e.dtype)
        targets = np.where(given.targets % 5 == 2, given.targets - 1, given.targets)
        results.append(
            run(replace(given, optional={"bias": bias}, targets=targets), way.options, "cce", memory_budget=way.budget)
        )
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.isfinite(np.float32(results[0][2]["c"])).all()


def test_another_backward_pass_has_the_bits_of_the_first():
    """With what the one before left of what was saved, after other cotangents, and among tokens that are ignored."""
    given = Way(ALL, TOKENS).inputs()
    wanted = core.Wanted(True, True, True)
    plan = plan_of(Call(TOKENS, D, V, "bfloat16", Head(), False, False, wanted, ALL), INTERPRETER, "cce")
    assert plan.saved == TOKENS
    start, follow = (jax.jit(partial(run, plan=plan)) for run in (forward.statistics, backward.gradients))
    rng = np.random.default_rng(0)
    x, y = (jnp.float32(rng.standard_normal((2, TOKENS))) for _ in "xy")
    y = y.at[0, ::3].set(0)  # whose target's element is then of another size
    for hidden in (ignored(TOKENS)[what] for what in ("few", "most")):
        arrays = core.Inputs(given.e, given.c, None, np.where(hidden, -1, given.targets))
        numbers, saved = start(arrays)

        def gradients(saved, cotangents, arrays=arrays, numbers=numbers):
            return follow(arrays, numbers, saved, core.Cotangents(*cotangents, None))

        first, left = gradients(saved, x)
        other, left = gradients(left, y)
        jax.tree.map(np.testing.assert_array_equal, gradients(left, x)[0], first)
        jax.tree.map(np.testing.assert_array_equal, gradients(saved, y)[0], other)
        assert error(other.e, first.e) > 0.1


def test_a_retained_vjp():
    given = Way(ALL, TOKENS).inputs()
    loss = partial(linear_cross_entropy, targets=given.targets, impl="cce", memory_budget=ALL)
    value, pullback = jax.vjp(loss, jnp.asarray(given.e), jnp.asarray(given.c))
    first, other, again = pullback(value), pullback(-2 * value), pullback(value)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for x, y in zip(other, first, strict=True):
        assert error(x, -2 * np.float32(y)) == 0, "a power of two is exact"


def over_rows(transform, given: Inputs, impl: str, budget: int):
    """Gradients of Σ_k w_k · loss(e_k, c, t_k), the sum taken in a way of JAX's."""
    e, t, w = given.e.reshape(2, -1, D), given.targets.reshape(2, -1), jnp.array([1.0, -3.0])

    def loss(e, c, t):
        return linear_cross_entropy(e, c, t, impl=impl, memory_budget=budget, precision="highest")

    def objective(e, c):
        return transform(loss)(e, c, t, w)

    return jax.jit(jax.value_and_grad(objective, (0, 1)))(jnp.asarray(e), jnp.asarray(given.c))


def mapped(loss):
    return lambda e, c, t, w: jnp.sum(w * jax.vmap(loss, (0, None, 0))(e, c, t))


def scanned(loss):
    def total(e, c, t, w):
        return jax.lax.scan(lambda s, x: (s + x[2] * loss(x[0], c, x[1]), None), 0.0, (e, t, w))[0]

    return total


def checkpointed(loss):
    return scanned(jax.checkpoint(loss))


@pytest.mark.parametrize(("transform", "budget"), [(mapped, ALL), (mapped, 0), (checkpointed, ALL)])
def test_transformed(transform, budget):
    """Under vmap the choice by the number of kept tokens, few in the second row, becomes a selection of both ways."""
    given = inputs(Case("", (2 * TOKENS,), D, V, ignored=0.0), "bfloat16")
    hidden = np.concatenate([ignored(TOKENS)["none"], ignored(TOKENS)["most"]])
    given = replace(given, targets=np.where(hidden, -100, given.targets))
    exact = over_rows(mapped, replace(given, e=np.float32(given.e), c=np.float32(given.c)), "reference", 0)
    reference = over_rows(mapped, given, "reference", 0)
    actual = over_rows(transform, given, "cce", budget)
    np.testing.assert_allclose(actual[0], exact[0], rtol=1e-6)
    for x, y, z, name in zip(actual[1], exact[1], reference[1], ("e", "c"), strict=True):
        # c's gradient is a sum of two rounded ones, of which scan rounds the sum too.
        assert_rounded(x, y, z, f"gradient of {name}", roundings=4)
