"""Exponentials that the forward pass saves for the backward pass, which then need not compute their logits again.

For the first N_s of the kept tokens (cce_kernels/tokens.py) the forward pass writes, in bfloat16, of all columns,

    P_iv = exp(z_iv − ρ_i)            ρ_i = target_i,  or lse_i where that is larger by LARGEST or there is no target

Saving the exponential, not the logit, keeps a relative error of 2⁻⁹ however large the logit is. ρ is known before lse,
and bfloat16 has float32's range, so that P, at most exp(LARGEST), cannot overflow. Then

    p_iv = P_iv · exp(ρ_i − lse_i)

Where dz is linear in p (no softcap, no sum), no dz of these tokens is formed. Let r_i = a_i·exp(ρ_i − lse_i), or
SMALLEST·t̂_i where that is larger; then with

    P_i,t_i ← (a_i·p_i,t_i + t̂_i) / r_i         de = r·(P·c)         dc = Pᵀ·(r·e)         dbias = Pᵀ·r

which are matmuls of whole arrays: a part of the columns instead would make XLA copy that part of c and of dc.

(SMALLEST·exp(LARGEST) = 2⁻²⁷, so what r was raised for stays below every rounding.) Of P only the targets' elements and
the rows of ignored tokens are overwritten, whatever they held: a second backward pass over the same P gives the same
bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Statistics

LARGEST = 30.0  # nats, 2^43
SMALLEST = 2.0**-70
ALIGNMENT = 8  # columns that rows of P are a multiple of, so that they start where the GPU loads widest
LEAST_SOFTCAP = 2.0  # below it 1 − (z/κ)² from a rounded exponential is off by more than that rounding
LARGEST_SOFTCAP = 36.0  # above it exp(z − ρ), at least exp(−2κ)/V, may underflow, and with it 1 − (z/κ)²


def can_be_saved(dtype: str, head: Head) -> bool:
    """bfloat16 alone: float16 lacks the range, and float32 is asked for where accuracy counts."""
    within = head.softcap is None or LEAST_SOFTCAP <= head.softcap <= LARGEST_SOFTCAP
    return dtype == "bfloat16" and within


def linear(head: Head, with_sum: bool) -> bool:
    """Whether dz is linear in p, so that none is formed of saved exponentials."""
    return head.softcap is None and not with_sum


def saved_shape(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The shape of P of so many tokens. Columns from V on are 0."""
    return tokens, -(-vocabulary // ALIGNMENT) * ALIGNMENT


def by_target(numbers: Statistics, targets: jax.Array, vocabulary: int) -> jax.Array:
    """Whether a kept token's exponentials are relative to its target's logit."""
    return (targets < vocabulary) & (numbers.lse - numbers.target <= LARGEST)


def references(numbers: Statistics, targets: jax.Array, vocabulary: int) -> jax.Array:
    """ρ, (N,), finite where a token is ignored."""
    use_target = (targets < 0) | by_target(numbers, targets, vocabulary)
    return jnp.where(use_target, numbers.target, numbers.lse)


class Factors(NamedTuple):
    """What P is multiplied with where no dz is formed of it, (N,) each."""

    r: jax.Array
    at_target: jax.Array  # P's element at the target


def factors(reference: jax.Array, numbers: Statistics, of: Cotangents) -> Factors:
    """r, without the logits' scale, and what stands in P at the targets."""
    raised = SMALLEST * of.target
    r = of.lse * jnp.exp(reference - numbers.lse)
    r = jnp.where(jnp.abs(r) < jnp.abs(raised), raised, r)
    at_target = of.lse * jnp.exp(numbers.target - numbers.lse) + of.target
    return Factors(r, jnp.where(r == 0, 0.0, at_target / jnp.where(r == 0, 1.0, r)))


def scaled(e: jax.Array, r: jax.Array) -> jax.Array:
    """r·e in e's type."""
    return (e * r[:, None]).astype(e.dtype)
