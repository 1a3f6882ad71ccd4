"""The gradient of the classifier and of the embeddings, one group of the vocabulary at a time.

For a group of columns the caller forms the logit cotangents dz, (N, V_g); two plain matmuls then give

    de += dz · c_g     float32, (N, D)          dc_g = dzᵀ · e     written once, in the type of c

One (N, V_g) buffer is reused by every group. No atomics, no float32 copy of dc: the same call is bit-identical.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cce_kernels.logits import Head
from cce_kernels.windows import FLOAT16_LARGEST, Groups, Window

ALL_COLUMNS = Window(*[np.int32(0)] * 3)  # where one group is all of the vocabulary


@dataclass(frozen=True)
class Wanted:
    """Which gradients a call needs; the others cost nothing."""

    e: bool
    c: bool
    bias: bool


class Gradients(NamedTuple):
    """de and dbias, sums so far, at least float32; dc, of which the groups write every row. None where not wanted."""

    e: jax.Array | None
    c: jax.Array | None
    bias: jax.Array | None

    @classmethod
    def begun(cls, e: jax.Array, c: jax.Array, head: Head, wanted: Wanted) -> "Gradients":
        wide = jnp.promote_types(e.dtype, jnp.float32)
        return cls(
            jnp.zeros(e.shape, wide) if wanted.e else None,
            lax.empty(c.shape, c.dtype) if wanted.c else None,
            jnp.zeros((c.shape[head.vocab_axis],), wide) if wanted.bias else None,
        )


class Products(NamedTuple):
    """The two matmuls of a group: of dz (N, V_g) with the group's columns of c, and with e.

    put_dc writes the group's part of dc, or adds to it, as whoever made the products says.
    """

    add_de: Callable[[jax.Array | None, jax.Array, Window], jax.Array]  # (de or None for 0, dz, window) -> de
    put_dc: Callable[[jax.Array, jax.Array, Window], jax.Array]  # (dc, dz, window) -> dc


class Beside(NamedTuple):
    """Saved exponentials, (N_s, V), whose product with e, (N, D), dc is to have in its sum; how many rows count.

    Below them both are 0 up to a multiple of config.DEPTH rows.
    """

    exponentials: jax.Array
    e: jax.Array
    count: jax.Array  # type: ignore[assignment]  # (1,) int32


def xla_products(e: jax.Array, c: jax.Array, *, head: Head, unit: jax.Array | None) -> Products:
    """Both by XLA. unit: what dz is to be multiplied by, where it was scaled to fit its type."""
    axis, wide = head.vocab_axis, jnp.promote_types(e.dtype, jnp.float32)

    def matmul(left, right, left_axis: int, right_axis: int, out) -> jax.Array:
        contract = (((left_axis,), (right_axis,)), ((), ()))
        return lax.dot_general(left, right, contract, precision=head.precision, preferred_element_type=out)

    def add_de(de, dz, window):
        c_g = lax.dynamic_slice_in_dim(c, window.start, dz.shape[1], axis)
        product = matmul(dz, c_g, 1, axis, wide)
        return product if de is None else de + product

    def put_dc(dc, dz, window):
        left, right = (dz, e) if axis == 0 else (e, dz)
        dc_g = matmul(left, right, 0, 0, c.dtype if unit is None else wide)
        return lax.dynamic_update_slice_in_dim(dc, unscaled(dc_g, unit, c.dtype), window.start, axis)

    return Products(add_de, put_dc)


def over_groups(body: Callable[[Any, Window], Any], carry: Any, groups: Groups) -> Any:
    """body(carry, window) -> carry for each group; window: of int32.

    A table of windows to scan over would be copied from at each step, and that copy keeps XLA from making the loop part
    of a CUDA graph.
    """
    return lax.fori_loop(0, groups.count, lambda i, carry: body(carry, groups.window(i.astype(jnp.int32))), carry)


def starts(window: Window) -> jax.Array:
    """Where a window starts and the first column that it counts, (2,), as Triton's kernels take it."""
    return jnp.stack([window.start, window.owned])


def add_groups(
    gradients: Gradients,
    form_dz: Callable[[Window], tuple[jax.Array, jax.Array | None]],
    groups: Groups,
    products: Products,
) -> Gradients:
    """gradients with what these groups of the vocabulary give.

    form_dz(window) gives dz of the group, (N, V_g), and its column sums, (V_g,), if the bias gradient is wanted.
    """

    def group(gradients: Gradients, window: Window) -> Gradients:
        de, dc, dbias = gradients
        dz, dz_sum = form_dz(window)
        if de is not None:
            de = products.add_de(de, dz, window)
        if de is not None and dc is not None:  # so that XLA's copies of c_g and dc_g are never there together
            de, dz = lax.optimization_barrier((de, dz))
        if dc is not None:
            dc = products.put_dc(dc, dz, window)
        if dbias is not None and dz_sum is not None:
            before = lax.dynamic_slice_in_dim(dbias, window.start, dz_sum.size)
            dbias = lax.dynamic_update_slice_in_dim(dbias, before + dz_sum, window.start, 0)
        return Gradients(de, dc, dbias)

    return over_groups(group, gradients, groups)


def unscaled(x, unit: jax.Array | None, dtype) -> jax.Array:
    return (x if unit is None else x * unit).astype(dtype)


def fitted(cotangents: jax.Array, weights: jax.Array | None, head: Head, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Cotangents scaled so that float16 holds dz without overflow and with the least underflow, and their unit.

    cotangents: (2 or 3, N), of lse, target and sum; weights: those of the sum, (V,). Other types need no unit.
    """
    if dtype != jnp.float16:
        return cotangents, None
    size = jnp.abs(cotangents * head.scale)
    if size.shape[0] == 3 and weights is not None:
        size = size.at[2].multiply(jnp.max(jnp.abs(weights)))
    bound = jnp.sum(size, axis=0)
    largest = jnp.max(jnp.where(jnp.isfinite(bound), bound, 0.0), initial=0.0)
    unit = jnp.where(largest > 0, largest, 1.0) / FLOAT16_LARGEST
    return cotangents / unit, unit
