"""The matmuls of the gradient on Hopper GPUs.

    de           dz·c_g                  added to de, float32; or written once, for all columns
    dc           dzᵀ·e                   written once, for a window of columns; or added to dc, float32, for all columns
                 Pᵀ·(r·e)                or this, for all columns

A block-sparse de sums over the listed steps of each row block alone (cce_kernels/block_sparse.py).
Read: left once per 256 columns and right once per 256 rows, from L2 where programs that run at the same time share
them. Never made: a copy of c_g, dc_g or any other part of an array. The memory system adds to de, each element once a
launch, so that the order of the sum is fixed. Each matmul stops at the last kept token: what is written once has any
numbers in later rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.block_sparse import DE_BLOCK, Listed
from cce_kernels.engines.engine import Multiplying, Problem, Products
from cce_kernels.engines.hopper.every_tile import Extent, every_tile, live_blocks, live_pairs
from cce_kernels.engines.hopper.matmul import Multiply, Origin, Sum
from cce_kernels.engines.hopper.registers import BLOCK, parts_of, quotient, remainder
from cce_kernels.engines.hopper.tiles import DEPTH, PAIR_ROWS

assert DE_BLOCK == (BLOCK, DEPTH)


def products(
    step: Multiplying,
    problem: Problem,
    unit: jax.Array | None,
    count: jax.Array,
    blocks: jax.Array | None = None,
    adding: bool = False,
) -> Products:
    """engine.Launched.products. adding: put_dc adds to dc, which is float32."""
    (e, c, *_), windows, splits = problem.inputs, step.windows, step.splits
    (tokens, width), vocabulary, axis = e.shape, problem.request.vocabulary, problem.head.vocab_axis
    run = partial(every_tile, gpu=problem.gpu)

    def start_of(number_ref):
        return windows.window(number_ref[0]).start

    def add_de(de, dz, window):
        adds = de is not None
        # A partial sum's last tile may have rows of the next one.
        if not adds and splits > 1 and tokens % step.de.of_pair[0]:
            de, adds = jnp.zeros((splits * tokens, width), jnp.float32), True
        elif not adds and problem.request.teacher_width:  # XLA may allocate an empty array while the logits exist
            zero, dz = lax.optimization_barrier((jnp.float32(0), dz))
            de = jnp.broadcast_to(zero, (splits * tokens, width))
        elif not adds:
            de = lax.empty((splits * tokens, width), jnp.float32)

        def sparse(others) -> Extent:
            count_ref, _, listed = others
            live = live_blocks(count_ref[0])

            def run_of(row):
                """The row block, and the first of its run of kept steps and of the next run."""
                block, split = remainder(quotient(row, BLOCK), live), quotient(row, live * BLOCK)
                steps = listed.count[block]
                return block, quotient(split * steps, splits), quotient((split + 1) * steps, splits)

            def steps(row, column):
                _, first, end = run_of(row)
                return end - first

            def origin(row, column) -> Origin:
                block, first, _ = run_of(row)
                return Origin(block * BLOCK, column, listed=lambda k: listed.steps[block, first + k])

            return Extent(live * splits, width, Sum(steps, origin))

        def extent(others) -> Extent:
            if blocks is not None:
                return sparse(others)
            count_ref, number_ref, _ = others
            start = start_of(number_ref)
            left = jnp.minimum(dz.shape[1], vocabulary - start)  # the window's columns that are in the vocabulary
            steps, live = quotient(left + (DEPTH * splits - 1), DEPTH * splits), live_pairs(count_ref[0])

            def origin(row, column) -> Origin:
                inner = quotient(row, live * PAIR_ROWS) * steps * DEPTH
                return Origin(remainder(row, live * PAIR_ROWS), column, inner, start + inner)

            return Extent(live * splits, width, Sum(steps, origin, None if splits == 1 else left))

        def write(warpgroup, product, row, column, de_ref, others):
            live = (live_pairs if blocks is None else live_blocks)(others[0][0]) * step.de.of_pair[0]
            below = quotient(row, live) * tokens + remainder(row, live)
            warpgroup.write((x for _, x in parts_of(product(), de_ref.dtype)), de_ref, below, column, add=adds)

        multiply = Multiply(step.de, right_axis=axis)
        others = count, window.number.reshape(1), None if blocks is None else Listed.of(blocks)
        return run((dz, c), others, de, multiply, extent, write, name="cce_de")

    def put_dc(dc, dz, window):
        def in_layout(of_vocabulary, of_width):
            """of_vocabulary and of_width in the order of dc's axes: first the one for dc's rows."""
            return (of_vocabulary, of_width) if axis == 0 else (of_width, of_vocabulary)

        def extent(others) -> Extent:
            count_ref, number_ref, _ = others
            start = start_of(number_ref)
            rows, columns = in_layout(jnp.minimum(dz.shape[1], vocabulary - start), width)
            tokens = Sum(quotient(count_ref[0] + (DEPTH - 1), DEPTH), Origin)
            pairs = quotient(rows + (PAIR_ROWS - 1), PAIR_ROWS)
            return Extent(jnp.where(count_ref[0] > 0, pairs, 0) if adding else pairs, columns, tokens)

        def write(warpgroup, product, row, column, dc_ref, others):
            _, number_ref, unit_ref = others
            parts = (x if unit_ref is None else x * unit_ref[0] for _, x in parts_of(product(), dc_ref.dtype))
            first_row, first_column = in_layout(start_of(number_ref), 0)
            parts = (x.astype(dc_ref.dtype) for x in parts)
            warpgroup.write(parts, dc_ref, first_row + row, first_column + column, add=adding)

        multiply = Multiply(step.dc, left_axis=0, right_axis=0)
        others = count, window.number.reshape(1), None if unit is None else unit.reshape(1)
        return run(in_layout(dz, e), others, dc, multiply, extent, write, name="cce_dc")

    return Products(add_de, put_dc)
