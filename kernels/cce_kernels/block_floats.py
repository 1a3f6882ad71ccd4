"""Block floating point: 16-bit integers that share a step, in which dc is summed over chunks of tokens.

A number x of a block is held as the integer q = round(x / step), −32767 ≤ q ≤ 32767, where step is the block's largest
magnitude over 32766. One rounding is off by at most step / 2, about 2⁻¹⁶ of the block's largest number; bfloat16 rounds
each number to 2⁻⁹ of itself. So a sum over many chunks is as accurate as one rounding, in the bytes of the result.

A block is one vocabulary entry and so many consecutive columns of D as the engine says: an entry that is rare shares no
step with a frequent one. The steps are an array of their own, `steps_shape`. If a number of a block is NaN or infinite,
its step is infinite, and all numbers of the block are NaN or infinite when they are decoded.

`step_of`, `encode` and `decode` are elementwise operations that the kernels of every engine can run. Programs of plain
XLA use `integers` in place of `encode`: of integers that are taken from the low bits of a float32, XLA stored −1
everywhere on an H200.
"""

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = 32766.0  # not 32767: the step is rounded
SMALLEST_STEP = 2.0**-120  # so that 1 / step is finite
ROUNDING = 1.5 * 2.0**23  # added to a float32 of magnitude below 2²², it leaves the nearest integer in the low bits
OFFSET = 2.0**23 + 2.0**15
ENTRIES = 768  # kernels write steps of whole tiles: the steps have room for a multiple of so many vocabulary entries

BLOCKS = 256, 192, 128


def block_of(width: int) -> int:
    """How many columns of D share a step. The fewest columns are padded, and larger blocks are preferred."""
    return min(BLOCKS, key=lambda columns: -(-width // columns) * (columns + 16))


def steps_shape(vocabulary: int, width: int) -> tuple[int, int]:
    """The shape of the steps, float32: blocks of D by vocabulary entries, in either layout of c.

    There is room for blocks of `block_of` columns, and of 128 if these are 192.
    """
    return -(-width // 256) * -(-256 // block_of(width)), -(-vocabulary // ENTRIES) * ENTRIES


def of_check(x: jax.Array) -> jax.Array:
    """What is summed over a block, so that `step_of` finds NaN: a maximum may drop it. No sum of finite ones is inf."""
    return x * 2.0**-10


def step_of(largest: jax.Array, check: jax.Array) -> jax.Array:
    """The step of a block; inf if a number of it is NaN or inf. largest: magnitude; check: the sum of `of_check`."""
    return jnp.maximum(jnp.where(check == check, largest, jnp.inf) * (1 / LARGEST), SMALLEST_STEP)


def encode(x: jax.Array, inverse_step: jax.Array, dtype) -> jax.Array:
    """x, float32, as integers, in the bits of an array of this 16-bit type."""
    bits = lax.bitcast_convert_type(x * inverse_step + ROUNDING, jnp.int32)
    return lax.bitcast_convert_type(bits.astype(jnp.int16), dtype)


def decode(x: jax.Array, step: jax.Array) -> jax.Array:
    """The float32 numbers that `encode` was given, rounded. Zero bits give zeros."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) ^ 0x8000
    return (lax.bitcast_convert_type(bits | 0x4B000000, jnp.float32) - OFFSET) * step


def decoded(x: jax.Array, steps: jax.Array, block: int, axis: int) -> jax.Array:
    """dc, float32, of its integers x, int16, in the layout of c, whose axis `axis` has the vocabulary entries.

    Elementwise: where what follows is too, XLA writes the result over the integers.
    """
    vocabulary, width = x.shape[axis], x.shape[1 - axis]
    each = jnp.repeat(steps[: -(-width // block), :vocabulary], block, axis=0)[:width]
    each = each.T if axis == 0 else each
    return jnp.where(each == 0, 0.0, decode(x, each))  # what no chunk has written would be zeros of either sign


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """x, (n, D), as (n, blocks, block), with zeros beyond D."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block)


def steps_of(x: jax.Array) -> jax.Array:
    """The steps, (n, blocks), of numbers `in_blocks`."""
    return step_of(jnp.max(jnp.abs(x), axis=2), jnp.sum(of_check(x), axis=2))


def integers(x: jax.Array, steps: jax.Array) -> jax.Array:
    """Numbers `in_blocks` as int16, of which `decode` takes the bits. steps: (n, blocks)."""
    return jnp.round(x * (1 / steps[:, :, None])).astype(jnp.int16)
