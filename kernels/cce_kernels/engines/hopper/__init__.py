"""The hopper engine: Pallas kernels lowered through Mosaic GPU, for Hopper GPUs (compute capability 9.0) and JAX 0.11.

The modules that import Mosaic GPU take a quarter of a second, so they are imported at the first launch.
"""

from dataclasses import replace
from functools import partial

from cce_kernels.block_floats import block_of
from cce_kernels.call import Call
from cce_kernels.compat import MOSAIC, VERSION
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Engine, Multiplying, Step
from cce_kernels.engines.hopper import tiles
from cce_kernels.engines.hopper.tiles import units_of
from cce_kernels.engines.order import cdiv, vocabulary_splits
from cce_kernels.tokens import MANY
from cce_kernels.windows import Groups, vocabulary_groups

BLOCK = tiles.PAIR_ROWS // 2  # tokens of a program
WHOLE = "whole_logits", "logits_and_maxima"


class Hopper(Engine):
    name = "hopper"
    finds_target, stops, multiplies_fastest = False, True, True
    launches = "sums", "form_dz", "products", "de_of_saved", "sum_dc", "whole_logits", "logits_and_maxima"
    block_sparse = whole_stops = True
    depth = tiles.DEPTH

    def refuses(self, call: Call, gpu: Gpu | None) -> str:
        """Calls on compute capability 9.0 with 16-bit types, no bias, no weighted sum, and sizes that TMA can copy.

        TMA copies tiles of TMA_ROWS × TMA_COLUMNS. D and V must be larger than one: if an array is exactly as wide, a
        write beyond its edge lands in the array (seen on an H200).
        """
        if gpu is None or gpu.compute_capability != "9.0":
            return "it needs a GPU of compute capability 9.0 (H100, H200)"
        if gpu.lacks:
            return gpu.lacks
        if not MOSAIC:
            return f"it needs JAX 0.11, and so Python 3.12 or newer; this is JAX {VERSION}"
        if call.itemsize != 2:
            return f"it takes bfloat16 and float16, not {call.dtype}"
        if call.with_bias or call.with_sum:
            return f"it takes no {'bias' if call.with_bias else 'label smoothing'}"
        of_v = tiles.TMA_ROWS if call.head.vocab_axis == 0 else tiles.TMA_COLUMNS
        sizes = ("width D", call.width, tiles.TMA_COLUMNS), ("vocabulary V", call.vocabulary, of_v)
        for name, size, multiple in sizes:
            if size % multiple or size <= tiles.TMA_COLUMNS:
                return f"the {name}, {size}, must be a multiple of {multiple} and larger than {tiles.TMA_COLUMNS}"
        if call.tokens < MANY:
            return f"it takes {MANY} tokens or more"
        return "" if call.tokens % tiles.TMA_ROWS == 0 else f"it takes a multiple of {tiles.TMA_ROWS} tokens"

    def offers(self, method: str, call: Call) -> bool:
        """Whole logits are float32, and TMA writes them: V must fit, even if c of 16 bits has V as its rows."""
        fits = method not in WHOLE or call.vocabulary % tiles.TMA_FLOATS == 0
        return fits and super().offers(method, call)

    def step(self, method: str, call: Call, gpu: Gpu, rows: int = 0, block: Block | None = None) -> Step:
        units = units_of(gpu)
        if method == "sum_dc" and call.dc_itemsize == 2:
            return Step(self, tiles.SUMMED[block_of(call.width)])
        if method == "sum_dc":
            sizes = tiles.dc_sizes(call.vocabulary, call.width, call.head.vocab_axis)
            return Step(self, tiles.cheapest(tiles.DC, *sizes, units))
        if method == "de_of_saved":
            return Step(self, tiles.cheapest(tiles.SAVED_DE, cdiv(rows, tiles.PAIR_ROWS), call.width, units))
        if method not in ("sums", *WHOLE):
            return Step(self, tiles.LOGITS)
        blocks = cdiv(rows, BLOCK), cdiv(call.vocabulary, tiles.LOGITS.columns)
        splits = vocabulary_splits(*blocks, rows, gpu.multiprocessors)
        return Step(self, tiles.LOGITS, min(splits, 2) if gpu.interpreted else splits)

    def block(self, sums: Step) -> Block:
        return Block(BLOCK, sums.tiles.columns)

    def groups(self, call: Call, tokens: int, room: int, column: int, gpu: Gpu) -> Groups:
        cost = partial(tiles.group_cost, tokens, call.width, call.head.vocab_axis, units_of(gpu))
        columns = cdiv(call.vocabulary, tiles.DEPTH) * tiles.DEPTH  # dz is whole tiles of TMA
        groups = vocabulary_groups(columns, room, column, cost, tiles.PAIR_ROWS, beyond=True)
        return replace(groups, columns=min(groups.columns, 2 * tiles.PAIR_ROWS)) if gpu.interpreted else groups

    def multiplying(self, call: Call, tokens: int, groups: Groups, gpu: Gpu) -> Multiplying:
        """The cheapest tiles; for dc the cheapest of the tiles that write no column of another group."""
        axis, units = call.head.vocab_axis, units_of(gpu)
        de = tiles.cheapest(tiles.DE, cdiv(tokens, tiles.PAIR_ROWS), call.width, units)
        sizes = tiles.dc_sizes(groups.columns, call.width, axis)
        dc = tiles.cheapest(tiles.dc_tiles(groups.columns, groups.count, axis), *sizes, units)
        return Multiplying(self, de, dc, groups)

    def de_of_chunk(self, call: Call, tokens: int, gpu: Gpu) -> Multiplying:
        of = tiles.SPARSE_DE if call.gradient_tolerance else tiles.DE
        tile, splits = tiles.de_of_chunk(of, tokens, call.width, call.vocabulary, units_of(gpu))
        return Multiplying(self, tile, None, Groups.whole(call.vocabulary, beyond=True), splits)


HOPPER = Hopper()
