"""The xla engine: XLA's own matmuls in groups of the vocabulary, on any device and for every type."""

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine, Multiplying
from cce_kernels.engines.xla.splitk import multiple, parts_of
from cce_kernels.windows import FEWEST_COLUMNS, Groups, vocabulary_groups

WORKSPACE = 32 * 2**20  # bytes: of XLA's matmuls
NUMBERS = 256  # bytes a token, for lse and the like
BLOCK_BYTES = 64 * 2**20  # without a GPU, the most for a block of logits: larger blocks are no faster there
GROUP_COST = 100  # in columns: the time of a group to read and write the sum for de, and of a dozen launches


class Xla(Engine):
    name = "xla"
    finds_target, stops, multiplies_fastest = True, False, True
    workspace = WORKSPACE
    launches = "sums", "form_dz", "products", "sum_dc"

    def refuses(self, call: Call, gpu: Gpu | None) -> str:
        return ""

    def dz_bytes(self, call: Call, tokens: int, gpu: Gpu | None) -> int:
        """The logits, dz and a copy of c_g. On a GPU dz takes the logits' memory if it has their type; on a CPU there
        are exponentials too.
        """
        wide = call.sum_itemsize
        blocks = 3 * wide if gpu is None else wide + (call.itemsize if call.itemsize < wide else 0)
        return blocks * tokens + call.itemsize * call.width

    def bytes_besides_logits(self, call: Call) -> int:
        """What may be held besides a block of logits of the forward pass.

        XLA may write the zeros of the sum for de early. The same without gradients: the same blocks give the same bits.
        """
        return (call.sum_itemsize * call.width + NUMBERS) * call.tokens + WORKSPACE

    def chunk_bytes(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> int:
        """What a token of a chunk of so many tokens holds, with dz of so many columns.

        The logits and dz, and on a CPU the exponentials, and for a mean their products with logarithms, which XLA's CPU
        compiler does not fuse; partial sums of de, e and de.
        """
        blocks = 3 + call.with_mean if gpu is None else 2 + self.pads_de(call, tokens, call.vocabulary, gpu)
        parts = self.parts_of_de(call, tokens, call.vocabulary, gpu)
        return call.sum_itemsize * (blocks * columns + (2 + parts) * call.width)

    def groups(self, call: Call, tokens: int, room: int, column: int, gpu) -> Groups:
        if gpu is None:
            room = min(room, 3 * BLOCK_BYTES)

        def cost(_: Groups, columns: int) -> float:
            return columns + GROUP_COST

        return vocabulary_groups(call.vocabulary, room, column, cost if gpu is not None else None)

    def pads(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> bool:
        """Whether XLA would copy both operands of one of the two matmuls: dz or saved exponentials, and c or e."""
        return self.pads_de(call, tokens, columns, gpu) or tokens % self._of_tokens(call, tokens, columns, gpu) > 0

    def pads_de(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> bool:
        """The same for the matmul of de alone."""
        needed = multiple(tokens, call.width, columns, call.itemsize, call.sum_itemsize, gpu) if call.wants.e else 1
        return columns % needed > 0

    def parts_of_de(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> int:
        """The number of partial sums of de that XLA holds."""
        return parts_of(tokens, call.width, columns, call.itemsize, call.sum_itemsize, gpu)

    def rows(self, call: Call, gpu: Gpu | None) -> int:
        """The tokens, and as many rows of zeros as dc needs so that XLA copies no operand of its matmul.

        The smallest groups need the most rows: XLA splits their matmuls into the most parts.
        """
        rows, columns = call.tokens, min(FEWEST_COLUMNS, call.vocabulary)
        while missing := -rows % self._of_tokens(call, rows, columns, gpu):
            rows += missing
        return rows

    def _of_tokens(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> int:
        return multiple(columns, call.width, tokens, call.itemsize, call.dc_itemsize, gpu) if call.wants.c else 1

    def multiplying(self, call: Call, tokens: int, groups: Groups, gpu) -> Multiplying:
        return Multiplying(self, None, None, groups)

    def de_of_chunk(self, call: Call, tokens: int, gpu) -> Multiplying:
        return Multiplying(self, None, None, Groups.whole(call.vocabulary))


XLA = Xla()
