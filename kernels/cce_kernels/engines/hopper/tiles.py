"""Tiles of the kernels for Hopper GPUs, measured on an H200: `python -m bench.tune` measures them again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cce_kernels.windows import Groups

PAIR_ROWS = 256  # rows of a pair of programs' tile
DEPTH = 64  # a step of its sum
TMA_ROWS, TMA_COLUMNS = 8, 64  # the tiles of 16-bit elements that arrays must consist of to be copied by TMA


@dataclass(frozen=True)
class PairTiles:
    """PAIR_ROWS × columns for a pair of programs."""

    columns: int
    stages: int  # steps that are copied ahead
    slots: int  # a warpgroup's buffers for what it writes, 64 rows of 128 bytes each
    lead: int = 0  # steps that the first warpgroup computes before the second begins

    def waves(self, pairs: int, width: int, units: int) -> int:
        """How many tiles one of so many pairs of multiprocessors computes at most, of pairs of row blocks × width."""
        return -(-pairs * -(-width // self.columns) // units)

    def cost(self, pairs: int, width: int, units: int) -> float:
        """What one step of all tiles takes, relative to that of one wave of tiles of 256 columns."""
        return self.waves(pairs, width, units) * (self.columns + 16) / 272


LOGITS = PairTiles(256, stages=4, slots=2, lead=2)  # of statistics and dz
# All of them fill shared memory, but for 10 KiB at least.
DE = (PairTiles(256, stages=4, slots=2), PairTiles(192, stages=4, slots=3), PairTiles(128, stages=5, slots=2))
SAVED_DE = (PairTiles(256, 4, 2, lead=2), PairTiles(192, 4, 3, lead=2), PairTiles(128, 5, 2, lead=2))
DC = SAVED_DE
LOGITS_EPILOGUE, GROUP = 3.0, 40.0  # what a tile of dz, and a group besides, cost, in steps of a matmul


def cheapest(tiles: Sequence[PairTiles], pairs: int, width: int, units: int) -> PairTiles:
    return min(tiles, key=lambda x: x.cost(pairs, width, units))


class Sizes(NamedTuple):
    """Of dc of a group, in the layout of c: pairs of row blocks, and columns."""

    pairs: int
    columns: int


def dc_sizes(columns: int, width: int, vocab_axis: int) -> Sizes:
    rows, across = (columns, width) if vocab_axis == 0 else (width, columns)
    return Sizes(-(-rows // PAIR_ROWS), across)


def dc_tiles(columns: int, groups: int, vocab_axis: int) -> Sequence[PairTiles]:
    """The tiles that may write dc of one of so many groups of columns.

    A tile is written whole. Where the group's columns are dc's, a tile that did not divide them would write zeros over
    columns of the next group. Beyond the array nothing is written, so that one group may have any.
    """
    return DC if vocab_axis == 0 or groups == 1 else [x for x in DC if columns % x.columns == 0]


def group_cost(tokens: int, of_dc: int, width: int, vocab_axis: int, units: int, groups: Groups, columns: int) -> float:
    """What a group of so many columns costs, in steps of a pair of multiprocessors; of_dc: the tokens dc sums over."""
    pairs = -(-tokens // PAIR_ROWS)
    dz = LOGITS.waves(pairs, columns, units) * (width / DEPTH + LOGITS_EPILOGUE)
    de = cheapest(DE, pairs, width, units).cost(pairs, width, units) * columns / DEPTH
    sizes, tiles = dc_sizes(columns, width, vocab_axis), dc_tiles(groups.columns, groups.count, vocab_axis)
    dc = cheapest(tiles, *sizes, units).cost(*sizes, units) * of_dc / DEPTH
    return dz + de + dc + GROUP


def splits_of(tokens: int, width: int, units: int) -> int:
    """As how many parts de of so few tokens is to be summed that they fill the GPU."""
    return max(1, units // (-(-tokens // PAIR_ROWS) * -(-width // PAIR_ROWS)))
