"""The matmuls of the gradient on Hopper GPUs.

    de           dz·c_g                  added to de, float32; or written once, for all columns
    saved_de     r·(P·c)                 written once, from saved exponentials (cce_kernels/exponentials.py)
    dc           dzᵀ·e                   written once, for a group of columns; or added to dc, float32, for all columns
                 Pᵀ·(r·e)                or this, for all columns

    de_of_runs   P·c                     pieces of its sums, over the kept steps alone (cce_kernels/block_sparse.py)

Read: left once per 256 columns and right once per 256 rows, from L2 where programs that run at the same time share
them. Never made: a copy of c_g, dc_g or any other part of an array. The memory system adds to de, each element once a
launch, so that the order of the sum is fixed. Each matmul stops at the last kept token: what is written once has any
numbers in later rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.block_sparse import DE_BLOCK, Runs
from cce_kernels.engines.engine import Multiplying, Problem, Step
from cce_kernels.engines.hopper.every_tile import Extent, every_tile, live_pairs, padded
from cce_kernels.engines.hopper.matmul import Multiply, Origin, Sum
from cce_kernels.engines.hopper.registers import BLOCK, along_rows, parts_of, quotient, remainder, vector_of
from cce_kernels.engines.hopper.tiles import DEPTH, PAIR_ROWS, units_of
from cce_kernels.engines.order import cdiv
from cce_kernels.gradients import Products

assert DE_BLOCK == (BLOCK, DEPTH)


def de_of_saved(
    step: Step, problem: Problem, p: jax.Array, r: jax.Array, count: jax.Array, out: jax.Array
) -> jax.Array:
    """engine.Launched.de_of_saved. p: (rows, V); r: (rows,)."""
    vocabulary, width, axis = problem.call.vocabulary, out.shape[1], problem.head.vocab_axis

    def extent(others) -> Extent:
        _, count_ref = others
        return Extent(live_pairs(count_ref[0]), width, Sum(cdiv(vocabulary, DEPTH), Origin))

    def write(warpgroup, product, row, column, out_ref, others):
        r = vector_of(others[0], row)
        parts = (x * along_rows(r, x.shape) for _, x in parts_of(product(), out_ref.dtype))
        warpgroup.write((x.astype(out_ref.dtype) for x in parts), out_ref, row, column)

    operands, others, multiply = (p, problem.inputs.c), (padded(r), count), Multiply(step.tiles, right_axis=axis)
    return every_tile(operands, others, out, multiply, extent, write, name="cce_saved_de", gpu=problem.gpu)


class ExtentOfRuns(NamedTuple):
    """As many runs as there are units for each tile of columns; a unit computes the pieces of one run for one tile.

    If there are more tiles of columns than units, there is one run.
    """

    runs: int
    of_run: Any  # ref: Runs.of_run
    width: int
    sum: Sum

    def of_unit(self, unit, units: int, columns: int) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
        column_tiles = -(-self.width // columns)
        run = jnp.minimum(quotient(unit, column_tiles), self.runs - 1)
        first, pieces = self.of_run[run, 0], self.of_run[run, 1]
        times = quotient(self.runs * column_tiles - unit + (units - 1), units)

        def at(n):
            turn = quotient(n, jnp.maximum(pieces, 1))
            return first + (n - turn * pieces), remainder(unit + turn * units, column_tiles)

        return times * pieces, at


def de_of_runs(step: Multiplying, problem: Problem, p: jax.Array, runs: Runs) -> jax.Array:
    """engine.Launched.de_of_runs. p: (rows, V)."""
    (number, _), width, axis = runs.of_run.shape, problem.call.width, problem.head.vocab_axis
    assert number == 1 or number * -(-width // step.de.of_pair[1]) <= units_of(problem.gpu)

    def extent(runs) -> ExtentOfRuns:
        def origin(row, column) -> Origin:
            piece = quotient(row, BLOCK)
            block, first = runs.block[piece], runs.first[piece]
            return Origin(block * BLOCK, column, listed=lambda k: runs.steps[block, first + k])

        of_piece = Sum(lambda row, column: runs.count[quotient(row, BLOCK)], origin)
        return ExtentOfRuns(number, runs.of_run, width, of_piece)

    def write(warpgroup, product, row, column, out_ref, _):
        warpgroup.write((x for _, x in parts_of(product(), out_ref.dtype)), out_ref, row, column)

    out = jax.ShapeDtypeStruct((len(runs.block) * BLOCK, width), jnp.float32)
    operands, multiply = (p, problem.inputs.c), Multiply(step.de, right_axis=axis)
    return every_tile(operands, runs, out, multiply, extent, write, name="cce_de", gpu=problem.gpu)


def products(
    step: Multiplying, problem: Problem, unit: jax.Array | None, count: jax.Array, adding: bool = False
) -> Products:
    """engine.Launched.products. adding: put_dc adds to dc, which is float32."""
    (e, c, *_), groups, splits = problem.inputs, step.groups, step.splits
    (tokens, width), vocabulary, axis = e.shape, problem.call.vocabulary, problem.head.vocab_axis
    run = partial(every_tile, gpu=problem.gpu)

    def start_of(number_ref):
        return groups.window(number_ref[0]).start

    def add_de(de, dz, window):
        adds = de is not None
        # A partial sum's last tile may have rows of the next one.
        if not adds and splits > 1 and tokens % PAIR_ROWS:
            de, adds = jnp.zeros((splits * tokens, width), jnp.float32), True
        elif not adds:
            de = lax.empty((splits * tokens, width), jnp.float32)

        def extent(others) -> Extent:
            count_ref, number_ref = others
            start = start_of(number_ref)
            left = jnp.minimum(dz.shape[1], vocabulary - start)  # the group's columns that are in the vocabulary
            steps, live = quotient(left + (DEPTH * splits - 1), DEPTH * splits), live_pairs(count_ref[0])

            def origin(row, column) -> Origin:
                inner = quotient(row, live * PAIR_ROWS) * steps * DEPTH
                return Origin(remainder(row, live * PAIR_ROWS), column, inner, start + inner)

            return Extent(live * splits, width, Sum(steps, origin, None if splits == 1 else left))

        def write(warpgroup, product, row, column, de_ref, others):
            live = live_pairs(others[0][0]) * PAIR_ROWS
            below = quotient(row, live) * tokens + remainder(row, live)
            warpgroup.write((x for _, x in parts_of(product(), de_ref.dtype)), de_ref, below, column, add=adds)

        multiply = Multiply(step.de, right_axis=axis)
        others = count, window.number.reshape(1)
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
