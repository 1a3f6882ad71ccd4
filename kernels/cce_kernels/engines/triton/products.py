"""The two matmuls of the gradient, for the first n tokens. Only the device knows n; the time grows with n.

    de[:n] += dz[:n] · c_g            dc_g = dz[:n]ᵀ · e[:n]

Read: dz once per tile of columns, c_g or e once per tile of rows, from L2 where programs that run at the same time
share them. Written: de once a window, dc once. Never made: a copy of c_g or dc_g.
dz may also be saved exponentials (cce_kernels/exponentials.py). For the same number of tokens XLA's matmuls take less
time (kernels/NOTES.md), but they always run for all tokens, and copy the window's part of c and of dc.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.engine import Multiplying, Problem, Products
from cce_kernels.engines.order import cdiv, grouped_order
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_tile, tile_index, tile_mask
from cce_kernels.engines.triton.tiles import TileConfig, blocks
from cce_kernels.head import Head
from cce_kernels.windows import Window

Kind = Literal["de", "dc"]
ROW_GROUP = 8  # row blocks that are computed for all columns before the next row blocks


def _kernel(how: How, left_ref, right_ref, start_ref, count_ref, unit_ref, before_ref, out_ref, *, shape, kind: Kind):
    """One tile of out. shape: the sizes (rows, columns, inner) of the product, which sums over inner.

    kind "de": dz (N, V_g) times c_g. Each of `splits` parts of the window adds to its own (N, D) sum; out (splits·N, D)
    holds the sums one below the other. before_ref: the sums before, in the memory of out; None: 0.
    kind "dc": dzᵀ times e for dc (V, D), or eᵀ times dz for dc (D, V).
    """
    head, tiles, splits = how.head, how.tiles, how.splits
    row_count, column_count, inner_count = shape
    row_blocks, column_blocks = cdiv(row_count, tiles.rows), cdiv(column_count, tiles.columns)
    split, block = pl.program_id(0) // (row_blocks * column_blocks), pl.program_id(0) % (row_blocks * column_blocks)
    row_block, column_block = grouped_order(block, row_blocks, column_blocks, ROW_GROUP)
    rows, columns = indices(row_block, tiles.rows), indices(column_block, tiles.columns)
    rows_ok, columns_ok = inside(rows, row_count, tiles.rows), inside(columns, column_count, tiles.columns)
    start, count = start_ref[0], count_ref[0]
    mask = tile_mask(rows_ok, columns_ok, (tiles.rows, tiles.columns))
    if kind == "dc":
        total = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
        total = sum_over_tokens(left_ref, right_ref, rows, columns, count, total, head=head, tiles=tiles)
        if unit_ref is not None:
            total *= unit_ref[0]
        at = (start + rows, columns) if head.vocab_axis == 0 else (rows, start + columns)
        plgpu.store(out_ref.at[tile_index(*at)], total.astype(out_ref.dtype), mask=mask)
        return

    # nothing reads rows of de from count on, so any number may be added there
    some = row_block * tiles.rows < count
    steps = cdiv(inner_count, tiles.depth)
    first, last = split * steps // splits, (split + 1) * steps // splits
    last = jnp.where(some, last, first)

    def step(k, total):  # masks compare with the arrays' own sizes: saved exponentials may have more than V columns
        inner = indices(k, tiles.depth)
        left = load_tile(left_ref, rows, inner, rows_ok, inside(inner, left_ref.shape[1], tiles.depth))
        ok = inside(inner, inner_count, tiles.depth)
        if head.vocab_axis == 0:
            right, axes = load_tile(right_ref, start + inner, columns, ok, columns_ok), (1, 0)
        else:
            right, axes = load_tile(right_ref, columns, start + inner, columns_ok, ok), (1, 1)
        return total + _product(left, right, axes, head)

    where = out_ref.at[tile_index(split * row_count + rows, columns)]
    some = jnp.broadcast_to(some, (tiles.rows, tiles.columns))
    mask = some if mask is None else mask & some
    if before_ref is None:
        total = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    else:  # loaded before the loop: after the loop this tile and the loop's total would not both fit the registers
        total = plgpu.load(where, mask=mask, other=0.0)
    plgpu.store(where, lax.fori_loop(first, last, step, total).astype(out_ref.dtype), mask=mask)


def _product(left: jax.Array, right: jax.Array, axes: tuple[int, int], head: Head) -> jax.Array:
    contract = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(left, right, contract, precision=head.precision, preferred_element_type=jnp.float32)


def sum_over_tokens(
    left_ref, right_ref, rows, columns, count, total: jax.Array, *, head: Head, tiles: TileConfig
) -> jax.Array:
    """total + (leftᵀ·right)[rows, columns], float32, over the first `count` tokens. left, right: a row for each token.

    Masks compare with the arrays' own sizes: exponentials may have more than V columns.
    """

    def step(k, total):
        inner = indices(k, tiles.depth)
        ok = inner < count
        left = load_tile(left_ref, inner, rows, ok, inside(rows, left_ref.shape[1], tiles.rows))
        right = load_tile(right_ref, inner, columns, ok, inside(columns, right_ref.shape[1], tiles.columns))
        return total + _product(left, right, (0, 0), head)

    return lax.fori_loop(jnp.int32(0), (count + tiles.depth - 1) // tiles.depth, step, total)


def products(
    step: Multiplying, problem: Problem, unit: jax.Array | None, count: jax.Array, kept_blocks: jax.Array | None = None
) -> Products:
    """engine.Launched.products, for the first `count` tokens alone."""
    (e, c, *_), head, splits = problem.inputs, problem.head, step.splits
    width, vocabulary = e.shape[1], head.vocabulary(c)

    def run(kind: Kind, left, right, window: Window, shape, out, before):
        tiles, parts = (step.de, splits) if kind == "de" else (step.dc, 1)
        scale = None if kind == "de" or unit is None else unit.reshape(1)
        how, programs = How(head, tiles, problem.gpu.interpreted, parts), blocks(shape, tiles) * parts
        given = how, left, right, window.start.reshape(1), count, scale, before
        kernel = partial(_kernel, shape=shape, kind=kind)
        return launch(kernel, *given, programs=programs, name=f"cce_{kind}", out_shape=out, in_place=before)

    def add_de(sums, dz, window):
        """Without sums, the result's rows from `count` on are arbitrary."""
        shape = *e.shape, min(dz.shape[1], vocabulary)
        return run("de", dz, c, window, shape, jax.ShapeDtypeStruct((splits * len(e), width), jnp.float32), sums)

    def put_dc(dc, dz, window):
        left, right = (dz, e) if head.vocab_axis == 0 else (e, dz)
        columns = min(dz.shape[1], vocabulary)
        shape = (columns, width) if head.vocab_axis == 0 else (width, columns)
        return run("dc", left, right, window, (*shape, len(e)), jax.ShapeDtypeStruct(dc.shape, dc.dtype), dc)

    return Products(add_de, put_dc)
