"""dc summed over chunks of tokens in plain XLA, one window of the vocabulary after another.

Held at a time: a window's part of the sum in float32. A result in float32 is summed in place; a result of 16 bits in
block floating point (cce_kernels/block_floats.py). Those integers are kept in an array of integers here: XLA may
convert a bfloat16 to float32 and back, which changes the bits of a NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.block_floats import decode, in_blocks, integers, steps_of
from cce_kernels.engines.engine import Part, Step, over_windows
from cce_kernels.request import Request


def sum_dc(
    step: Step, request: Request, _, dc: jax.Array, steps: jax.Array | None, part: Part
) -> tuple[jax.Array, jax.Array | None]:
    """engine.Launched.sum_dc. step.tiles: how many columns of D share a step."""
    block, windows, head, e, unit = step.tiles, step.windows, request.head, part.e, part.unit
    axis, width, dtype, wide = head.vocab_axis, e.shape[1], dc.dtype, jnp.promote_types(e.dtype, jnp.float32)
    blocks_of_d = -(-width // block)

    def of_window(window) -> jax.Array:
        """The window's part of the sum, (V_g, D)."""
        left_g = lax.dynamic_slice_in_dim(part.left, window.start, windows.columns, 1)
        contract = (((0,), (0,)), ((), ()))
        found = lax.dot_general(left_g, e, contract, precision=head.precision, preferred_element_type=wide)
        return found if unit is None else found * unit

    def add(carry, window):
        dc, steps = carry
        total = of_window(window)
        own = (window.start + jnp.arange(windows.columns) >= window.owned)[:, None]
        old = lax.dynamic_slice_in_dim(dc, window.start, windows.columns, axis)
        old = old if axis == 0 else old.T
        if steps is None:
            new = old + total
        else:
            of_entries = lax.dynamic_slice_in_dim(steps, window.start, windows.columns, 1)
            size = of_entries[:blocks_of_d].T
            total = in_blocks(total, block) + decode(in_blocks(old, block), size[:, :, None])
            size = jnp.where(own, steps_of(total), size)
            of_entries = lax.dynamic_update_slice_in_dim(of_entries, size.T, 0, 0)
            steps = lax.dynamic_update_slice_in_dim(steps, of_entries, window.start, 1)
            new = integers(total, size).reshape(windows.columns, -1)[:, :width]
        new = jnp.where(own, new, old)  # the other columns are the neighbour's
        new, dc = lax.optimization_barrier((new, dc))  # so that nothing reads dc while the window is written in place
        return lax.dynamic_update_slice_in_dim(dc, new if axis == 0 else new.T, window.start, axis), steps

    if steps is None and windows.count == 1:  # one matmul, which adds to dc in place
        total = of_window(windows.window(0))
        return dc + (total if axis == 0 else total.T), None
    if steps is None:
        return over_windows(add, (dc, steps), windows)
    bits, steps = over_windows(add, (lax.bitcast_convert_type(dc, jnp.int16), steps), windows)
    return lax.bitcast_convert_type(bits, dtype), steps
