"""The specification: the core's numbers from the full (N, V) logits. JAX differentiates it, to any order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cce_jax.plans import Core
from cce_kernels.given_ids import columns_of
from cce_kernels.mean import finite, quotient, sums_of
from cce_kernels.numbers import Inputs, Statistics


def statistics(inputs: Inputs, core: Core, over: tuple[str, ...] = ()) -> Statistics:
    """The same numbers as cce_jax.core.statistics; materialises the (N, V) logits.

    over: the axes of jax.shard_map over whose devices the columns are split; c and targets are then the device's own.
    """
    e, c, bias, targets, weights, scale, inverse, ids = inputs
    head = core.head
    c, bias = rounded(c, e.dtype), rounded(bias, e.dtype)
    e = jnp.where(targets[:, None] < 0, 0, e)  # a NaN in an ignored token must not reach c's gradient
    raw = head.product(e.astype(c.dtype), c, 1 - head.vocab_axis)
    z = head.logits(raw, None if bias is None else bias.astype(raw.dtype), scale)
    inverse = None if inverse is None else jnp.where(targets < 0, 1, inverse)
    z = inputs._replace(inverse_temperature=inverse).divided(z)
    is_target = targets[:, None] == jnp.arange(head.vocabulary(c))
    peak = lax.stop_gradient(jnp.max(z, axis=1))
    peak = finite(lax.pmax(peak, over) if over else peak)
    mass, moment, total = sums_of(z, peak, weights)
    target = jnp.sum(jnp.where(is_target, z, 0), axis=1)
    if ids is not None:
        columns = columns_of(inputs, head)
        ids = jnp.where(columns < 0, 0, jnp.take_along_axis(z, jnp.maximum(columns, 0), axis=1))
    sums = mass, target, total if core.with_sum else None, moment if core.with_mean else None, ids
    mass, target, total, moment, ids = lax.psum(sums, over) if over else sums
    return Statistics(jnp.log(mass), peak, target, total, None if moment is None else quotient(moment, mass), ids)


def nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """The number of dtype that is nearest to x, in x's own type.

    x.astype(dtype).astype(x.dtype) may be x itself: XLA computes with excess precision by default, and so leaves out
    such a pair of conversions, even if the second one is part of a matmul.
    """
    info = jnp.finfo(dtype)
    found = lax.reduce_precision(x, info.nexp, info.nmant)  # makes 0 of numbers below the least normal one
    if info.nexp == jnp.finfo(x.dtype).nexp:  # XLA takes such numbers for 0 anyway
        return found
    least, step = float(info.smallest_normal), float(info.smallest_normal * info.eps)
    return jnp.where(jnp.abs(x) < least, jnp.round(x / step) * step, found)


def rounded(x: jax.Array | None, dtype: Any) -> Any:
    """`nearest`, whose gradient is not rounded."""
    if x is None or x.dtype == dtype:
        return x
    own = lax.stop_gradient(x)
    near = nearest(own, dtype)
    return jnp.where(near == own, x, x + (near - own))  # exact, as near - own has few digits; inf - inf would be NaN
