"""Kernels that work on saved exponentials P (cce_kernels/exponentials.py).

    dz        dz.py's formula without a softcap, with p_iv = P_iv · exp(ρ_i − lse_i); of the whole vocabulary in place
    targets   P_i,t_i ← a given number, in place
    clear     P_i ← 0 where token i is ignored, in place

dz reads and writes 2 bytes an element. targets writes 2 bytes a token. clear writes the rows of ignored tokens.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.dz import load_cotangents, load_weights, window_numbers
from cce_kernels.engines.triton.loads import (
    dz_shapes,
    indices,
    inside,
    launch,
    load_scalar,
    load_tile,
    load_vector,
    store_dz,
    tile_index,
    tile_mask,
)
from cce_kernels.engines.triton.tiles import CLEARED, SAVED_TARGETS, TileConfig, other_tiles
from cce_kernels.gradients import ALL_COLUMNS, FormDz
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs
from cce_kernels.windows import Groups, Window


class Exponentials(NamedTuple):
    """Saved exponentials P, (rows, V), their reference ρ, (rows,), and the log-sum-exps, (rows,)."""

    saved: jax.Array
    reference: jax.Array
    lse: jax.Array


def _dz_kernel(
    saved_ref, inputs: Inputs, reference_ref, lse_ref, cotangents: Cotangents, window_ref, dz_ref, sums_ref,
    *, head: Head, tiles: TileConfig, groups: Groups,
):  # fmt: skip
    tokens, group_columns = dz_ref.shape
    program, column_blocks = pl.program_id(0), cdiv(group_columns, tiles.columns)
    row_block, column_block = program // column_blocks, program % column_blocks
    rows, local = indices(row_block, tiles.rows), indices(column_block, tiles.columns)
    rows_ok = inside(rows, tokens, tiles.rows)
    local_ok = inside(local, group_columns, tiles.columns)
    columns = window_ref[0] + local
    reference, lse = (load_vector(x, rows, rows_ok)[:, None] for x in (reference_ref, lse_ref))
    targets = load_vector(inputs.targets, rows, rows_ok, other=-1)[:, None]
    named = columns < groups.vocabulary if groups.beyond else local_ok
    weights = load_weights(inputs.weights, columns, named)
    of = load_cotangents(cotangents, rows, rows_ok)

    saved = load_tile(saved_ref, rows, columns, rows_ok, local_ok).astype(jnp.float32)
    saved = jnp.where(targets >= 0, saved, 0.0)  # the rows of ignored tokens are arbitrary, and may hold NaN
    p = saved * jnp.exp(reference - lse)
    dz = head.cotangent(None, p, columns[None, :] == targets, of, weights, load_scalar(inputs.scale))
    if groups.overlap:
        dz = jnp.where((columns >= window_ref[1])[None, :], dz, 0.0)
    if groups.beyond:  # columns of P from V on, which stay 0
        dz = jnp.where((columns < groups.vocabulary)[None, :], dz, 0.0)
    store_dz(dz_ref, sums_ref, dz, row_block, rows, local, rows_ok, local_ok)


def form_dz_of_saved(step: Step, problem: Problem, p: Exponentials, of: Cotangents) -> FormDz:
    """engine.Launched.form_dz_of_saved."""

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        assert problem.call.wanted is not None
        dz, sums = _dz(step, problem, p, of, window, with_sums=problem.call.wanted.bias)
        return dz, None if sums is None else jnp.sum(sums, axis=0)

    return form


def dz_in_place(step: Step, problem: Problem, p: Exponentials, of: Cotangents) -> jax.Array:
    """engine.Launched.dz_in_place."""
    columns, vocabulary = p.saved.shape[1], problem.call.vocabulary
    step = replace(step, groups=Groups(vocabulary, columns, beyond=columns > vocabulary))
    return _dz(step, problem, p, of, ALL_COLUMNS, in_place=p.saved)[0]


def _dz(
    step: Step, problem: Problem, p: Exponentials, of: Cotangents, window: Window, with_sums: bool = False,
    in_place: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    groups, tiles, tokens, given = step.groups, step.tiles, p.saved.shape[0], problem.inputs
    assert groups is not None
    inputs = Inputs(None, None, None, given.targets, given.weights, given.scale)  # type: ignore[arg-type]
    return launch(
        partial(_dz_kernel, head=problem.head, tiles=tiles, groups=groups),
        *(p.saved, inputs, p.reference, p.lse, of, window_numbers(window)),
        out_shape=dz_shapes(tokens, groups.columns, p.saved.dtype, tiles.rows, with_sums),
        programs=cdiv(tokens, tiles.rows) * cdiv(groups.columns, tiles.columns),
        tiles=tiles,
        interpret=problem.gpu.interpreted,
        name="cce_saved_dz",
        in_place=in_place,
    )


def _targets_kernel(_, targets_ref, values_ref, saved_ref, *, tiles: TileConfig, vocabulary: int):
    rows = indices(pl.program_id(0), tiles.rows)
    rows_ok = rows < saved_ref.shape[0]
    targets = load_vector(targets_ref, rows, rows_ok, other=-1)
    value = load_vector(values_ref, rows, rows_ok)
    named = (targets >= 0) & (targets < vocabulary)  # V, not P's columns: P may have more columns than V
    plgpu.store(saved_ref.at[rows, jnp.where(named, targets, 0)], value.astype(saved_ref.dtype), mask=named)


def _clear_kernel(_, targets_ref, clear_ref, saved_ref, *, tiles: TileConfig):
    """Writes 0 into the rows of ignored tokens among the first clear_ref[0] rows."""
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


def _in_place(kernel, saved: jax.Array, *operands, name: str, tiles: TileConfig, interpret: bool) -> jax.Array:
    tiles = other_tiles(tiles, interpret)
    return launch(
        partial(kernel, tiles=tiles),
        *(saved, *operands),
        out_shape=jax.ShapeDtypeStruct(saved.shape, saved.dtype),
        programs=cdiv(saved.shape[0], tiles.rows),
        tiles=tiles,
        interpret=interpret,
        name=name,
        in_place=saved,
    )


def with_targets(problem: Problem, saved: jax.Array, values: jax.Array) -> jax.Array:
    """saved, in place, with each token's value, (rows,), in the column of its target."""
    kernel, how = partial(_targets_kernel, vocabulary=problem.call.vocabulary), problem.gpu.interpreted
    return _in_place(
        kernel, saved, problem.inputs.targets, values, name="cce_targets", tiles=SAVED_TARGETS, interpret=how
    )


def cleared(problem: Problem, saved: jax.Array, rows: jax.Array) -> jax.Array:
    """saved, in place, with 0 in the rows of ignored tokens among the first `rows` rows. rows: (1,) int32."""
    targets, how = problem.inputs.targets, problem.gpu.interpreted
    return _in_place(_clear_kernel, saved, targets, rows, name="cce_clear", tiles=CLEARED, interpret=how)
