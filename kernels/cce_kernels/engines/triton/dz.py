"""The dz kernel: the cotangents dz (N, V_g) of one window of columns, from logits that the kernel computes again.

    dz_iv = ((a"_i + μ"_i·log P_iv)·P_iv + t̂_i·[v = t_i] + s_i·w_v) · ∂z_iv/∂(e_i·c_v)        P_iv = exp(z_iv − ρ_i)

Fused: the matmul e·c_gᵀ, bias, scale, softcap, temperature, exponential, all cotangents, the chain rule, dz's column
sums.
Read: e once per tile of columns and c_g once per tile of rows (256 and 128 on Hopper), from L2 where
programs that run at the same time share them.
Written: dz once, 2 bytes an element for 16-bit inputs, into a buffer that every window reuses. Never written: a logit,
a probability, dz of the whole vocabulary.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv, grouped_order, row_group
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.logits import divided, exp, factor_of, load_inverse_temperature, logits_tile
from cce_kernels.numbers import Cotangents, Inputs, Numbers
from cce_kernels.windows import FormDz, Window


def window_numbers(window: Window) -> jax.Array:
    """The first column of a window and the first column that it owns, (2,), in the form that kernels take."""
    return jnp.stack([window.start, window.owned])


def load_cotangents(cotangents: Cotangents, rows: jax.Array, rows_ok) -> Cotangents:
    """The cotangents of these rows, each as a column (rows, 1). cotangents: refs."""
    return jax.tree.map(lambda ref: load_vector(ref, rows, rows_ok)[:, None], cotangents)


def load_weights(weights_ref, columns: jax.Array, columns_ok) -> jax.Array | None:
    return None if weights_ref is None else load_vector(weights_ref, columns, columns_ok)[None, :]


def store_dz(dz_ref, sums_ref, dz: jax.Array, row_block, rows: jax.Array, local: jax.Array, rows_ok, local_ok) -> None:
    """Writes the tile dz[rows, local], and its column sums to sums[row_block, local] if sums_ref is not None."""
    mask = tile_mask(rows_ok, local_ok, (rows.size, local.size))
    plgpu.store(dz_ref.at[tile_index(rows, local)], dz.astype(dz_ref.dtype), mask=mask)
    if sums_ref is not None:
        if rows_ok is not None:
            dz = jnp.where(rows_ok[:, None], dz, 0.0)
        block = jnp.full((local.size,), row_block, jnp.int32)
        plgpu.store(sums_ref.at[block, local], jnp.sum(dz, axis=0), mask=local_ok)


def dz_shapes(tokens: int, columns: int, dtype, rows: int, with_sums: bool) -> tuple:
    """The shapes of the two arrays that store_dz writes for a window of columns, in tiles of `rows` rows."""
    sums = jax.ShapeDtypeStruct((cdiv(tokens, rows), columns), jnp.float32) if with_sums else None
    return jax.ShapeDtypeStruct((tokens, columns), dtype), sums


def _kernel(how: How, inputs: Inputs, of_rows, cotangents, window_ref, count_ref, dz_ref, sums_ref):
    """One tile of dz. Blocks of tokens from count_ref[0] on are neither computed nor written.

    of_rows: the references, and what no logit exceeds or None.
    """
    head, tiles, windows = how.head, how.tiles, how.windows
    tokens, window_columns = dz_ref.shape
    column_blocks = cdiv(window_columns, tiles.columns)
    height = row_group(inputs.e.shape[1], inputs.e.dtype.itemsize, tiles.rows)
    row_block, column_block = grouped_order(pl.program_id(0), cdiv(tokens, tiles.rows), column_blocks, height)

    def tile() -> None:
        rows, local = indices(row_block, tiles.rows), indices(column_block, tiles.columns)
        rows_ok = inside(rows, tokens, tiles.rows)
        local_ok = inside(local, window_columns, tiles.columns)
        columns = window_ref[0] + local

        # The epilogue's operands are loaded before the K loop, which hides the wait for them.
        reference, most = jax.tree.map(lambda ref: load_vector(ref, rows, rows_ok)[:, None], of_rows)
        targets = load_vector(inputs.targets, rows, rows_ok, other=-1)[:, None]
        weights = load_weights(inputs.weights, columns, local_ok)
        of = load_cotangents(cotangents, rows, rows_ok)
        inverse = load_inverse_temperature(inputs, rows, rows_ok)

        x = logits_tile(inputs, rows, columns, rows_ok, local_ok, head=head, tiles=tiles)
        log_p = divided(x, inverse, most) - reference
        p, is_target = exp(log_p, how.interpret), columns[None, :] == targets
        dz = head.cotangent(x, p, is_target, of, weights, factor_of(inputs, inverse), log_p)
        if windows.overlap:
            dz = jnp.where((columns >= window_ref[1])[None, :], dz, 0.0)
        store_dz(dz_ref, sums_ref, dz, row_block, rows, local, rows_ok, local_ok)

    if count_ref is None:
        tile()
    else:
        pl.when(row_block * tiles.rows < count_ref[0])(tile)


def form_dz(step: Step, problem: Problem, numbers: Numbers, of: Cotangents, count: jax.Array | None) -> FormDz:
    """engine.Launched.form_dz. count: rows of dz from this one on need not be written; None: all rows are written."""
    inputs, tiles, windows = problem.inputs, step.tiles, step.windows
    tokens, with_sums = inputs.e.shape[0], problem.request.wants.bias
    row_blocks, column_blocks = cdiv(tokens, tiles.rows), cdiv(windows.columns, tiles.columns)
    out = dz_shapes(tokens, windows.columns, inputs.e.dtype, tiles.rows, with_sums)
    of_rows = numbers.reference, numbers.most(inputs)

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        given = How.of(step, problem), inputs, of_rows, of, window_numbers(window), count
        dz, sums = launch(_kernel, *given, programs=row_blocks * column_blocks, name="cce_dz", out_shape=out)
        if sums is None:
            return dz, None
        if count is not None:
            computed = jnp.arange(row_blocks, dtype=jnp.int32) * tiles.rows < count
            sums = jnp.where(computed[:, None], sums, 0)
        return dz, jnp.sum(sums, axis=0)

    return form
