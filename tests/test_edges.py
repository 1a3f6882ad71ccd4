"""Ignored tokens that hold NaN, targets out of range, no tokens, extreme logits, determinism."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy
from tests.call import run
from tests.cases import IMPLS, Case, inputs
from tests.tolerance import assert_rounded, error
from tests.truth import truth
from tests.wrapped import Wrapped

CASE = Case("edge", leading=(24,), width=16, vocabulary=70, arrays=("bias",))


def grads(e, c, targets, impl, **options):
    """The sum of what the loss returns, and its gradients of e and c."""
    return jax.value_and_grad(
        lambda e, c: jnp.sum(linear_cross_entropy(e, c, targets, impl=impl, precision="highest", **options)), (0, 1)
    )(jnp.asarray(e), jnp.asarray(c))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_of_an_ignored_token_gets_out(impl, poison, reduction):
    given = inputs(CASE)
    ignored = given.targets == -100
    assert ignored.any()
    bad = given.e.copy()
    bad[ignored] = poison
    weight = np.where(ignored, np.nan, 1.0).astype(np.float32)
    bias = given.optional["bias"].copy()
    bias[3] = 200.0  # whose exponential is infinite in float32
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "bias": bias, "reduction": reduction}
    clean = grads(given.e, given.c, given.targets, impl, **options)
    dirty = grads(bad, given.c, given.targets, impl, token_weight=weight, **options)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(dirty))
    assert not np.asarray(dirty[1][0])[ignored].any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_token_ignored_is_zero_not_nan(impl, weighted, reduction):
    given = inputs(CASE)
    options = {"class_weight": np.ones(70, np.float32)} if weighted else {}
    targets = np.full_like(given.targets, -100)
    loss, gradients = grads(given.e, given.c, targets, impl, reduction=reduction, **options)
    assert loss == 0
    assert all(not np.asarray(g).any() for g in gradients)


@pytest.mark.parametrize("impl", IMPLS)
def test_num_items_zero_is_zero(impl):
    given = inputs(CASE)
    loss, gradients = grads(given.e, given.c, given.targets, impl, num_items=0)
    assert loss == 0
    assert all(not np.asarray(g).any() for g in gradients)


@pytest.mark.parametrize("number", [3_000_000_000, np.int64(3_000_000_000), 10**30, 3e9, np.float64(3e9)])
def test_num_items_is_any_number_that_float32_holds(number):
    given = inputs(CASE)
    total = linear_cross_entropy(given.e, given.c, given.targets, reduction="sum")
    for call in (linear_cross_entropy, jax.jit(linear_cross_entropy, static_argnames="num_items")):
        mean = call(given.e, given.c, given.targets, num_items=number)
        np.testing.assert_allclose(mean, np.float64(total) / float(number), rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens(impl, reduction):
    e, c, targets = np.zeros((2, 0, 16), np.float32), np.ones((70, 16), np.float32), np.zeros((2, 0), np.int32)
    loss, lse = linear_cross_entropy(e, c, targets, impl=impl, reduction=reduction, return_lse=True)
    assert loss.shape == ((2, 0) if reduction == "none" else ())
    assert lse.shape == (2, 0)
    assert float(jnp.sum(loss)) == 0
    de, dc = jax.grad(lambda e, c: linear_cross_entropy(e, c, targets, impl=impl), (0, 1))(e, c)
    assert de.shape == e.shape
    assert not np.asarray(dc).any()


@pytest.mark.parametrize("bad", [70, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("impl", IMPLS)
def test_target_out_of_range_is_nan_and_so_is_every_gradient_it_reaches(impl, bad):
    given = inputs(CASE)
    targets = given.targets.copy()
    targets[5] = bad
    loss, lse = linear_cross_entropy(given.e, given.c, targets, impl=impl, reduction="none", return_lse=True)
    others = np.arange(24) != 5
    assert np.isnan(loss[5])
    assert np.isfinite(lse[5])
    clean = linear_cross_entropy(given.e, given.c, given.targets, impl=impl, reduction="none")
    np.testing.assert_allclose(loss[others], clean[others], rtol=1e-6)
    de, dc = grads(given.e, given.c, targets, impl, reduction="sum")[1]
    assert np.isnan(de[5]).all()
    assert np.isfinite(np.asarray(de)[others]).all()
    assert np.isnan(dc).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_wide_integers_do_not_wrap_into_the_vocabulary(impl):
    given = inputs(CASE)
    targets = given.targets.astype(np.int64)
    targets[5], targets[6] = 2**32 + 3, -(2**40)
    loss = linear_cross_entropy(given.e, given.c, targets, impl=impl, reduction="none")
    assert np.isnan(loss[5:7]).all()
    unsigned = np.where(given.targets < 0, 255, given.targets).astype(np.uint8)
    loss = linear_cross_entropy(given.e, given.c, unsigned, impl=impl, ignore_index=255)
    assert loss == linear_cross_entropy(given.e, given.c, given.targets, impl=impl)


@pytest.mark.parametrize("ignore_index", [-(2**31), 2**31 - 1, 2**32 + 3, -(2**40), 2**63, 10**30])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_is_an_ignore_index(dtype, ignore_index):
    """Where the targets' type holds it, it is what it ignores, and no value near it; elsewhere it ignores nothing."""
    given = inputs(CASE)
    targets = np.where(given.targets < 0, 3, given.targets).astype(dtype)
    held = np.iinfo(dtype).min <= ignore_index <= np.iinfo(dtype).max
    targets[5] = ignore_index if held else np.iinfo(dtype).max
    targets[6] = np.iinfo(dtype).max if ignore_index != np.iinfo(dtype).max else ignore_index - 1
    with jax.enable_x64(True):
        array = jnp.asarray(targets)
    for t, x64 in ((targets, False), (array, True)):
        with jax.enable_x64(x64):
            run = partial(linear_cross_entropy, given.e, given.c, t, ignore_index=ignore_index, reduction="none")
            loss = run()
            assert (loss[5] == 0) if held else np.isnan(loss[5])
            assert np.isnan(loss[6]), "out of range and not ignored"
            assert np.isfinite(np.delete(loss, [5, 6])).all()
            np.testing.assert_array_equal(np.isnan(run(shift=2)), np.isnan(loss)[2:])
            with pytest.raises(ValueError, match=rf"targets\[{6 if held else 5}\] = "):
                run(check_targets=True)


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("impl", IMPLS)
def test_extreme_logits(impl, scale):
    """|z| to 1e4 and targets far below the largest logit, which a sum of exponentials cannot hold in float32."""
    given = inputs(CASE)
    z = (given.e.astype(np.float64) @ given.c.T.astype(np.float64)) / np.abs(given.e @ given.c.T).max() * scale
    e = (given.e / np.abs(given.e @ given.c.T).max() * scale).astype(np.float32)
    loss, (de, dc) = grads(e, given.c, given.targets, impl)
    kept = given.targets != -100
    lse = np.logaddexp.reduce(z, axis=1)
    expected = (lse - z[np.arange(24), np.where(kept, given.targets, 0)])[kept].mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    p = np.exp(z - lse[:, None])
    p[np.arange(24), np.where(kept, given.targets, 0)] -= 1
    p *= kept[:, None] / kept.sum()
    # A logit of 1e4 has an ulp of 1e-3, and the softmax that relative error.
    assert error(de, p @ given.c) < 1e-6 * scale + 1e-5
    assert error(dc, p.T @ e) < 1e-6 * scale + 1e-5


@pytest.mark.parametrize("impl", IMPLS)
def test_a_bias_of_minus_infinity_removes_a_class(impl):
    given = inputs(CASE)
    removed = np.arange(70) >= 40
    targets = np.where(given.targets >= 40, given.targets - 40, given.targets)
    bias = np.where(removed, -np.inf, 0.0).astype(np.float32)
    loss, (de, dc) = grads(given.e, given.c, targets, impl, bias=bias)
    fewer, (de_fewer, dc_fewer) = grads(given.e, given.c[:40], targets, impl)
    np.testing.assert_allclose(loss, fewer, rtol=1e-6)
    np.testing.assert_allclose(de, de_fewer, atol=1e-6)
    np.testing.assert_allclose(dc[:40], dc_fewer, atol=1e-6)
    assert not np.asarray(dc)[40:].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_same_call_same_bits(impl):
    given = inputs(CASE, "bfloat16")
    first, second = (grads(given.e, given.c, given.targets, impl) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("cotangent", [1e-6, 1.0, 1e4])
def test_float16_neither_underflows_nor_overflows(cotangent):
    """p/N of a mean over many tokens is below float16's smallest number; a loss scale times it, above its largest."""
    given = inputs(Case("half", leading=(64,), width=16, vocabulary=300, ignored=0.0), "float16")

    def objective(e, c, impl):
        return cotangent * linear_cross_entropy(e, c, given.targets, impl=impl, precision="highest")

    exact = jax.grad(objective, (0, 1))(given.e.astype(np.float32), given.c.astype(np.float32), "reference")
    for impl in ("cce", "chunked"):
        for gradient, want in zip(jax.grad(objective, (0, 1))(given.e, given.c, impl), exact, strict=True):
            rounded = np.asarray(want).astype(np.float16)
            assert error(gradient, want) < 2 * error(rounded, want) + 1e-3


@pytest.mark.parametrize("impl", ["cce", "chunked"])
def test_float16_keeps_what_is_far_smaller_than_the_largest_cotangent(impl):
    """Flat softmaxes over many classes, of tokens that count 2⁻¹⁰ of another one: their dz are 2⁻²¹ of the largest.

    lse alone has a cotangent, so no target's element hides the small ones. The token that counts has an embedding of 0:
    dc has nothing of it, and its own row of de is left out.
    """
    tokens, vocabulary = 24, 2001
    given = inputs(Case("flat", (tokens,), 16, vocabulary, ignored=0.0), "float16")
    others = np.arange(tokens) > 0
    e, c = (given.e / 64 * others[:, None]).astype(np.float16), (1 + given.c / 64).astype(np.float16)
    cotangents = np.where(others, 2.0**-10, 1.0) * 2.0**14

    def objective(e, c, impl):
        _, lse = linear_cross_entropy(e, c, given.targets, impl=impl, return_lse=True, precision="highest")
        return jnp.sum(lse * cotangents.astype(np.float32))

    z = np.float64(e) @ np.float64(c).T
    dz = cotangents[:, None] * np.exp(z - np.logaddexp.reduce(z, axis=1)[:, None])
    reference = jax.grad(objective, (0, 1))(jnp.asarray(e), jnp.asarray(c), "reference")
    actual = jax.grad(objective, (0, 1))(jnp.asarray(e), jnp.asarray(c), impl)
    for name, exact, rows in (("e", dz @ np.float64(c), others), ("c", dz.T @ np.float64(e), ...)):
        k = "ec".index(name)
        assert_rounded(actual[k][rows], exact[rows], reference[k][rows], f"gradient of {name}", roundings=2)


FACTORS = {
    "scale": Case("scale", (24,), 16, 300, options={"logit_scale": 4096.0, "reduction": "none", "return_lse": True}),
    "class weights": Case("class weights", (24,), 16, 300, ("class_weight",),
                          options={"label_smoothing": 1.0, "reduction": "none", "return_lse": True}),
}  # fmt: skip


@pytest.mark.parametrize("impl", ["cce", "chunked"])
@pytest.mark.parametrize("factor", FACTORS)
def test_float16_has_room_for_every_factor_of_dz(factor, impl):
    """Gradients that float16 holds, of a dz that is 4096 or 10⁴ times its largest cotangent."""
    case = FACTORS[factor]
    given = inputs(case, "float16")
    if factor == "scale":
        given = replace(given, e=given.e / 64, c=given.c / 64)
    else:  # lse has no cotangent, which would be as large as the mean weight
        weight = given.optional["class_weight"] * 1e4
        of_lse = -given.of_loss * weight.mean(dtype=np.float32)
        given = replace(given, optional={"class_weight": weight}, of_lse=of_lse)
    _, _, exact = truth(given, case.options)
    _, _, reference = run(given, case.options, "reference")
    _, _, actual = run(given, case.options, impl)
    for name, gradient in actual.items():
        assert_rounded(gradient, exact[name], reference[name], f"gradient of {name}", roundings=2)


@pytest.mark.parametrize("impl", ["cce", "chunked"])
def test_in_float16_a_target_out_of_range_reaches_no_other_row(impl):
    """dz is divided by a number that is computed from the cotangents of all tokens, of which one is NaN.

    The others' are 100, which float16 does not hold where they are divided by a number for cotangents of 1.
    """
    given = inputs(CASE, "float16")
    run = partial(grads, impl=impl, reduction="sum", token_weight=np.full(24, 100, np.float32))
    others = np.arange(24) != 5
    targets = np.where(others, given.targets, 70)
    de, dc = run(given.e, given.c, targets)[1]
    clean, _ = run(given.e, given.c, np.where(others, given.targets, -100))[1]
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(de[others], clean[others])
    assert np.isnan(de[5]).all()
    assert np.isnan(dc).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_removed_class_of_weight_zero_takes_no_part_in_smoothing(impl):
    """Its logit is −inf, and 0 · inf is NaN."""
    given = inputs(CASE)
    weight = np.where(np.arange(70) == 3, 0.0, 1.5).astype(np.float32)
    targets = np.where(given.targets == 3, 4, given.targets)
    found = []
    for low in (-np.inf, -1e4):
        bias = np.where(weight == 0, low, given.optional["bias"]).astype(np.float32)
        options = {"bias": bias, "class_weight": weight, "label_smoothing": 0.1}
        found.append(grads(given.e, given.c, targets, impl, **options))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[0]))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_float64_where_it_can_be_held():
    case = Case("double", leading=(20,), width=8, vocabulary=50)
    given = inputs(case)
    e, c = np.float64(given.e), np.float64(given.c)
    with pytest.raises(TypeError, match=r"float64.*jax_enable_x64"):
        linear_cross_entropy(e, c, given.targets)
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match=r"'cce' takes.*float64"):
            linear_cross_entropy(e, c, given.targets, impl="cce")
        results = [grads(e, c, given.targets, impl) for impl in ("reference", "chunked", "auto")]
    for loss, gradients in results[1:]:
        assert loss.dtype == np.float64
        np.testing.assert_allclose(loss, results[0][0], rtol=1e-13)
        for actual, want in zip(gradients, results[0][1], strict=True):
            np.testing.assert_allclose(actual, want, atol=1e-14)


@pytest.mark.parametrize("name", ["class_weight", "token_weight"])
@pytest.mark.parametrize("impl", ["reference", "chunked", "auto"])
def test_float64_weights_keep_their_digits(impl, name):
    case = Case("double", (20,), 8, 50, (name,), options={"label_smoothing": 0.3, "z_loss": 0.1, "logit_scale": 0.7})
    given = inputs(case)
    weight = np.float64(given.optional[name]) + 1 / 3
    double = replace(given, e=np.float64(given.e), c=np.float64(given.c), optional={name: weight})
    want, _, exact = truth(double, case.options)
    with jax.enable_x64(True):
        loss, _, gradients = run(double, case.options, impl)
    np.testing.assert_allclose(loss, want, rtol=1e-13)
    for of, gradient in gradients.items():
        assert error(gradient, exact[of]) < 1e-13, of


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("impl", IMPLS)
def test_sequences_too_short_for_a_shift_of_one_have_no_loss(impl, length, reduction):
    e, c = np.ones((4, length, 16), np.float32), np.ones((70, 16), np.float32)
    targets, weight = np.full((4, length), 3, np.int32), np.ones((4, length), np.float32)

    def total(e, c):
        loss, lse = linear_cross_entropy(e, c, targets, impl=impl, reduction=reduction, shift=1, return_lse=True,
                                         token_weight=weight, label_smoothing=0.1)  # fmt: skip
        assert loss.shape == ((4, 0) if reduction == "none" else ())
        assert lse.shape == (4, 0)
        return jnp.sum(loss) + jnp.sum(lse)

    value, gradients = jax.value_and_grad(total, (0, 1))(e, c)
    assert value == 0
    assert [g.shape for g in gradients] == [e.shape, c.shape]
    assert not any(np.asarray(g).any() for g in gradients)


@pytest.mark.parametrize("impl", ["cce", "chunked"])
def test_the_budget_all_is_that_of_more_than_enough_bytes(impl):
    given = inputs(Case("all", (24,), 16, 70), "bfloat16")
    want = grads(given.e, given.c, given.targets, impl, memory_budget=2e12)
    jax.tree.map(np.testing.assert_array_equal, grads(given.e, given.c, given.targets, impl, memory_budget="all"), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_anything_with_jax_array_is_an_array(impl):
    given = inputs(Case("wrapped", (24,), 16, 70, arrays=("bias", "class_weight", "token_weight")))
    optional = {k: jnp.asarray(v) for k, v in given.optional.items()}
    arrays = {"e": jnp.asarray(given.e), "c": jnp.asarray(given.c), "targets": jnp.asarray(given.targets),
              "num_items": jnp.float32(12), **optional}  # fmt: skip
    want = linear_cross_entropy(**arrays, impl=impl)
    wrapped = {k: Wrapped(x) for k, x in arrays.items()}
    assert linear_cross_entropy(**wrapped, impl=impl) == want
    np.testing.assert_allclose(jax.jit(lambda a: linear_cross_entropy(**a, impl=impl))(wrapped), want, rtol=1e-6)

    def loss(leaves):
        return linear_cross_entropy(**{**arrays, **leaves}, impl=impl)

    leaves = {k: arrays[k] for k in ("e", "c", "bias")}
    gradients = jax.grad(loss)(leaves)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        for name, gradient in transform(loss)({k: wrapped[k] for k in leaves}).items():
            assert error(gradient.value, gradients[name]) < 1e-6
