"""Tiles of the kernels for Hopper GPUs. They were measured on an H200; `python -m bench.tune` measures them again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cce_kernels.device import Gpu
from cce_kernels.windows import Windows

PAIR_ROWS = 256  # rows of the tile of a pair of programs, if these are not side by side
BLOCK = PAIR_ROWS // 2  # rows of a program's tile
DEPTH = 64  # elements of the inner axis in one step of a tile's sum
TMA_ROWS, TMA_COLUMNS = 8, 64  # TMA copies arrays of 16-bit elements that are multiples of this tile
TMA_FLOATS = 32  # float32 arrays need a multiple of so many columns


def units_of(gpu: Gpu) -> int:
    """The number of units of the GPU. A unit is a pair of multiprocessors, which runs a pair of programs."""
    return gpu.multiprocessors // 2


@dataclass(frozen=True)
class PairTiles:
    """The tile of a pair of programs. Each program's is BLOCK × columns.

    The two are one below the other; or, if `across`, side by side.
    """

    columns: int
    stages: int  # steps that are copied ahead
    slots: int  # buffers through which a warpgroup writes its tile, 64 rows of 128 bytes each
    lead: int = 0  # steps that the first warpgroup computes before the second begins
    across: bool = False

    @property
    def of_pair(self) -> tuple[int, int]:
        """The rows and columns of the pair's tile."""
        return (BLOCK, 2 * self.columns) if self.across else (PAIR_ROWS, self.columns)

    def waves(self, pairs: int, width: int, units: int) -> int:
        """The most tiles of an array of `pairs` tiles' height, (…, width), that one unit computes."""
        return -(-pairs * -(-width // self.of_pair[1]) // units)

    def cost(self, pairs: int, width: int, units: int) -> float:
        """The time of one step of all tiles, relative to one step of one wave of tiles of 256 columns."""
        return self.waves(pairs, width, units) * (self.columns + 16) / 272


LOGITS = PairTiles(256, stages=4, slots=2, lead=2)  # the tile of statistics and dz
# With 256, 192 and 128 columns the kernels take 224, 208 and 192 KiB of shared memory.
DE = (PairTiles(256, stages=4, slots=2), PairTiles(192, stages=4, slots=3), PairTiles(128, stages=5, slots=2))
SPARSE_DE = tuple(replace(x, across=True) for x in DE)
DC = (PairTiles(256, 4, 2, lead=2), PairTiles(192, 4, 3, lead=2), PairTiles(128, 5, 2, lead=2))
# By the columns of a tile; the slots hold a whole tile, which is read before it is written.
SUMMED = {256: PairTiles(256, 3, 4, lead=2), 192: PairTiles(192, 4, 3, lead=2), 128: PairTiles(128, 5, 2, lead=2)}
SPLITS, SPLIT_PART = 12, 16  # the most partial sums of de; all take at most 2 / 16 of a chunk's exponentials
SPLIT_COST = 0.003  # of one more partial sum, relative to a wave of tiles
LOGITS_EPILOGUE, WINDOW = 3.0, 40.0  # in steps of a matmul: dz's epilogue of a tile, and the fixed cost of a window


def cheapest(tiles: Sequence[PairTiles], pairs: int, width: int, units: int) -> PairTiles:
    return min(tiles, key=lambda x: x.cost(pairs, width, units))


class Sizes(NamedTuple):
    """The size of a window's part of dc, in the layout of c: pairs of row blocks, and columns."""

    pairs: int
    columns: int


def dc_sizes(columns: int, width: int, vocab_axis: int) -> Sizes:
    rows, across = (columns, width) if vocab_axis == 0 else (width, columns)
    return Sizes(-(-rows // PAIR_ROWS), across)


def dc_tiles(columns: int, windows: int, vocab_axis: int) -> Sequence[PairTiles]:
    """The tiles that may write a window's part of dc, where the vocabulary has `windows` windows of `columns` columns.

    A kernel writes whole tiles. With vocab_axis 1 the window's columns are columns of dc: a tile whose width does not
    divide them would write zeros into the next window's columns. A single window may have any tile, as TMA writes
    nothing beyond dc.
    """
    return DC if vocab_axis == 0 or windows == 1 else [x for x in DC if columns % x.columns == 0]


def window_cost(tokens: int, width: int, vocab_axis: int, units: int, windows: Windows, columns: int) -> float:
    """The time of a window of so many columns, in steps of a unit."""
    pairs = -(-tokens // PAIR_ROWS)
    dz = LOGITS.waves(pairs, columns, units) * (width / DEPTH + LOGITS_EPILOGUE)
    de = cheapest(DE, pairs, width, units).cost(pairs, width, units) * columns / DEPTH
    sizes, tiles = dc_sizes(columns, width, vocab_axis), dc_tiles(windows.columns, windows.count, vocab_axis)
    dc = cheapest(tiles, *sizes, units).cost(*sizes, units) * tokens / DEPTH
    return dz + de + dc + WINDOW


def splits_of(tile: PairTiles, tokens: int, width: int, columns: int, units: int) -> int:
    """The number of partial sums of de over so many columns, where the tiles of so few tokens leave units idle."""
    rows, across = tile.of_pair
    return max(1, min(SPLITS, units // (-(-tokens // rows) * -(-width // across)), -(-columns // DEPTH)))


def de_of_chunk(
    tiles: Sequence[PairTiles], tokens: int, width: int, vocabulary: int, units: int
) -> tuple[PairTiles, int]:
    """The tile, and the number of partial sums of de, with which the programs for a chunk fill the GPU best."""
    most = max(1, min(SPLITS, vocabulary // (SPLIT_PART * width)))

    def cost(choice: tuple[PairTiles, int]) -> float:
        tile, splits = choice
        pairs = -(-tokens // tile.of_pair[0])
        return tile.cost(pairs * splits, width, units) / (splits * (PAIR_ROWS // tile.of_pair[0])) + SPLIT_COST * splits

    return min([(tile, splits) for tile in tiles for splits in range(1, most + 1)], key=cost)
