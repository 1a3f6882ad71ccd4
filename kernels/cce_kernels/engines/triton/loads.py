"""Masked loads and stores of Triton's kernels, a tile of logits, and the launch of a kernel.

Every index is an array, never a slice: Pallas' interpreter then treats a masked element as a GPU does.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.tiles import TileConfig
from cce_kernels.head import Head
from cce_kernels.numbers import LOG2_E, Inputs

# JAX 0.11 warns at every Triton lowering. A user can do nothing about it: pyproject.toml bounds jax from above instead.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def exp2_shifted(z: jax.Array, shift: jax.Array, *, interpret: bool) -> jax.Array:
    """exp2(z · log2 e − shift), in two instructions an element on a GPU. shift broadcasts against z.

    The compiler would take seven: it does not fuse the multiplication with the subtraction, and it adds instructions
    to the hardware's exponential to keep denormal results.
    """
    if interpret:
        return jnp.exp2(z * LOG2_E - shift)
    (p,) = plgpu.elementwise_inline_asm(
        "{ .reg .f32 x; fma.rn.ftz.f32 x, $1, 0f3FB8AA3B, $2; ex2.approx.ftz.f32 $0, x; }",
        args=[z, jnp.broadcast_to(-shift, z.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(z.shape, jnp.float32)],
    )
    return p


def indices(block, size: int) -> jax.Array:
    """The indices of the block-th block of `size` elements."""
    return block * size + jnp.arange(size, dtype=jnp.int32)


def inside(index: jax.Array, size: int, block: int) -> jax.Array | None:
    """Whether each index is below size. None, for no mask, where blocks divide size exactly."""
    return None if size % block == 0 else index < size


def load_vector(ref, index: jax.Array, mask: jax.Array | None, other: float = 0) -> jax.Array:
    """ref[index], or `other` where the mask is false."""
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else other)


def load_scalar(ref):
    """The one element of ref, or None if ref is None."""
    return None if ref is None else ref[0]


def token_rows(rows: jax.Array, rows_ok: jax.Array | None, order_ref) -> tuple[jax.Array, jax.Array | None]:
    """The rows of e that hold these tokens, and the mask to load them with. order_ref: tokens.Rows.order."""
    return (rows, rows_ok) if order_ref is None else (load_vector(order_ref, rows, rows_ok), None)


def tile_mask(rows_ok: jax.Array | None, columns_ok: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """The mask of a tile from the masks of its rows and of its columns; None if both are None."""
    mask = None if rows_ok is None else jnp.broadcast_to(rows_ok[:, None], shape)
    if columns_ok is None:
        return mask
    columns = jnp.broadcast_to(columns_ok[None, :], shape)
    return columns if mask is None else mask & columns


def tile_index(rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (rows.size, columns.size)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def load_tile(ref, rows: jax.Array, columns: jax.Array, rows_ok, columns_ok) -> jax.Array:
    """The tile ref[rows, columns], 0 where a mask is false."""
    mask = tile_mask(rows_ok, columns_ok, (rows.size, columns.size))
    return plgpu.load(ref.at[tile_index(rows, columns)], mask=mask, other=None if mask is None else 0.0)


def product_tile(e_ref, c_ref, rows, columns, rows_ok, columns_ok, *, head: Head, depth: int) -> jax.Array:
    """(e·cᵀ)[rows, columns], float32, in steps of `depth` along D. columns: columns of the logits.

    Reads each element of its block of e and of c once, accumulates in registers, and writes nothing.
    """
    width = e_ref.shape[1]

    def step(k, accumulator):
        inner = indices(k, depth)
        inner_ok = inside(inner, width, depth)
        e = load_tile(e_ref, rows, inner, rows_ok, inner_ok)
        if head.vocab_axis == 0:
            c, contract = load_tile(c_ref, columns, inner, columns_ok, inner_ok), 1
        else:
            c, contract = load_tile(c_ref, inner, columns, inner_ok, columns_ok), 0
        return accumulator + head.product(e, c, contract)

    return lax.fori_loop(0, cdiv(width, depth), step, jnp.zeros((rows.size, columns.size), jnp.float32))


def logits_tile(inputs: Inputs, rows, columns, rows_ok, columns_ok, *, head: Head, tiles: TileConfig) -> jax.Array:
    """z[rows, columns], float32, (tiles.rows, tiles.columns)."""
    raw = product_tile(inputs.e, inputs.c, rows, columns, rows_ok, columns_ok, head=head, depth=tiles.depth)
    bias = inputs.bias
    bias = None if bias is None else load_vector(bias, columns, columns_ok).astype(jnp.float32)[None, :]
    return head.logits(raw, bias, load_scalar(inputs.scale))


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
    """The shapes of the two arrays that store_dz writes for a group of columns, in tiles of `rows` rows."""
    sums = jax.ShapeDtypeStruct((cdiv(tokens, rows), columns), jnp.float32) if with_sums else None
    return jax.ShapeDtypeStruct((tokens, columns), dtype), sums


def launch(
    kernel, *operands: Any, out_shape, programs: int, tiles: TileConfig, interpret: bool, name: str, in_place=None
):
    """One Pallas call over a one-dimensional grid. operands: arrays, tuples of arrays, or None.

    in_place: the operands, one or a tuple, whose buffers become the first outputs. Elements that the kernel does not
    write keep the operand's values.
    """
    arrays = jax.tree.leaves(operands)
    places = [[x is y for x in arrays].index(True) for y in jax.tree.leaves(in_place)]
    call = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(programs,),
        input_output_aliases={place: output for output, place in enumerate(places)},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name=name,
    )
    return call(*operands)
