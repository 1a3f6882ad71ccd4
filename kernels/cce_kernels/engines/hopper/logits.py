"""head.Head.logits for the epilogues of Hopper's kernels: tanh is computed from the hardware's exponential."""

import jax
import jax.numpy as jnp

from cce_kernels.engines.hopper.registers import along_rows
from cce_kernels.head import Head
from cce_kernels.numbers import FLOAT32_MAX, LOG2_E

SMALL = 0.25  # at this |x| both formulas for tanh x have an error of less than four roundings


def logits(raw: jax.Array, head: Head, scale) -> jax.Array:
    """The logits before the temperature from the raw product, without a bias. scale: None for 1."""
    z = raw if scale is None else _rounded(raw * scale)
    return z if head.softcap is None else _capped(z, head.softcap)


def divided(x: jax.Array, inverse: jax.Array | None, most: jax.Array | None = None) -> jax.Array:
    """Logits divided by the temperatures of their rows. inverse: a number for each row; None for 1.

    most: as Numbers.most has it.
    """
    z = x if inverse is None else x * along_rows(inverse, x.shape)
    if most is not None:
        return jnp.minimum(z, along_rows(most, x.shape))
    return z if inverse is None else _rounded(z)


def _rounded(product: jax.Array) -> jax.Array:
    """cce_kernels.numbers.rounded in one instruction, for products that are finite, as without a bias they are."""
    return jnp.maximum(product, -FLOAT32_MAX)


def _capped(z: jax.Array, softcap: float) -> jax.Array:
    """softcap · tanh(z / softcap).

    tanh x = 1 − 2/(1 + exp(2x)) has an absolute error of 2⁻²³, which is too much for a small x. For small x the series
    tanh x = x − x³/3 + 2x⁵/15 − 17x⁷/315 is used; its next term, relative to x, is 0.022·x⁸. (The error of the
    hardware's own tanh is 2⁻¹¹.)
    """
    x = z * (1 / softcap)
    square = x * x
    small = z + z * (square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    large = softcap - 2 * softcap / (1 + jnp.exp2(x * (2 * LOG2_E)))
    return jnp.where(jnp.abs(x) < SMALL, small, large)
