"""The xla engine: XLA's own matmuls in groups of the vocabulary, on any device and for every type."""

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine, Multiplying
from cce_kernels.engines.xla import products, statistics, summed
from cce_kernels.engines.xla.splitk import multiple, parts_of
from cce_kernels.windows import FEWEST_COLUMNS, Groups, vocabulary_groups

BLOCK_BYTES = 64 * 2**20  # without a GPU, the most for a block of logits: larger blocks are no faster there
GROUP_COST = 100  # in columns: the time of a group to read and write the sum for de, and of a dozen launches


class Xla(Engine):
    name = "xla"
    finds_target, stops, in_place, multiplies_fastest = True, False, False, True

    def refuses(self, call: Call, gpu: Gpu | None) -> str:
        return ""

    def tile(self, role: str, call: Call, gpu, tokens: int = 0) -> None:
        """None: XLA chooses its own tiles."""

    def splits(self, call: Call, rows: int, gpu) -> int:
        return 1

    def blocks(self, tiles) -> tuple[int, int]:
        raise NotImplementedError

    def dz_bytes(self, call: Call, tokens: int, gpu: Gpu | None) -> int:
        """The logits, dz and a copy of c_g. On a GPU dz takes the logits' memory if it has their type; on a CPU there
        are exponentials too.
        """
        blocks = 3 * call.wide if gpu is None else call.wide + (call.itemsize if call.itemsize < call.wide else 0)
        return blocks * tokens + call.itemsize * call.width

    def groups(self, call: Call, tokens: int, room: int, column: int, gpu) -> Groups:
        if gpu is None:
            room = min(room, 3 * BLOCK_BYTES)

        def cost(_: Groups, columns: int) -> float:
            return columns + GROUP_COST

        return vocabulary_groups(call.vocabulary, room, column, cost if gpu is not None else None)

    def pads(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> bool:
        """Whether XLA would copy both operands of one of the two matmuls: dz or saved exponentials, and c or e."""
        return self.pads_de(call, tokens, columns, gpu) or tokens % self._of_dc(call, tokens, columns, gpu) > 0

    def pads_de(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> bool:
        """The same for the matmul of de alone."""
        assert call.wanted is not None
        of_de = multiple(tokens, call.width, columns, call.itemsize, call.wide, gpu) if call.wanted.e else 1
        return columns % of_de > 0

    def parts_of_de(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> int:
        """The number of partial sums of de that XLA holds."""
        return parts_of(tokens, call.width, columns, call.itemsize, call.wide, gpu)

    def rows(self, call: Call, gpu: Gpu | None) -> int:
        """The tokens, and as many rows of zeros as dc needs so that XLA copies no operand of its matmul.

        The smallest groups need the most rows: XLA splits their matmuls into the most parts.
        """
        rows, columns = call.tokens, min(FEWEST_COLUMNS, call.vocabulary)
        while missing := -rows % self._of_dc(call, rows, columns, gpu):
            rows += missing
        return rows

    def _of_dc(self, call: Call, tokens: int, columns: int, gpu: Gpu | None) -> int:
        assert call.wanted is not None
        return multiple(columns, call.width, tokens, call.itemsize, call.of_dc, gpu) if call.wanted.c else 1

    def multiplying(self, call: Call, tokens: int, groups: Groups, gpu) -> Multiplying:
        return Multiplying(self, None, None)

    def sums(self, inputs, at, reference, save, *, head, with_sum, tiles, splits, gpu):
        """tiles: the groups of the vocabulary."""
        return statistics.sums(inputs, head=head, with_sum=with_sum, groups=tiles)

    def form_dz(self, inputs, lse, cotangents, count, *, head, groups, wanted, tiles, gpu):
        return statistics.former(inputs, lse, cotangents, head=head, groups=groups, with_sums=wanted.bias)

    def products(self, e, c, *, head, unit, count, how, groups, gpu):
        return products.products(e, c, head=head, unit=unit)

    def sum_dc(self, dc, steps, left, e, unit, count, factor, *, head, tiles, gpu):
        """tiles: the groups of the vocabulary, and the columns of D that share a step."""
        groups, block = tiles
        return summed.sum_dc(dc, steps, left, e, unit, factor, head=head, groups=groups, block=block)


XLA = Xla()
