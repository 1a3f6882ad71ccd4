"""The two matmuls of the gradient by XLA, for all tokens. XLA copies the window's part of c and of dc."""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.engines.engine import Multiplying, Problem, Products


def products(
    step: Multiplying, problem: Problem, unit: jax.Array | None, count: jax.Array, blocks: jax.Array | None = None
) -> Products:
    """engine.Launched.products."""
    (e, c, *_), head = problem.inputs, problem.head
    axis, wide = head.vocab_axis, jnp.promote_types(e.dtype, jnp.float32)

    def matmul(left, right, left_axis: int, right_axis: int, out) -> jax.Array:
        contract = (((left_axis,), (right_axis,)), ((), ()))
        return lax.dot_general(left, right, contract, precision=head.precision, preferred_element_type=out)

    def add_de(de, dz, window):
        c_g = lax.dynamic_slice_in_dim(c, window.start, dz.shape[1], axis)
        product = matmul(dz, c_g, 1, axis, wide)
        return product if de is None else de + product

    def put_dc(dc, dz, window):
        # dz is the first operand: on a CPU XLA has no 16-bit product of e and a batch of dz
        dc_g = matmul(dz, e, 0, 0, dc.dtype if unit is None else wide)
        dc_g = dc_g if axis == 0 else dc_g.T
        dc_g = (dc_g if unit is None else dc_g * unit).astype(dc.dtype)
        return lax.dynamic_update_slice_in_dim(dc, dc_g, window.start, axis)

    return Products(add_de, put_dc)
