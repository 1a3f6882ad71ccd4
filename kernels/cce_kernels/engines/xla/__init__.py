"""Plain XLA, on any device and for every type: matmuls of groups of the vocabulary, nothing written by hand."""

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Multiplying
from cce_kernels.engines.xla import products, statistics
from cce_kernels.windows import Groups, vocabulary_groups

BLOCK_BYTES = 64 * 2**20  # of logits at a time where there is no GPU: more is no faster
BLOCKS = 3  # of logits and what XLA makes of them, that are there at a time


class Xla:
    name = "xla"
    offers = frozenset(["sums", "form_dz", "products"])
    finds_target, stops, in_place, multiplies_fastest = True, False, False, True

    def serves(self, call: Call, gpu: Gpu | None) -> bool:
        return True

    def tile(self, role: str, call: Call, gpu, tokens: int = 0) -> None:
        """XLA's own."""

    def splits(self, call: Call, rows: int, gpu) -> int:
        return 1

    def block_rows(self, tiles) -> int:
        raise NotImplementedError

    def dz_bytes(self, call: Call, tokens: int) -> int:
        return BLOCKS * call.wide * tokens

    def groups(self, call: Call, tokens: int, of_dc: int, room: int, column: int, gpu) -> Groups:
        """The fewest that may be."""
        room = room if gpu is not None else min(room, BLOCKS * BLOCK_BYTES)
        return vocabulary_groups(call.vocabulary, room, column)

    def multiplying(self, call: Call, tokens: int, groups: Groups, split: bool, gpu) -> Multiplying:
        return Multiplying(self, None, None)

    def sums(self, inputs, at, reference, saved_tokens, *, head, with_sum, tiles, splits, gpu):
        """tiles: the groups of the vocabulary."""
        return statistics.sums(inputs, head=head, with_sum=with_sum, groups=tiles)

    def form_dz(self, inputs, lse, cotangents, count, *, head, groups, wanted, tiles, gpu):
        return statistics.former(inputs, lse, cotangents, head=head, groups=groups, with_sums=wanted.bias)

    def products(self, e, c, *, head, unit, count, how, groups, adding=False, beside=None, gpu):
        assert not adding
        assert beside is None
        return products.products(e, c, head=head, unit=unit)


XLA = Xla()
