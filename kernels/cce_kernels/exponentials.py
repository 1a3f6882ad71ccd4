"""Exponentials that the forward pass saves, so that the backward pass need not compute their logits again.

The forward pass saves P (N, V), bfloat16, with the kept tokens first (cce_kernels/tokens.py):

    P_iv = exp(z_iv − ρ_i) · u_iv     ρ_i = target_i; or max_v z_iv or lse_i: lse_i − ρ_i ≤ LARGEST (blocks.py)

ρ is the token's reference (numbers.Numbers). u = ∂z/∂y is the slope of the softcap at z, and 1 without one. Saving
the exponential, not the logit, keeps a relative error of 2⁻⁹ however large the logit is; and u, which is 1 − (z/κ)²,
keeps its digits where z is close to κ. P cannot overflow: it is at most exp(LARGEST), and bfloat16 has float32's range.
Then

    p_iv · u_iv = P_iv · exp(−m_i)     m_i = log Σ_v exp(z_iv − ρ_i)

Without a weighted sum, dz is linear in p·u, and the backward pass forms no dz: it multiplies P itself.
Let r_i = a_i·exp(−m_i), or SMALLEST·t̂_i·u_i,t_i if that is larger in absolute value. Then

    P_i,t_i ← (a_i·p_i,t_i + t̂_i)·u_i,t_i / r_i       de = r·(P·c)         dc = Pᵀ·(r·e)         dbias = Pᵀ·r

These are matmuls of whole arrays: with a part of the columns XLA would copy that part of c and of dc.

(Raising r adds at most SMALLEST·exp(LARGEST) = 2⁻²⁷ relative to the target's element, which is below every rounding.)
With a weighted sum, or a cotangent of the mean (cce_kernels/mean.py), dz is formed from P. It cannot be where a softcap
is set too: then nothing is saved. Nor is it for the logits of given ids (cce_kernels/given_ids.py), or for a cotangent
of the mean over a vocabulary that is split.
With a temperature z are the logits after it, and u stays the slope of the softcap alone: r has the other factor.
The backward pass overwrites P only at the targets and in the rows of ignored tokens. No result depends on
the values that it overwrites, so that a second backward pass over the same P gives the same bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Numbers

LARGEST = 30.0  # nats, 2^43
SMALLEST = 2.0**-70
ALIGNMENT = 8  # columns: a row of P is a multiple of this, so that the GPU's widest loads can begin at every row
TILE = 64  # columns: and of this if V is a multiple of ALIGNMENT, as Hopper GPUs copy tiles of this width


def saved_shape(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The shape of P for so many tokens. Its columns from V on are 0."""
    multiple = ALIGNMENT if vocabulary % ALIGNMENT else TILE
    return tokens, -(-vocabulary // multiple) * multiple


class Factors(NamedTuple):
    """The numbers with which matmuls of P itself give the gradients, (N,) each."""

    r: jax.Array
    at_target: jax.Array  # the number that replaces P's element at the target


def factors(numbers: Numbers, of: Cotangents, inputs: Inputs, head: Head) -> Factors:
    """r without the factor of the inputs, and P's new elements at the targets. of: 0 for ignored tokens."""
    u = 1.0 if head.softcap is None else head.slope(inputs.capped(numbers.target))
    raised = SMALLEST * of.target * u
    r = of.lse * jnp.exp(-numbers.log_mass)
    r = jnp.where(jnp.abs(r) < jnp.abs(raised), raised, r)
    at_target = (of.lse * jnp.exp(numbers.log_p(numbers.target)) + of.target) * u
    return Factors(r, jnp.where(r == 0, 0.0, at_target / jnp.where(r == 0, 1.0, r)))


def scaled(e: jax.Array, r: jax.Array) -> jax.Array:
    """r·e in e's type."""
    return (e * r[:, None]).astype(e.dtype)


def sum_of_rows(x: jax.Array, r: jax.Array) -> jax.Array:
    """xᵀ·r, at least float32, of an x with a row for each of the numbers r. Beside a bfloat16 x no array of its size is
    held; in float16 numbers as small as r would be 0.
    """
    if x.dtype != jnp.bfloat16:
        return jnp.sum(r[:, None] * x, axis=0)
    high = r.astype(x.dtype)
    both = jnp.stack([high, (r - high).astype(x.dtype)])  # their sum holds 16 bits of r, twice as many as bfloat16
    sums = lax.dot_general(both, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return jnp.sum(sums, axis=0)
