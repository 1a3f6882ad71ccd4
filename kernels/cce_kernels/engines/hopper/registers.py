"""Numbers and tiles in registers, for the kernels of Hopper GPUs and their epilogues."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cce_kernels.compat import NO_INDEX
from cce_kernels.engines.hopper.tiles import BLOCK

ROWS = BLOCK // 2  # rows of a warpgroup: the height of the tensor cores' tiles


def quotient(a, b) -> jax.Array:
    """a // b for numbers that are not negative, in int32 even where JAX's default integers have 64 bits."""
    return lax.div(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32))


def remainder(a, b) -> jax.Array:
    """a % b, in int32 as `quotient`."""
    return lax.rem(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32))


def multiple(x, of: int):
    """x. Tells the compiler that x is a multiple of `of`."""
    return x if isinstance(x, int) else pl.multiple_of(x, of)


def parts_of(tile: jax.Array, dtype) -> Iterator[tuple[int, jax.Array]]:
    """The parts of a tile and the first column of each. They are as wide as `Warpgroup.write` takes them in this type.

    An epilogue should compute one part after another: for a whole tile there are not enough registers.
    """
    width = 128 // jnp.dtype(dtype).itemsize
    return ((first, tile[:, first : first + width]) for first in range(0, tile.shape[1], width))


def vector_of(ref, row) -> jax.Array:
    """ref[row : row + ROWS]: a number for each row of a warpgroup's tile."""
    at = ref.at[pl.ds(row, ROWS)]
    loaded = plgpu.load(at, *NO_INDEX, optimized=False)  # type: ignore[reportCallIssue]
    return plgpu.layout_cast(loaded, plgpu.Layout.WGMMA.reduce(1))


def along_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, (0,))


def column_numbers(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def zero_vector() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
