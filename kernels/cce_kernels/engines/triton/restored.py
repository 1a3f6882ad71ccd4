"""The restored kernel: moves the rows of kept tokens from the front of x (N or more, D) to their tokens' own rows.

    x_i ← x_position(i), or 0 where token i is ignored

Read: the rows of kept tokens. Written: N rows, in place. Nothing is moved where all tokens are kept.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_tile, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.tiles import RESTORED, other_tiles
from cce_kernels.head import Head
from cce_kernels.tokens import Kept


def _kernel(how: How, _, position_ref, count_ref, x_ref):
    """Moves some columns of all rows, from the last block of rows to the first.

    position(i) ≤ i, so that no row is overwritten before it is read.
    """
    tiles = how.tiles
    tokens, width = position_ref.shape[0], x_ref.shape[1]
    columns = indices(pl.program_id(0), tiles.columns)
    columns_ok = inside(columns, width, tiles.columns)
    blocks = cdiv(tokens, tiles.rows)

    def block(k, carry):
        rows = indices(blocks - 1 - k, tiles.rows)
        rows_ok = inside(rows, tokens, tiles.rows)
        position = load_vector(position_ref, rows, rows_ok, other=-1)
        x = load_tile(x_ref, position, columns, position >= 0, columns_ok)
        if not how.interpret:
            plgpu.debug_barrier()  # every warp has read its rows before any warp writes
        mask = tile_mask(rows_ok, columns_ok, (tiles.rows, tiles.columns))
        plgpu.store(x_ref.at[tile_index(rows, columns)], x, mask=mask)
        return carry

    first = jnp.where(count_ref[0] == tokens, jnp.int32(blocks), jnp.int32(0))  # all kept: no row moves
    lax.fori_loop(first, jnp.int32(blocks), block, 0)


def restored(_: Step, gpu: Gpu, x: jax.Array, kept: Kept) -> jax.Array:
    """tokens.Kept.restored(x), computed in place. x: (N or more, D); the result: its first N rows."""
    tiles, interpret = other_tiles(RESTORED, gpu.interpreted), gpu.interpreted
    given = How(Head(), tiles, interpret), x, jnp.where(kept.live, kept.position, -1), kept.count
    moved = launch(_kernel, *given, programs=cdiv(x.shape[1], tiles.columns), name="cce_restored", in_place=x)
    return moved[: kept.position.size]
