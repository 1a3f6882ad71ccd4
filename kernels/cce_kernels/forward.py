"""The forward kernels: log-sum-exp, target logit and (for label smoothing) weighted logit sum of every token.

    lse_i = log Σ_v exp z_iv        target_i = z_i,t_i        sum_i = Σ_v w_v z_iv

The target kernel gathers the row of c that each token's target names and dots it with the token's row of e.
Read: e once, and one row of c a token. Written: 4 bytes a token.

The statistics kernel then needs no maximum: it sums exp(z − target_i), which float32 holds unless some logit exceeds
the target's by 88. A row where one does comes out as inf, and the rescue kernel, which the same code makes, repeats
that block of rows with a running maximum; programs with nothing to rescue read 4 bytes a token and end.
Where e is not copied with the kept tokens first, a twin of the statistics kernel takes the blocks whose tokens are no
neighbours in e: to look up where each row lies takes registers, and 2 to 4 % of the time.
Fused: the matmul e·cᵀ, bias, scale, softcap, exponential, both sums.
Read: e once per 256 columns and c once per 128 rows, from L2 wherever programs that run together share them.
Written: 4 bytes a token and split for lse (and for sum); where asked for, the exponentials of the first tokens, 2
bytes each (cce_kernels/saved.py). Never written: a logit.
A program owns `tiles.rows` tokens and one of `splits` equal runs of the vocabulary, which it walks tile by tile.
Tokens that are ignored come last, and programs that have none but those end at once (cce_kernels/tokens.py).
On Hopper GPUs another kernel takes the place of the statistics kernel in most calls (cce_kernels/hopper_kernels.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.config import TileConfig, target_of
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.saved import by_target, saved_shape, store_exponentials
from cce_kernels.tiles import (
    FLOAT32_MAX,
    LOG2_E,
    cdiv,
    exp2_shifted,
    for_hopper,
    grouped_order,
    inside,
    kept_tokens,
    launch,
    load_vector,
    logits_tile,
    product_tile,
    row_group,
    token_rows,
    vocabulary_splits,
)

TARGET_TILES = TileConfig(rows=16, columns=16, depth=128, warps=4, stages=3)


def _target_kernel(e_ref, c_ref, bias_ref, targets_ref, order_ref, target_ref, *, head: Head, tiles: TileConfig):
    tokens, vocabulary = e_ref.shape[0], vocabulary_size(c_ref, head)
    rows = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    rows_ok = inside(rows, tokens, tiles.rows)
    targets = load_vector(targets_ref, rows, rows_ok, other=-1)
    named = (targets >= 0) & (targets < vocabulary)
    columns = jnp.where(named, targets, 0)

    source, source_ok = token_rows(rows, rows_ok, order_ref)
    products = product_tile(e_ref, c_ref, source, columns, source_ok, None, head=head, depth=tiles.depth)
    own = jnp.arange(tiles.rows)
    raw = jnp.sum(jnp.where(own[:, None] == own[None, :], products, 0.0), axis=1)  # of each row with its own target
    bias = None if bias_ref is None else load_vector(bias_ref, columns, None).astype(jnp.float32)
    target = jnp.where(named, head.logits(raw, bias), jnp.where(targets < 0, FLOAT32_MAX, -FLOAT32_MAX))
    plgpu.store(target_ref.at[rows], target, mask=rows_ok)


def _statistics_kernel(
    e_ref, c_ref, bias_ref, target_ref, weights_ref, before_ref, order_ref, starts_ref, count_ref, lse_ref, sum_ref,
    saved_ref,
    *, head: Head, tiles: TileConfig, splits: int, interpret: bool, rescue: bool = False, scattered: bool = False,
):  # fmt: skip
    """Statistics relative to the target's logit; or, to rescue, relative to a running maximum where before_ref, which
    lse_ref overwrites, is not finite. With starts_ref, only of blocks whose tokens are neighbours in e, or scattered.
    """
    tokens, vocabulary = e_ref.shape[0], vocabulary_size(c_ref, head)
    column_tiles = cdiv(vocabulary, tiles.columns)
    height = row_group(e_ref.shape[1], e_ref.dtype.itemsize, tiles.rows)
    row_block, split = grouped_order(pl.program_id(0), cdiv(tokens, tiles.rows), splits, height)
    rows = row_block * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    rows_ok = inside(rows, tokens, tiles.rows)
    slot = jnp.full((tiles.rows,), split, jnp.int32), rows
    first, last = split * column_tiles // splits, (split + 1) * column_tiles // splits
    source, source_ok = token_rows(rows, rows_ok, order_ref)
    if count_ref is not None:
        last = jnp.where(row_block * tiles.rows < count_ref[0], last, first)
        rows_ok = rows < count_ref[0]
    written = rows_ok
    if starts_ref is not None:
        start = starts_ref[row_block]
        here = start < 0 if scattered else start >= 0
        last = jnp.where(here, last, first)
        written = rows_ok & here
        if not scattered:
            # The compiler, told that it is small, reads rows at constant distances from one address.
            small = start & jnp.int32(2 ** tokens.bit_length() - 1)
            source = small + jnp.arange(tiles.rows, dtype=jnp.int32)
    saved_ok = rows_ok
    if saved_ref is not None and saved_ref.shape[0] < tokens:
        saved_ok = rows < (saved_ref.shape[0] if count_ref is None else jnp.minimum(count_ref[0], saved_ref.shape[0]))
    if rescue:
        failed = ~(plgpu.load(before_ref.at[slot], mask=rows_ok, other=None if rows_ok is None else 0.0) < jnp.inf)
        written = failed if rows_ok is None else rows_ok & failed
        last = jnp.where(jnp.max(failed.astype(jnp.int32)) > 0, last, first)
        reference = jnp.full((tiles.rows,), -FLOAT32_MAX, jnp.float32)
    else:
        reference = jnp.clip(load_vector(target_ref, rows, rows_ok) * LOG2_E, -FLOAT32_MAX, FLOAT32_MAX)

    def tile(j, carry):
        reference, total, weighted = carry  # total: Σ exp2(z·log₂e − reference)
        columns = j * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
        columns_ok = inside(columns, vocabulary, tiles.columns)
        z = logits_tile(e_ref, c_ref, bias_ref, source, columns, source_ok, columns_ok, head=head, tiles=tiles)
        if sum_ref is not None:
            valid = jnp.ones_like(columns, jnp.float32) if columns_ok is None else columns_ok.astype(jnp.float32)
            weights = valid if weights_ref is None else load_vector(weights_ref, columns, columns_ok)
            weighted += jnp.sum(jnp.where(weights[None, :] == 0, 0.0, weights[None, :] * z), axis=1)
        if columns_ok is not None:
            z = jnp.where(columns_ok[None, :], z, -jnp.inf)
        if rescue:
            peak = jnp.maximum(reference, jnp.minimum(jnp.max(z, axis=1) * LOG2_E, FLOAT32_MAX))
            reference, total = peak, total * jnp.exp2(reference - peak)
        p = exp2_shifted(z, reference[:, None], interpret=interpret)
        total += jnp.sum(p, axis=1)
        if saved_ref is not None:
            store_exponentials(saved_ref, p, rows, columns, saved_ok)
        return reference, total, weighted

    zeros = jnp.zeros((tiles.rows,), jnp.float32)
    reference, total, weighted = lax.fori_loop(first, last, tile, (reference, zeros, zeros))

    # A run of the vocabulary all of whose exponentials underflow has total 0 and lse -inf.
    plgpu.store(lse_ref.at[slot], (reference + jnp.log2(total)) / LOG2_E, mask=written)
    if sum_ref is not None:
        plgpu.store(sum_ref.at[slot], weighted, mask=rows_ok)


def _replace_kernel(
    e_ref, c_ref, bias_ref, lse_ref, by_lse_ref, _, saved_ref,
    *, head: Head, tiles: TileConfig, splits: int, interpret: bool,
):  # fmt: skip
    """The saved exponentials of those tokens for which they are relative to lse; blocks without any are not touched."""
    tokens, vocabulary = saved_ref.shape[0], vocabulary_size(c_ref, head)
    column_tiles = cdiv(vocabulary, tiles.columns)
    height = row_group(e_ref.shape[1], e_ref.dtype.itemsize, tiles.rows)
    row_block, split = grouped_order(pl.program_id(0), cdiv(tokens, tiles.rows), splits, height)
    rows = row_block * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    rows_ok = inside(rows, tokens, tiles.rows)
    written = load_vector(by_lse_ref, rows, rows_ok) > 0
    lse = load_vector(lse_ref, rows, rows_ok)[:, None] * LOG2_E
    first, last = split * column_tiles // splits, (split + 1) * column_tiles // splits
    last = jnp.where(jnp.max(written.astype(jnp.int32)) > 0, last, first)

    def tile(j, carry):
        columns = j * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
        columns_ok = inside(columns, vocabulary, tiles.columns)
        z = logits_tile(e_ref, c_ref, bias_ref, rows, columns, rows_ok, columns_ok, head=head, tiles=tiles)
        if columns_ok is not None:
            z = jnp.where(columns_ok[None, :], z, -jnp.inf)
        store_exponentials(saved_ref, exp2_shifted(z, lse, interpret=interpret), rows, columns, written)
        return carry

    lax.fori_loop(first, last, tile, 0)


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
    may_copy: bool = False,
    saved_tokens: int = 0,
    tiles: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """lse, target and, with_sum, the weighted sum of the logits of each token: float32, (N,); and what is saved.

    e: (N, D) and c: (V, D) or (D, V) of one type: bfloat16, float16 or float32. bias: (V,). targets: (N,) int32;
    a token whose target is outside [0, V) gets the target logit 0, and all three numbers are 0 where it is negative
    or, for few tokens, arbitrary. weights: (V,) float32, 1 where None.
    Saved: (saved_tokens, V), as cce_kernels/saved.py says; None where that is 0.
    Scratch: splits · 4 · N bytes, and as much again for the sum; and e with the kept tokens first where it may copy it,
    there is a sum or something is saved.
    """
    vocabulary = vocabulary_size(c, head)
    gpu, chosen = target_of(e.dtype, e.shape[1], interpret)
    chosen_here, tiles = tiles is None, tiles or chosen.statistics
    gathering = may_copy or with_sum or saved_tokens > 0
    kept = kept_tokens(targets, interpret, gathering)
    order = starts = count = None
    if kept is not None:
        count, targets = kept.count, kept.gathered(targets, -1)
        if gathering:
            e = kept.gathered(e, 0)
        else:
            order, starts = kept.order, kept.starts(tiles.rows)
    tokens = e.shape[0]
    row_blocks, column_tiles = cdiv(tokens, tiles.rows), cdiv(vocabulary, tiles.columns)
    splits = 2 if interpret else vocabulary_splits(row_blocks, column_tiles, tokens, gpu.multiprocessors)
    target = launch(
        partial(_target_kernel, head=head, tiles=TARGET_TILES), e, c, bias, targets, order,
        out_shape=jax.ShapeDtypeStruct((tokens,), jnp.float32),
        programs=cdiv(tokens, TARGET_TILES.rows), tiles=TARGET_TILES, interpret=interpret, name="cce_target",
    )  # fmt: skip
    partials = jax.ShapeDtypeStruct((splits, tokens), jnp.float32)
    exponentials = jax.ShapeDtypeStruct(saved_shape(saved_tokens, vocabulary), e.dtype) if saved_tokens else None
    run = partial(launch, tiles=tiles, interpret=interpret)
    kernel = partial(_statistics_kernel, head=head, tiles=tiles, splits=splits, interpret=interpret)
    walk = partial(run, programs=row_blocks * splits)
    if chosen_here and for_hopper(e, c, bias, with_sum, gpu, interpret):
        from cce_kernels import hopper_kernels  # here, as Mosaic GPU takes a quarter of a second to import

        until = jnp.full(1, tokens, jnp.int32) if count is None else count
        lse, saved = hopper_kernels.statistics(e, c, target, starts, until, exponentials, head=head, splits=splits)
        total = None
    else:
        lse, total, saved = walk(
            kernel, e, c, bias, target, weights, None, order, starts, count,
            out_shape=(partials, partials if with_sum else None, exponentials), name="cce_statistics",
        )  # fmt: skip
    only_lse = partial(walk, out_shape=(partials, None, None))
    if order is not None:
        lse, _, _ = only_lse(partial(kernel, scattered=True), e, c, bias, target, None, lse, order, starts, count,
                             in_place=lse, name="cce_scattered")  # fmt: skip
    lse, _, _ = only_lse(partial(kernel, rescue=True), e, c, bias, None, None, lse, order, None, count, in_place=lse,
                         name="cce_rescue")  # fmt: skip
    lse = jax.nn.logsumexp(lse, axis=0)
    target = jnp.where((targets >= 0) & (targets < vocabulary), target, 0.0)
    if saved is not None:
        by_lse = (targets >= 0) & ~by_target(lse, target, targets, vocabulary)
        saved = run(
            partial(_replace_kernel, head=head, tiles=tiles, splits=splits, interpret=interpret),
            e, c, bias, lse, by_lse.astype(jnp.int32), saved, programs=cdiv(saved_tokens, tiles.rows) * splits,
            out_shape=exponentials, name="cce_replace", in_place=saved,
        )  # fmt: skip
    total = None if total is None else jnp.sum(total, axis=0)
    numbers = (lse, target, total)
    if kept is not None:
        numbers = tuple(None if x is None else kept.restored(x) for x in numbers)
    return *numbers, saved  # type: ignore[return-value]
