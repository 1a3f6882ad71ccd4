"""The size of the tile that one program of a Triton kernel computes, its number of warps, and its pipeline's stages.

TABLE has these by GPU. The rows for 16 bits and compute capability 9.0 were measured on an H200; `python -m bench.tune`
measures them again. The other rows have the largest tiles whose kernels fit shared memory and spill no registers;
tests/test_lowering.py checks that of every row. Nothing is tuned at run time.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cce_kernels.block_floats import block_of
from cce_kernels.device import Gpu
from cce_kernels.engines.order import cdiv
from cce_kernels.request import Request


@dataclass(frozen=True)
class TileConfig:
    """One program's tile: rows × columns, with a K loop in steps of depth. All are powers of two, as is warps."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "depth", "warps"):
            value = getattr(self, name)
            if value <= 0 or value & (value - 1):
                raise ValueError(f"TileConfig: {name}={value} must be a power of two")
        if min(self.columns, self.depth) < 16:
            raise ValueError(f"TileConfig: {self.columns=}, {self.depth=} must be at least 16")
        if self.stages < 1:
            raise ValueError(f"TileConfig: {self.stages=} must be positive")


class Tiles(NamedTuple):
    """The tiles of the kernels that multiply matrices, by role."""

    statistics: TileConfig  # also for its variants: rescue, scattered, replace
    dz: TileConfig
    de: TileConfig  # rows and columns are of de, depth is along the vocabulary
    dc: TileConfig  # rows and columns are of dc, depth is along the tokens
    sum_dc: TileConfig  # the same; its rows are vocabulary entries, its 256 columns share a step

    @classmethod
    def same(cls, tiles: TileConfig, sum_dc: TileConfig) -> "Tiles":
        return cls(tiles, tiles, tiles, tiles, sum_dc)


INTERPRETED = TileConfig(rows=16, columns=32, depth=16, warps=4, stages=1)
TARGET = TileConfig(rows=16, columns=16, depth=128, warps=4, stages=3)  # its columns are its rows' targets
SAVED_DZ = TileConfig(rows=16, columns=512, depth=16, warps=4, stages=1)
DZ_IN_PLACE = TileConfig(rows=2, columns=4096, depth=16, warps=8, stages=1)
SAVED_SUMS = replace(DZ_IN_PLACE, rows=1)
NORMS = TileConfig(rows=1, columns=1024, depth=16, warps=8, stages=1)
DIVERGENCE = replace(NORMS, columns=2048, warps=4)
SAVED_TARGETS = TileConfig(rows=16, columns=16, depth=16, warps=4, stages=1)
CLEARED = replace(SAVED_TARGETS, columns=1024)
THRESHOLDS = TileConfig(rows=512, columns=16, depth=16, warps=8, stages=1)  # rows: parts; columns: tokens

SQUARE = TileConfig(rows=128, columns=128, depth=64, warps=8, stages=3)
WIDE = replace(SQUARE, columns=256)
FLAT = replace(WIDE, rows=64)  # with 128 rows the old tile and the sum spill registers on 8.0, 8.9 and 12.0
FLOAT32 = replace(SQUARE, depth=32)

# The keys: compute capability, and bytes of an element.
TABLE = {
    ("8.0", 2): Tiles.same(SQUARE, FLAT),
    ("8.6", 2): Tiles.same(SQUARE, FLAT),
    ("8.9", 2): Tiles.same(SQUARE, FLAT),
    ("9.0", 2): Tiles.same(WIDE, WIDE),
    ("10.0", 2): Tiles.same(SQUARE, WIDE),  # with 256 columns the kernels of dz and de spill registers
    ("12.0", 2): Tiles.same(SQUARE, FLAT),
    **{(gpu, 4): Tiles.same(FLOAT32, FLOAT32) for gpu in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")},
}
WINDOW_COST = 4.0  # in tiles: a window reads and writes the sum for de, copies c_g and dc_g, and launches
NARROW = 1024  # D up to which dz takes SQUARE on 9.0: SQUARE was faster than WIDE at D = 768, and slower at 2304
NARROW_TABLE = {("9.0", 2): TABLE["9.0", 2]._replace(dz=SQUARE)}
SAFE = {
    2: Tiles.same(replace(SQUARE, depth=32), replace(FLAT, depth=32)),
    4: Tiles.same(replace(FLOAT32, rows=64, columns=64), replace(FLOAT32, rows=64, columns=64)),
}


def tiles_for(itemsize: int, width: int, gpu: Gpu) -> Tiles:
    """The tiles for this type and D on this GPU. For a GPU that TABLE lacks: tiles that fit every supported GPU."""
    if gpu.interpreted:
        return Tiles.same(INTERPRETED, replace(INTERPRETED, columns=256))
    key = gpu.compute_capability, itemsize
    narrow = NARROW_TABLE.get(key) if width <= NARROW else None
    return narrow or TABLE.get(key) or SAFE[itemsize]


def sum_dc_tiles(request: Request, gpu: Gpu) -> TileConfig:
    """The tiles of the kernel that sums dc over chunks.

    In 16 bits the columns of a tile share a step. Where they are not 256, they are 128: `steps_shape` has as much room
    for blocks of 128 columns as for blocks of 192.
    """
    found = tiles_for(request.itemsize, request.width, gpu)
    shares = request.dc_itemsize == 2 and block_of(request.width) == 256
    return found.sum_dc if shares else replace(found.dc, columns=128)


def other_tiles(tiles: TileConfig, interpret: bool) -> TileConfig:
    """The tiles of a kernel that multiplies no matrices: `tiles` on a GPU, tiny tiles in the interpreter."""
    return TileConfig(rows=min(tiles.rows, 32), columns=16, depth=16, warps=4, stages=1) if interpret else tiles


def blocks(shape: tuple[int, ...], tiles: TileConfig) -> int:
    """The number of tiles of an array."""
    return cdiv(shape[0], tiles.rows) * cdiv(shape[1], tiles.columns)


def splits_of(tokens: int, width: int, tiles: TileConfig, multiprocessors: int) -> int:
    """The number of partial sums of de with which the programs for so few tokens fill the GPU."""
    return max(1, multiprocessors // blocks((tokens, width), tiles))
