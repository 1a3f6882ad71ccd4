"""The specification: the core's numbers and divergences from the full logits. JAX differentiates it, to any order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cce_jax.plans import Core
from cce_kernels.divergence import Divergence, Divergences, Given, Side
from cce_kernels.divergence_terms import entropy_terms
from cce_kernels.given_ids import columns_of
from cce_kernels.head import Head
from cce_kernels.mean import finite, quotient, sums_of, weighted_sum_of
from cce_kernels.numbers import Inputs, Numbers, divided


def numbers_of(inputs: Inputs, core: Core, over: tuple[str, ...] = ()) -> Numbers:
    """The same numbers as cce_jax.core.numbers_of; materialises the (N, V) logits.

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
    mass, moment = sums_of(z, peak)
    total = weighted_sum_of(z, peak, weights) if core.numbers.sum else None
    target = jnp.sum(jnp.where(is_target, z, 0), axis=1)
    if ids is not None:
        columns = columns_of(inputs, head)
        ids = jnp.where(columns < 0, 0, jnp.take_along_axis(z, jnp.maximum(columns, 0), axis=1))
    sums = mass, target, total, moment if core.numbers.mean else None, ids
    mass, target, total, moment, ids = lax.psum(sums, over) if over else sums
    return Numbers(jnp.log(mass), peak, target, total, None if moment is None else quotient(moment, mass), ids)


def divergences(given: Given, head: Head, of: Divergence) -> Divergences:
    """The divergences and entropies of cce_kernels/divergence.py, for e (..., D), from the full logits (..., V).

    head: of the student.
    """
    (e, c, bias, scale), _, weight, inverse, shares = given
    c, bias, live = rounded(c, e.dtype), rounded(bias, e.dtype), weight != 0

    def log_p(side: Side, head: Head) -> jax.Array:
        flat = jnp.where(live.reshape(-1)[:, None], side.e.reshape(-1, side.e.shape[-1]), 0)
        z = head.whole_logits(*side._replace(e=flat))
        z = divided(z, None if inverse is None else jnp.where(live, inverse, 1).reshape(-1))
        return jax.nn.log_softmax(jnp.where(live.reshape(-1)[:, None], z, 0))  # else 0 · inf may be NaN

    log_s = log_p(Side(e.astype(c.dtype), c, bias, scale), head)
    log_t = log_p(given.teacher, of.teacher).astype(log_s.dtype)
    s, t = jnp.exp(log_s), jnp.exp(log_t)
    neither = (log_s == log_t) & jnp.isinf(log_s)  # of other equal ones the difference has a derivative
    gap = jnp.where(neither, 0, log_t - log_s)

    def kl(p: jax.Array, log_p_over_q: jax.Array) -> jax.Array:
        return jnp.sum(p * jnp.where(p > 0, log_p_over_q, 0), axis=1)  # the derivative of 0 times infinity is NaN

    if of.kind == "jsd":
        of_t, of_s = shares  # type: ignore[misc]
        total = of_t * kl(t, -_log_mixed(-gap, of_s, of_t)) + of_s * kl(s, -_log_mixed(gap, of_t, of_s))
    else:
        total = kl(t, gap) if of.kind == "forward_kl" else kl(s, -gap)
    entropy = jnp.sum(entropy_terms(log_s), axis=1) if of.entropy else None
    return jax.tree.map(lambda x: jnp.where(live, x.reshape(live.shape), 0), Divergences(total, entropy))


def _log_mixed(x: jax.Array, share: jax.Array, rest: jax.Array) -> jax.Array:
    """log(rest + share·exp(x)), where share + rest = 1. It keeps its digits where share is close to 0 or to 1.

    So does its derivative: that of expm1 has none where x is low, and the quotient of large numbers multiplies small
    probabilities to 0.
    """
    x = jnp.minimum(x, 80)  # where it is more, the probability that the result belongs to is below exp(−80)
    low, peak = x < -1, jax.lax.stop_gradient(jnp.maximum(x, 0))
    less = share * jnp.where(low, jnp.exp(jnp.where(low, x, -1)) - 1, jnp.expm1(jnp.where(low, 0, x)))
    near, large = jnp.abs(less) < 0.5, peak + jnp.log(rest * jnp.exp(-peak) + share * jnp.exp(x - peak))
    return jnp.where(near, jnp.log1p(jnp.where(near, less, 0)), large)


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
