"""The specification: the core's three numbers from the full (N, V) logits. JAX differentiates it, to any order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Statistics


def statistics(inputs: Inputs, *, head: Head, with_sum: bool, over: tuple[str, ...] = ()) -> Statistics:
    """The same numbers as cce_jax.core.statistics; materialises the (N, V) logits.

    over: the axes of jax.shard_map over whose devices the columns are split; c and targets are of the device's own.
    """
    e, c, bias, targets, weights, scale = inputs
    c, bias = _rounded(c, e.dtype), _rounded(bias, e.dtype)
    e = jnp.where(targets[:, None] < 0, 0, e)  # a NaN in an ignored token must not reach c's gradient
    raw = head.product(e.astype(c.dtype), c, 1 - head.vocab_axis)
    z = head.logits(raw, None if bias is None else bias.astype(raw.dtype), scale)
    is_target = targets[:, None] == jnp.arange(head.vocabulary(c))
    total = jnp.sum(z if weights is None else jnp.where(weights == 0, 0, weights * z), axis=1) if with_sum else None
    target = jnp.sum(jnp.where(is_target, z, 0), axis=1)
    if not over:
        return Statistics(jax.nn.logsumexp(z, axis=1), target, total)
    largest = lax.pmax(lax.stop_gradient(jnp.max(z, axis=1)), over)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    mass, target, total = lax.psum((jnp.sum(jnp.exp(z - largest[:, None]), axis=1), target, total), over)
    return Statistics(largest + jnp.log(mass), target, total)


def _rounded(x: jax.Array | None, dtype) -> Any:
    """x rounded to dtype, in x's own type. The gradient is not rounded."""
    if x is None or x.dtype == dtype:
        return x
    rounded = lax.stop_gradient(x.astype(dtype).astype(x.dtype))
    return x + (rounded - lax.stop_gradient(x))  # exact: the difference of x and its rounded value has few digits
