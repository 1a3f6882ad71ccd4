"""Tile configurations: how large a tile one program computes, with how many warps, and how much it copies ahead.

TABLE has those of Triton's kernels, by GPU; HOPPER those of the kernels for Hopper. HOPPER and the 16-bit rows for
compute capability 9.0 were measured on an H200: `python -m bench.tune` measures the rows again. The others are the
largest tiles whose kernels fit shared memory and spill no registers, which tests/test_lowering.py holds every row to.
Nothing is tuned at run time.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class TileConfig:
    """One program's tile of logits: rows × columns, its K loop in steps of depth; all powers of two."""

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
        if min(self.rows, self.columns, self.depth) < 16:
            raise ValueError(f"TileConfig: {self.rows=}, {self.columns=}, {self.depth=} must be at least 16")
        if self.stages < 1:
            raise ValueError(f"TileConfig: {self.stages=} must be positive")

    def shared_memory(self, itemsize: int) -> int:
        """Bytes of shared memory that the pipelined loads of e and c take."""
        return (self.rows + self.columns) * self.depth * itemsize * self.stages


class Tiles(NamedTuple):
    """The tiles of the kernels that multiply matrices, by role."""

    statistics: TileConfig  # and of the kernels that repeat part of it
    dz: TileConfig
    de: TileConfig  # its rows and columns are those of de, its depth is of the vocabulary
    dc: TileConfig  # those of dc, and of tokens

    @classmethod
    def same(cls, tiles: TileConfig) -> "Tiles":
        return cls(tiles, tiles, tiles, tiles)


PAIR_ROWS, DEPTH = 256, 64  # the rows of a pair of programs' tile; a step of its sum


@dataclass(frozen=True)
class PairTiles:
    """A tile of a kernel for Hopper (cce_kernels/hopper.py): PAIR_ROWS × columns for a pair of programs."""

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


class HopperTiles(NamedTuple):
    """By role. Of the tiles for products those are taken that cost least."""

    logits: PairTiles  # of statistics and dz
    de: tuple[PairTiles, ...]
    saved_de: tuple[PairTiles, ...]
    dc: tuple[PairTiles, ...]


INTERPRETER = TileConfig(rows=16, columns=32, depth=16, warps=4, stages=1)

SQUARE = TileConfig(rows=128, columns=128, depth=64, warps=8, stages=3)
WIDE = replace(SQUARE, columns=256)
FLOAT32 = replace(SQUARE, depth=32)

# By compute capability and the bytes of an element.
TABLE = {
    ("8.0", 2): Tiles.same(SQUARE),
    ("8.6", 2): Tiles.same(SQUARE),
    ("8.9", 2): Tiles.same(SQUARE),
    ("9.0", 2): Tiles.same(WIDE),
    ("10.0", 2): Tiles.same(SQUARE),  # with 256 columns dz and de spill
    ("12.0", 2): Tiles.same(SQUARE),
    **{(gpu, 4): Tiles.same(FLOAT32) for gpu in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")},
}
HOPPER = HopperTiles(
    logits=PairTiles(256, stages=4, slots=2, lead=2),
    de=(PairTiles(256, stages=4, slots=2), PairTiles(192, stages=4, slots=3), PairTiles(128, stages=5, slots=2)),
    saved_de=(PairTiles(256, 4, 2, lead=2), PairTiles(192, 4, 3, lead=2), PairTiles(128, 5, 2, lead=2)),
    dc=(PairTiles(256, 4, 2, lead=2), PairTiles(192, 4, 3, lead=2), PairTiles(128, 5, 2, lead=2)),
)  # all of them fill shared memory, but for 10 KiB at least
NARROW = 1024  # D: of the two tiles for dz on 9.0 the smaller was faster at 768 and slower at 2304
NARROW_TABLE = {("9.0", 2): TABLE["9.0", 2]._replace(dz=SQUARE)}
SAFE = {
    2: Tiles.same(TileConfig(rows=128, columns=128, depth=32, warps=8, stages=3)),
    4: Tiles.same(TileConfig(rows=64, columns=64, depth=32, warps=8, stages=3)),
}


@dataclass(frozen=True)
class Gpu:
    """What a launcher wants to know of the GPU it compiles for."""

    compute_capability: str
    multiprocessors: int

    @property
    def supported(self) -> bool:
        """Whether the kernels run on it: NVIDIA, compute capability 8.0 or more."""
        major = self.compute_capability.partition(".")[0]
        return major.isdigit() and int(major) >= 8


H200 = Gpu("9.0", 132)


def local_gpu() -> Gpu | None:
    """The first GPU of this process, or None; starts JAX's backend if nothing has yet."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices(backend="gpu")[0]
    return Gpu(str(getattr(device, "compute_capability", "0")), int(getattr(device, "core_count", 0) or 132))


def tile_config(dtype: jax.typing.DTypeLike, width: int, gpu: Gpu) -> Tiles:
    """The tiles for this type and D on this GPU; some that fit every supported GPU where it is not in the table."""
    key = gpu.compute_capability, jnp.dtype(dtype).itemsize
    narrow = NARROW_TABLE.get(key) if width <= NARROW else None
    return narrow or TABLE.get(key) or SAFE[key[1]]


def target_of(dtype: jax.typing.DTypeLike, width: int, interpret: bool) -> tuple[Gpu, Tiles]:
    """The GPU to launch for, an H200 where there is none, and its tiles; the interpreter's are tiny."""
    if interpret:
        return H200, Tiles.same(INTERPRETER)
    gpu = local_gpu() or H200
    return gpu, tile_config(dtype, width, gpu)
