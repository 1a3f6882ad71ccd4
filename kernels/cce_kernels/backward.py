"""The dz kernel: the cotangents of one group of logits, from logits that it computes again; and the gradient.

    dz_iv = (a_i·p_iv + t̂_i·[v = t_i] + s_i·w_v) · ∂z_iv/∂(e_i·c_v)        p_iv = exp(z_iv − lse_i)

Fused: the matmul e·c_gᵀ, bias, scale, softcap, the softmax, all three cotangents, the chain rule, dz's column sums.
Read: e once per 256 columns and c_g once per 128 rows, from L2 wherever programs that run together share them.
Written: dz once, 2 bytes an element for 16-bit inputs, into the one buffer every group reuses. Never written: a logit,
a probability, or dz of more of the vocabulary than fits in the scratch.

Tokens whose exponentials the forward pass saved need no logits (cce_kernels/saved.py): they begin dc, to which the
others add. Ignored tokens come last (cce_kernels/tokens.py): where they are many, kernels run that stop at the last
token that is kept.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cce_kernels.budget import group_of, linear
from cce_kernels.config import TileConfig, Tiles, target_of
from cce_kernels.groups import Gradients, Wanted, add_groups, fitted, unscaled, xla_products
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.products import kernel_products, splits_of
from cce_kernels.saved import direct_gradients, dz_of_saved, prepared, references
from cce_kernels.tiles import (
    LOG2_E,
    cdiv,
    dz_shapes,
    exp2_shifted,
    grouped_order,
    inside,
    kept_tokens,
    launch,
    load_vector,
    logits_tile,
    row_group,
    store_dz,
)
from cce_kernels.tokens import without_ignored
from cce_kernels.windows import Groups

FEW = 0.8  # of the tokens: with fewer kept, kernels that stop there are faster than XLA's matmuls of all


def _dz_kernel(
    e_ref, c_ref, bias_ref, targets_ref, lse_ref, cotangents_ref, weights_ref, window_ref, count_ref, dz_ref, sums_ref,
    *, head: Head, tiles: TileConfig, groups: Groups, interpret: bool,
):  # fmt: skip
    """One tile of dz. With count_ref, nothing is computed or written for blocks of tokens from there on."""
    group_columns = dz_ref.shape[1]
    column_blocks = cdiv(group_columns, tiles.columns)
    height = row_group(e_ref.shape[1], e_ref.dtype.itemsize, tiles)
    block = grouped_order(pl.program_id(0), cdiv(dz_ref.shape[0], tiles.rows), column_blocks, height)
    tile = partial(
        _dz_tile, block, e_ref, c_ref, bias_ref, targets_ref, lse_ref, cotangents_ref, weights_ref, window_ref, dz_ref,
        sums_ref, head=head, tiles=tiles, groups=groups, interpret=interpret,
    )  # fmt: skip
    if count_ref is None:
        tile()
    else:
        pl.when(block[0] * tiles.rows < count_ref[0])(tile)


def _dz_tile(
    block, e_ref, c_ref, bias_ref, targets_ref, lse_ref, cotangents_ref, weights_ref, window_ref, dz_ref, sums_ref,
    *, head: Head, tiles: TileConfig, groups: Groups, interpret: bool,
):  # fmt: skip
    tokens, group_columns = dz_ref.shape
    row_block, column_block = block
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
    store_dz(dz_ref, sums_ref, dz, row_block, rows, local, rows_ok, local_ok)


def dz_of_group(
    e, c, bias, lse, targets, cotangents, weights, count, window,
    *, head: Head, groups: Groups, wanted: Wanted, tiles: TileConfig, interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """dz of the group at this window, (N, V_g), and its column sums if the bias gradient is wanted.

    count: from which token on nothing need be written; None for all.
    """
    tokens = e.shape[0]
    row_blocks, column_blocks = cdiv(tokens, tiles.rows), cdiv(groups.columns, tiles.columns)
    dz, sums = launch(
        partial(_dz_kernel, head=head, tiles=tiles, groups=groups, interpret=interpret),
        e, c, bias, targets, lse, cotangents, weights, window, count,
        out_shape=dz_shapes(tokens, groups.columns, e.dtype, tiles.rows, wanted.bias),
        programs=row_blocks * column_blocks, tiles=tiles, interpret=interpret, name="cce_dz",
    )  # fmt: skip
    if sums is None:
        return dz, None
    if count is not None:
        sums = jnp.where((jnp.arange(row_blocks) * tiles.rows < count)[:, None], sums, 0)
    return dz, jnp.sum(sums, axis=0)


class _Tokens(NamedTuple):
    """Some of the tokens, in the order of those kept."""

    targets: jax.Array
    lse: jax.Array
    cotangents: jax.Array
    count: jax.Array  # type: ignore[assignment]  # (1,) int32: after so many of them all are ignored

    def part(self, start: int, stop: int) -> "_Tokens":
        count = jnp.clip(self.count - start, 0, stop - start)
        rows = slice(start, stop)
        return _Tokens(self.targets[rows], self.lse[rows], self.cotangents[:, rows], count)


def gradients(
    e: jax.Array,
    c: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array | None,
    lse: jax.Array,
    target: jax.Array,
    saved: jax.Array | None,
    cotangents: jax.Array,
    *,
    head: Head,
    wanted: Wanted,
    memory_budget: int,
    interpret: bool,
    tiles: Tiles | None = None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None, jax.Array | None]:
    """de, dc and dbias from the cotangents of the core's three numbers, None where not wanted; and saved, overwritten.

    Arrays as in forward.statistics, which gave lse, target and what is saved; tokens with a negative target take no
    part. cotangents: (2 or 3, N) float32, of lse, target and sum. Scratch: as cce_kernels/budget.py plans it.
    """
    gpu, chosen = target_of(e.dtype, e.shape[1], interpret)
    tiles = tiles or chosen
    (tokens, width), vocabulary = e.shape, vocabulary_size(c, head)
    # XLA would take the forward pass's copy of e with the kept tokens first, and hold it until here, but for a barrier.
    kept = kept_tokens(lax.optimization_barrier(targets), interpret)
    if kept is None:
        e, cotangents, lse = without_ignored(e, cotangents, lse, targets)
    else:
        cotangents, lse = kept.gathered(cotangents.T, 0).T, kept.gathered(lse, jnp.inf)
        target, targets = kept.gathered(target, 0), kept.gathered(targets, -1)

    def embeddings(start: int, stop: int) -> jax.Array:
        return (e if kept is None else kept.gathered(e, 0))[start:stop]

    few = None if kept is None else kept.count[0] < FEW * tokens
    cotangents, unit = fitted(cotangents, weights, head, e.dtype)
    everyone = _Tokens(targets, lse, cotangents, jnp.full(1, tokens, jnp.int32) if kept is None else kept.count)
    count_saved = 0 if saved is None else saved.shape[0]
    first, others = everyone.part(0, count_saved), everyone.part(count_saved, tokens)
    direct = linear(head, with_sum=cotangents.shape[0] == 3)
    aligned = saved is not None and saved.shape[1] == vocabulary  # or XLA would copy it
    reference = row_scale = None
    if saved is not None:
        target = target[:count_saved]
        reference = references(first.lse, target, first.targets, vocabulary)
        if direct:
            clear = True if few is None or wanted.bias else ~few if aligned else False
            saved, row_scale = prepared(saved, reference, first.lse, target, first.targets, first.cotangents, clear,
                                        head=head, interpret=interpret)  # fmt: skip
    plan = partial(group_of, tokens=tokens, saved=count_saved, width=width, vocabulary=vocabulary, dtype=e.dtype,
                   memory_budget=memory_budget, direct=direct, tiles=tiles.dz, interpret=interpret)  # fmt: skip
    options = dict(head=head, wanted=wanted, interpret=interpret)
    by_kernels = partial(kernel_products, c=c, head=head, unit=unit, tiles=tiles, interpret=interpret)
    by_xla = partial(xla_products, c=c, head=head, unit=unit)

    def of_saved(stop: bool) -> Gradients:
        e = embeddings(0, count_saved)
        if direct:
            products = partial(by_kernels, count=first.count) if stop or not aligned else by_xla
            return direct_gradients(saved, row_scale, e, c, products, head=head, wanted=wanted)
        groups = plan(count_saved, copies=not stop)
        form = partial(dz_of_saved, saved, reference, first.lse, first.targets, first.cotangents, weights,
                       groups=groups, **options)  # fmt: skip
        products = by_kernels(e, count=first.count) if stop else by_xla(e)
        return add_groups(Gradients.begun(e, c, head, wanted), form, groups, products)

    def of_others(stop: bool, begun: Gradients | None) -> Gradients:
        """de of the tokens that are not saved; and dc and dbias, added to those begun."""
        e = embeddings(count_saved, tokens)
        groups = plan(len(e), copies=not stop and begun is None)
        form = partial(dz_of_group, e, c, bias, others.lse, others.targets, others.cotangents, weights,
                       others.count if stop else None, groups=groups, tiles=tiles.dz, **options)  # fmt: skip
        if begun is None:
            products = by_kernels(e, count=others.count) if stop else by_xla(e)
            return add_groups(Gradients.begun(e, c, head, wanted), form, groups, products)
        splits = splits_of(len(e), width, tiles.de, gpu.multiprocessors)
        products = by_kernels(e, count=others.count, adding=True, splits=splits)
        sums = jnp.zeros((splits * len(e), width), jnp.float32) if wanted.e else None
        sums, dc, dbias = add_groups(begun._replace(e=sums), form, groups, products)
        de = None if sums is None else jnp.sum(sums.reshape(splits, *e.shape), axis=0)
        return Gradients(de, dc, dbias)

    def found(stop: bool) -> tuple[list[jax.Array], jax.Array | None, jax.Array | None]:
        """The parts of de, dc and dbias; stop: at the last kept token, with kernels, where XLA multiplies all."""
        if saved is None:
            all_found = [of_others(stop, None)]
        elif count_saved == tokens:
            all_found = [of_saved(stop)]
        else:
            begun = of_saved(stop)
            all_found = [begun, of_others(stop, begun)]
        return [x.e for x in all_found if x.e is not None], all_found[-1].c, all_found[-1].bias

    if few is None:
        parts, dc, dbias = found(False)
    else:
        parts, dc, dbias = lax.cond(few, lambda: found(True), lambda: found(False))
    parts = [unscaled(x, unit, e.dtype) for x in parts]
    de = None if not parts else jnp.concatenate(parts) if kept is None else kept.restored(*parts)
    return de, dc, None if dbias is None else unscaled(dbias, unit, e.dtype), saved
