"""JAX's own settings, such as strict promotion and jax_debug_nans. Drawn calls (tests/search) have them too."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy, linear_divergence, linear_log_probs, linear_token_loss
from tests.cases import Case, inputs


@contextmanager
def no_promotion():
    """Of types or of ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_every_function_takes_16_bits_without_promotion(impl, dtype):
    e, c, targets = jnp.ones((6, 4), dtype), jnp.ones((9, 4), dtype), jnp.zeros(6, jnp.int32)
    ids = jnp.zeros((6, 2), jnp.int16)
    calls = {
        "log_probs": lambda e, c: linear_log_probs(e, c, targets, ids=ids, temperature=jnp.ones(6, dtype)).lse.sum(),
        "token_loss": lambda e, c: linear_token_loss(e, c, targets, lambda x: x.log_probs * x.entropy, entropy=True),
        "divergence": lambda e, c: linear_divergence(e, c, e, c, temperature=0.7),
    }
    want = {name: jax.grad(call, (0, 1))(e, c) for name, call in calls.items()}
    with no_promotion():
        for name, call in calls.items():
            jax.tree.map(np.testing.assert_array_equal, jax.grad(call, (0, 1))(e, c), want[name])


GIVEN = inputs(Case("many tokens", leading=(300,), width=16, vocabulary=70), "bfloat16")
E, C = jnp.asarray(GIVEN.e), jnp.asarray(GIVEN.c)


@pytest.mark.parametrize("impl", ["cce", "chunked"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
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


@pytest.mark.parametrize("impl", ["cce", "chunked"])
@pytest.mark.parametrize("what", ["a target out of range", "logits that overflow"])
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
