"""The restored kernel: moves the rows of kept tokens from the front of x (N or more, D) to their tokens' own rows.

    x_i ← x_place(i), or 0 where token i is ignored

Read: the rows of kept tokens. Written: N rows, in place. Nothing is moved where all tokens are kept.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.loads import indices, inside, launch, load_tile, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.tiles import RESTORED, TileConfig, other_tiles
from cce_kernels.tokens import Kept


def _kernel(_, place_ref, count_ref, x_ref, *, tiles: TileConfig, interpret: bool):
    """Moves some columns of all rows, from the last block of rows to the first.

    place(i) ≤ i, so that no row is overwritten before it is read.
    """
    tokens, width = place_ref.shape[0], x_ref.shape[1]
    columns = indices(pl.program_id(0), tiles.columns)
    columns_ok = inside(columns, width, tiles.columns)
    blocks = cdiv(tokens, tiles.rows)

    def block(k, carry):
        rows = indices(blocks - 1 - k, tiles.rows)
        rows_ok = inside(rows, tokens, tiles.rows)
        place = load_vector(place_ref, rows, rows_ok, other=-1)
        x = load_tile(x_ref, place, columns, place >= 0, columns_ok)
        if not interpret:
            plgpu.debug_barrier()  # every warp has read its rows before any warp writes
        mask = tile_mask(rows_ok, columns_ok, (tiles.rows, tiles.columns))
        plgpu.store(x_ref.at[tile_index(rows, columns)], x, mask=mask)
        return carry

    first = jnp.where(count_ref[0] == tokens, jnp.int32(blocks), jnp.int32(0))  # all kept: no row moves
    lax.fori_loop(first, jnp.int32(blocks), block, 0)


def restored(x: jax.Array, kept: Kept, *, interpret: bool) -> jax.Array:
    """tokens.Kept.restored(x), computed in place. x: (N or more, D); the result: its first N rows."""
    tiles = other_tiles(RESTORED, interpret)
    moved = launch(
        partial(_kernel, tiles=tiles, interpret=interpret),
        *(x, jnp.where(kept.live, kept.place, -1), kept.count),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        programs=cdiv(x.shape[1], tiles.columns),
        tiles=tiles,
        interpret=interpret,
        name="cce_restored",
        in_place=x,
    )
    return moved[: kept.place.size]
