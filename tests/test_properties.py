"""Laws that any cross-entropy obeys."""

import jax
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cce_jax import linear_cross_entropy
from tests.cases import Case, inputs
from tests.tolerance import error

RANDOM = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])


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
