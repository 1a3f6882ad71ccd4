"""The dz kernel: the cotangents of one group of logits, from logits that it computes again; and the gradient.

    dz_iv = (a_i·p_iv + t̂_i·[v = t_i] + s_i·w_v) · ∂z_iv/∂(e_i·c_v)        p_iv = exp(z_iv − lse_i)

Fused: the matmul e·c_gᵀ, bias, scale, softcap, the softmax, all three cotangents, the chain rule, dz's column sums.
Read: e once per 256 columns and c_g once per 128 rows, from L2 wherever programs that run together share them.
Written: dz once, 2 bytes an element for 16-bit inputs, into the one buffer every group reuses. Never written: a logit,
a probability, or dz of more of the vocabulary than fits in the scratch.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.config import TileConfig, target_of
from cce_kernels.groups import Groups, Wanted, grouped_gradient, vocabulary_groups
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.tiles import (
    LOG2_E,
    cdiv,
    exp2_shifted,
    grouped_order,
    inside,
    launch,
    load_vector,
    logits_tile,
    row_group,
    tile_index,
    tile_mask,
)  # fmt: skip

SCRATCH_BYTES = 360 * 2**20  # XLA adds 32 MiB of workspace for its matmuls
GROUP_COST = 4.0  # reading and writing de's accumulator, copies of c_g and dc_g, launches


def _dz_kernel(
    e_ref, c_ref, bias_ref, targets_ref, lse_ref, cotangents_ref, weights_ref, window_ref, dz_ref, sums_ref,
    *, head: Head, tiles: TileConfig, groups: Groups, interpret: bool,
):  # fmt: skip
    tokens, group_columns = dz_ref.shape
    column_blocks = cdiv(group_columns, tiles.columns)
    row_blocks = cdiv(tokens, tiles.rows)
    height = row_group(e_ref.shape[1], e_ref.dtype.itemsize, tiles)
    row_block, column_block = grouped_order(pl.program_id(0), row_blocks, column_blocks, height)
    rows = row_block * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    rows_ok = inside(rows, tokens, tiles.rows)
    local = column_block * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    local_ok = inside(local, group_columns, tiles.columns)
    start, owned = window_ref[0], window_ref[1]
    columns = start + local

    # What the epilogue needs is asked for before the K loop, which hides the wait.
    lse = load_vector(lse_ref, rows, rows_ok)[:, None] * LOG2_E
    targets = load_vector(targets_ref, rows, rows_ok, other=-1)[:, None]
    weights = 1.0 if weights_ref is None else load_vector(weights_ref, columns, local_ok)[None, :]
    cotangents = [load_vector(cotangents_ref, rows, rows_ok, row=k)[:, None] for k in range(cotangents_ref.shape[0])]

    z = logits_tile(e_ref, c_ref, bias_ref, rows, columns, rows_ok, local_ok, head=head, tiles=tiles)
    p = exp2_shifted(z, lse, interpret=interpret)
    dz = head.cotangent(z, p, columns[None, :] == targets, *cotangents, weights=weights)
    if groups.overlap:
        dz = jnp.where((columns >= owned)[None, :], dz, 0.0)
    mask = tile_mask(rows_ok, local_ok, (tiles.rows, tiles.columns))
    plgpu.store(dz_ref.at[tile_index(rows, local)], dz.astype(dz_ref.dtype), mask=mask)
    if sums_ref is not None:
        if rows_ok is not None:
            dz = jnp.where(rows_ok[:, None], dz, 0.0)
        block = jnp.full((tiles.columns,), row_block, jnp.int32)
        plgpu.store(sums_ref.at[block, local], jnp.sum(dz, axis=0), mask=local_ok)


def gradients(
    e: jax.Array,
    c: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array | None,
    lse: jax.Array,
    cotangents: jax.Array,
    *,
    head: Head,
    wanted: Wanted,
    interpret: bool,
    tiles: TileConfig | None = None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """de, dc and dbias from the cotangents of the core's three numbers; None where not wanted.

    Arrays as in forward.statistics; lse: (N,) float32; cotangents: (2 or 3, N) float32, of lse, target and sum.
    Scratch: one group of dz, c and dc, and an (N, D) float32 accumulator: 360 MiB where that is possible.
    """
    gpu, chosen = target_of(e.dtype, interpret)
    tiles = tiles or chosen
    tokens, width = e.shape
    itemsize = e.dtype.itemsize
    row_blocks = cdiv(tokens, tiles.rows)

    def cost(columns: int) -> float:  # in tiles: the dz kernel's waves of programs, and what each group costs besides
        return cdiv(row_blocks * cdiv(columns, tiles.columns), gpu.multiprocessors) + GROUP_COST

    groups = vocabulary_groups(
        vocabulary_size(c, head),
        budget=SCRATCH_BYTES - 4 * tokens * width,  # less de's accumulator
        column_bytes=itemsize * (tokens + 2 * width),
        cost=cost,
    )
    if interpret:
        groups = Groups(groups.vocabulary, min(groups.vocabulary, 3 * tiles.columns))
    column_blocks = cdiv(groups.columns, tiles.columns)

    def dz_of_group(window: jax.Array, c_g: jax.Array, cotangents: jax.Array):
        del c_g  # the kernel reads its columns of c in place
        dz, sums = launch(
            partial(_dz_kernel, head=head, tiles=tiles, groups=groups, interpret=interpret),
            e, c, bias, targets, lse, cotangents, weights, window,
            out_shape=(
                jax.ShapeDtypeStruct((tokens, groups.columns), e.dtype),
                jax.ShapeDtypeStruct((row_blocks, groups.columns), jnp.float32) if wanted.bias else None,
            ),
            programs=row_blocks * column_blocks, tiles=tiles, interpret=interpret, name="cce_dz",
        )  # fmt: skip
        return dz, None if sums is None else jnp.sum(sums, axis=0)

    return grouped_gradient(dz_of_group, e, c, cotangents, weights, head=head, groups=groups, wanted=wanted)
