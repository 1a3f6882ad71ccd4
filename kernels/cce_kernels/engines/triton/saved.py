"""Kernels that work on saved exponentials P (cce_kernels/exponentials.py).

    targets   P_i,t_i ← a given number, in place
    clear     P_i ← 0 where token i is ignored, in place

targets writes 2 bytes a token. clear writes the rows of ignored tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.tiles import CLEARED, SAVED_TARGETS, TileConfig, other_tiles


def _targets_kernel(how: How, _, targets_ref, values_ref, saved_ref, *, vocabulary: int):
    tiles = how.tiles
    rows = indices(pl.program_id(0), tiles.rows)
    rows_ok = rows < saved_ref.shape[0]
    targets = load_vector(targets_ref, rows, rows_ok, other=-1)
    value = load_vector(values_ref, rows, rows_ok)
    named = (targets >= 0) & (targets < vocabulary)  # V, not P's columns: P may have more columns than V
    plgpu.store(saved_ref.at[rows, jnp.where(named, targets, 0)], value.astype(saved_ref.dtype), mask=named)


def _clear_kernel(how: How, _, targets_ref, clear_ref, saved_ref):
    """Writes 0 into the rows of ignored tokens among the first clear_ref[0] rows."""
    tiles = how.tiles
    tokens, columns_of_p = saved_ref.shape
    rows = indices(pl.program_id(0), tiles.rows)
    ignored = (load_vector(targets_ref, rows, rows < tokens) < 0) & (rows < clear_ref[0])
    last = jnp.where(jnp.max(ignored.astype(jnp.int32)) > 0, jnp.int32(cdiv(columns_of_p, tiles.columns)), jnp.int32(0))
    shape = tiles.rows, tiles.columns

    def clear(j, carry):
        columns = indices(j, tiles.columns)
        mask = tile_mask(ignored, inside(columns, columns_of_p, tiles.columns), shape)
        plgpu.store(saved_ref.at[tile_index(rows, columns)], jnp.zeros(shape, saved_ref.dtype), mask=mask)
        return carry

    lax.fori_loop(jnp.int32(0), last, clear, 0)


def saved_targets(
    _: Step, problem: Problem, saved: jax.Array, at_target: jax.Array, clear: jax.Array | None
) -> jax.Array:
    """engine.Launched.saved_targets, in two launches. at_target: (rows,); clear: (1,) int32."""
    interpret, targets, vocabulary = problem.gpu.interpreted, problem.inputs.targets, problem.call.vocabulary

    def in_place(kernel, saved: jax.Array, numbers: jax.Array, tiles: TileConfig, name: str) -> jax.Array:
        tiles = other_tiles(tiles, interpret)
        given, programs = (saved, targets, numbers), cdiv(saved.shape[0], tiles.rows)
        return launch(kernel, How(problem.head, tiles, interpret), *given, programs=programs, name=name, in_place=saved)

    write = partial(_targets_kernel, vocabulary=vocabulary)
    filled = in_place(write, saved, at_target, SAVED_TARGETS, "cce_targets")
    return filled if clear is None else in_place(_clear_kernel, filled, clear, CLEARED, "cce_clear")
