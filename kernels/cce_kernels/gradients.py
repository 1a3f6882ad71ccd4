"""The gradients of embeddings, classifier and bias, one window of the vocabulary at a time.

For a window of V_g columns an engine forms the cotangents dz, (N, V_g). Two matmuls then give

    de += dz · c_g     float32, (N, D)          dc_g = dzᵀ · e     written once, in the type of the result

Every window reuses one (N, V_g) buffer. No sum depends on timing, so that the same call gives the same bits. dc is of
e's type, without a float32 copy; or it is float32 (Request.wide_dc), and is never rounded to 16 bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.block_floats import decode, in_blocks, integers, steps_of
from cce_kernels.engines.engine import Products, over_windows
from cce_kernels.float16 import FLOAT16_LARGEST, OF_EXPONENT, SMALLEST_ROW
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Numbers
from cce_kernels.request import Request
from cce_kernels.windows import FormDz, Window, Windows


class De(NamedTuple):
    """Rows of de: values · units."""

    values: jax.Array  # (n, D), of Request.left_de_dtype
    units: jax.Array | None  # Request.units_shape, at least float32; None: 1


def summed_parts(de: jax.Array, splits: int) -> jax.Array:
    """The sum of partial sums of de, which follow one another, (splits·n, D)."""
    return de if splits == 1 else jnp.sum(de.reshape(splits, -1, de.shape[1]), axis=0)


def add_windows(gradients: Gradients, form_dz: FormDz, windows: Windows, products: Products) -> Gradients:
    """gradients, with the contributions of these windows of the vocabulary: de is added to, dc and dbias are written.

    de: partial sums, as products.add_de takes them.
    """

    def add(gradients: Gradients, window: Window) -> Gradients:
        de, dc, dbias = gradients
        dz, dz_sum = form_dz(window)
        if de is not None:
            de = products.add_de(de, dz, window)
        if de is not None and dc is not None:  # so that XLA never holds its copies of c_g and dc_g at the same time
            de, dz = lax.optimization_barrier((de, dz))
        if dc is not None:
            dc = products.put_dc(dc, dz, window)
        if dbias is not None and dz_sum is not None:
            dbias = lax.dynamic_update_slice_in_dim(dbias, dz_sum, window.start, 0)
        return Gradients(de, dc, dbias)

    return over_windows(add, gradients, windows)


def unscaled(x: jax.Array, unit: jax.Array | None, dtype) -> jax.Array:
    return (x if unit is None else x * unit).astype(dtype)


def divided(de: jax.Array, request: Request) -> De:
    """de, (n, D), rounded to Request.left_de_dtype.

    In float16 each row is divided by a power of two. The row's largest number is then between FLOAT16_LARGEST and twice
    that. A factor multiplies the row later. Without the units a number could become inf or 0 in float16, although its
    product with the factor is neither. int16 is block floating point (cce_kernels/block_floats.py).
    """
    if not request.divides_de:
        return De(de.astype(request.left_de_dtype), None)
    if request.left_de_dtype == "int16":
        x = in_blocks(de, request.unit_columns)
        units = steps_of(x)
        return De(integers(x, units).reshape(len(de), -1)[:, : request.width], units)
    largest = jnp.max(jnp.abs(de), axis=1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), jnp.maximum(largest, SMALLEST_ROW), FLOAT16_LARGEST)
    bits = lax.bitcast_convert_type(largest, jnp.int32) & OF_EXPONENT
    units = lax.bitcast_convert_type(bits, jnp.float32) / FLOAT16_LARGEST
    return De((de / units).astype(request.left_de_dtype), units)


def multiplied(de: De, of_token: jax.Array, request: Request) -> jax.Array:
    """de, (n, D), each row times a number, (n,), rounded once, to the type of the result. The inverse of `divided`."""
    values, units = de
    by = of_token[:, None]
    if request.left_de_dtype == "int16":
        assert units is not None
        values = decode(values, jnp.repeat(units, request.unit_columns, axis=1)[:, : request.width])
    elif units is not None:
        by = by * units
    return (values * by).astype(request.de_dtype)


def fitted(cotangents: Cotangents, numbers: Numbers, inputs: Inputs) -> tuple[Cotangents, jax.Array | None]:
    """For float16: the cotangents divided by a unit, and the unit. For other types: the cotangents and None.

    The unit makes the largest possible |dz| FLOAT16_LARGEST, so that nothing overflows and few elements underflow. With
    a cotangent μ of the mean |dz| is at most |a + μ + μ·entropy| + |μ|/e + …, as p·|log p| ≤ 1/e and p·(1 + z − mean) =
    p·(1 + entropy + log p) (cce_kernels/mean.py).
    """
    if inputs.e.dtype != jnp.float16:
        return cotangents, None
    factor, of_tokens = 1.0 if inputs.factor is None else inputs.factor, cotangents
    if cotangents.mean is not None:
        assert numbers.mean is not None
        of_tokens = cotangents._replace(lse=cotangents.lse + cotangents.mean + cotangents.mean * numbers.entropy)
    if cotangents.ids is not None:  # they add where all ids of a token are one
        of_tokens = of_tokens._replace(ids=jnp.sum(jnp.abs(cotangents.ids), axis=1))
    sizes = jax.tree.map(lambda x: jnp.abs(x * factor), of_tokens)
    if sizes.sum is not None and inputs.weights is not None:
        sizes = sizes._replace(sum=sizes.sum * jnp.max(jnp.abs(inputs.weights)))
    bound = sum(jax.tree.leaves(sizes))
    largest = jnp.max(jnp.where(jnp.isfinite(bound), bound, 0.0), initial=0.0)
    unit = jnp.maximum(largest, SMALLEST_ROW) / FLOAT16_LARGEST
    return jax.tree.map(lambda x: x / unit, cotangents), unit
