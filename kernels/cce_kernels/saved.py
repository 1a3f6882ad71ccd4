"""Exponentials that the forward pass saves for the backward pass, which then need not compute their logits again.

For the first N_s of the kept tokens (cce_kernels/tokens.py) the statistics kernel writes, in bfloat16, of all columns,

    P_iv = exp(z_iv − ρ_i)            ρ_i = target_i,  or lse_i where that is larger by LARGEST or there is no target

Saving the exponential, not the logit, keeps a relative error of 2⁻⁹ however large the logit is. ρ is known before lse,
and bfloat16 has float32's range, so that P, at most exp(LARGEST), cannot overflow. Then

    p_iv = P_iv · exp(ρ_i − lse_i)

Where dz is linear in p (no softcap, no sum), no dz of these tokens is formed. Let r_i = a_i·exp(ρ_i − lse_i), or
SMALLEST·t̂_i where that is larger; then with

    P_i,t_i ← (a_i·p_i,t_i + t̂_i) / r_i         de = r·(P·c)         dc = Pᵀ·(r·e)         dbias = Pᵀ·r

which are matmuls of whole arrays: a part of the columns instead would make XLA copy that part of c and of dc.

(SMALLEST·exp(LARGEST) = 2⁻²⁷, so what r was raised for stays below every rounding.) Of P only targets' elements and
rows of ignored tokens are overwritten, whatever they held: a second backward pass over the same P gives the same bits.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.config import INTERPRETER, TileConfig
from cce_kernels.groups import ALL_COLUMNS, Gradients, Products, Wanted, starts
from cce_kernels.logits import Head
from cce_kernels.tiles import (
    cdiv,
    dz_shapes,
    inside,
    launch,
    load_tile,
    load_vector,
    store_dz,
    tile_index,
    tile_mask,
)
from cce_kernels.windows import Groups

LARGEST = 30.0  # nats, 2^43
SMALLEST = 2.0**-70
ALIGNMENT = 8  # columns that rows of P are a multiple of, so that they start where the GPU loads widest
DZ_TILES = TileConfig(rows=16, columns=512, depth=16, warps=4, stages=1)


def saved_shape(tokens: int, vocabulary: int) -> tuple[int, int]:
    """The shape of P of so many tokens. Columns from V on are 0."""
    return tokens, cdiv(vocabulary, ALIGNMENT) * ALIGNMENT


def whole_rows(saved: jax.Array, vocabulary: int) -> bool:
    """Whether P has no columns but those of the vocabulary, without which XLA's matmuls would copy it."""
    return saved.shape[1] == vocabulary


def by_target(lse: jax.Array, target: jax.Array, targets: jax.Array, vocabulary: int) -> jax.Array:
    """Whether a kept token's exponentials are relative to its target's logit."""
    return (targets < vocabulary) & (lse - target <= LARGEST)


def references(lse: jax.Array, target: jax.Array, targets: jax.Array, vocabulary: int) -> jax.Array:
    """ρ, (N,), finite where a token is ignored."""
    return jnp.where((targets < 0) | by_target(lse, target, targets, vocabulary), target, lse)


def store_exponentials(saved_ref, p: jax.Array, rows: jax.Array, columns: jax.Array, rows_ok) -> None:
    """p: 0 from column V on. Written to the end of P's rows: a mask that ends at any V would store columns singly."""
    mask = tile_mask(rows_ok, inside(columns, saved_ref.shape[1], columns.size), (rows.size, columns.size))
    plgpu.store(saved_ref.at[tile_index(rows, columns)], p.astype(saved_ref.dtype), mask=mask)


def _dz_kernel(
    saved_ref, reference_ref, lse_ref, targets_ref, cotangents_ref, weights_ref, window_ref, dz_ref, sums_ref,
    *, head: Head, tiles: TileConfig, groups: Groups,
):  # fmt: skip
    """dz of a group of columns from their exponentials. Read and written: 2 bytes an element."""
    tokens, group_columns = dz_ref.shape
    program, column_blocks = pl.program_id(0), cdiv(group_columns, tiles.columns)
    row_block, column_block = program // column_blocks, program % column_blocks
    rows = row_block * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    rows_ok = inside(rows, tokens, tiles.rows)
    local = column_block * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    local_ok = inside(local, group_columns, tiles.columns)
    columns = window_ref[0] + local
    reference, lse = (load_vector(x, rows, rows_ok)[:, None] for x in (reference_ref, lse_ref))
    targets = load_vector(targets_ref, rows, rows_ok, other=-1)[:, None]
    weights = 1.0 if weights_ref is None else load_vector(weights_ref, columns, local_ok)[None, :]
    cotangents = [load_vector(cotangents_ref, rows, rows_ok, row=k)[:, None] for k in range(cotangents_ref.shape[0])]

    saved = load_tile(saved_ref, rows, columns, rows_ok, local_ok).astype(jnp.float32)
    saved = jnp.where(targets >= 0, saved, 0.0)  # what lies in the rows of ignored tokens is arbitrary
    z = None if head.softcap is None else jnp.maximum(reference + jnp.log(saved), -head.softcap)
    p = saved * jnp.exp(reference - lse)
    dz = head.cotangent(z, p, columns[None, :] == targets, *cotangents, weights=weights)
    if groups.overlap:
        dz = jnp.where((columns >= window_ref[1])[None, :], dz, 0.0)
    store_dz(dz_ref, sums_ref, dz, row_block, rows, local, rows_ok, local_ok)


def dz_of_saved(
    saved, reference, lse, targets, cotangents, weights, window, *, head: Head, groups: Groups, wanted: Wanted,
    interpret: bool, tiles: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """dz of the group at this window, (N, V_g), and its column sums if the bias gradient is wanted."""
    tokens = saved.shape[0]
    tiles = tiles or (INTERPRETER if interpret else DZ_TILES)
    dz, sums = launch(
        partial(_dz_kernel, head=head, tiles=tiles, groups=groups),
        saved, reference, lse, targets, cotangents, weights, starts(window),
        out_shape=dz_shapes(tokens, groups.columns, saved.dtype, tiles.rows, wanted.bias),
        programs=cdiv(tokens, tiles.rows) * cdiv(groups.columns, tiles.columns),
        tiles=tiles, interpret=interpret, name="cce_saved_dz",
    )  # fmt: skip
    return dz, None if sums is None else jnp.sum(sums, axis=0)


def _targets_kernel(_, targets_ref, values_ref, saved_ref, *, tiles: TileConfig):
    """Each token's element at its target."""
    rows = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    rows_ok = rows < saved_ref.shape[0]
    targets = load_vector(targets_ref, rows, rows_ok, other=-1)
    value = load_vector(values_ref, rows, rows_ok)
    named = (targets >= 0) & (targets < saved_ref.shape[1])
    plgpu.store(saved_ref.at[rows, jnp.where(named, targets, 0)], value.astype(saved_ref.dtype), mask=named)


def _clear_kernel(_, targets_ref, clear_ref, saved_ref, *, tiles: TileConfig):
    """Zeros in the rows of ignored tokens, where anything may lie, of the first clear_ref[0] rows."""
    tokens, vocabulary = saved_ref.shape
    rows = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    ignored = (load_vector(targets_ref, rows, rows < tokens) < 0) & (rows < clear_ref[0])
    last = jnp.where(jnp.max(ignored.astype(jnp.int32)) > 0, jnp.int32(cdiv(vocabulary, tiles.columns)), jnp.int32(0))
    shape = tiles.rows, tiles.columns

    def clear(j, carry):
        columns = j * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
        mask = tile_mask(ignored, inside(columns, vocabulary, tiles.columns), shape)
        plgpu.store(saved_ref.at[tile_index(rows, columns)], jnp.zeros(shape, saved_ref.dtype), mask=mask)
        return carry

    lax.fori_loop(jnp.int32(0), last, clear, 0)


def _in_place(kernel, saved, *operands, name: str, columns: int, interpret: bool):
    tiles = TileConfig(rows=16, columns=16 if interpret else columns, depth=16, warps=4, stages=1)
    return launch(
        partial(kernel, tiles=tiles), saved, *operands, out_shape=jax.ShapeDtypeStruct(saved.shape, saved.dtype),
        programs=cdiv(saved.shape[0], tiles.rows), tiles=tiles, interpret=interpret, name=name, in_place=saved,
    )  # fmt: skip


def prepared(
    saved, reference, lse, target, targets, cotangents, clear, *, head: Head, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """P as the matmuls take it, in place, and r times the logits' scale, (N,).

    clear: of how many rows those of ignored tokens are to be zero, known to the device alone; None for no row.
    """
    of_lse, of_target = cotangents[0], cotangents[1]
    raised = SMALLEST * of_target
    r = of_lse * jnp.exp(reference - lse)
    r = jnp.where(jnp.abs(r) < jnp.abs(raised), raised, r)
    value = jnp.where(r == 0, 0.0, (of_lse * jnp.exp(target - lse) + of_target) / jnp.where(r == 0, 1.0, r))
    saved = _in_place(_targets_kernel, saved, targets, value, name="cce_targets", columns=16, interpret=interpret)
    if clear is not None:
        saved = _in_place(
            _clear_kernel, saved, targets, clear.reshape(1), name="cce_clear", columns=1024, interpret=interpret
        )
    return saved, r * head.scale


def scaled(e: jax.Array, r: jax.Array) -> jax.Array:
    """r·e in e's type."""
    return (e * r[:, None]).astype(e.dtype)


def direct_gradients(
    saved, r, e, c, products: Callable[[jax.Array], Products], *, head: Head, wanted: Wanted
) -> Gradients:  # fmt: skip
    """The gradients that the tokens of `saved` give, de in its own type; r and e are theirs.

    products(e): the matmuls with this e.
    """
    de, dc, dbias = Gradients.begun(e, c, head, wanted)
    if wanted.e:
        de = (products(e).add_de(None, saved, ALL_COLUMNS) * r[:, None]).astype(e.dtype)
        r, de = lax.optimization_barrier((r, de))  # so that the scaled e and de in float32 are never there together
    if dc is not None:
        dc = products(scaled(e, r)).put_dc(dc, saved, ALL_COLUMNS)
    if dbias is not None:
        high = r.astype(e.dtype)
        both = jnp.stack([high, (r - high).astype(e.dtype)])  # r to 16 bits
        sums = lax.dot_general(both, saved, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        dbias = jnp.sum(sums, axis=0)[: dbias.size]
    return Gradients(de, dc, dbias)
