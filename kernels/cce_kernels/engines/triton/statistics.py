"""The statistics kernel: the log-mass and the mean of each token's logits; and two variants.

    log_mass_i = log Σ_v exp(z_iv − ρ_i)        mean_i = Σ_v p_iv (z_iv − ρ_i)

The kernel needs no maximum: ρ is the target's logit, so that a sum overflows float32 only where a logit exceeds the
target's by 88. Such a row gets log_mass = inf. With a mean, a row whose log_mass is above LARGEST gets it too: the
entropy is log_mass − mean, and a difference of large numbers has few digits. The rescue kernel, made of the same code,
computes blocks with such rows again, with a running maximum, which becomes their ρ. Its programs that have nothing to
rescue read 4 bytes a token and end.
The replace kernel exists where exponentials are saved. It writes those of tokens whose reference is another one.

Fused: the matmul e·cᵀ, bias, scale, softcap, temperature, exponential, all sums.
Read: e once per tile of columns and c once per tile of rows (256 and 128 on Hopper), from L2 where
programs that run at the same time share them.
Written: 4 bytes a token and split for log_mass, and for the mean; 2 bytes for each saved exponential
(cce_kernels/exponentials.py). Never written: a logit.
A program owns `tiles.rows` tokens and one of `splits` equal runs of the vocabulary, which it walks tile by tile.
Ignored tokens come last; a program that has only ignored tokens ends at once (cce_kernels/tokens.py).
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.engine import Problem, Step, Sums
from cce_kernels.engines.order import cdiv, grouped_order, row_group
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.logits import divided, exp, load_inverse_temperature, logits_tile
from cce_kernels.engines.triton.tiles import TileConfig
from cce_kernels.exponentials import LARGEST, saved_shape
from cce_kernels.mean import quotient
from cce_kernels.numbers import FLOAT32_MAX, LOG2_E, Inputs, logarithm

Kind = Literal["statistics", "rescue"]


def _run_of(how: How, inputs: Inputs, tokens: int):
    """This program's block of rows, its split, the first tile of columns of its run, and the tile after the last."""
    head, tiles, splits = how.head, how.tiles, how.splits
    column_tiles = cdiv(saved_shape(tokens, head.vocabulary(inputs.c))[1], tiles.columns)
    height = row_group(inputs.e.shape[1], inputs.e.dtype.itemsize, tiles.rows)
    row_block, split = grouped_order(pl.program_id(0), cdiv(tokens, tiles.rows), splits, height)
    return row_block, split, split * column_tiles // splits, (split + 1) * column_tiles // splits


def _of_vocabulary(columns: jax.Array, tokens: int, vocabulary: int, tiles: TileConfig) -> jax.Array | None:
    """Whether each column is below V; None where all tiles are. The tiles also cover the columns of P beyond V."""
    ends_with_p = saved_shape(tokens, vocabulary)[1] == vocabulary
    return inside(columns, vocabulary, tiles.columns) if ends_with_p else columns < vocabulary


def _store_exponentials(saved_ref, p: jax.Array, slope, rows: jax.Array, columns: jax.Array, rows_ok) -> None:
    """Stores p·slope up to the end of P's rows. p is 0 from column V on. slope: None for 1.

    With a mask that ends at an arbitrary V the compiler would store one column at a time.
    """
    mask = tile_mask(rows_ok, inside(columns, saved_ref.shape[1], columns.size), (rows.size, columns.size))
    p = p if slope is None else p * slope
    plgpu.store(saved_ref.at[tile_index(rows, columns)], p.astype(saved_ref.dtype), mask=mask)


def _failed(log_mass_ref, slot, rows_ok):
    """(rows,): whether the log-mass of a row of the block is inf or NaN."""
    return ~(plgpu.load(log_mass_ref.at[slot], mask=rows_ok, other=None if rows_ok is None else 0.0) < jnp.inf)


def _kernel(
    how: How, inputs: Inputs, count_ref, given_ref, before, mass_ref, saved_ref, mean_ref, peak_ref, *, kind: Kind
):
    """The statistics of a block of rows and a run of columns, relative to the references, given_ref.

    "rescue": relative to a running maximum, which is written to peak_ref, for the rows whose log-mass in before,
    (log_mass, mean, references), is inf or NaN. mass_ref, mean_ref and peak_ref are the same buffers.
    """
    head, tiles, rescue = how.head, how.tiles, kind == "rescue"
    tokens, vocabulary = mass_ref.shape[1], head.vocabulary(inputs.c)
    row_block, split, first, last = _run_of(how, inputs, tokens)
    rows = indices(row_block, tiles.rows)
    rows_ok = inside(rows, tokens, tiles.rows)
    slot = jnp.full((tiles.rows,), split, jnp.int32), rows
    if count_ref is not None:
        last = jnp.where(row_block * tiles.rows < count_ref[0], last, first)
        rows_ok = rows < count_ref[0]
    if rescue:
        last = jnp.where(jnp.max(_failed(before[0], slot, rows_ok).astype(jnp.int32)) > 0, last, first)
        reference = jnp.full((tiles.rows,), -FLOAT32_MAX, jnp.float32)
    else:
        reference = load_vector(given_ref, rows, rows_ok)

    inverse = load_inverse_temperature(inputs, rows, rows_ok)

    def tile(j, carry):
        reference, total, moment = carry  # total: Σ q, moment: Σ q·log q with q = exp(z − reference)
        columns = indices(j, tiles.columns)
        columns_ok = _of_vocabulary(columns, tokens, vocabulary, tiles)
        x = logits_tile(inputs, rows, columns, rows_ok, columns_ok, head=head, tiles=tiles)
        z = divided(x, inverse)
        slope = None if saved_ref is None or head.softcap is None else head.slope(x)
        if columns_ok is not None:
            z = jnp.where(columns_ok[None, :], z, -jnp.inf)
        if rescue:
            peak = jnp.maximum(reference, jnp.minimum(jnp.max(z, axis=1), FLOAT32_MAX))
            rescaled = jnp.exp(reference - peak)
            if mean_ref is not None:
                moment = rescaled * (moment + (reference - peak) * total)
            reference, total = peak, total * rescaled
        log_p = z - reference[:, None]
        p = exp(log_p, how.interpret)
        total += jnp.sum(p, axis=1)
        if mean_ref is not None:
            moment += jnp.sum(p * logarithm(log_p), axis=1)
        if saved_ref is not None:
            _store_exponentials(saved_ref, p, slope, rows, columns, rows_ok)
        return reference, total, moment

    zeros = jnp.zeros((tiles.rows,), jnp.float32)
    begin = reference, zeros, None if mean_ref is None else zeros
    reference, total, moment = lax.fori_loop(first, last, tile, begin)

    # Read once more, so that no register holds it in the loop.
    written = _failed(before[0], slot, rows_ok) if rescue else rows_ok
    # If all exponentials of the run underflow, total is 0 and log_mass is -inf.
    log_mass = jnp.log2(total) / LOG2_E
    if mean_ref is not None:
        plgpu.store(mean_ref.at[slot], quotient(moment, total), mask=written)
        if not rescue:
            log_mass = jnp.where(log_mass < LARGEST, log_mass, jnp.inf)
    plgpu.store(mass_ref.at[slot], log_mass, mask=written)
    if peak_ref is not None:
        plgpu.store(peak_ref.at[slot], reference, mask=written)


def sums(step: Step, problem: Problem, count: jax.Array | None, reference: jax.Array, save: bool) -> Sums:
    """engine.Launched.sums."""
    inputs, tiles, splits = problem.inputs, step.tiles, step.splits
    tokens, vocabulary = reference.size, problem.head.vocabulary(inputs.c)
    parts = jax.ShapeDtypeStruct((splits, tokens), jnp.float32)
    saved = jax.ShapeDtypeStruct(saved_shape(tokens, vocabulary), inputs.e.dtype) if save else None
    given = How.of(step, problem), inputs._replace(targets=None, weights=None), count, reference, None
    kernel, programs = partial(_kernel, kind="statistics"), cdiv(tokens, tiles.rows) * splits
    out = parts, saved, parts if problem.request.numbers.mean else None, None
    log_mass, p, mean, _ = launch(kernel, *given, programs=programs, name="cce_statistics", out_shape=out)
    return Sums(log_mass, None, p, mean=mean)


def rescued(step: Step, problem: Problem, count: jax.Array | None, before: Sums) -> Sums:
    """engine.Launched.rescued."""
    splits, tokens = before.log_mass.shape
    inputs, how = problem.inputs._replace(targets=None, weights=None), How.of(replace(step, splits=splits), problem)
    programs, kernel = cdiv(tokens, step.tiles.rows) * splits, partial(_kernel, kind="rescue")
    operands = how, inputs, count, None, (before.log_mass, before.mean, before.reference)
    in_place = before.log_mass, None, before.mean, before.reference
    log_mass, _, mean, peaks = launch(kernel, *operands, programs=programs, name="cce_rescue", in_place=in_place)
    return before._replace(log_mass=log_mass, mean=mean, reference=peaks)


def _replace_kernel(how: How, inputs: Inputs, reference_ref, others_ref, _, saved_ref):
    """Writes the exponentials of tokens where others > 0, by their references. Skips blocks without such tokens."""
    head, tiles = how.head, how.tiles
    tokens, vocabulary = saved_ref.shape[0], head.vocabulary(inputs.c)
    row_block, _, first, last = _run_of(how, inputs, tokens)
    rows = indices(row_block, tiles.rows)
    rows_ok = inside(rows, tokens, tiles.rows)
    written = load_vector(others_ref, rows, rows_ok) > 0
    reference = load_vector(reference_ref, rows, rows_ok)[:, None]
    last = jnp.where(jnp.max(written.astype(jnp.int32)) > 0, last, first)
    inverse = load_inverse_temperature(inputs, rows, rows_ok)

    def tile(j, carry):
        columns = indices(j, tiles.columns)
        columns_ok = _of_vocabulary(columns, tokens, vocabulary, tiles)
        x = logits_tile(inputs, rows, columns, rows_ok, columns_ok, head=head, tiles=tiles)
        z, slope = divided(x, inverse), None if head.softcap is None else head.slope(x)
        if columns_ok is not None:
            z = jnp.where(columns_ok[None, :], z, -jnp.inf)
        _store_exponentials(saved_ref, exp(z - reference, how.interpret), slope, rows, columns, written)
        return carry

    lax.fori_loop(first, last, tile, 0)


def saved_again(step: Step, problem: Problem, reference: jax.Array, others: jax.Array, saved: jax.Array) -> jax.Array:
    """engine.Launched.saved_again. saved: (rows, V); reference: (rows,); others: (rows,) bool; inputs.e: gathered."""
    inputs, programs = problem.inputs._replace(targets=None, weights=None), cdiv(len(saved), step.tiles.rows)
    given = How.of(step, problem), inputs, reference, others.astype(jnp.int32), saved
    return launch(_replace_kernel, *given, programs=programs * step.splits, name="cce_replace", in_place=saved)
