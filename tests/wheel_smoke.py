"""Run by `make dist` with the installed wheel alone: the package works without the repository, torch or a GPU."""

import importlib.util
import sys

import jax
import jax.numpy as jnp

import cce_jax

assert "site-packages" in str(cce_jax.__file__), cce_jax.__file__
assert importlib.util.find_spec("torch") is None
e, c, targets = jnp.ones((4, 8)), jnp.eye(16, 8), jnp.arange(4)
for impl in ("auto", "cce", "reference"):
    loss, gradients = jax.value_and_grad(
        lambda e, c, impl=impl: cce_jax.linear_cross_entropy(e, c, targets, impl=impl), (0, 1)
    )(e, c)
    expected = jax.nn.logsumexp(e @ c.T, axis=1).mean() - 1
    assert abs(float(loss - expected)) < 1e-5, (impl, loss, expected)
print("the wheel works", file=sys.stderr)
