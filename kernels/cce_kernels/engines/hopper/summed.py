"""dc summed over chunks of tokens on Hopper GPUs, in block floating point (cce_kernels/block_floats.py).

    next      dc ← encode(decode(dc) + Pᵀ·(r·e))
    last      dc ← factor · (decode(dc) + Pᵀ·(r·e)), rounded to the type of the result

P: a chunk's exponentials, r·e: its scaled embeddings (cce_kernels/exponentials.py).
Read: P once per 256 columns and e once per 256 rows, from L2 where programs that run at the same time share them; dc
once, copied while the tensor cores multiply. Written: dc once, 2 bytes an element; a step for each block.
Never made: dc in float32.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cce_kernels.block_floats import decode, encode, step_of
from cce_kernels.engines.hopper.every_tile import PAIR_GROUP, Extent, every_tile
from cce_kernels.engines.hopper.matmul import ROWS, Multiply, Place, Sum, along_rows, parts_of, quotient, vector_of
from cce_kernels.engines.hopper.tiles import DEPTH, PAIR_ROWS, PairTiles
from cce_kernels.head import Head


def sum_dc(
    dc: jax.Array, steps: jax.Array | None, p: jax.Array, e: jax.Array, count: jax.Array, factor: jax.Array | None,
    *, head: Head, tiles: PairTiles, units: int, interpret,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """engine.Engine.sum_dc. A block of numbers that share a step is a row of a tile: one vocabulary entry.

    For a dc (D, V) too, whose tiles are then transposed: if an entry were a column, its largest magnitude would have to
    be exchanged between the warps, each of which holds 16 rows.
    """
    axis = head.vocab_axis
    vocabulary, width = dc.shape[axis], dc.shape[1 - axis]

    def extent(others) -> Extent:
        count = others[0][0]
        pairs = -(-vocabulary // PAIR_ROWS)
        if factor is None:  # a chunk without tokens adds nothing
            pairs = jnp.where(count > 0, pairs, 0)
        return Extent(pairs, width, Sum(quotient(count + (DEPTH - 1), DEPTH), Place))

    def write(warpgroup, product, row, column, dc_ref, others, steps_ref):
        factor = None if others[1] is None else others[1][0]
        tile = quotient(column, tiles.columns)
        step = vector_of(steps_ref.at[tile], row)  # loaded before the tensor cores begin, which hides the wait
        added = product(near_end=lambda: warpgroup.begin_reading(dc_ref, row, column))
        old = zip((x for _, x in parts_of(added, dc_ref.dtype)), warpgroup.read(), strict=True)
        parts = [x + decode(bits, along_rows(step, x.shape)) for x, bits in old]
        if factor is not None:
            warpgroup.write_at_once(((x * factor).astype(dc_ref.dtype) for x in parts), dc_ref, row, column)
            return
        largest = jnp.max(jnp.abs(parts[0]), axis=1)
        for x in parts[1:]:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
        step = step_of(largest)
        steps_ref[tile, pl.ds(row, ROWS)] = step
        inverse = along_rows(1 / step, parts[0].shape)
        warpgroup.write_at_once((encode(x, inverse, dc_ref.dtype) for x in parts), dc_ref, row, column)

    multiply = Multiply(tiles, left_axis=0, right_axis=0, out_axis=axis)
    return every_tile((p, e), (count, factor), (dc, steps), multiply, extent, write, units=units, group=PAIR_GROUP,
                      name="cce_dc_sum", interpret=interpret)  # fmt: skip
