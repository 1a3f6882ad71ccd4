"""The dz kernel: the cotangents dz (N, V_g) of one group of columns, from logits that the kernel computes again.

    dz_iv = (a_i·p_iv + t̂_i·[v = t_i] + s_i·w_v) · ∂z_iv/∂(e_i·c_v)        p_iv = exp(z_iv − lse_i)

Fused: the matmul e·c_gᵀ, bias, scale, softcap, softmax, all three cotangents, the chain rule, dz's column sums.
Read: e once per tile of columns and c_g once per tile of rows (256 and 128 on Hopper), from L2 where
programs that run at the same time share them.
Written: dz once, 2 bytes an element for 16-bit inputs, into a buffer that every group reuses. Never written: a logit,
a probability, dz of the whole vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv, grouped_order, row_group
from cce_kernels.engines.triton.loads import (
    dz_shapes,
    exp2_shifted,
    indices,
    inside,
    launch,
    load_scalar,
    load_vector,
    logits_tile,
    store_dz,
)
from cce_kernels.engines.triton.tiles import TileConfig
from cce_kernels.gradients import FormDz
from cce_kernels.head import Head
from cce_kernels.numbers import LOG2_E, Cotangents, Inputs
from cce_kernels.windows import Groups, Window


def window_numbers(window: Window) -> jax.Array:
    """The first column of a window and the first column that it owns, (2,), in the form that kernels take."""
    return jnp.stack([window.start, window.owned])


def load_cotangents(cotangents: Cotangents, rows: jax.Array, rows_ok) -> Cotangents:
    """The cotangents of these rows, each as a column (rows, 1). cotangents: refs."""
    return jax.tree.map(lambda ref: load_vector(ref, rows, rows_ok)[:, None], cotangents)


def load_weights(weights_ref, columns: jax.Array, columns_ok) -> jax.Array | None:
    return None if weights_ref is None else load_vector(weights_ref, columns, columns_ok)[None, :]


def _kernel(
    inputs: Inputs, lse_ref, cotangents: Cotangents, window_ref, count_ref, dz_ref, sums_ref,
    *, head: Head, tiles: TileConfig, groups: Groups, interpret: bool,
):  # fmt: skip
    """One tile of dz. Blocks of tokens from count_ref[0] on are neither computed nor written."""
    tokens, group_columns = dz_ref.shape
    column_blocks = cdiv(group_columns, tiles.columns)
    height = row_group(inputs.e.shape[1], inputs.e.dtype.itemsize, tiles.rows)
    row_block, column_block = grouped_order(pl.program_id(0), cdiv(tokens, tiles.rows), column_blocks, height)

    def tile() -> None:
        rows, local = indices(row_block, tiles.rows), indices(column_block, tiles.columns)
        rows_ok = inside(rows, tokens, tiles.rows)
        local_ok = inside(local, group_columns, tiles.columns)
        columns = window_ref[0] + local

        # The epilogue's operands are loaded before the K loop, which hides the wait for them.
        lse = load_vector(lse_ref, rows, rows_ok)[:, None] * LOG2_E
        targets = load_vector(inputs.targets, rows, rows_ok, other=-1)[:, None]
        weights = load_weights(inputs.weights, columns, local_ok)
        of = load_cotangents(cotangents, rows, rows_ok)

        z = logits_tile(inputs, rows, columns, rows_ok, local_ok, head=head, tiles=tiles)
        p = exp2_shifted(z, lse, interpret=interpret)
        dz = head.cotangent(z, p, columns[None, :] == targets, of, weights, load_scalar(inputs.scale))
        if groups.overlap:
            dz = jnp.where((columns >= window_ref[1])[None, :], dz, 0.0)
        store_dz(dz_ref, sums_ref, dz, row_block, rows, local, rows_ok, local_ok)

    if count_ref is None:
        tile()
    else:
        pl.when(row_block * tiles.rows < count_ref[0])(tile)


def form_dz(step: Step, problem: Problem, lse: jax.Array, cotangents: Cotangents, count: jax.Array | None) -> FormDz:
    """engine.Launched.form_dz. count: rows of dz from this one on need not be written; None: all rows are written."""
    inputs, tiles, groups, interpret = problem.inputs, step.tiles, step.groups, problem.gpu.interpreted
    assert groups is not None
    assert problem.call.wanted is not None
    tokens, with_sums = inputs.e.shape[0], problem.call.wanted.bias
    row_blocks, column_blocks = cdiv(tokens, tiles.rows), cdiv(groups.columns, tiles.columns)
    kernel = partial(_kernel, head=problem.head, tiles=tiles, groups=groups, interpret=interpret)

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        dz, sums = launch(
            kernel,
            *(inputs, lse, cotangents, window_numbers(window), count),
            out_shape=dz_shapes(tokens, groups.columns, inputs.e.dtype, tiles.rows, with_sums),
            programs=row_blocks * column_blocks,
            tiles=tiles,
            interpret=interpret,
            name="cce_dz",
        )
        if sums is None:
            return dz, None
        if count is not None:
            computed = jnp.arange(row_blocks, dtype=jnp.int32) * tiles.rows < count
            sums = jnp.where(computed[:, None], sums, 0)
        return dz, jnp.sum(sums, axis=0)

    return form
