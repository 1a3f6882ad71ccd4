"""The triton engine: Pallas kernels for NVIDIA GPUs of compute capability 8.0 and up, and for Pallas' interpreter.

The modules that import Triton are imported at the first launch: a jaxlib may lack Triton (device.has_triton).
"""

from dataclasses import replace

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine, Multiplying
from cce_kernels.engines.order import cdiv, vocabulary_splits
from cce_kernels.engines.triton import tiles
from cce_kernels.windows import Groups, vocabulary_groups


class Triton(Engine):
    name = "triton"
    finds_target, stops, in_place, multiplies_fastest = False, True, True, False

    def refuses(self, call: Call, gpu: Gpu | None) -> str:
        """All types except float64."""
        if gpu is None or not gpu.supported:
            return "it needs an NVIDIA GPU of compute capability 8.0 or more"
        return "" if call.itemsize <= 4 else "it takes no float64"

    def tile(self, role: str, call: Call, gpu: Gpu, tokens: int = 0) -> tiles.TileConfig:
        if role in ("target", "saved_dz"):
            return tiles.other_tiles(tiles.SAVED_DZ, gpu.interpreted) if role == "saved_dz" else tiles.TARGET
        if role == "sum_dc":
            return tiles.sum_dc_tiles(call.itemsize, call.width, call.of_dc, gpu)
        found = tiles.tiles_for(call.itemsize, call.width, gpu)
        return found.statistics if role == "sums" else found.dz

    def splits(self, call: Call, rows: int, gpu: Gpu) -> int:
        tile = self.tile("sums", call, gpu)
        blocks = cdiv(rows, tile.rows), cdiv(call.vocabulary, tile.columns)
        splits = vocabulary_splits(*blocks, rows, gpu.multiprocessors)
        return min(splits, 2) if gpu.interpreted else splits

    def blocks(self, tiles) -> tuple[int, int]:
        return tiles.rows, tiles.columns

    def dz_bytes(self, call: Call, tokens: int, gpu: Gpu) -> int:
        return call.itemsize * tokens

    def groups(self, call: Call, tokens: int, room: int, column: int, gpu: Gpu) -> Groups:
        tile = self.tile("form_dz", call, gpu)

        def waves(_: Groups, columns: int) -> float:
            """The cost of a group in tiles: one for each wave of the dz kernel's programs, and GROUP_COST."""
            return cdiv(cdiv(tokens, tile.rows) * cdiv(columns, tile.columns), gpu.multiprocessors) + tiles.GROUP_COST

        groups = vocabulary_groups(call.vocabulary, room, column, waves)
        return replace(groups, columns=min(groups.columns, 3 * tile.columns)) if gpu.interpreted else groups

    def multiplying(self, call: Call, tokens: int, groups: Groups, gpu: Gpu) -> Multiplying:
        found = tiles.tiles_for(call.itemsize, call.width, gpu)
        return Multiplying(self, found.de, found.dc)

    def de_of_chunk(self, call: Call, tokens: int, gpu: Gpu) -> Multiplying:
        tile = tiles.tiles_for(call.itemsize, call.width, gpu).de
        return Multiplying(self, tile, None, tiles.splits_of(tokens, call.width, tile, gpu.multiprocessors))

    def target(self, inputs, order, *, head, tiles, gpu):
        from cce_kernels.engines.triton import target

        return target.target(inputs, order, head=head, tiles=tiles, interpret=gpu.interpreted)

    def sums(self, inputs, at, reference, save, *, head, with_sum, tiles, splits, gpu):
        from cce_kernels.engines.triton import statistics

        return statistics.sums(inputs, at, reference, save, head=head, with_sum=with_sum, tiles=tiles,
                               splits=splits, interpret=gpu.interpreted)  # fmt: skip

    def again(self, inputs, at, reference, before, *, head, tiles, gpu):
        from cce_kernels.engines.triton import statistics

        return statistics.again(inputs, at, reference, before, head=head, tiles=tiles, interpret=gpu.interpreted)

    def replaced(self, inputs, lse, by_lse, saved, *, head, tiles, splits, gpu):
        from cce_kernels.engines.triton import statistics

        return statistics.replaced(inputs, lse, by_lse, saved, head=head, tiles=tiles, splits=splits,
                                   interpret=gpu.interpreted)  # fmt: skip

    def form_dz(self, inputs, lse, cotangents, count, *, head, groups, wanted, tiles, gpu):
        from cce_kernels.engines.triton import dz

        return dz.former(inputs, lse, cotangents, count, head=head, groups=groups, with_sums=wanted.bias, tiles=tiles,
                         interpret=gpu.interpreted)  # fmt: skip

    def form_dz_of_saved(self, saved, inputs, reference, lse, cotangents, *, head, groups, wanted, tiles, gpu):
        from cce_kernels.engines.triton import saved as exponentials

        return exponentials.former_of_saved(saved, inputs, reference, lse, cotangents, head=head, groups=groups,
                                     with_sums=wanted.bias, tiles=tiles, interpret=gpu.interpreted)  # fmt: skip

    def products(self, e, c, *, head, unit, count, how: Multiplying, groups, gpu):
        from cce_kernels.engines.triton import products

        return products.products(e, c, head=head, unit=unit, count=count, de=how.de, dc=how.dc, splits=how.splits,
                                 interpret=gpu.interpreted)  # fmt: skip

    def form_dz_in_place(self, saved, inputs, reference, lse, cotangents, *, head, vocabulary, tiles, gpu):
        from cce_kernels.engines.triton import saved as exponentials

        return exponentials.dz_in_place(saved, inputs, reference, lse, cotangents, head=head, vocabulary=vocabulary,
                                        tiles=tiles, interpret=gpu.interpreted)  # fmt: skip

    def sum_dc(self, dc, steps, left, e, unit, count, factor, *, head, tiles, gpu):
        from cce_kernels.engines.triton import summed

        assert unit is None
        return summed.sum_dc(dc, steps, left, e, count, factor, head=head, tiles=tiles, interpret=gpu.interpreted)

    def ready(self, saved, targets, at_target, clear, *, vocabulary, gpu):
        from cce_kernels.engines.triton import saved as exponentials

        filled = exponentials.with_targets(saved, targets, at_target, vocabulary=vocabulary, interpret=gpu.interpreted)
        return filled if clear is None else exponentials.cleared(filled, targets, clear, interpret=gpu.interpreted)

    def restored(self, x, kept, *, gpu):
        from cce_kernels.engines.triton import restored

        return restored.restored(x, kept, interpret=gpu.interpreted)


TRITON = Triton()
