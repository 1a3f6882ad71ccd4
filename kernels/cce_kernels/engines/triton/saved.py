"""Kernels that work on saved exponentials P (cce_kernels/exponentials.py).

    sums      Σ_v P_iv and Σ_v P_iv·log P_iv
    dz        dz.py's formula without a softcap, from P_iv; of the whole vocabulary in place
    targets   P_i,t_i ← a given number, in place
    clear     P_i ← 0 where token i is ignored, in place

sums reads 2 bytes an element. dz reads and writes 2 bytes an element. targets writes 2 bytes a token. clear writes the
rows of ignored tokens.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.dz import dz_shapes, load_cotangents, load_weights, store_dz, window_numbers
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_tile, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.logits import factor_of, load_inverse_temperature, log2
from cce_kernels.engines.triton.tiles import CLEARED, SAVED_SUMS, SAVED_TARGETS, TileConfig, blocks, other_tiles
from cce_kernels.exponentials import ALIGNMENT
from cce_kernels.numbers import LOG2_E, Cotangents, Inputs
from cce_kernels.windows import ALL_COLUMNS, FormDz, Window, Windows


def _dz_kernel(how: How, saved_ref, inputs: Inputs, cotangents, window_ref, dz_ref, sums_ref):
    head, tiles, windows = how.head, how.tiles, how.windows
    tokens, window_columns = dz_ref.shape
    program, column_blocks = pl.program_id(0), cdiv(window_columns, tiles.columns)
    row_block, column_block = program // column_blocks, program % column_blocks
    rows, local = indices(row_block, tiles.rows), indices(column_block, tiles.columns)
    rows_ok = inside(rows, tokens, tiles.rows)
    local_ok = inside(local, window_columns, tiles.columns)
    start = window_ref[0]
    if windows.vocabulary % ALIGNMENT == 0 and windows.columns % ALIGNMENT == 0:  # Triton must see it for wide accesses
        start = lax.div(start, jnp.int32(ALIGNMENT)) * ALIGNMENT
    columns = start + local
    targets = load_vector(inputs.targets, rows, rows_ok, other=-1)[:, None]
    named = columns < windows.vocabulary if windows.beyond else local_ok
    weights = load_weights(inputs.weights, columns, named)
    of = load_cotangents(cotangents, rows, rows_ok)
    of = of if of.mean is None else of._replace(mean=of.mean / LOG2_E)  # log₂ p takes the place of log p

    held = local_ok
    if windows.beyond:
        held = columns < saved_ref.shape[1] if held is None else held & (columns < saved_ref.shape[1])
    p = load_tile(saved_ref, rows, columns, rows_ok, held).astype(jnp.float32)
    p = jnp.where(targets >= 0, p, 0.0)  # the rows of ignored tokens are arbitrary, and may hold NaN
    log_p = None if of.mean is None else log2(p, how.interpret)
    inverse = load_inverse_temperature(inputs, rows, rows_ok)
    dz = head.cotangent(None, p, columns[None, :] == targets, of, weights, factor_of(inputs, inverse), log_p)
    if windows.overlap:
        dz = jnp.where((columns >= window_ref[1])[None, :], dz, 0.0)
    if windows.beyond:  # columns of P from V on, which stay 0
        dz = jnp.where((columns < windows.vocabulary)[None, :], dz, 0.0)
    store_dz(dz_ref, sums_ref, dz, row_block, rows, local, rows_ok, local_ok)


def _sums_kernel(how: How, saved_ref, mass_ref, moment_ref):
    """Of one row. The moment is to the base 2."""
    row, columns_of_p, tile = pl.program_id(0), saved_ref.shape[1], how.tiles.columns
    rows = jnp.full((1,), row, jnp.int32)

    def add(j, sums):
        columns = indices(j, tile)
        p = load_tile(saved_ref, rows, columns, None, inside(columns, columns_of_p, tile)).astype(jnp.float32)
        return sums[0] + p, sums[1] + jnp.where(p > 0, p * log2(p, how.interpret), 0.0)

    zeros = jnp.zeros((1, tile), jnp.float32)
    mass, moment = lax.fori_loop(jnp.int32(0), jnp.int32(cdiv(columns_of_p, tile)), add, (zeros, zeros))
    plgpu.store(mass_ref.at[rows], jnp.sum(mass, axis=1))
    plgpu.store(moment_ref.at[rows], jnp.sum(moment, axis=1))


def mass_and_moment(problem: Problem, saved: jax.Array) -> tuple[jax.Array, jax.Array]:
    """engine.Launched.mass_and_moment."""
    interpret, numbers = problem.gpu.interpreted, jax.ShapeDtypeStruct(saved.shape[:1], jnp.float32)
    how = How(problem.head, other_tiles(SAVED_SUMS, interpret), interpret)
    shapes = {"programs": saved.shape[0], "name": "cce_saved_sums", "out_shape": (numbers, numbers)}
    mass, moment = launch(_sums_kernel, how, saved, **shapes)
    return mass, moment / LOG2_E


def form_dz_of_saved(step: Step, problem: Problem, saved: jax.Array, of: Cotangents) -> FormDz:
    """engine.Launched.form_dz_of_saved."""

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        dz, sums = _dz(step, problem, window, saved, of, with_sums=problem.request.wants.bias)
        return dz, None if sums is None else jnp.sum(sums, axis=0)

    return form


def dz_in_place(step: Step, problem: Problem, saved: jax.Array, of: Cotangents) -> jax.Array:
    """engine.Launched.dz_in_place."""
    columns, vocabulary = saved.shape[1], problem.request.vocabulary
    step = replace(step, windows=Windows(vocabulary, columns, beyond=columns > vocabulary))
    return _dz(step, problem, ALL_COLUMNS, saved, of, in_place=saved)[0]


def _dz(step: Step, problem: Problem, window: Window, saved: jax.Array, of: Cotangents, with_sums=False, in_place=None):
    tiles, windows, tokens, given = step.tiles, step.windows, saved.shape[0], problem.inputs
    inputs = given._replace(e=None, c=None, bias=None)  # type: ignore[arg-type]
    given = How.of(step, problem), saved, inputs, of, window_numbers(window)
    out = dz_shapes(tokens, windows.columns, saved.dtype, tiles.rows, with_sums)
    programs = blocks((tokens, windows.columns), tiles)
    return launch(_dz_kernel, *given, programs=programs, name="cce_saved_dz", out_shape=out, in_place=in_place)


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
    interpret, targets, vocabulary = problem.gpu.interpreted, problem.inputs.targets, problem.request.vocabulary

    def in_place(kernel, saved: jax.Array, numbers: jax.Array, tiles: TileConfig, name: str) -> jax.Array:
        tiles = other_tiles(tiles, interpret)
        given, programs = (saved, targets, numbers), cdiv(saved.shape[0], tiles.rows)
        return launch(kernel, How(problem.head, tiles, interpret), *given, programs=programs, name=name, in_place=saved)

    write = partial(_targets_kernel, vocabulary=vocabulary)
    filled = in_place(write, saved, at_target, SAVED_TARGETS, "cce_targets")
    return filled if clear is None else in_place(_clear_kernel, filled, clear, CLEARED, "cce_clear")
