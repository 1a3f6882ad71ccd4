"""What the forward pass leaves for the backward pass, besides the inputs and the numbers of each token.

The plan decides by which way the gradients are formed, and so which arrays there are:

    recomputed                 none
    saved                      exponentials
    in the forward pass        de, dc and dbias of the sum of the tokens' losses, up to the factor of the backward pass;
                               and where dc has 16 bits its steps; and in float16, or beside a teacher, the units of the
                               rows of de; with a weighted sum of the logits q (cce_kernels/weighted_sum.py)
    the same, de alone wanted  m, from which de follows for any cotangents
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels.block_floats import steps_shape
from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, MULTIPLE, Blocks
from cce_kernels.exponentials import saved_shape
from cce_kernels.plan.plan import Plan
from cce_kernels.request import Request


class Residuals(NamedTuple):
    """None: there is no such array."""

    exponentials: jax.Array | None = None  # exponentials.saved_shape, in e's type
    m: jax.Array | None = None  # (N, D), in e's type
    de: jax.Array | None = None  # (N, D)
    dc: jax.Array | None = None  # in c's shape: of the result's type, or int16 if there are steps
    steps: jax.Array | None = None
    dbias: jax.Array | None = None  # (V,) float32
    units: jax.Array | None = None  # Request.units_shape, float32: what de is divided by
    q: jax.Array | None = None  # (D,) float32

    @property
    def of_one_factor(self) -> bool:
        """Whether these are gradients up to one factor."""
        return self.de is not None or self.dc is not None or self.dbias is not None


def shapes_of(plan: Plan) -> Residuals:
    """The shapes and types of what the forward pass leaves by this plan, as jax.ShapeDtypeStruct."""
    request, how, wanted = plan.request, plan.in_forward, plan.request.wanted

    def array(*shape: int, dtype: Any = request.dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    if wanted is None or (how is None and not plan.saved):
        return Residuals()
    if how is None:
        return Residuals(exponentials=array(*saved_shape(plan.saved, request.vocabulary)))
    if not request.one_factor:
        return Residuals(m=array(request.tokens, request.width))
    wide = request.sum_dtype
    size = (request.vocabulary, request.width) if request.head.vocab_axis == 0 else (request.width, request.vocabulary)
    steps = steps_shape(request.vocabulary, request.width)
    return Residuals(
        de=array(request.tokens, request.width, dtype=request.left_de_dtype) if wanted.e else None,
        dc=array(*size, dtype=jnp.int16 if request.sums_dc_in_16_bits else wide) if wanted.c else None,
        steps=array(*steps, dtype=jnp.float32) if request.sums_dc_in_16_bits else None,
        dbias=array(request.vocabulary, dtype=wide) if wanted.bias else None,
        units=array(*request.units_shape(request.tokens), dtype=wide) if wanted.e and request.divides_de else None,
        q=array(request.width, dtype=wide) if wanted.c and request.sum_is_linear else None,
    )


def shapes_of_blocks(request: Request, tokens: int) -> Blocks | None:
    """The shapes of the blocks of a chunk of so many tokens, as jax.ShapeDtypeStruct; None without a tolerance."""
    if not request.gradient_tolerance:
        return None
    rows, columns = (-(-size // MULTIPLE) * MULTIPLE for size in (tokens, request.vocabulary))
    shapes = ((rows // x.tokens, columns // x.columns) for x in (DE_BLOCK, DC_BLOCK))
    return Blocks(*(jax.ShapeDtypeStruct(shape, bool) for shape in shapes))  # type: ignore[arg-type]
