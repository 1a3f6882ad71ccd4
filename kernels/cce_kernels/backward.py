"""The dz kernel: the cotangents of one group of logits, from logits that it computes again; and the gradient.

    dz_iv = (a_i·p_iv + t̂_i·[v = t_i] + s_i·w_v) · ∂z_iv/∂(e_i·c_v)        p_iv = exp(z_iv − lse_i)

Fused: the matmul e·c_gᵀ, bias, scale, softcap, the softmax, all three cotangents, the chain rule, dz's column sums.
Read: e once per 256 columns and c_g once per 128 rows, from L2 wherever programs that run together share them.
Written: dz once, 2 bytes an element for 16-bit inputs, into the one buffer every group reuses. Never written: a logit,
a probability, or dz of more of the vocabulary than fits in the scratch.

Tokens whose exponentials the forward pass saved need no logits (cce_kernels/saved.py): they begin dc, to which the
others add. Ignored tokens come last (cce_kernels/tokens.py): where they are many, kernels run that stop at the last
token that is kept. On Hopper GPUs the kernels of cce_kernels/hopper_kernels.py take the place of the dz kernel and of
all products in most calls. They always stop there, so that no choice is left; they sum dc of saved tokens and of the
others at once, so that it is rounded once; and they hold nothing beside what is saved, as e, scaled for dc, lies where
de will. Where there is memory for what XLA's matmuls of everything saved hold, these run, and take a little less time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from cce_kernels.budget import group_of, linear, ragged_bytes, whole_bytes
from cce_kernels.config import DEPTH, Gpu, TileConfig, Tiles, target_of
from cce_kernels.groups import (
    ALL_COLUMNS,
    Beside,
    Gradients,
    Products,
    Wanted,
    add_groups,
    fitted,
    starts,
    unscaled,
    xla_products,
)
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.products import kernel_products, splits_of
from cce_kernels.restored import restored
from cce_kernels.saved import direct_gradients, dz_of_saved, prepared, references, scaled, whole_rows
from cce_kernels.tiles import (
    LOG2_E,
    cdiv,
    dz_shapes,
    exp2_shifted,
    for_hopper,
    gathered,
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
    height = row_group(e_ref.shape[1], e_ref.dtype.itemsize, tiles.rows)
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
        e, c, bias, targets, lse, cotangents, weights, starts(window), count,
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

    e: Callable[[], jax.Array]  # gathers their embeddings, where they are needed, so that one copy is there at a time
    targets: jax.Array
    lse: jax.Array
    cotangents: jax.Array
    count: jax.Array  # type: ignore[assignment]  # (1,) int32: after so many of them all are ignored

    def part(self, start: int, stop: int) -> "_Tokens":
        count = jnp.clip(self.count - start, 0, stop - start)
        rows = slice(start, stop)
        return _Tokens(lambda: self.e()[rows], self.targets[rows], self.lse[rows], self.cotangents[:, rows], count)


class _Saved(NamedTuple):
    """The exponentials of some tokens, what they are relative to and, where no dz is formed of them, their scale."""

    exponentials: jax.Array
    reference: jax.Array
    scale: jax.Array | None


@dataclass(frozen=True)
class _Backward:
    """The gradients that some of the tokens give. stop: with kernels, at the last kept one; or XLA multiplies all."""

    c: jax.Array
    bias: jax.Array | None
    weights: jax.Array | None
    unit: jax.Array | None
    head: Head
    wanted: Wanted
    tiles: Tiles
    gpu: Gpu
    on_hopper: bool
    interpret: bool
    plan: Callable[..., Groups]

    def products(self, e: jax.Array, tokens: _Tokens, groups: Groups | None, stop: bool, **how: Any) -> Products:
        """groups: None for all columns at once."""
        if not stop:
            return xla_products(e, self.c, head=self.head, unit=self.unit)
        if groups is not None and groups.beyond:
            from cce_kernels import hopper_kernels

            return hopper_kernels.products(e, self.c, head=self.head, unit=self.unit, count=tokens.count,
                                           groups=groups, gpu=self.gpu, **how)  # fmt: skip
        return kernel_products(e, self.c, head=self.head, unit=self.unit, count=tokens.count, tiles=self.tiles,
                               interpret=self.interpret, **how)  # fmt: skip

    def of_saved(self, tokens: _Tokens, saved: _Saved, stop: bool) -> Gradients:
        e, head, wanted = tokens.e(), self.head, self.wanted
        p, reference, scale = saved
        if scale is not None:
            stop = stop or not whole_rows(p, vocabulary_size(self.c, head))
            return direct_gradients(p, scale, e, self.c, lambda e: self.products(e, tokens, None, stop), head=head,
                                    wanted=wanted)  # fmt: skip
        groups = self.plan(len(e), copies=not stop, on_hopper=False)
        form = partial(dz_of_saved, p, reference, tokens.lse, tokens.targets, tokens.cotangents, self.weights,
                       groups=groups, head=head, wanted=wanted, interpret=self.interpret)  # fmt: skip
        return add_groups(
            Gradients.begun(e, self.c, head, wanted), form, groups, self.products(e, tokens, groups, stop)
        )

    def form_dz(self, e: jax.Array, tokens: _Tokens, groups: Groups, stop: bool) -> Callable:
        """What forms dz of a group of columns of these tokens."""
        if self.on_hopper:
            from cce_kernels import hopper_kernels

            form = hopper_kernels.dz_of_groups(e, self.c, tokens.lse, tokens.targets, tokens.cotangents, tokens.count,
                                               head=self.head, groups=groups, gpu=self.gpu)  # fmt: skip
            return lambda window: (form(window), None)
        return partial(dz_of_group, e, self.c, self.bias, tokens.lse, tokens.targets, tokens.cotangents, self.weights,
                       tokens.count if stop else None, groups=groups, tiles=self.tiles.dz, head=self.head,
                       wanted=self.wanted, interpret=self.interpret)  # fmt: skip

    def of_others(
        self, tokens: _Tokens, begun: Gradients | None, stop: bool, beside: Beside | None = None
    ) -> Gradients:  # fmt: skip
        """de of tokens that are not saved; dbias and dc, added to those begun, or dc with what is beside in its sum."""
        e, head, wanted = tokens.e(), self.head, self.wanted
        groups = self.plan(len(e), copies=not stop and begun is None, on_hopper=self.on_hopper)
        form = self.form_dz(e, tokens, groups, stop)
        if begun is None:
            return add_groups(
                Gradients.begun(e, self.c, head, wanted), form, groups, self.products(e, tokens, groups, stop)
            )
        splits = splits_of(len(e), e.shape[1], self.tiles.de, self.gpu.multiprocessors)
        how = {"adding": True} if beside is None else {"beside": beside}
        products = self.products(e, tokens, groups, True, splits=splits, **how)
        sums = jnp.zeros((splits * len(e), e.shape[1]), jnp.float32) if wanted.e else None
        sums, dc, dbias = add_groups(begun._replace(e=sums), form, groups, products)
        de = None if sums is None else jnp.sum(sums.reshape(splits, *e.shape), axis=0)
        return Gradients(de, dc, dbias)

    def with_saved_on_hopper(
        self, everyone: _Tokens, first: _Tokens, others: _Tokens, saved: _Saved
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """de, in the order of the tokens, and dc of all of them, the first of which are saved, or all."""
        from cce_kernels import hopper_kernels

        p, _, r = saved
        assert r is not None
        count = len(p)
        options = {"head": self.head, "gpu": self.gpu}
        shape, de_of_others = (len(everyone.targets), self.c.shape[1 - self.head.vocab_axis]), None
        place = lax.empty(shape, self.c.dtype)  # of the scaled e, then of de
        dc = lax.empty(self.c.shape, self.c.dtype) if self.wanted.c else None
        if dc is not None:
            place = scaled(everyone.e(), jnp.pad(r, (0, shape[0] - count)))
        if count < shape[0]:
            beside = Beside(p, place, first.count)
            de_of_others, dc, _ = self.of_others(others, Gradients(None, dc, None), True, beside)
        elif dc is not None:
            vocabulary = vocabulary_size(self.c, self.head)
            whole = Groups(vocabulary, vocabulary, beyond=True)
            products = hopper_kernels.products(place, self.c, unit=None, count=first.count, groups=whole, **options)
            dc = products.put_dc(dc, p, ALL_COLUMNS)
        if not self.wanted.e:
            return None, dc
        place, dc = lax.optimization_barrier((place, dc))  # which is made of the scaled e, before de is in its place
        de = hopper_kernels.de_of_saved(p, r, self.c, first.count, place, **options)
        if de_of_others is not None:
            de = lax.dynamic_update_slice_in_dim(de, de_of_others.astype(de.dtype), count, 0)
        return de, dc


def _saved(
    p: jax.Array, target: jax.Array, tokens: _Tokens, few: jax.Array | None,
    *, direct: bool, by_hopper: bool, head: Head, wanted: Wanted, vocabulary: int, interpret: bool,
) -> _Saved:  # fmt: skip
    """The exponentials p of these tokens as they are to be multiplied; by_hopper: by the kernels for it."""
    reference = references(tokens.lse, target, tokens.targets, vocabulary)
    if not direct:
        return _Saved(p, reference, None)
    clear = None  # of how many rows those of ignored tokens are to be 0, as what multiplies them leaves none out
    if few is None or wanted.bias:
        clear = jnp.full(1, p.shape[0], jnp.int32)
    elif by_hopper:
        clear = tokens.count + (DEPTH - 1)
    elif whole_rows(p, vocabulary):
        clear = jnp.where(few, 0, p.shape[0])
    p, scale = prepared(p, reference, tokens.lse, target, tokens.targets, tokens.cotangents, clear, head=head,
                        interpret=interpret)  # fmt: skip
    return _Saved(p, reference, scale)


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
    chosen_here, tiles = tiles is None, tiles or chosen
    width, vocabulary = e.shape[1], vocabulary_size(c, head)
    # XLA would take the forward pass's copy of e with the kept tokens first, and hold it until here, but for a barrier.
    kept = kept_tokens(lax.optimization_barrier(targets), interpret)
    if kept is None:
        e, cotangents, lse = without_ignored(e, cotangents, lse, targets)
    else:
        cotangents, lse = kept.gathered(cotangents.T, 0).T, kept.gathered(lse, jnp.inf)
        target, targets = kept.gathered(target, 0), kept.gathered(targets, -1)
    tokens = targets.size
    with_sum = cotangents.shape[0] == 3
    direct = linear(head, with_sum)
    on_hopper = chosen_here and for_hopper(gathered(e), c, bias, with_sum, gpu, interpret)
    few = None if kept is None else kept.count[0] < FEW * tokens
    cotangents, unit = fitted(cotangents, weights, head, e.dtype)
    everyone = _Tokens(
        lambda: e if kept is None else kept.gathered(e, 0), targets, lse, cotangents,
        jnp.full(1, tokens, jnp.int32) if kept is None else kept.count,
    )  # fmt: skip
    count_saved = 0 if saved is None else saved.shape[0]
    first, others = everyone.part(0, count_saved), everyone.part(count_saved, tokens)
    all_by_xla = count_saved == tokens and memory_budget >= whole_bytes(len(e), width, vocabulary, wanted.c)
    saved_by_hopper = on_hopper and direct and not all_by_xla
    of_first = None
    if saved is not None:
        of_first = _saved(saved, target[:count_saved], first, few, direct=direct, by_hopper=saved_by_hopper, head=head,
                          wanted=wanted, vocabulary=vocabulary, interpret=interpret)  # fmt: skip
        saved = of_first.exponentials
    memory_budget -= ragged_bytes(len(e), width)
    plan = partial(group_of, tokens=tokens, saved=count_saved, width=width, vocabulary=vocabulary, dtype=e.dtype,
                   wanted=wanted, memory_budget=memory_budget, direct=direct, tiles=tiles.dz,
                   interpret=interpret)  # fmt: skip
    backward = _Backward(c, bias, weights, unit, head, wanted, tiles, gpu, on_hopper, interpret, plan)

    if of_first is not None and saved_by_hopper:
        de, dc = backward.with_saved_on_hopper(everyone, first, others, of_first)
        if de is not None and kept is not None:
            de = restored(de, kept, interpret=interpret)
        return de, dc, None, saved

    def of_saved(stop: bool) -> list[Gradients]:
        return [] if of_first is None else [backward.of_saved(first, of_first, stop)]

    def with_others(parts: list[Gradients], stop: bool) -> list[Gradients]:
        if count_saved == tokens:
            return parts
        return [*parts, backward.of_others(others, parts[0] if parts else None, stop)]

    def decided(found: Callable[[bool], list[Gradients]]) -> list[Gradients]:
        """Where few tokens are kept, by kernels that stop at the last one."""
        return found(False) if few is None else lax.cond(few, lambda: found(True), lambda: found(False))

    if on_hopper:  # whose kernels always stop there, and can be no part of a conditional that does not wait
        parts = with_others(decided(of_saved) if of_first is not None else [], True)
    else:
        parts = decided(lambda stop: with_others(of_saved(stop), stop))
    dc, dbias = parts[-1].c, parts[-1].bias
    of_e = [unscaled(x.e, unit, e.dtype) for x in parts if x.e is not None]
    de = None if not of_e else jnp.concatenate(of_e) if kept is None else kept.restored(*of_e)
    return de, dc, None if dbias is None else unscaled(dbias, unit, e.dtype), saved
