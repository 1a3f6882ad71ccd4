"""The bytes that a call holds beyond its inputs and results: how many each part of a plan adds.

The memory budget bounds these bytes, saved or temporary. A very small budget is exceeded by the least plan. Memory goes
first to what a backward pass always holds: an (N, D) float32 sum for de, some numbers a token, XLA's workspace and a
group of FEWEST_COLUMNS columns. The next GROUP_BYTES make groups larger and so fewer: each group costs about
0.15 ms besides its work. The rest saves exponentials, 2·V bytes a token, so that fewer logits are computed again.
"""

import math
from dataclasses import dataclass

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine
from cce_kernels.engines.xla import XLA
from cce_kernels.exponentials import saved_shape
from cce_kernels.windows import FEWEST_COLUMNS

WORKSPACE = 32 * 2**20  # the workspace of XLA's matmuls
GROUP_BYTES = 256 * 2**20
GROUP_WORTH = 8 * 2**20  # one more group costs as much time as computing so many bytes of exponentials again
SPLIT_BYTES = 17 * 2**20  # the most that the partial sums of de take, where de of few tokens has several
NUMBERS = 256  # bytes a token, for lse and the like
SAVED_DZ_ROWS, DZ_ROWS = 16, 64  # the fewest rows of a tile of dz: each tile stores its column sums for dbias


@dataclass(frozen=True)
class Bytes:
    """The bytes of a call whose kept tokens are gathered into `rows` rows.

    engine: the engine that forms dz; products: the engine that multiplies dz where nothing is saved.
    """

    call: Call
    gpu: Gpu | None
    rows: int
    engine: Engine
    products: Engine

    @property
    def direct(self) -> bool:
        """Whether saved exponentials are multiplied as they are."""
        return not self.call.with_sum

    @property
    def together(self) -> bool:
        """Whether one matmul of the engine sums dc over saved and other tokens: saved tokens then have no de."""
        return self.engine.offers("de_of_saved") and self.direct

    @property
    def gathered(self) -> int:
        """The copy of e with the kept tokens first, or with zeros for ignored tokens; 0 where it shares de's memory."""
        placed = self.engine.stops and self.rows == self.call.tokens
        return 0 if placed else self.call.itemsize * self.rows * self.call.width

    @property
    def always(self) -> int:
        """What is held besides a group: the sum for de, some numbers a token, and the workspace of XLA's matmuls."""
        return self.sum_of_de + NUMBERS * self.rows + (0 if self.products.in_place else WORKSPACE)

    @property
    def sum_of_de(self) -> int:
        """0 where the sum is de itself, which is a result. If e is frozen: a copy of e that `gathered` lacks."""
        call, wanted = self.call, self.call.wanted
        if wanted is None or not wanted.e:
            return call.itemsize * self.rows * call.width - self.gathered
        itself = not self.engine.stops and self.rows == call.tokens and call.itemsize == call.wide
        return 0 if itself else call.wide * self.rows * call.width

    @property
    def beside_logits(self) -> int:
        """What may be held besides a block of logits of the xla engine's forward pass.

        XLA may write the zeros of the sum for de early. The same without gradients: the same blocks give the same bits.
        """
        return (self.call.wide * self.call.width + NUMBERS) * self.call.tokens + WORKSPACE

    def column(self, tokens: int, *, copies: bool, of_saved: bool = False, padded: bool = False) -> int:
        """The bytes of one column of a group: dz of so many tokens, a copy of c_g or dc_g, partial sums of dbias.

        padded: whether XLA pads dz and c_g, and so holds a second dz. (Of c_g one copy is counted already.)
        """
        call, bias = self.call, self.call.wanted is not None and self.call.wanted.bias
        dz = call.itemsize * tokens if of_saved else self.engine.dz_bytes(call, tokens, self.gpu)
        dz += call.itemsize * tokens * padded
        sums = 4 * -(-tokens // (SAVED_DZ_ROWS if of_saved else DZ_ROWS)) * bias
        return dz + max(call.itemsize, call.of_dc) * call.width * copies + sums

    def least_group(self, tokens: int, **of) -> int:
        return min(FEWEST_COLUMNS, self.call.vocabulary) * self.column(tokens, **of)

    def saved(self, tokens: int) -> int:
        return 2 * math.prod(saved_shape(tokens, self.call.vocabulary))

    def beside_matmuls(self, tokens: int) -> int:
        """What XLA's matmuls with the exponentials of so many tokens hold besides the exponentials.

        They hold first de, in float32 and rounded, and then the scaled e. XLA puts the float32 de into the memory of dc
        if it fits.
        """
        call, rounded = self.call, self.call.of_de * tokens * self.call.width
        if call.wanted is not None and call.wanted.c and 2 * tokens <= call.vocabulary:
            return rounded + NUMBERS * self.rows + WORKSPACE
        return 4 * tokens * call.width + max(rounded, WORKSPACE) + NUMBERS * self.rows

    def everything(self) -> int:
        """The most that a plan holds if it saves all exponentials and lets XLA multiply them."""
        return self.gathered + self.saved(self.rows) + self.beside_matmuls(self.rows)

    def beside_saved(self, tokens: int) -> int:
        """What so many saved tokens hold besides their exponentials while groups of the other tokens run: de, rounded.

        If `together`, they hold the scaled e instead. Where de is wanted, the scaled e takes no memory of its own: it
        is in the memory that de takes later.
        """
        call, wanted = self.call, self.call.wanted
        if self.together:
            return 2 * self.rows * call.width * (wanted is not None and wanted.c and not wanted.e)
        return call.of_de * tokens * call.width

    def beside_groups(self, saved: int) -> int:
        """What is held besides a group while the groups of the other tokens run, or of all tokens if not `direct`."""
        width, others = self.call.width, self.rows - saved
        if not self.direct:
            return self.sum_of_de + NUMBERS * self.rows + WORKSPACE + 4 * self.rows * width
        of_others = self.call.of_de * others * width + max(4 * others * width, SPLIT_BYTES) + NUMBERS * self.rows
        return self.beside_saved(saved) + of_others

    def wanted_group(self, tokens: int) -> int:
        """The best size in bytes of a group for so many tokens that are not saved, where other tokens are saved.

        Their dz has S = 2·V·tokens bytes, and so S/G groups of G bytes. A group takes G bytes from the exponentials
        that could be saved, and costs as much time as computing W = GROUP_WORTH bytes of them again. The total
        G + W·S/G is least at G = √(S·W).
        """
        wanted = math.isqrt(2 * self.call.vocabulary * tokens * GROUP_WORTH)
        return max(min(wanted, GROUP_BYTES), self.least_group(tokens, copies=False))

    def least(self) -> int:
        """The least plan: nothing saved, the smallest groups."""
        of = {"copies": not self.products.in_place}
        if self.engine.stops:
            return self.gathered + self.always + self.least_group(self.rows, **of)
        of["padded"] = XLA.pads(self.call, self.rows, min(FEWEST_COLUMNS, self.call.vocabulary), self.gpu)
        return max(self.gathered + self.always, self.beside_logits) + self.least_group(self.rows, **of)
