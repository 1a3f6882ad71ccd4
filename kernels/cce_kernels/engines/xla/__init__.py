"""The xla engine: XLA's own matmuls in windows of the vocabulary, on any device and for every type."""

import math
from typing import ClassVar

from cce_kernels.block_floats import block_of
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Costs, Engine, Multiplying, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.head import is_highest
from cce_kernels.request import Request
from cce_kernels.windows import FEWEST_COLUMNS, Windows, vocabulary_windows

WORKSPACE = 32 * 2**20  # bytes: of XLA's matmuls
NUMBERS = 256  # bytes a token, for lse and the like
BLOCK_BYTES = 64 * 2**20  # without a GPU, the most for a block of logits: larger blocks are no faster there
SMALL = 4 * 2**20  # bytes: a window of dc may have so many even if dc is small
WINDOW_COST = 100  # in columns: the time of a window to read and write the sum for de, and of a dozen launches
TILE = 128


def parts_of(m: int, n: int, gpu: Gpu | None) -> int:
    """The most parts, a power of 2, into which XLA splits the sums of a matmul whose result is (m, n); 1: it does not.

    XLA's SplitkRewriter gives each multiprocessor a tile where the result has too few. It may take fewer parts, if it
    takes their sum for too dear. No option of a program turns the rule off.
    """
    tiles = max(m * n / TILE**2, 1) if min(m, n) < TILE else cdiv(m, TILE) * cdiv(n, TILE)
    if gpu is None or gpu.interpreted or tiles >= gpu.multiprocessors:
        return 1
    return 2 ** math.ceil(math.log2(gpu.multiprocessors / tiles))


def multiple(m: int, n: int, itemsize: int, gpu: Gpu | None) -> int:
    """A power of 2. XLA may pad both operands, and so copy whole arrays, if the sums' length is no multiple of it."""
    parts = parts_of(m, n, gpu)
    return parts * 16 // itemsize if parts > 1 else 1


IN_16_BITS = Costs(1.0, 1.0, byte=170.0, logit=150.0, launches=2.5e10, multiple=256)
# A float32 matmul takes as long as 3 (TF32) or 15 ("highest") in bfloat16. XLA moves 24 bytes for each logit.
IN_TF32 = Costs(1.0, 1.0, byte=60.0, logit=1440.0, launches=8e9, multiple=32)
IN_FLOAT32 = Costs(1.0, 1.0, byte=12.0, logit=290.0, launches=1.6e9, multiple=32)
ON_CPU = Costs(1.0, 1.0, byte=6.0, logit=100.0, launches=1e7, multiple=32, new=42.0)


class Xla(Engine):
    name = "xla"
    finds_target, stops, multiplies_fastest = True, False, True
    launches: ClassVar = {"sums": "statistics", "form_dz": "statistics", "products": "products", "sum_dc": "summed"}

    def refuses(self, request: Request, gpu: Gpu | None) -> str:
        return ""

    def dz_bytes(self, request: Request, tokens: int, gpu: Gpu | None) -> int:
        """The logits, dz and a copy of c_g. On a GPU dz takes the logits' memory if it has their type; on a CPU there
        are exponentials too.
        """
        wide = request.sum_itemsize
        blocks = 3 * wide if gpu is None else wide + (request.itemsize if request.itemsize < wide else 0)
        return blocks * tokens + request.itemsize * request.width

    def bytes_besides_logits(self, request: Request) -> int:
        """What may be held besides a block of logits of the forward pass.

        XLA may write the zeros of the sum for de early. The same without gradients: the same blocks give the same bits.
        """
        return (request.sum_itemsize * request.width + NUMBERS) * request.tokens + WORKSPACE

    def chunk_bytes(self, request: Request, tokens: int, columns: int, gpu: Gpu | None) -> int:
        """What a token of a chunk of so many tokens holds, with dz of so many columns.

        The logits and dz, and on a CPU the exponentials, and for a mean their products with logarithms, which XLA's CPU
        compiler does not fuse; partial sums of de, e and de.
        """
        blocks = 3 + request.numbers.mean if gpu is None else 2 + self.pads_de(request, tokens, request.vocabulary, gpu)
        parts = parts_of(tokens, request.width, gpu)
        return request.sum_itemsize * (blocks * columns + (2 + parts) * request.width)

    def costs(self, request: Request, gpu: Gpu | None) -> Costs:
        if gpu is None:
            return ON_CPU
        if request.itemsize == 2:
            return IN_16_BITS
        return IN_FLOAT32 if is_highest(request.head.precision) else IN_TF32

    def step(self, method: str, request: Request, gpu: Gpu | None, rows: int = 0, block: Block | None = None) -> Step:
        if method != "sum_dc":
            return Step(self)
        columns = block_of(request.width)  # that share a step
        if gpu is not None and request.dc_itemsize == request.sum_itemsize:  # the matmul adds to dc in place
            return Step(self, columns, windows=Windows.whole(request.vocabulary))
        column = 3 * request.sum_itemsize * request.width  # a window's part of dc, in float32, and what becomes of it
        room = max(min(BLOCK_BYTES, request.vocabulary * column // 8), SMALL)
        return Step(self, columns, windows=self.windows(request, rows, room, column, gpu))

    def columns_of_a_step(self, step: Step) -> int:
        return step.tiles

    def windows(self, request: Request, tokens: int, room: int, column: int, gpu) -> Windows:
        if gpu is None:
            room = min(room, 3 * BLOCK_BYTES)

        def cost(_: Windows, columns: int) -> float:
            return columns + WINDOW_COST

        return vocabulary_windows(request.vocabulary, room, column, cost if gpu is not None else None)

    def pads(self, request: Request, tokens: int, columns: int, gpu: Gpu | None) -> bool:
        """Whether XLA may copy both operands of one of the two matmuls: dz or saved exponentials, and c or e."""
        return self.pads_de(request, tokens, columns, gpu) or tokens % self.tokens_of_dc(request, columns, gpu) > 0

    def pads_de(self, request: Request, tokens: int, columns: int, gpu: Gpu | None) -> bool:
        """The same for the matmul of de alone."""
        return request.wants.e and columns % multiple(tokens, request.width, request.itemsize, gpu) > 0

    def tokens_of_dc(self, request: Request, columns: int, gpu: Gpu | None) -> int:
        """With a multiple of so many tokens XLA copies no operand of dc's matmul for so many columns."""
        return multiple(columns, request.width, request.itemsize, gpu) if request.wants.c else 1

    def rows(self, request: Request, gpu: Gpu | None) -> int:
        """The tokens, and as many rows of zeros as dc needs so that XLA copies no operand of its matmul.

        The smallest windows need the most rows: XLA splits their matmuls into the most parts.
        """
        needed = self.tokens_of_dc(request, min(FEWEST_COLUMNS, request.vocabulary), gpu)
        return cdiv(request.tokens, needed) * needed

    def multiplying(self, request: Request, tokens: int, windows: Windows, gpu) -> Multiplying:
        return Multiplying(self, None, None, windows)

    def de_of_chunk(self, request: Request, tokens: int, gpu) -> Multiplying:
        return Multiplying(self, None, None, Windows.whole(request.vocabulary))


XLA = Xla()
