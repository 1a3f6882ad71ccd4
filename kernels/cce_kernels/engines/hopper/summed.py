"""dc summed over chunks of tokens on Hopper GPUs, in block floating point (cce_kernels/block_floats.py).

    dc ← encode(decode(dc) + Pᵀ·(r·e))

P: a chunk's exponentials, r·e: its scaled embeddings (cce_kernels/exponentials.py).
Read: P once per 256 columns and e once per 256 rows, from L2 where programs that run at the same time share them; dc
once, copied while the tensor cores multiply. Written: dc once, 2 bytes an element; a step for each block.
Block-sparse (cce_kernels/block_sparse.py): of P and e only what is listed for 256 entries of the vocabulary. Entries
for which nothing is listed are neither read nor written.
Never made: dc in float32.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cce_kernels.block_floats import decode, encode, of_check, step_of
from cce_kernels.block_sparse import DC_BLOCK, Listed
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Multiplying, Part, Problem, Step
from cce_kernels.engines.hopper.every_tile import Extent, every_tile
from cce_kernels.engines.hopper.matmul import Multiply, Origin, Sum
from cce_kernels.engines.hopper.products import products
from cce_kernels.engines.hopper.registers import ROWS, along_rows, parts_of, quotient, vector_of
from cce_kernels.engines.hopper.tiles import DEPTH, PAIR_ROWS, PairTiles
from cce_kernels.numbers import Inputs
from cce_kernels.request import Request
from cce_kernels.windows import ALL_COLUMNS, Windows


def sum_dc(
    step: Step, request: Request, gpu: Gpu, dc: jax.Array, steps: jax.Array | None, part: Part
) -> tuple[jax.Array, jax.Array | None]:
    """engine.Launched.sum_dc."""
    assert part.unit is None
    if steps is not None:
        return _in_block_floats(step.tiles, request, gpu, dc, steps, part)
    # The memory system adds to float32.
    how = Multiplying(step.engine, None, step.tiles, Windows.whole(part.left.shape[1], beyond=True))
    problem = Problem(request, gpu, Inputs(part.e, dc, None, None))  # type: ignore[arg-type]
    return products(how, problem, None, part.count, adding=True).put_dc(dc, part.left, ALL_COLUMNS), None


def _in_block_floats(
    tiles: PairTiles, request: Request, gpu: Gpu, dc: jax.Array, steps: jax.Array, part: Part
) -> tuple[jax.Array, jax.Array]:
    """A block of numbers that share a step is a row of a tile: one vocabulary entry.

    For a dc (D, V) too, whose tiles are then transposed: if an entry were a column, its largest magnitude would have to
    be exchanged between the warps, each of which holds 16 rows.
    """
    vocabulary, width, axis = request.vocabulary, request.width, request.head.vocab_axis

    def extent(others) -> Extent:
        count, listed = others[0][0], others[1]
        pairs = -(-vocabulary // PAIR_ROWS)
        if listed is not None:
            return sparse(listed)
        pairs = jnp.where(count > 0, pairs, 0)  # a chunk without tokens adds nothing
        return Extent(pairs, width, Sum(quotient(count + (DEPTH - 1), DEPTH), Origin))

    def sparse(listed: Any) -> Extent:
        """Only rows of dc that some token keeps."""

        def origin(row, column) -> Origin:
            pair = quotient(row, PAIR_ROWS)
            return Origin(row, column, listed=lambda k: listed.steps[pair, k])

        def steps(row, column):
            return quotient(listed.count[quotient(row, PAIR_ROWS)] * DC_BLOCK.tokens + (DEPTH - 1), DEPTH)

        return Extent(listed.live[0], width, Sum(steps, origin), pair_of=lambda k: listed.blocks[k])

    def write(warpgroup, product, row, column, dc_ref, others, steps_ref):
        tile = quotient(column, tiles.columns)
        step = vector_of(steps_ref.at[tile], row)  # loaded before the tensor cores begin, which hides the wait
        added = product(near_end=lambda: warpgroup.begin_reading(dc_ref, row, column))
        old = zip((x for _, x in parts_of(added, dc_ref.dtype)), warpgroup.read(), strict=True)
        parts = [x + decode(bits, along_rows(step, x.shape)) for x, bits in old]
        largest, check = jnp.abs(parts[0]), of_check(parts[0])
        for x in parts[1:]:
            largest, check = jnp.maximum(largest, jnp.abs(x)), check + of_check(x)
        step = step_of(jnp.max(largest, axis=1), jnp.sum(check, axis=1))
        steps_ref[tile, pl.ds(row, ROWS)] = step
        inverse = along_rows(1 / step, parts[0].shape)
        warpgroup.write_at_once((encode(x, inverse, dc_ref.dtype) for x in parts), dc_ref, row, column)

    multiply = Multiply(tiles, left_axis=0, right_axis=0, out_axis=axis)
    listed = None if part.blocks is None else Listed.of(part.blocks.T)
    if listed is not None:
        multiply = replace(multiply, gather=DC_BLOCK.tokens)
    operands, others, outputs = (part.left, part.e), (part.count, listed), (dc, steps)
    return every_tile(operands, others, outputs, multiply, extent, write, name="cce_dc_sum", gpu=gpu)
