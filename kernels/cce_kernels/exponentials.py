"""Exponentials that the forward pass saves, so that the backward pass need not compute their logits again.

The forward pass saves P (N_s, V), bfloat16, for the first N_s of the kept tokens (cce_kernels/tokens.py):

    P_iv = exp(z_iv − ρ_i)            ρ_i = target_i;  ρ_i = lse_i where lse_i − target_i > LARGEST or t_i is no column

ρ is the reference of P. Saving the exponential, not the logit, keeps a relative error of 2⁻⁹ however large the logit
is. P cannot overflow: it is at most exp(LARGEST), and bfloat16 has float32's range. The softmax is then

    p_iv = P_iv · exp(ρ_i − lse_i)

Where dz is linear in p (no softcap, no weighted sum), the backward pass forms no dz of these tokens: it multiplies P
itself. Let r_i = a_i·exp(ρ_i − lse_i), or SMALLEST·t̂_i if that is larger in absolute value. Then

    P_i,t_i ← (a_i·p_i,t_i + t̂_i) / r_i         de = r·(P·c)         dc = Pᵀ·(r·e)         dbias = Pᵀ·r

These are matmuls of whole arrays: with a part of the columns XLA would copy that part of c and of dc.

(Raising r to SMALLEST·t̂ adds at most SMALLEST·exp(LARGEST) = 2⁻²⁷ relative to t̂, which is below every rounding.) The
backward pass overwrites P only at the targets and in the rows of ignored tokens. It does not read what it overwrites,
so that a second backward pass over the same P gives the same bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Statistics

LARGEST = 30.0  # nats, 2^43
SMALLEST = 2.0**-70
ALIGNMENT = 8  # columns: P's rows are a multiple of this, so that each starts where the GPU's widest loads can
LEAST_SOFTCAP = 2.0  # below it, 1 − (z/κ)² from a rounded exponential has a larger error than that rounding
LARGEST_SOFTCAP = 36.0  # above it, exp(z − ρ) ≥ exp(−2κ)/V may underflow, and 1 − (z/κ)² is then lost


def can_be_saved(dtype: str, head: Head) -> bool:
    """Only for bfloat16: float16 lacks the range, and a float32 call is made for its accuracy."""
    within = head.softcap is None or LEAST_SOFTCAP <= head.softcap <= LARGEST_SOFTCAP
    return dtype == "bfloat16" and within


def linear(head: Head, with_sum: bool) -> bool:
    """Whether dz is linear in p, so that saved exponentials are multiplied as they are."""
    return head.softcap is None and not with_sum


def saved_shape(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The shape of P for so many tokens. Its columns from V on are 0."""
    return tokens, -(-vocabulary // ALIGNMENT) * ALIGNMENT


def by_target(numbers: Statistics, targets: jax.Array, vocabulary: int) -> jax.Array:
    """Whether a kept token's reference ρ is its target's logit, (N,)."""
    return (targets < vocabulary) & (numbers.lse - numbers.target <= LARGEST)


def references(numbers: Statistics, targets: jax.Array, vocabulary: int) -> jax.Array:
    """ρ, (N,), finite where a token is ignored."""
    use_target = (targets < 0) | by_target(numbers, targets, vocabulary)
    return jnp.where(use_target, numbers.target, numbers.lse)


class Factors(NamedTuple):
    """The factors with which P is multiplied as it is, (N,) each."""

    r: jax.Array
    at_target: jax.Array  # the number that replaces P's element at the target


def factors(reference: jax.Array, numbers: Statistics, of: Cotangents) -> Factors:
    """r without the logits' scale, and P's new elements at the targets."""
    raised = SMALLEST * of.target
    r = of.lse * jnp.exp(reference - numbers.lse)
    r = jnp.where(jnp.abs(r) < jnp.abs(raised), raised, r)
    at_target = of.lse * jnp.exp(numbers.target - numbers.lse) + of.target
    return Factors(r, jnp.where(r == 0, 0.0, at_target / jnp.where(r == 0, 1.0, r)))


def scaled(e: jax.Array, r: jax.Array) -> jax.Array:
    """r·e in e's type."""
    return (e * r[:, None]).astype(e.dtype)
