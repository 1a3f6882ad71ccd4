"""The bytes that a call holds beyond its inputs and results: what each part of a plan adds.

The memory budget bounds them, saved or temporary; the least plan holds more than a very small budget. A backward pass
always holds an (N, D) float32 sum for de, some numbers a token, XLA's workspace and a group of at least FEWEST_COLUMNS.
The next GROUP_BYTES make groups larger, each of which costs about 0.15 ms besides its work. All beyond saves
exponentials, 2·V bytes a token, each of which spares the backward pass one logit.
"""

import math
from dataclasses import dataclass

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine
from cce_kernels.exponentials import linear, saved_shape
from cce_kernels.windows import FEWEST_COLUMNS

WORKSPACE = 32 * 2**20  # of XLA's matmuls
GROUP_BYTES = 256 * 2**20
GROUP_WORTH = 8 * 2**20  # of exponentials: what one more group costs
SPLIT_BYTES = 17 * 2**20  # de of so few tokens that it is summed in several parts, at most
NUMBERS = 256  # bytes a token, of lse and the like
SAVED_DZ_ROWS, DZ_ROWS = 16, 64  # the fewest rows of a tile of dz, over which its columns are summed for dbias


@dataclass(frozen=True)
class Bytes:
    """Of a call whose kept tokens are gathered in `rows` rows.

    engine: who forms dz; products: who multiplies it where nothing is saved.
    """

    call: Call
    gpu: Gpu | None
    rows: int
    engine: Engine
    products: Engine

    @property
    def direct(self) -> bool:
        """Whether saved exponentials are multiplied as they are."""
        return linear(self.call.head, self.call.with_sum)

    @property
    def together(self) -> bool:
        """Whether the engine sums dc of saved tokens and others at once, and so holds nothing beside what is saved."""
        return self.engine.offers("de_of_saved") and self.direct

    @property
    def gathered(self) -> int:
        """A copy of e, gathered or without ignored tokens, unless it lies where de will be."""
        placed = self.engine.stops and self.rows == self.call.tokens
        return 0 if placed else self.call.itemsize * self.rows * self.call.width

    @property
    def always(self) -> int:
        """Beside a group: de's sum, numbers of each token, and what XLA's matmuls take."""
        return self.sum_of_de(self.rows) + NUMBERS * self.rows + (0 if self.products.in_place else WORKSPACE)

    def sum_of_de(self, tokens: int) -> int:
        return self.call.wide * tokens * self.call.width

    def column(self, tokens: int, *, copies: bool, of_saved: bool = False) -> int:
        """Of a group: what forming dz of so many tokens holds, copies of c_g or dc_g, partial sums of dbias."""
        call, bias = self.call, self.call.wanted is not None and self.call.wanted.bias
        dz = call.itemsize * tokens if of_saved else self.engine.dz_bytes(call, tokens, self.gpu)
        sums = 4 * -(-tokens // (SAVED_DZ_ROWS if of_saved else DZ_ROWS)) * bias
        return dz + call.itemsize * call.width * copies + sums

    def least_group(self, tokens: int, **of) -> int:
        return min(FEWEST_COLUMNS, self.call.vocabulary) * self.column(tokens, **of)

    def saved(self, tokens: int) -> int:
        return 2 * math.prod(saved_shape(tokens, self.call.vocabulary))

    def beside_matmuls(self, tokens: int) -> int:
        """What XLA's matmuls with exponentials of so many tokens take beside these: first de in float32, which XLA puts
        where dc will lie if it fits there, and rounded; then the scaled e.
        """
        call, rounded = self.call, 2 * tokens * self.call.width
        if call.wanted is not None and call.wanted.c and 2 * tokens <= call.vocabulary:
            return rounded + NUMBERS * self.rows + WORKSPACE
        return 4 * tokens * call.width + max(rounded, WORKSPACE) + NUMBERS * self.rows

    def everything(self) -> int:
        """What saving everything takes at most, multiplied by XLA."""
        return self.gathered + self.saved(self.rows) + self.beside_matmuls(self.rows)

    def beside_saved(self, tokens: int) -> int:
        """What of so many saved tokens is there beside their exponentials and groups of the others: de, rounded.

        Together, the scaled e lies where de will, if that is wanted.
        """
        wanted = self.call.wanted
        if self.together:
            return 2 * self.rows * self.call.width * (wanted is not None and wanted.c and not wanted.e)
        return 2 * tokens * self.call.width

    def beside_groups(self, saved: int) -> int:
        """What groups of the others, or of all where dz is formed of saved tokens too, take beside their dz."""
        width, others = self.call.width, self.rows - saved
        if not self.direct:
            return self.sum_of_de(self.rows) + NUMBERS * self.rows + WORKSPACE + 4 * self.rows * width
        of_others = 2 * others * width + max(4 * others * width, SPLIT_BYTES) + NUMBERS * self.rows
        return self.beside_saved(saved) + of_others

    def wanted_group(self, tokens: int) -> int:
        """The bytes of a group of columns of so many tokens that are not saved, beside others that are.

        With G bytes each, there are S/G groups, S = 2·V·tokens. If one costs as much as to compute W bytes of
        exponentials again, which a group of G bytes leaves no room for, the sum G + W·S/G is least at G = √(S·W).
        """
        wanted = math.isqrt(2 * self.call.vocabulary * tokens * GROUP_WORTH)
        return max(min(wanted, GROUP_BYTES), self.least_group(tokens, copies=False))

    def least(self) -> int:
        """The least plan: nothing saved, the smallest groups."""
        return self.gathered + self.always + self.least_group(self.rows, copies=not self.products.in_place)
