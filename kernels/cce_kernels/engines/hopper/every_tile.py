"""What the kernels of dz, de and dc have in common: each writes every tile of a product once.

A pair is 256 rows (PAIR_ROWS), which a pair of programs computes: two row blocks, one a program. A unit is a pair of
multiprocessors.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels.device import Gpu
from cce_kernels.engines.hopper.matmul import Multiply, Sum, Work, launch, over_tiles
from cce_kernels.engines.hopper.registers import BLOCK, quotient
from cce_kernels.engines.hopper.tiles import PAIR_ROWS, units_of
from cce_kernels.engines.order import grouped_order

PAIR_GROUP = 8  # the most pairs of row blocks that are computed for all columns before the next pairs


def padded(x: jax.Array) -> jax.Array:
    """x, one number a token, with zeros up to a multiple of PAIR_ROWS: only TMA could load beyond the end of x."""
    return jnp.pad(x, (0, -x.size % PAIR_ROWS))


def live_pairs(count: jax.Array) -> jax.Array:
    """How many pairs of row blocks hold the first `count` tokens."""
    return quotient(count + (PAIR_ROWS - 1), PAIR_ROWS)


def live_blocks(count: jax.Array) -> jax.Array:
    """How many row blocks hold the first `count` tokens."""
    return quotient(count + (BLOCK - 1), BLOCK)


def spread(unit, units: int, pairs, column_tiles: int | jax.Array, group: int):
    """How many of the pairs · column_tiles tiles a unit computes, and a function: n -> (pair, column) of its n-th tile.

    Tiles that are computed at the same time are neighbours, whatever the number of pairs, which only the device knows.
    """
    tiles = quotient(pairs * column_tiles - unit + (units - 1), units)
    return tiles, lambda n: grouped_order(unit + n * units, pairs, column_tiles, group)


class Extent(NamedTuple):
    """The size of a product."""

    pairs: Any  # of row blocks
    columns: Any
    sum: Sum  # that makes up a tile
    group: int = PAIR_GROUP  # pairs that are computed for all columns before the next pairs
    pair_of: Callable[[Any], Any] | None = None  # k -> the k-th pair that is computed; None: all are

    def at(self, tile: tuple[Any, Any]) -> tuple[Any, Any]:
        pair, column = tile
        return (pair if self.pair_of is None else self.pair_of(pair)), column


def every_tile(
    operands: Any, others: Any, out: Any, multiply: Multiply, extent: Callable, write: Callable, *, name: str, gpu: Gpu
) -> Any:
    """Runs a kernel that writes each tile of left·right once. operands: left and right.

    others: a tree of arrays, which extent(others) -> Extent and write(...) get as refs.
    write(warpgroup, product, row, column, out, others): writes a warpgroup's tile, which begins at this row and column.
    product() computes the tile.
    """

    outs, units = out if isinstance(out, tuple) else (out,), units_of(gpu)
    tiles, (rows, columns) = multiply.tiles, multiply.tiles.of_pair

    def at_program(tile: tuple[Any, Any], program) -> tuple[Any, Any]:
        """The first row and column of a program's part of a pair's tile."""
        row, column = tile[0] * rows, tile[1] * columns
        return (row, column + program * tiles.columns) if tiles.across else (row + program * BLOCK, column)

    def kernel(others, out_ref, *more_refs):
        shape = extent(others)
        column_tiles = quotient(shape.columns + (columns - 1), columns)
        of_unit = partial(spread, units=units, pairs=shape.pairs, column_tiles=column_tiles, group=shape.group)

        def work(unit, program) -> Work:
            count, at = of_unit(unit)

            return Work(count, lambda n: at_program(shape.at(at(n)), program), shape.sum)

        def compute(warpgroup, work, product):
            def tile(at, first_step, steps):
                row, column = warpgroup.first_row(at[0]), at[1]
                write(warpgroup, partial(product, first_step, steps), row, column, out_ref, others, *more_refs)

            return over_tiles(work, tile)

        return work, compute

    multiply = replace(multiply, written=outs[0].dtype)
    written = launch(operands, others, outs, multiply, kernel, pairs=units, name=name, gpu=gpu)
    return tuple(written) if isinstance(out, tuple) else written[0]
