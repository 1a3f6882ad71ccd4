"""What the forward pass leaves for the backward pass, besides the inputs and the numbers of each token.

The plan decides by which way the gradients are formed, and so which arrays there are:

    recomputed                 none
    saved                      exponentials
    in the forward pass        de, dc and dbias of the sum of the tokens' losses, up to the factor of the backward pass;
                               and where dc has 16 bits its steps, and the last chunk, whose part of dc is not added
                               yet; and in float16, or beside a teacher, the units of the rows of de
    the same, de alone wanted  m, from which de follows for any cotangents
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels import block_sparse
from cce_kernels.block_floats import steps_shape
from cce_kernels.exponentials import saved_shape
from cce_kernels.gradients import Left
from cce_kernels.plan.plan import Plan


class Residuals(NamedTuple):
    """None: there is no such array."""

    exponentials: jax.Array | None = None  # exponentials.saved_shape, in e's type
    m: jax.Array | None = None  # (N, D), in e's type
    de: jax.Array | None = None  # (N, D)
    dc: jax.Array | None = None  # in c's shape: of the result's type, or int16 if there are steps
    steps: jax.Array | None = None
    dbias: jax.Array | None = None  # (V,) float32
    units: jax.Array | None = None  # Call.units_shape, float32: what de is divided by
    last: Left | None = None

    @property
    def of_one_factor(self) -> bool:
        """Whether these are gradients up to one factor."""
        return self.de is not None or self.dc is not None or self.dbias is not None


def shapes_of(plan: Plan) -> Residuals:
    """The shapes and types of what the forward pass leaves by this plan, as jax.ShapeDtypeStruct."""
    call, how, wanted = plan.call, plan.in_forward, plan.call.wanted

    def array(*shape: int, dtype: Any = call.dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    if wanted is None or (how is None and not plan.saved):
        return Residuals()
    if how is None:
        return Residuals(exponentials=array(*saved_shape(plan.saved, call.vocabulary)))
    if not call.one_factor:
        return Residuals(m=array(call.tokens, call.width))
    wide, rows = call.sum_dtype, how.chunks.last
    size = (call.vocabulary, call.width) if call.head.vocab_axis == 0 else (call.width, call.vocabulary)
    last, steps = None, None
    if rows:
        unit = array(dtype=wide) if call.dtype == "float16" and how.forward is None else None
        left = array(*saved_shape(rows, call.vocabulary))
        blocks = block_sparse.shapes_of(call, rows)
        kept = None if blocks is None else blocks.dc
        last = Left(left, array(rows, call.width), unit, array(1, dtype=jnp.int32), kept)
        steps = array(*steps_shape(call.vocabulary, call.width, how.chunks.block), dtype=jnp.float32)
    return Residuals(
        de=array(call.tokens, call.width, dtype=call.left_de_dtype) if wanted.e else None,
        dc=array(*size, dtype=jnp.int16 if rows else wide) if wanted.c else None,
        steps=steps,
        dbias=array(call.vocabulary, dtype=wide) if wanted.bias else None,
        units=array(*call.units_shape(call.tokens), dtype=wide) if wanted.e and call.divides_de else None,
        last=last,
    )
