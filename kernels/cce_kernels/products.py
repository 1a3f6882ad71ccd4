"""The two matmuls of the gradient for a number of tokens that only the device knows; they cost what those tokens cost.

    de[:n] += dz[:n] · c_g            dc_g = dz[:n]ᵀ · e[:n]

Read: dz once per tile of columns, c_g or e once per tile of rows, from L2 where programs that run together share them;
c where it lies. Written: de once a group, dc once. Never made: a copy of c_g or dc_g.
In place of dz may stand all exponentials that were saved (cce_kernels/saved.py). They take longer than XLA's for the
same tokens (docs/performance.md), which always run for all, and copy the part of c and of dc (cce_kernels/groups.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.config import TileConfig, Tiles
from cce_kernels.groups import Products
from cce_kernels.logits import Head
from cce_kernels.tiles import cdiv, grouped_order, inside, launch, load_tile, tile_index, tile_mask

ROW_GROUP = 8  # row blocks that go through all columns before the next ones


def _product_kernel(
    left_ref, right_ref, start_ref, count_ref, unit_ref, _, out_ref,
    *, head: Head, tiles: TileConfig, shape: tuple[int, int, int], kind: str,
):  # fmt: skip
    """A tile of out (rows, columns) of the product over `inner`; kind says which axis is the group of the vocabulary.

    "de": dz (N, V_g) and c, added to de (N, D). "dc": dzᵀ and e, or eᵀ and dz, written to dc (V, D) or (D, V).
    """
    row_count, column_count, inner_count = shape
    row_blocks, column_blocks = cdiv(row_count, tiles.rows), cdiv(column_count, tiles.columns)
    row_block, column_block = grouped_order(pl.program_id(0), row_blocks, column_blocks, ROW_GROUP)
    rows = row_block * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    columns = column_block * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    rows_ok, columns_ok = inside(rows, row_count, tiles.rows), inside(columns, column_count, tiles.columns)
    start, count = start_ref[0], count_ref[0]
    some = row_block * tiles.rows < count
    steps = (count + tiles.depth - 1) // tiles.depth
    if kind == "de":  # in rows from count on anything may be added: nothing reads them
        steps = jnp.where(some, jnp.int32(cdiv(inner_count, tiles.depth)), jnp.int32(0))

    def step(k, total):
        inner = k * tiles.depth + jnp.arange(tiles.depth, dtype=jnp.int32)
        if kind == "dc":
            ok = inner < count
            left = load_tile(left_ref, inner, rows, ok, rows_ok)
            right = load_tile(right_ref, inner, columns, ok, columns_ok)
            axes = 0, 0
        else:
            ok = inside(inner, inner_count, tiles.depth)
            left = load_tile(left_ref, rows, inner, rows_ok, ok)
            if head.vocab_axis == 0:
                right, axes = load_tile(right_ref, start + inner, columns, ok, columns_ok), (1, 0)
            else:
                right, axes = load_tile(right_ref, columns, start + inner, columns_ok, ok), (1, 1)
        contract = ((axes[:1], axes[1:]), ((), ()))
        return total + lax.dot_general(left, right, contract, precision=head.precision,
                                       preferred_element_type=jnp.float32)  # fmt: skip

    mask = tile_mask(rows_ok, columns_ok, (tiles.rows, tiles.columns))
    if kind == "de":
        where = out_ref.at[tile_index(rows, columns)]
        some = jnp.broadcast_to(some, (tiles.rows, tiles.columns))
        mask = some if mask is None else mask & some
        total = plgpu.load(where, mask=mask, other=0.0)  # before the loop: after it, both would not fit the registers
    else:
        where = out_ref.at[tile_index(*((start + rows, columns) if head.vocab_axis == 0 else (rows, start + columns)))]
        total = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    total = lax.fori_loop(jnp.int32(0), steps, step, total)
    if unit_ref is not None:
        total *= unit_ref[0]
    plgpu.store(where, total.astype(out_ref.dtype), mask=mask)


def kernel_products(
    e: jax.Array, c: jax.Array, *, head: Head, unit: jax.Array | None, count: jax.Array, tiles: Tiles,
    interpret: bool,
) -> Products:  # fmt: skip
    """Both for the first `count` tokens alone. unit: what dz is to be multiplied by in dc."""
    width = e.shape[1]

    def run(kind: str, tiles: TileConfig, left, right, start, out, shape, unit):
        return launch(
            partial(_product_kernel, head=head, tiles=tiles, shape=shape, kind=kind),
            left, right, start.reshape(1), count, unit, out, out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
            programs=cdiv(shape[0], tiles.rows) * cdiv(shape[1], tiles.columns), tiles=tiles, interpret=interpret,
            name=f"cce_{kind}", in_place=out,
        )  # fmt: skip

    def add_de(de, dz, start):
        de = jnp.zeros(e.shape, jnp.float32) if de is None else de
        return run("de", tiles.de, dz, c, start, de, (*de.shape, dz.shape[1]), None)

    def put_dc(dc, dz, start):
        left, right = (dz, e) if head.vocab_axis == 0 else (e, dz)
        shape = (dz.shape[1], width) if head.vocab_axis == 0 else (width, dz.shape[1])
        scale = None if unit is None else unit.reshape(1)
        return run("dc", tiles.dc, left, right, start, dc, (*shape, e.shape[0]), scale)

    return Products(add_de, put_dc)
