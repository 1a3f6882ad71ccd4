"""dc summed over chunks of tokens in plain XLA, one group of the vocabulary after another.

Held at a time: a group's part of the sum in float32. A result in float32 is summed in place; a result of 16 bits in
block floating point (cce_kernels/block_floats.py). Those integers are kept in an array of integers here: XLA may
convert a bfloat16 to float32 and back, which changes the bits of a NaN.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.block_floats import decode, in_blocks, integers, steps_of
from cce_kernels.call import Call
from cce_kernels.engines.engine import Step
from cce_kernels.gradients import Left, over_groups


def sum_dc(
    step: Step, call: Call, _, dc: jax.Array, steps: jax.Array | None, left: Left, factor: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """engine.Launched.sum_dc. step.tiles: how many columns of D share a step."""
    block, groups, head, e, unit = step.tiles, step.groups, call.head, left.e, left.unit
    axis, width, dtype, wide = head.vocab_axis, e.shape[1], dc.dtype, jnp.promote_types(e.dtype, jnp.float32)
    blocks_of_d = -(-width // block)

    def part(window) -> jax.Array:
        """The group's part of the sum, (V_g, D)."""
        left_g = lax.dynamic_slice_in_dim(left.left, window.start, groups.columns, 1)
        contract = (((0,), (0,)), ((), ()))
        found = lax.dot_general(left_g, e, contract, precision=head.precision, preferred_element_type=wide)
        return found if unit is None else found * unit

    def group(carry, window):
        dc, steps = carry
        total = part(window)
        own = (window.start + jnp.arange(groups.columns) >= window.owned)[:, None]
        old = lax.dynamic_slice_in_dim(dc, window.start, groups.columns, axis)
        old = old if axis == 0 else old.T
        if steps is None:
            total = old + total
            new = (total if factor is None else total * factor).astype(dc.dtype)
        else:
            of_group = lax.dynamic_slice_in_dim(steps, window.start, groups.columns, 1)
            size = of_group[:blocks_of_d].T
            total = in_blocks(total, block) + decode(in_blocks(old, block), size[:, :, None])
            if factor is None:
                size = jnp.where(own, steps_of(total), size)
                total = integers(total, size)
                of_group = lax.dynamic_update_slice_in_dim(of_group, size.T, 0, 0)
                steps = lax.dynamic_update_slice_in_dim(steps, of_group, window.start, 1)
            else:
                total = lax.bitcast_convert_type((total * factor).astype(dtype), jnp.int16)
            new = total.reshape(groups.columns, -1)[:, :width]
        new = jnp.where(own, new, old)  # the other columns are the neighbour's
        new, dc = lax.optimization_barrier((new, dc))  # so that nothing reads dc while the group is written in place
        return lax.dynamic_update_slice_in_dim(dc, new if axis == 0 else new.T, window.start, axis), steps

    if steps is None and groups.count == 1:  # one matmul, which adds to dc in place
        total = part(groups.window(0))
        total = dc + (total if axis == 0 else total.T)
        return (total if factor is None else total * factor).astype(dc.dtype), None
    if steps is None:
        return over_groups(group, (dc, steps), groups)
    bits, steps = over_groups(group, (lax.bitcast_convert_type(dc, jnp.int16), steps), groups)
    return lax.bitcast_convert_type(bits, dtype), steps
