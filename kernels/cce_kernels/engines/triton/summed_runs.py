"""The kernel that sums the pieces of a block-sparse de (block_sparse.Runs).

    de_i = r_i · Σ_pieces of i's row block          0 where token i is not kept

Read: each piece once. Written: de once, rounded. The order of the sum is fixed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.block_sparse import DE_BLOCK, Runs
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_tile, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.tiles import SUMMED_RUNS, other_tiles
from cce_kernels.head import Head


def _kernel(how: How, pieces_ref, of_block_ref, r_ref, count_ref, out_ref):
    tiles, (tokens, width) = how.tiles, out_ref.shape
    program, across = pl.program_id(0), cdiv(width, tiles.columns)
    rows, columns = indices(program // across, tiles.rows), indices(program % across, tiles.columns)
    rows_ok, columns_ok = inside(rows, tokens, tiles.rows), inside(columns, width, tiles.columns)
    block = program // across * tiles.rows // DE_BLOCK.tokens
    first, count = of_block_ref[block, 0], of_block_ref[block, 1]

    def add(k, total):
        at = rows + (first + k - block) * DE_BLOCK.tokens
        return total + load_tile(pieces_ref, at, columns, None, columns_ok)

    total = lax.fori_loop(jnp.int32(0), count, add, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    scaled = total * load_vector(r_ref, rows, rows_ok)[:, None]
    de = jnp.where((rows < count_ref[0])[:, None], scaled, 0.0).astype(out_ref.dtype)
    mask = tile_mask(rows_ok, columns_ok, (tiles.rows, tiles.columns))
    plgpu.store(out_ref.at[tile_index(rows, columns)], de, mask=mask)


def summed_runs(
    _: Step, gpu: Gpu, pieces: jax.Array, runs: Runs, r: jax.Array, count: jax.Array, dtype: Any
) -> jax.Array:
    """engine.Launched.summed_runs. r: (n,) float32; count: (1,) int32."""
    tiles = other_tiles(SUMMED_RUNS, gpu.interpreted)
    out = jax.ShapeDtypeStruct((r.size, pieces.shape[1]), dtype)
    programs = cdiv(r.size, tiles.rows) * cdiv(pieces.shape[1], tiles.columns)
    given = How(Head(), tiles, gpu.interpreted), pieces, runs.of_block, r, count
    return launch(_kernel, *given, programs=programs, name="cce_summed_runs", out_shape=out)
