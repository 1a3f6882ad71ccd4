"""dc summed over chunks of tokens by Triton, in block floating point (cce_kernels/block_floats.py) or in float32.

    dc ← encode(decode(dc) + leftᵀ·e)         in float32  dc ← dc + leftᵀ·e

left: a chunk's exponentials or its dz (n, V). e: the embeddings (n, D), scaled if left has exponentials.
Read: left once per tile of columns and e once per tile of rows, from L2 where programs that run at the same time share
them; dc once. Written: dc once, in place, 2 or 4 bytes an element; a step for each block. Never made: a 16-bit dc in
float32, a part of dc in memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.block_floats import decode, encode, of_check, step_of
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Part, Step
from cce_kernels.engines.order import cdiv, grouped_order
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, tile_index, tile_mask
from cce_kernels.engines.triton.products import ROW_GROUP, sum_over_tokens
from cce_kernels.engines.triton.tiles import blocks
from cce_kernels.exponentials import ALIGNMENT
from cce_kernels.request import Request


def _kernel(how: How, left_ref, e_ref, _, old_steps_ref, count_ref, dc_ref, steps_ref):
    """One tile of dc: its rows are vocabulary entries and its columns one block of D, in either layout of dc.

    So the largest magnitude of a block is that of a tile's row. dc_ref: int16 if there are steps.
    """
    head, tiles = how.head, how.tiles
    vocabulary, width = dc_ref.shape if head.vocab_axis == 0 else dc_ref.shape[::-1]
    row_blocks, column_blocks = cdiv(vocabulary, tiles.rows), cdiv(width, tiles.columns)
    row_block, column_block = grouped_order(pl.program_id(0), row_blocks, column_blocks, ROW_GROUP)
    rows, columns = indices(row_block, tiles.rows), indices(column_block, tiles.columns)
    rows_ok, columns_ok = inside(rows, vocabulary, tiles.rows), inside(columns, width, tiles.columns)
    shape = tiles.rows, tiles.columns
    index, mask = tile_index(rows, columns), tile_mask(rows_ok, columns_ok, shape)
    where = dc_ref.at[index if head.vocab_axis == 0 else index[::-1]]

    add = partial(sum_over_tokens, left_ref, e_ref, rows, columns, count_ref[0], tiles=tiles, head=head)
    load = partial(plgpu.load, where, mask=mask, other=None if mask is None else jnp.zeros((), dc_ref.dtype))
    if old_steps_ref is None:
        plgpu.store(where, add(load()), mask=mask)
        return
    # The old tile is loaded before the matmul, which hides the wait. If its elements must be loaded one by one, their
    # addresses would take too many registers until then.
    aligned = dc_ref.shape[1] % ALIGNMENT == 0
    old = load() if aligned else None
    total = add(jnp.zeros(shape, jnp.float32))
    old = load() if old is None else old
    step_index = jnp.full((tiles.rows,), column_block, jnp.int32), rows  # the steps' array has rows of whole tiles
    total += decode(old, plgpu.load(old_steps_ref.at[step_index])[:, None])
    step = step_of(jnp.max(jnp.abs(total), axis=1), jnp.sum(of_check(total), axis=1))
    plgpu.store(steps_ref.at[step_index], step)
    plgpu.store(where, encode(total, (1 / step)[:, None], jnp.int16), mask=mask)


def sum_dc(
    step: Step, request: Request, gpu: Gpu, dc: jax.Array, steps: jax.Array | None, part: Part
) -> tuple[jax.Array, jax.Array | None]:
    """engine.Launched.sum_dc. step.tiles.columns: how many columns of D share a step.

    The kernel gets and gives 16-bit integers: XLA may take them for NaN in the type of the result, and change them.
    """
    assert part.unit is None
    tiles, head, axis = step.tiles, request.head, request.head.vocab_axis
    held = dc if steps is None else lax.bitcast_convert_type(dc, jnp.int16)
    given = How(head, tiles, gpu.interpreted), part.left, part.e, held, steps, part.count
    programs = blocks((dc.shape[axis], dc.shape[1 - axis]), tiles)
    found, steps = launch(_kernel, *given, programs=programs, name="cce_dc_sum", in_place=(held, steps))
    return found if steps is None else lax.bitcast_convert_type(found, dc.dtype), steps
