"""The triton engine: Pallas kernels for NVIDIA GPUs of compute capability 8.0 and up, and for Pallas' interpreter.

The modules that import Triton are imported at the first launch: a jaxlib may lack Triton (compat.has_triton).
"""

from dataclasses import replace

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Engine, Multiplying, Step
from cce_kernels.engines.order import cdiv, vocabulary_splits
from cce_kernels.engines.triton import tiles
from cce_kernels.windows import Groups, vocabulary_groups


class Triton(Engine):
    name = "triton"
    finds_target, stops, multiplies_fastest = False, True, False
    launches = (
        *("target", "sums", "recomputed", "saved_again", "saved_targets", "restored", "thresholds"),
        *("whole_logits", "divergence_pass"),
        *("form_dz", "form_dz_of_saved", "dz_in_place", "mass_and_moment", "products", "sum_dc"),
    )

    def refuses(self, call: Call, gpu: Gpu | None) -> str:
        """All types except float64."""
        if gpu is None:
            return "it needs an NVIDIA GPU of compute capability 8.0 or more"
        if gpu.lacks:
            return gpu.lacks
        return "" if call.itemsize <= 4 else "it takes no float64"

    def step(self, method: str, call: Call, gpu: Gpu, rows: int = 0, block: Block | None = None) -> Step:
        found = tiles.tiles_for(call.itemsize, call.width, gpu)
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
            return Step(self, tiles.sum_dc_tiles(call, gpu))
        if method == "form_dz":
            return Step(self, found.dz)
        if method == "recomputed" and block is not None:
            return Step(
                self, replace(found.statistics, rows=block.rows or found.statistics.rows, columns=block.columns)
            )
        if method != "sums":
            return Step(self)
        blocks = cdiv(rows, found.statistics.rows), cdiv(call.vocabulary, found.statistics.columns)
        splits = vocabulary_splits(*blocks, rows, gpu.multiprocessors)
        return Step(self, found.statistics, min(splits, 2) if gpu.interpreted else splits)

    def block(self, sums: Step) -> Block:
        return Block(sums.tiles.rows, sums.tiles.columns)

    def groups(self, call: Call, tokens: int, room: int, column: int, gpu: Gpu) -> Groups:
        tile = tiles.tiles_for(call.itemsize, call.width, gpu).dz

        def waves(_: Groups, columns: int) -> float:
            """The cost of a group in tiles: one for each wave of the dz kernel's programs, and GROUP_COST."""
            return cdiv(cdiv(tokens, tile.rows) * cdiv(columns, tile.columns), gpu.multiprocessors) + tiles.GROUP_COST

        groups = vocabulary_groups(call.vocabulary, room, column, waves)
        return replace(groups, columns=min(groups.columns, 3 * tile.columns)) if gpu.interpreted else groups

    def multiplying(self, call: Call, tokens: int, groups: Groups, gpu: Gpu) -> Multiplying:
        found = tiles.tiles_for(call.itemsize, call.width, gpu)
        return Multiplying(self, found.de, found.dc, groups)

    def de_of_chunk(self, call: Call, tokens: int, gpu: Gpu) -> Multiplying:
        tile = tiles.tiles_for(call.itemsize, call.width, gpu).de
        splits = tiles.splits_of(tokens, call.width, tile, gpu.multiprocessors)
        return Multiplying(self, tile, None, Groups.whole(call.vocabulary, beyond=True), splits)


TRITON = Triton()
