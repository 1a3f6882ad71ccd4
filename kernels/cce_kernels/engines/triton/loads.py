"""Masked loads of Triton's kernels.

Every index is an array, never a slice: Pallas' interpreter then treats a masked element as a GPU does.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu


def indices(block, size: int) -> jax.Array:
    """The indices of the block-th block of `size` elements."""
    return block * size + jnp.arange(size, dtype=jnp.int32)


def inside(index: jax.Array, size: int, block: int) -> jax.Array | None:
    """Whether each index is below size. None, for no mask, where blocks divide size exactly."""
    return None if size % block == 0 else index < size


def load_vector(ref, index: jax.Array, mask: jax.Array | None, other: float = 0) -> jax.Array:
    """ref[index], or `other` where the mask is false."""
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else other)


def load_scalar(ref):
    """The one element of ref, or None if ref is None."""
    return None if ref is None else ref[0]


def tile_mask(rows_ok: jax.Array | None, columns_ok: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """The mask of a tile from the masks of its rows and of its columns; None if both are None."""
    mask = None if rows_ok is None else jnp.broadcast_to(rows_ok[:, None], shape)
    if columns_ok is None:
        return mask
    columns = jnp.broadcast_to(columns_ok[None, :], shape)
    return columns if mask is None else mask & columns


def tile_index(rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (rows.size, columns.size)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def load_tile(ref, rows: jax.Array, columns: jax.Array, rows_ok, columns_ok) -> jax.Array:
    """The tile ref[rows, columns], 0 where a mask is false."""
    mask = tile_mask(rows_ok, columns_ok, (rows.size, columns.size))
    return plgpu.load(ref.at[tile_index(rows, columns)], mask=mask, other=None if mask is None else 0)
