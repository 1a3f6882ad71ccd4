"""Combinations of options and shapes drawn at random, against float64; and laws that any cross-entropy obeys."""

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cce_jax import linear_cross_entropy
from tests.call import run
from tests.cases import ARRAYS, Case, inputs
from tests.tolerance import error
from tests.truth import truth

RANDOM = settings(max_examples=16, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw) -> Case:
    options = {"reduction": draw(st.sampled_from(["mean", "sum", "none"])), "return_lse": draw(st.booleans())}
    numbers = {"softcap": (0.5, 20), "logit_scale": (-2, 2), "label_smoothing": (0, 1), "z_loss": (0, 0.1),
               "num_items": (0.5, 50)}  # fmt: skip
    for name, (low, high) in numbers.items():
        if draw(st.booleans()) and (name != "num_items" or options["reduction"] == "mean"):
            options[name] = draw(st.floats(low, high, allow_subnormal=False))
    leading = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    if leading and leading[-1] > 1:
        options["shift"] = draw(st.integers(0, leading[-1] - 1))
    arrays = tuple(a for a in ARRAYS if draw(st.booleans()))
    return Case("random", leading, draw(st.integers(1, 40)), draw(st.integers(1, 130)), arrays, 0.3, options)


@RANDOM
@given(cases(), st.sampled_from(["cce", "chunked", "reference"]), st.sampled_from([0, 1]), st.integers(0, 99))
def test_any_combination_in_float32(case, impl, vocab_axis, seed):
    """float32 against float64, each gradient relative to the largest: 3e-5 is 256 roundings of terms of one size.

    Where a token's p is almost 1, p − 1 cancels: what is left is off by roundings of 1, times a cotangent and an
    element of the other matrix.
    """
    drawn = inputs(case, seed=seed)
    want = truth(drawn, case.options)
    actual = run(drawn, case.options, impl, vocab_axis=vocab_axis)
    np.testing.assert_allclose(actual[0], want[0], rtol=3e-5, atol=3e-5)
    np.testing.assert_allclose(actual[1], want[1], rtol=3e-5, atol=3e-5)
    cotangent = max(1, abs(case.options.get("logit_scale", 1))) * np.abs(drawn.of_loss).max(initial=0.0)
    other = {"e": drawn.c, "c": drawn.e}
    for name, gradient in actual[2].items():
        assert np.isfinite(gradient).all()
        size = max(np.abs(want[2][name]).max(initial=0.0), 1e-3)
        cancelled = 4 * np.finfo(np.float32).eps * cotangent * np.abs(other.get(name, 1.0)).max(initial=0.0)
        assert np.abs(gradient - want[2][name]).max(initial=0.0) <= 3e-5 * size + cancelled, name


@RANDOM
@given(st.integers(0, 999), st.sampled_from(["cce", "chunked"]))
def test_permuting_the_vocabulary_changes_nothing(seed, impl):
    rng = np.random.default_rng(seed)
    drawn = inputs(Case("permuted", leading=(9,), width=8, vocabulary=67, ignored=0.0), seed=seed)
    order = rng.permutation(67)
    place = np.argsort(order)

    def gradients(c, targets):
        return jax.value_and_grad(lambda e, c: linear_cross_entropy(e, c, targets, impl=impl), (0, 1))(drawn.e, c)

    loss, (de, dc) = gradients(drawn.c, drawn.targets)
    permuted, (de_permuted, dc_permuted) = gradients(drawn.c[order], place[drawn.targets].astype(np.int32))
    np.testing.assert_allclose(permuted, loss, rtol=1e-6)
    assert error(de_permuted, de) < 2e-6
    assert error(dc_permuted, np.asarray(dc)[order]) < 2e-6


@RANDOM
@given(st.integers(0, 999), st.sampled_from(["cce", "chunked"]))
def test_the_gradient_of_the_bias_sums_to_zero(seed, impl):
    """Adding a constant to all logits changes no cross-entropy."""
    drawn = inputs(Case("constant", leading=(11,), width=8, vocabulary=45, arrays=("bias",)), seed=seed)
    db = jax.grad(
        lambda b: linear_cross_entropy(drawn.e, drawn.c, drawn.targets, bias=b, impl=impl, label_smoothing=0.1)
    )(drawn.optional["bias"])
    assert abs(float(np.sum(np.asarray(db, np.float64)))) < 1e-6
