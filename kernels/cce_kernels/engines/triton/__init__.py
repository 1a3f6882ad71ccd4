"""The triton engine: Pallas kernels for NVIDIA GPUs of compute capability 8.0 and up, and for Pallas' interpreter.

The modules that import Triton are imported at the first launch: a jaxlib may lack Triton (compat.has_triton).
"""

from dataclasses import replace
from typing import ClassVar

from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Costs, Engine, Multiplying, Step
from cce_kernels.engines.order import cdiv, vocabulary_splits
from cce_kernels.engines.triton import tiles
from cce_kernels.engines.xla import XLA
from cce_kernels.request import Request
from cce_kernels.windows import Windows, vocabulary_windows

COSTS = Costs(1.08, 1.15, byte=170.0, logit=150.0, launches=2.5e10, multiple=256)  # measured on an H200, in 16 bits


class Triton(Engine):
    name = "triton"
    finds_target, stops, multiplies_fastest = False, True, False
    launches: ClassVar = {
        **{"target": "target", "form_dz": "dz", "products": "products", "sum_dc": "summed", "thresholds": "thresholds"},
        **dict.fromkeys(("sums", "rescued", "saved_again"), "statistics"),
        **dict.fromkeys(("form_dz_of_saved", "dz_in_place", "mass_and_moment", "saved_targets"), "saved"),
        **dict.fromkeys(("whole_logits", "divergence_pass"), "divergence"),
    }

    def refuses(self, request: Request, gpu: Gpu | None) -> str:
        """All types except float64."""
        if gpu is None:
            return "it needs an NVIDIA GPU of compute capability 8.0 or more"
        if gpu.lacks:
            return gpu.lacks
        return "" if request.itemsize <= 4 else "it takes no float64"

    def step(self, method: str, request: Request, gpu: Gpu, rows: int = 0, block: Block | None = None) -> Step:
        found = tiles.tiles_for(request.itemsize, request.width, gpu)
        if method == "target":
            return Step(self, tiles.TARGET)
        if method in ("form_dz_of_saved", "dz_in_place"):
            tile = tiles.SAVED_DZ if method == "form_dz_of_saved" else tiles.DZ_IN_PLACE
            return Step(self, tiles.other_tiles(tile, gpu.interpreted))
        if method == "whole_logits":
            return Step(self, tiles.other_tiles(tiles.NORMS, gpu.interpreted), 2 if gpu.interpreted else 4)
        if method == "divergence_pass":
            return Step(self, tiles.other_tiles(tiles.DIVERGENCE, gpu.interpreted))
        if method == "sum_dc":
            return Step(self, tiles.sum_dc_tiles(request, gpu))
        if method == "form_dz":
            return Step(self, found.dz)
        if method == "rescued" and block is not None:
            return Step(
                self, replace(found.statistics, rows=block.rows or found.statistics.rows, columns=block.columns)
            )
        if method != "sums":
            return Step(self)
        blocks = cdiv(rows, found.statistics.rows), cdiv(request.vocabulary, found.statistics.columns)
        splits = vocabulary_splits(*blocks, rows, gpu.multiprocessors)
        return Step(self, found.statistics, min(splits, 2) if gpu.interpreted else splits)

    def costs(self, request: Request, gpu: Gpu | None) -> Costs:
        return COSTS if request.itemsize == 2 else XLA.costs(request, gpu)

    def block(self, sums: Step) -> Block:
        return Block(sums.tiles.rows, sums.tiles.columns)

    def windows(self, request: Request, tokens: int, room: int, column: int, gpu: Gpu) -> Windows:
        tile = tiles.tiles_for(request.itemsize, request.width, gpu).dz

        def waves(_: Windows, columns: int) -> float:
            """The cost of a window in tiles: one for each wave of the dz kernel's programs, and WINDOW_COST."""
            return cdiv(cdiv(tokens, tile.rows) * cdiv(columns, tile.columns), gpu.multiprocessors) + tiles.WINDOW_COST

        windows = vocabulary_windows(request.vocabulary, room, column, waves)
        return replace(windows, columns=min(windows.columns, 3 * tile.columns)) if gpu.interpreted else windows

    def multiplying(self, request: Request, tokens: int, windows: Windows, gpu: Gpu) -> Multiplying:
        found = tiles.tiles_for(request.itemsize, request.width, gpu)
        splits = tiles.splits_of(tokens, request.width, found.de, gpu.multiprocessors)
        return Multiplying(self, found.de, found.dc, windows, min(splits, cdiv(windows.columns, found.de.depth)))

    def de_of_chunk(self, request: Request, tokens: int, gpu: Gpu) -> Multiplying:
        tile = tiles.tiles_for(request.itemsize, request.width, gpu).de
        splits = tiles.splits_of(tokens, request.width, tile, gpu.multiprocessors)
        return Multiplying(self, tile, None, Windows.whole(request.vocabulary, beyond=True), splits)


TRITON = Triton()
