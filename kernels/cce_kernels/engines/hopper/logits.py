"""head.Head.logits as Hopper's epilogues compute it: with tanh from the hardware's exponential."""

import jax
import jax.numpy as jnp

from cce_kernels.head import Head

LOG2_E = 1.4426950408889634  # the hardware's exponential is base 2: exp(z) = exp2(z · log2 e)
SMALL = 0.25  # where both ways to tanh are off by less than four roundings


def logits(raw: jax.Array, head: Head, scale) -> jax.Array:
    """z from a raw product, without a bias; scale: None for 1."""
    z = raw if scale is None else raw * scale
    return z if head.softcap is None else _capped(z, head.softcap)


def _capped(z: jax.Array, softcap: float) -> jax.Array:
    """softcap · tanh(z / softcap).

    1 − 2/(1 + exp(2x)) is off by 2⁻²³ whatever x is: too much where x is small, as it is multiplied by softcap. There
    tanh x = x − x³/3 + 2x⁵/15 − 17x⁷/315, whose next term is 0.022·x⁸ of x. (The hardware's own tanh is off by 2⁻¹¹.)
    """
    x = z * (1 / softcap)
    square = x * x
    small = z + z * (square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    large = softcap - 2 * softcap / (1 + jnp.exp2(x * (2 * LOG2_E)))
    return jnp.where(jnp.abs(x) < SMALL, small, large)
