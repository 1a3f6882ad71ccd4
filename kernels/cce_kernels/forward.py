"""The statistics kernel: log-sum-exp, target logit and (for label smoothing) weighted logit sum of every token.

    lse_i = log Σ_v exp z_iv        target_i = z_i,t_i        sum_i = Σ_v w_v z_iv

Fused: the matmul e·cᵀ, bias, scale, softcap, a running (max, sum of exponentials), the pick of the target's logit.
Read: e once per 256 columns and c once per 128 rows, from L2 wherever programs that run together share them.
Written: 4 bytes a token and split for lse (and for sum), 4 bytes a token for target. Never written: a logit.

A program owns `tiles.rows` tokens and one of `splits` equal runs of the vocabulary, which it walks tile by tile.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.config import H200, INTERPRETER, TileConfig, local_gpu, tile_config
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.tiles import LOG2_E, cdiv, grouped_order, inside, launch, load_vector, logits_tile

SCRATCH_BYTES = 2 * 2**20  # of partial statistics, at most; a token count that needs more gets one split


def vocabulary_splits(row_blocks: int, column_tiles: int, tokens: int, multiprocessors: int) -> int:
    """Into how many runs to cut the vocabulary so that programs fill the GPU's multiprocessors evenly.

    One program runs on a multiprocessor at a time, so the time is proportional to
    (programs / multiprocessors, rounded up) · (tiles a program walks); more splits also cost a little each.
    """
    most = min(column_tiles, max(1, SCRATCH_BYTES // (4 * max(tokens, 1))), 1024)

    def cost(splits: int) -> float:
        waves = cdiv(row_blocks * splits, multiprocessors)
        return waves * (cdiv(column_tiles, splits) + 0.25)

    return min(range(1, most + 1), key=cost)


def _statistics_kernel(
    e_ref, c_ref, bias_ref, targets_ref, weights_ref, lse_ref, target_ref, sum_ref,
    *, head: Head, tiles: TileConfig, splits: int,
):  # fmt: skip
    tokens, vocabulary = e_ref.shape[0], vocabulary_size(c_ref, head)
    column_tiles = cdiv(vocabulary, tiles.columns)
    tiles_per_split = cdiv(column_tiles, splits)
    row_block, split = grouped_order(pl.program_id(0), cdiv(tokens, tiles.rows), splits, tiles.row_group)
    rows = row_block * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    rows_ok = inside(rows, tokens, tiles.rows)
    targets = load_vector(targets_ref, rows, rows_ok, other=-1)

    def tile(j, carry):
        peak, total, target, weighted = carry
        columns = j * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
        columns_ok = inside(columns, vocabulary, tiles.columns)
        z = logits_tile(e_ref, c_ref, bias_ref, rows, columns, rows_ok, columns_ok, head=head, tiles=tiles)
        is_target = columns[None, :] == targets[:, None]
        target += jnp.sum(jnp.where(is_target, z, 0.0), axis=1)
        if sum_ref is not None:
            valid = jnp.ones_like(columns, jnp.float32) if columns_ok is None else columns_ok.astype(jnp.float32)
            weights = valid if weights_ref is None else load_vector(weights_ref, columns, columns_ok)
            weighted += jnp.sum(jnp.where(weights[None, :] == 0, 0.0, weights[None, :] * z), axis=1)
        if columns_ok is not None:
            z = jnp.where(columns_ok[None, :], z, -jnp.inf)
        # The running sum is relative to `peak`, which is in units of log 2 and always finite.
        tile_peak = jnp.max(z, axis=1) * LOG2_E
        new_peak = jnp.maximum(peak, jnp.where(jnp.abs(tile_peak) < jnp.inf, tile_peak, peak))
        total = total * jnp.exp2(peak - new_peak) + jnp.sum(jnp.exp2(z * LOG2_E - new_peak[:, None]), axis=1)
        return new_peak, total, target, weighted

    zeros = jnp.zeros((tiles.rows,), jnp.float32)
    lowest = jnp.full((tiles.rows,), -1e38, jnp.float32)
    first = split * tiles_per_split
    last = jnp.minimum(first + tiles_per_split, column_tiles)
    peak, total, target, weighted = lax.fori_loop(first, last, tile, (lowest, zeros, zeros, zeros))

    # An empty run of the vocabulary, or one of -inf logits alone, has total 0 and lse -inf.
    slot = jnp.full((tiles.rows,), split, jnp.int32), rows
    plgpu.store(lse_ref.at[slot], (peak + jnp.log2(total)) / LOG2_E, mask=rows_ok)
    in_run = (targets >= first * tiles.columns) & (targets < jnp.minimum(last * tiles.columns, vocabulary))
    plgpu.store(target_ref.at[rows], target, mask=in_run if rows_ok is None else in_run & rows_ok)
    if sum_ref is not None:
        plgpu.store(sum_ref.at[slot], weighted, mask=rows_ok)


def statistics(
    e: jax.Array,
    c: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array | None,
    *,
    head: Head,
    with_sum: bool,
    interpret: bool,
    tiles: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """lse, target and, with_sum, the weighted sum of the logits of each token: float32, (N,).

    e: (N, D) and c: (V, D) or (D, V) of one type: bfloat16, float16 or float32. bias: (V,). targets: (N,) int32;
    a token whose target is outside [0, V) gets the target logit 0. weights: (V,) float32, 1 where None.
    Scratch: splits · 4 · N bytes, and as much again for the sum.
    """
    tokens, vocabulary = e.shape[0], vocabulary_size(c, head)
    gpu = (None if interpret else local_gpu()) or H200
    tiles = tiles or (INTERPRETER if interpret else tile_config(e.dtype, gpu))
    row_blocks, column_tiles = cdiv(tokens, tiles.rows), cdiv(vocabulary, tiles.columns)
    splits = 2 if interpret else vocabulary_splits(row_blocks, column_tiles, tokens, gpu.multiprocessors)
    partial_shape = jax.ShapeDtypeStruct((splits, tokens), jnp.float32)
    lse, target, total = launch(
        partial(_statistics_kernel, head=head, tiles=tiles, splits=splits),
        e, c, bias, targets, weights,
        out_shape=(partial_shape, jax.ShapeDtypeStruct((tokens,), jnp.float32), partial_shape if with_sum else None),
        programs=row_blocks * splits, tiles=tiles, interpret=interpret, name="cce_statistics",
    )  # fmt: skip
    in_vocabulary = (targets >= 0) & (targets < vocabulary)
    return (
        jax.nn.logsumexp(lse, axis=0),
        jnp.where(in_vocabulary, target, 0.0),
        None if total is None else jnp.sum(total, axis=0),
    )
