"""A tile of logits, and its exponentials."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.loads import indices, inside, load_scalar, load_tile, load_vector
from cce_kernels.engines.triton.tiles import TileConfig
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs

LEAST = float(jnp.finfo(jnp.float32).min)


def load_inverse_temperature(inputs: Inputs, rows: jax.Array, rows_ok: jax.Array | None) -> jax.Array | None:
    """The inverse temperatures of these tokens as a column, (rows, 1); None for 1. inputs: refs."""
    inverse = inputs.inverse_temperature
    return None if inverse is None else load_vector(inverse, rows, rows_ok, other=1)[:, None]


def divided(x: jax.Array, inverse: jax.Array | None, most: jax.Array | None = None) -> jax.Array:
    """Logits divided by the temperatures of their tokens, each rounded, as cce_kernels.numbers.rounded explains.

    most: as Numbers.most has it, in the form of inverse. Without it −inf becomes the least finite number, whose
    exponential is 0 as well; inf stays, so that its token has no numbers.
    """
    z = x if inverse is None else x * inverse
    if most is not None:
        return jnp.minimum(z, most)
    return z if inverse is None else jnp.maximum(z, LEAST)


def factor_of(inputs: Inputs, inverse: jax.Array | None):
    """numbers.Inputs.factor, to broadcast against a tile. inputs: refs."""
    scale = load_scalar(inputs.scale)
    return inverse if scale is None else scale if inverse is None else scale * inverse


def exp(x: jax.Array, interpret: bool) -> jax.Array:
    """exp x, in two instructions an element on a GPU. The compiler would add others, to keep denormal results."""
    instructions = "{ .reg .f32 x; mul.rn.ftz.f32 x, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, x; }"
    return jnp.exp(x) if interpret else _elementwise(instructions, x)


def log2(x: jax.Array, interpret: bool) -> jax.Array:
    """log₂ x, −inf for 0, in one instruction an element on a GPU: its absolute error is 2⁻²² at most."""
    return jnp.log2(x) if interpret else _elementwise("lg2.approx.ftz.f32 $0, $1;", x)


def _elementwise(instructions: str, x: jax.Array) -> jax.Array:
    """What these instructions of PTX make of each element of x, float32."""
    out = [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    return plgpu.elementwise_inline_asm(instructions, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=out)[0]


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
    """The logits before the temperature, x[rows, columns], float32, (tiles.rows, tiles.columns)."""
    raw = product_tile(inputs.e, inputs.c, rows, columns, rows_ok, columns_ok, head=head, depth=tiles.depth)
    bias = inputs.bias
    bias = None if bias is None else load_vector(bias, columns, columns_ok).astype(jnp.float32)[None, :]
    return head.logits(raw, bias, load_scalar(inputs.scale))
