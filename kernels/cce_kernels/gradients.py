"""The gradients of embeddings, classifier and bias, one group of the vocabulary at a time.

For a group of V_g columns an engine forms the cotangents dz, (N, V_g). Two matmuls then give

    de += dz · c_g     float32, (N, D)          dc_g = dzᵀ · e     written once, in the type of the result

Every group reuses one (N, V_g) buffer. No sum depends on timing, so that the same call gives the same bits. dc is of
e's type, without a float32 copy; or it is float32 (Call.wide_dc), and is never rounded to 16 bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cce_kernels.block_floats import decode, in_blocks, integers, steps_of
from cce_kernels.call import Call
from cce_kernels.float16 import FLOAT16_LARGEST, OF_EXPONENT, SMALLEST_ROW
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Gradients, Inputs, Statistics
from cce_kernels.windows import Groups, Window

ALL_COLUMNS = Window(*[np.int32(0)] * 3)  # the window of the one group that is the whole vocabulary

# window -> dz of the group, (N, V_g), and the column sums of dz, (V_g,), or None if dbias is not wanted
FormDz = Callable[[Window], tuple[jax.Array, jax.Array | None]]


class De(NamedTuple):
    """Rows of de: values · units."""

    values: jax.Array  # (n, D), of Call.left_de_dtype
    units: jax.Array | None  # Call.units_shape, at least float32; None: 1


class Products(NamedTuple):
    """The two matmuls of a group: dz (N, V_g) by the group's part of c, and dzᵀ by e."""

    # (de, dz, window) -> de; None for 0: the rows of ignored tokens may then be arbitrary
    add_de: Callable[[jax.Array | None, jax.Array, Window], jax.Array]
    put_dc: Callable[[jax.Array, jax.Array, Window], jax.Array]  # (dc, dz, window) -> dc


class Left(NamedTuple):
    """A matmul that is left to be done: factor · (dc + unit · leftᵀ·e), over the first `count` rows."""

    left: jax.Array  # (n, V): exponentials, or dz
    e: jax.Array  # (n, D)
    unit: jax.Array | None
    count: jax.Array  # type: ignore[assignment]  # (1,) int32
    blocks: jax.Array | None = None  # the blocks of `left` that are multiplied (block_sparse.Blocks.dc); None: all


def over_groups(body: Callable[[Any, Window], Any], carry: Any, groups: Groups) -> Any:
    """Runs body(carry, window) -> carry for each group; the window's fields are int32.

    A scan over a table of windows would copy a row of the table at each step. With that copy XLA does not make the loop
    part of a CUDA graph.
    """
    return lax.fori_loop(0, groups.count, lambda i, carry: body(carry, groups.window(i.astype(jnp.int32))), carry)


def add_groups(gradients: Gradients, form_dz: FormDz, groups: Groups, products: Products) -> Gradients:
    """gradients, with the contributions of these groups of the vocabulary: de is added to, dc and dbias are written."""

    def group(gradients: Gradients, window: Window) -> Gradients:
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

    return over_groups(group, gradients, groups)


def without_ignored(
    inputs: Inputs, reference: jax.Array, cotangents: Cotangents, rows: int
) -> tuple[Inputs, jax.Array, Cotangents]:
    """The same with e = 0, cotangents 0 and the reference FLOAT32_MAX for ignored tokens: their dz is then 0.
    Their temperature is 1.

    That reference makes P = 0. With 0 a large bias would make P inf, and 0 · inf is NaN. Ignored tokens are appended
    until there are so many rows. e is copied after the forward pass, on which the targets are made to depend.
    """
    live, missing = inputs.targets >= 0, rows - inputs.targets.size

    def kept(x: jax.Array, live: jax.Array, fill: float) -> jax.Array:
        x = jnp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, fill)
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)

    cotangents = jax.tree.map(lambda x: kept(x, live, 0), cotangents)
    given = kept(inputs.targets, live, -1), kept(reference, live, FLOAT32_MAX)
    targets, reference = lax.optimization_barrier(given)
    e, inverse = kept(inputs.e, targets[: live.size] >= 0, 0), inputs.inverse_temperature
    inverse = None if inverse is None else kept(inverse, live, 1)
    return inputs._replace(e=e, targets=targets, inverse_temperature=inverse), reference, cotangents


def unscaled(x: jax.Array, unit: jax.Array | None, dtype) -> jax.Array:
    return (x if unit is None else x * unit).astype(dtype)


def divided(de: jax.Array, call: Call) -> De:
    """de, (n, D), rounded to Call.left_de_dtype.

    In float16 each row is divided by a power of two. The row's largest number is then between FLOAT16_LARGEST and twice
    that. A factor multiplies the row later. Without the units a number could become inf or 0 in float16, although its
    product with the factor is neither. int16 is block floating point (cce_kernels/block_floats.py).
    """
    if not call.divides_de:
        return De(de.astype(call.left_de_dtype), None)
    if call.left_de_dtype == "int16":
        x = in_blocks(de, call.unit_columns)
        units = steps_of(x)
        return De(integers(x, units).reshape(len(de), -1)[:, : call.width], units)
    largest = jnp.max(jnp.abs(de), axis=1, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), jnp.maximum(largest, SMALLEST_ROW), FLOAT16_LARGEST)
    bits = lax.bitcast_convert_type(largest, jnp.int32) & OF_EXPONENT
    units = lax.bitcast_convert_type(bits, jnp.float32) / FLOAT16_LARGEST
    return De((de / units).astype(call.left_de_dtype), units)


def multiplied(de: De, of_token: jax.Array, call: Call) -> jax.Array:
    """de, (n, D), each row times a number, (n,), rounded once, to the type of the result. The inverse of `divided`."""
    values, units = de
    by = of_token[:, None]
    if call.left_de_dtype == "int16":
        assert units is not None
        values = decode(values, jnp.repeat(units, call.unit_columns, axis=1)[:, : call.width])
    elif units is not None:
        by = by * units
    return (values * by).astype(call.de_dtype)


def fitted(cotangents: Cotangents, numbers: Statistics, inputs: Inputs) -> tuple[Cotangents, jax.Array | None]:
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
