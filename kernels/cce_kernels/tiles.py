"""What the forward and the backward kernel share: masked loads, one tile of logits, the order of programs.

Every index is an array, never a slice: Pallas' interpreter then treats a masked element as a GPU does.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.config import Gpu, TileConfig
from cce_kernels.logits import Head
from cce_kernels.tokens import Kept

LOG2_E = 1.4426950408889634  # the hardware's exponential is base 2: exp(z) = exp2(z · log2 e)


# JAX 0.11 warns at every Triton lowering. A user cannot act on that; the upper bound on jax in pyproject.toml does.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


FLOAT32_MAX = 3e38  # stands for an infinite reference, from which differences are not NaN
MANY = 256  # tokens, of which those that are ignored are worth looking for
MOSAIC = jax.__version_info__ >= (0, 11)  # in JAX 0.10 the kernels for Hopper lower, but never ran on a GPU
TMA_ROWS, TMA_COLUMNS = 8, 64  # of 16 bits, the tiles that arrays must consist of for the kernels for Hopper
SCRATCH_BYTES = 3 * 2**20  # of partial statistics, at most
SHARED_BYTES = 20 * 2**20  # of e that programs running side by side read: a third of an H200's L2


def exp2_shifted(z: jax.Array, shift: jax.Array, *, interpret: bool) -> jax.Array:
    """exp2(z · log2 e − shift), two instructions an element on a GPU; shift broadcasts against z.

    The compiler would spend seven: it neither fuses the multiply into the subtraction nor, keeping denormal results,
    uses the hardware's exponential bare.
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


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def inside(index: jax.Array, size: int, block: int) -> jax.Array | None:
    """Mask of the indices below size; None where blocks tile size exactly and no mask is needed."""
    return None if size % block == 0 else index < size


def load_vector(ref, index: jax.Array, mask: jax.Array | None, other: float = 0, row: int | None = None) -> jax.Array:
    """ref[index], or ref[row, index] of a two-dimensional ref; other where the mask is false."""
    where = index if row is None else (jnp.full_like(index, row), index)
    return plgpu.load(ref.at[where], mask=mask, other=None if mask is None else other)


def token_rows(rows: jax.Array, rows_ok: jax.Array | None, order_ref) -> tuple[jax.Array, jax.Array | None]:
    """The rows of e that hold these tokens, and the mask of those to load; order_ref: tokens.Kept.order or None."""
    return (rows, rows_ok) if order_ref is None else (load_vector(order_ref, rows, rows_ok), None)


def tile_mask(rows_ok: jax.Array | None, columns_ok: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """The mask of a tile from the masks of its rows and of its columns; None where neither needs one."""
    mask = None if rows_ok is None else jnp.broadcast_to(rows_ok[:, None], shape)
    if columns_ok is None:
        return mask
    columns = jnp.broadcast_to(columns_ok[None, :], shape)
    return columns if mask is None else mask & columns


def tile_index(rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (rows.size, columns.size)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def load_tile(ref, rows: jax.Array, columns: jax.Array, rows_ok, columns_ok) -> jax.Array:
    """ref[rows, columns] as a tile, zero where a mask is false."""
    mask = tile_mask(rows_ok, columns_ok, (rows.size, columns.size))
    return plgpu.load(ref.at[tile_index(rows, columns)], mask=mask, other=None if mask is None else 0.0)


def product_tile(e_ref, c_ref, rows, columns, rows_ok, columns_ok, *, head: Head, depth: int) -> jax.Array:
    """(e·cᵀ)[rows, columns], float32, in steps of `depth` along D; columns index c's vocabulary.

    Reads each element of its block of e and of c once; accumulates in registers; writes nothing.
    """
    width = e_ref.shape[1]

    def step(k, accumulator):
        inner = k * depth + jnp.arange(depth, dtype=jnp.int32)
        inner_ok = inside(inner, width, depth)
        e = load_tile(e_ref, rows, inner, rows_ok, inner_ok)
        if head.vocab_axis == 0:
            c, contract = load_tile(c_ref, columns, inner, columns_ok, inner_ok), 1
        else:
            c, contract = load_tile(c_ref, inner, columns, inner_ok, columns_ok), 0
        return accumulator + head.product(e, c, contract)

    return lax.fori_loop(0, cdiv(width, depth), step, jnp.zeros((rows.size, columns.size), jnp.float32))


def store_dz(dz_ref, sums_ref, dz: jax.Array, row_block, rows: jax.Array, local: jax.Array, rows_ok, local_ok) -> None:
    """Writes a tile of dz, (rows, local), and the sums of its columns where they are wanted, (row block, local)."""
    mask = tile_mask(rows_ok, local_ok, (rows.size, local.size))
    plgpu.store(dz_ref.at[tile_index(rows, local)], dz.astype(dz_ref.dtype), mask=mask)
    if sums_ref is not None:
        if rows_ok is not None:
            dz = jnp.where(rows_ok[:, None], dz, 0.0)
        block = jnp.full((local.size,), row_block, jnp.int32)
        plgpu.store(sums_ref.at[block, local], jnp.sum(dz, axis=0), mask=local_ok)


def dz_shapes(tokens: int, columns: int, dtype, rows: int, with_sums: bool) -> tuple:
    """What store_dz writes of a group of columns, in tiles of so many rows."""
    sums = jax.ShapeDtypeStruct((cdiv(tokens, rows), columns), jnp.float32) if with_sums else None
    return jax.ShapeDtypeStruct((tokens, columns), dtype), sums


def logits_tile(e_ref, c_ref, bias_ref, rows, columns, rows_ok, columns_ok, *, head: Head, tiles: TileConfig):
    """z[rows, columns], float32, (tiles.rows, tiles.columns)."""
    raw = product_tile(e_ref, c_ref, rows, columns, rows_ok, columns_ok, head=head, depth=tiles.depth)
    bias = None if bias_ref is None else load_vector(bias_ref, columns, columns_ok).astype(jnp.float32)[None, :]
    return head.logits(raw, bias)


def row_group(width: int, itemsize: int, rows: int, most: int = 32) -> int:
    """How many row blocks go through all columns before the next ones: those whose rows of e fit in SHARED_BYTES."""
    return max(1, min(most, SHARED_BYTES // (rows * width * itemsize)))


def grouped_order(program, row_blocks, column_blocks, row_group: int):
    """(row block, column block) of a program: neighbours share rows of e or columns of c in L2."""
    group, offset = program // (row_group * column_blocks), program % (row_group * column_blocks)
    first = group * row_group
    height = jnp.minimum(row_blocks - first, row_group)
    return first + offset % height, offset // height


def vocabulary_splits(row_blocks: int, column_tiles: int, tokens: int, multiprocessors: int) -> int:
    """Into how many runs to cut the vocabulary so that programs fill the GPU's multiprocessors evenly.

    One program runs on a multiprocessor at a time, so a launch takes (programs / multiprocessors, rounded up) times
    the tiles that a program walks, and each program costs about a third of a tile more to start and end.
    """
    most = min(column_tiles, max(1, SCRATCH_BYTES // (4 * max(tokens, 1))), 1024)
    return min(range(1, most + 1), key=lambda s: cdiv(row_blocks * s, multiprocessors) * (column_tiles / s + 0.3))


def gathered_rows(tokens: int) -> int:
    """In how many rows tokens are gathered: up to a multiple of those that TMA copies at once, if there are many."""
    return cdiv(tokens, TMA_ROWS) * TMA_ROWS if tokens >= MANY else tokens


def gathered(e: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What e (N, D) is once its tokens are gathered."""
    return jax.ShapeDtypeStruct((gathered_rows(e.shape[0]), e.shape[1]), e.dtype)


def kept_tokens(targets: jax.Array, interpret: bool, gathering: bool = True) -> Kept | None:
    """Those with a target that is not negative; None where there are so few tokens that sorting them saves nothing.

    Both passes must find the same, so that it does not depend on the tiles of either. gathering: whether e will be.
    """
    rows = gathered_rows(targets.size) if gathering else targets.size
    return Kept.of(targets, rows) if targets.size >= (32 if interpret else MANY) else None


def for_hopper(
    e: jax.Array | jax.ShapeDtypeStruct, c: jax.Array | jax.ShapeDtypeStruct, bias: Any, with_sum: bool, gpu: Gpu,
    interpret: bool,
) -> bool:  # fmt: skip
    """Whether the kernels of cce_kernels/hopper_kernels.py compute this call.

    Those in JAX 0.11 for compute capability 9.0, 16 bits, no bias and no weighted sum, many tokens, and a D and V that
    TMA copies.
    """
    tiled = e.shape[0] % TMA_ROWS == 0 and all(size % TMA_COLUMNS == 0 and size > TMA_COLUMNS for size in c.shape)
    plain = bias is None and not with_sum and e.dtype.itemsize == 2
    return MOSAIC and not interpret and gpu.compute_capability == "9.0" and plain and tiled and e.shape[0] >= MANY


def launch(kernel, *operands, out_shape, programs: int, tiles: TileConfig, interpret: bool, name: str, in_place=None):
    """One Pallas call over a one-dimensional grid; operands that are None reach the kernel as None.

    in_place: the operand whose buffer the first output takes over, and with it what the kernel does not write.
    """
    arrays = [x for x in operands if x is not None]
    call = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(programs,),
        input_output_aliases={} if in_place is None else {[x is in_place for x in arrays].index(True): 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name=name,
    )
    return call(*operands)
