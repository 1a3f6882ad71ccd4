"""The hopper engine: Pallas kernels lowered through Mosaic GPU, for Hopper GPUs (compute capability 9.0) and JAX 0.11.

The modules that import Mosaic GPU take a quarter of a second, so they are imported at the first launch.
"""

from dataclasses import replace
from functools import partial
from typing import ClassVar

from cce_kernels.block_floats import block_of
from cce_kernels.compat import MOSAIC, VERSION
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Costs, Engine, Multiplying, Step
from cce_kernels.engines.hopper import tiles
from cce_kernels.engines.hopper.tiles import units_of
from cce_kernels.engines.order import cdiv, vocabulary_splits
from cce_kernels.request import Request
from cce_kernels.tokens import MANY
from cce_kernels.windows import Windows, vocabulary_windows

BLOCK = tiles.PAIR_ROWS // 2  # tokens of a program
COSTS = Costs(1.0, 1.0, byte=170.0, logit=150.0, launches=2.5e10, multiple=tiles.PAIR_ROWS)
WHOLE = "whole_logits", "logits_and_maxima"


class Hopper(Engine):
    name = "hopper"
    finds_target, stops, multiplies_fastest = False, True, True
    launches: ClassVar = {
        **{"sums": "statistics", "form_dz": "dz", "products": "products", "sum_dc": "summed"},
        **dict.fromkeys(WHOLE, "whole"),
    }
    block_sparse = whole_stops = True
    depth = tiles.DEPTH

    def refuses(self, request: Request, gpu: Gpu | None) -> str:
        """Calls on compute capability 9.0 with 16-bit types, no bias, and sizes that TMA can copy.

        TMA copies tiles of TMA_ROWS × TMA_COLUMNS. D and V must be larger than one: if an array is exactly as wide, a
        write beyond its edge lands in the array (seen on an H200).
        """
        if gpu is None or gpu.compute_capability != "9.0":
            return "it needs a GPU of compute capability 9.0 (H100, H200)"
        if gpu.lacks:
            return gpu.lacks
        if not MOSAIC:
            return f"it needs JAX 0.11, and so Python 3.12 or newer; this is JAX {VERSION}"
        if request.itemsize != 2:
            return f"it takes bfloat16 and float16, not {request.dtype}"
        if request.with_bias:
            return "it takes no bias"
        of_v = tiles.TMA_ROWS if request.head.vocab_axis == 0 else tiles.TMA_COLUMNS
        sizes = ("width D", request.width, tiles.TMA_COLUMNS), ("vocabulary V", request.vocabulary, of_v)
        for name, size, multiple in sizes:
            if size % multiple or size <= tiles.TMA_COLUMNS:
                return f"the {name}, {size}, must be a multiple of {multiple} and larger than {tiles.TMA_COLUMNS}"
        if request.tokens < MANY:
            return f"it takes {MANY} tokens or more"
        return "" if request.tokens % tiles.TMA_ROWS == 0 else f"it takes a multiple of {tiles.TMA_ROWS} tokens"

    def lacks(self, method: str, request: Request) -> str:
        """Whole logits are float32, and TMA writes them: V must fit, even if c of 16 bits has V as its rows."""
        if method in WHOLE and request.vocabulary % tiles.TMA_FLOATS:
            return f"it holds whole logits of a vocabulary that is a multiple of {tiles.TMA_FLOATS}"
        if method == "form_dz" and request.numbers.sum:
            return "with label smoothing it does not compute logits a second time"
        return super().lacks(method, request)

    def step(self, method: str, request: Request, gpu: Gpu, rows: int = 0, block: Block | None = None) -> Step:
        units = units_of(gpu)
        if method == "sum_dc" and request.dc_itemsize == 2:
            return Step(self, tiles.SUMMED[block_of(request.width)])
        if method == "sum_dc":
            sizes = tiles.dc_sizes(request.vocabulary, request.width, request.head.vocab_axis)
            return Step(self, tiles.cheapest(tiles.DC, *sizes, units))
        if method not in ("sums", *WHOLE):
            return Step(self, tiles.LOGITS)
        blocks = cdiv(rows, BLOCK), cdiv(request.vocabulary, tiles.LOGITS.columns)
        splits = vocabulary_splits(*blocks, rows, gpu.multiprocessors)
        return Step(self, tiles.LOGITS, min(splits, 2) if gpu.interpreted else splits)

    def costs(self, request: Request, gpu: Gpu | None) -> Costs:
        return COSTS

    def block(self, sums: Step) -> Block:
        return Block(BLOCK, sums.tiles.columns)

    def windows(self, request: Request, tokens: int, room: int, column: int, gpu: Gpu) -> Windows:
        cost = partial(tiles.window_cost, tokens, request.width, request.head.vocab_axis, units_of(gpu))
        columns = cdiv(request.vocabulary, tiles.DEPTH) * tiles.DEPTH  # dz is whole tiles of TMA
        windows = vocabulary_windows(columns, room, column, cost, tiles.PAIR_ROWS, beyond=True)
        return replace(windows, columns=min(windows.columns, 2 * tiles.PAIR_ROWS)) if gpu.interpreted else windows

    def multiplying(self, request: Request, tokens: int, windows: Windows, gpu: Gpu) -> Multiplying:
        """The cheapest tiles; for dc the cheapest of the tiles that write no column of another window."""
        axis, units = request.head.vocab_axis, units_of(gpu)
        de = tiles.cheapest(tiles.DE, cdiv(tokens, tiles.PAIR_ROWS), request.width, units)
        sizes = tiles.dc_sizes(windows.columns, request.width, axis)
        dc = tiles.cheapest(tiles.dc_tiles(windows.columns, windows.count, axis), *sizes, units)
        return Multiplying(self, de, dc, windows, tiles.splits_of(de, tokens, request.width, windows.columns, units))

    def de_of_chunk(self, request: Request, tokens: int, gpu: Gpu) -> Multiplying:
        of = tiles.SPARSE_DE if request.gradient_tolerance else tiles.DE
        tile, splits = tiles.de_of_chunk(of, tokens, request.width, request.vocabulary, units_of(gpu))
        return Multiplying(self, tile, None, Windows.whole(request.vocabulary, beyond=True), splits)


HOPPER = Hopper()
