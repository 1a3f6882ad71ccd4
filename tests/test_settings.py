"""jax_debug_nans. Drawn calls (tests/search) have it too, and the other settings of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy
from tests.cases import Case, inputs

GIVEN = inputs(Case("many tokens", leading=(300,), width=16, vocabulary=70), "bfloat16")
E, C = jnp.asarray(GIVEN.e), jnp.asarray(GIVEN.c)


@pytest.mark.parametrize(
    ("transform", "impl"),
    [(lambda f: f, "chunked"), (jax.jit, "cce"), (jax.checkpoint, "chunked")],
    ids=["eager", "jit", "checkpoint"],
)
def test_debug_nans_finds_no_nan_of_an_ignored_token(transform, impl):
    """Nothing writes the ignored tokens' rows of the saved exponentials, which the forward pass returns."""
    e = E.at[GIVEN.targets < 0].set(jnp.inf)

    def loss(e, c, targets):
        return linear_cross_entropy(e, c, targets, impl=impl)

    want = jax.value_and_grad(loss, (0, 1))(e, C, GIVEN.targets)
    with jax.debug_nans(True):
        found = jax.value_and_grad(transform(loss), (0, 1))(e, C, GIVEN.targets)
        twice = jnp.stack([GIVEN.targets] * 2)
        over = jax.grad(lambda c: jax.lax.scan(lambda s, t: (s + transform(loss)(e, c, t), None), 0.0, twice)[0])
        twice = over(C)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    of_c = jax.grad(loss, 1)(e, C, GIVEN.targets)  # e is frozen there too, so that the chunks may be others
    np.testing.assert_allclose(np.float32(twice), 2 * np.float32(of_c), rtol=2**-7)


@pytest.mark.parametrize(
    ("what", "impl"),
    [("a target out of range", "cce"), ("logits that overflow", "cce"), ("logits that overflow", "chunked")],
)
def test_debug_nans_finds_a_nan_that_the_input_deserves(what, impl):
    """In the interpreted kernels too, which JAX cannot run by themselves while it looks for the NaN."""
    e, targets = E, GIVEN.targets.copy()
    if what == "a target out of range":
        targets[200] = 70
    else:
        e = E.at[np.flatnonzero(targets >= 0)[:8]].set(3e38)
    gradient = jax.value_and_grad(lambda e: linear_cross_entropy(e, C, targets, impl=impl))
    for run in (gradient, jax.jit(gradient)):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            run(e)
