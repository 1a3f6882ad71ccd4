"""The bytes that a call holds beyond its inputs and results: how many each part of a plan adds.

The memory budget bounds these bytes, saved or temporary. A very small budget is exceeded by the least plan. Memory goes
first to what a backward pass always holds: an (N, D) float32 sum for de, some numbers a token, XLA's workspace and a
group of FEWEST_COLUMNS columns. The rest makes groups larger and so fewer: each group costs about 0.15 ms besides its
work. A budget that holds the exponentials of all tokens, 2·V bytes each, saves these instead.
"""

import math
from dataclasses import dataclass

from cce_kernels.block_floats import steps_shape
from cce_kernels.block_sparse import PART
from cce_kernels.call import ITEMSIZE, Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine
from cce_kernels.engines.xla import NUMBERS, WORKSPACE, XLA
from cce_kernels.exponentials import can_be_saved, saved_shape
from cce_kernels.plan.plan import Chunks
from cce_kernels.windows import FEWEST_COLUMNS

GROUP_BYTES = 256 * 2**20
ID_NUMBERS = 40  # bytes of a given id of a token, for its column and dz (cce_kernels/given_ids.py)
MOST_LOGITS = 512, 256  # tokens whose logits are held at a time beside a teacher, the fastest first
OF_TEACHER_ON_CPU = 6  # blocks of logits: those of the teacher, and what XLA's CPU compiler does not fuse
CHUNK_NUMBERS = 96  # bytes a token, for lse and the like, where the forward pass forms the gradients
SAVED_DZ_ROWS, DZ_ROWS = 16, 64  # the fewest rows of a tile of dz: each tile stores its column sums for dbias


@dataclass(frozen=True)
class Bytes:
    """The bytes of a call whose kept tokens are gathered into `rows` rows.

    engine: the engine that forms dz; products: the engine that multiplies dz where nothing is saved.
    most_logits: plan.InForward.most_logits.
    """

    call: Call
    gpu: Gpu | None
    rows: int
    engine: Engine
    products: Engine
    most_logits: int = 0

    @property
    def direct(self) -> bool:
        """Whether saved exponentials are multiplied as they are."""
        return not self.call.forms_dz

    @property
    def in_place(self) -> bool:
        """Whether the engine's matmuls with saved exponentials write each result once, and hold no float32 de."""
        return self.engine.offers("de_of_saved", self.call) and self.direct

    @property
    def gathered(self) -> int:
        """The copy of e with the kept tokens first, or with zeros for ignored tokens; 0 where it shares de's memory."""
        placed = self.engine.stops and self.rows == self.call.tokens
        return 0 if placed else self.call.itemsize * self.rows * self.call.width

    @property
    def always(self) -> int:
        """What is held besides a group: the sum for de, some numbers a token, and the workspace of XLA's matmuls."""
        of_ids = ID_NUMBERS * self.call.ids * self.rows
        return of_ids + self.sum_of_de + NUMBERS * self.rows + self.products.workspace

    @property
    def sum_of_de(self) -> int:
        """0 where the sum is de itself, which is a result. If e is frozen: a copy of e that `gathered` lacks."""
        call = self.call
        if not call.wants.e:
            return call.itemsize * self.rows * call.width - self.gathered
        itself = not self.engine.stops and self.rows == call.tokens and call.itemsize == call.sum_itemsize
        return 0 if itself else call.sum_itemsize * self.rows * call.width

    def column(self, tokens: int, *, copies: bool, of_saved: bool = False, padded: bool = False) -> int:
        """The bytes of one column of a group: dz of so many tokens, a copy of c_g or dc_g, partial sums of dbias.

        padded: whether XLA pads dz and c_g, and so holds a second dz. (Of c_g one copy is counted already.)
        """
        call, bias = self.call, self.call.wants.bias
        dz = call.itemsize * tokens if of_saved else self.engine.dz_bytes(call, tokens, self.gpu)
        dz += call.itemsize * tokens * padded
        sums = 4 * -(-tokens // (SAVED_DZ_ROWS if of_saved else DZ_ROWS)) * bias
        return dz + max(call.itemsize, call.dc_itemsize) * call.width * copies + sums

    def least_group(self, tokens: int, **of) -> int:
        return min(FEWEST_COLUMNS, self.call.vocabulary) * self.column(tokens, **of)

    def saved(self, tokens: int) -> int:
        return 2 * math.prod(saved_shape(tokens, self.call.vocabulary))

    @property
    def besides_in_place(self) -> int:
        """What is held beside saved exponentials that the engine multiplies: the scaled e, and numbers of the tokens.

        The scaled e counts 0 where it is in the memory that de takes later, or is not needed. The numbers count where
        c is rounded: elsewhere XLA keeps them in the memory of a result.
        """
        call, wants = self.call, self.call.wants
        return self.rows * (2 * call.width * (wants.c and not wants.e) + NUMBERS * call.wide_dc)

    @property
    def bytes_besides_matmuls(self) -> int:
        """What XLA's matmuls with the exponentials of all tokens hold besides the exponentials.

        They hold first de, in float32 and rounded, and then the scaled e. XLA puts the float32 de into the memory of dc
        if it fits.
        """
        rounded = ITEMSIZE[self.call.de_dtype] * self.rows * self.call.width
        if self.call.wants.c and 2 * self.rows <= self.call.vocabulary:
            return rounded + NUMBERS * self.rows + WORKSPACE
        return 4 * self.rows * self.call.width + max(rounded, WORKSPACE) + NUMBERS * self.rows

    @property
    def bytes_besides_groups(self) -> int:
        """What is held besides the exponentials of all tokens and a group, where dz is formed from exponentials."""
        return self.sum_of_de + NUMBERS * self.rows + WORKSPACE + 4 * self.rows * self.call.width

    def everything(self) -> int:
        """The most that a plan holds if it saves all exponentials and lets XLA multiply them."""
        return self.gathered + self.saved(self.rows) + self.bytes_besides_matmuls

    def of_saved(self) -> int:
        """The bytes from which on the exponentials of all tokens are saved, besides `gathered`."""
        if self.in_place:
            besides = self.besides_in_place
        elif self.direct:
            besides = self.bytes_besides_matmuls
        else:
            least = self.least_group(self.rows, copies=not self.products.stops, of_saved=True)
            besides = self.bytes_besides_groups + max(GROUP_BYTES, least)
        return self.saved(self.rows) + besides

    @property
    def stores(self) -> bool:
        """Whether a chunk of the forward pass stores exponentials, and the engine sums dc; else XLA holds the chunk's
        logits, and sums dc.
        """
        return self.engine.stops and can_be_saved(self.call)

    def de_by_xla(self, tokens: int) -> bool:
        """Whether XLA multiplies what a chunk of so many tokens stores by c.

        Its matmul is faster than Triton's, unless XLA copies the operands: where P has more columns than c, or where
        XLA splits the sum.
        """
        call, columns = self.call, saved_shape(1, self.call.vocabulary)[1]
        slower = self.stores and not self.engine.multiplies_fastest
        return slower and columns == call.vocabulary and not XLA.pads_de(call, tokens, columns, self.gpu)

    def sums_of_de(self, tokens: int) -> int:
        """The bytes of the float32 sums from which an element of de of a chunk of so many tokens is rounded."""
        if self.de_by_xla(tokens):
            return 4 * XLA.parts_of_de(self.call, tokens, self.call.vocabulary, self.gpu)
        return 4 * self.engine.de_of_chunk(self.call, tokens, self.gpu).splits

    def of_a_token(self, tokens: int) -> int:
        """What a token of a chunk of so many tokens holds: its exponentials or logits, and rows of e and de."""
        call, columns = self.call, saved_shape(1, self.call.vocabulary)[1]
        of_teacher = self.of_teacher(columns) if call.teacher_width else 0
        if not self.stores:
            return XLA.chunk_bytes(call, tokens, columns, self.gpu) + of_teacher
        of_e = call.itemsize + max(call.itemsize, self.of_de(tokens))  # e, and scaled e
        masses = 6 * columns // PART * bool(call.gradient_tolerance)  # and sums and scores of them
        return 2 * columns + masses + of_e * call.width + of_teacher

    def of_de(self, tokens: int) -> int:
        """What an element of de of a chunk of so many tokens holds: partial sums, and their sum."""
        return (self.sums_of_de(tokens) + ITEMSIZE[self.call.left_de_dtype]) * self.call.wants.e

    def of_teacher(self, columns: int) -> int:
        """What a token of a chunk holds more beside a teacher: its logits, and copies of a row of the teacher.

        Where a chunk stores dz, `of_chunks` counts the logits of both, as they are held for a part of the chunk.
        """
        call = self.call
        blocks = (0 if self.stores else 1) if self.gpu is not None else OF_TEACHER_ON_CPU
        rows = 1 if self.stores else 4
        return blocks * call.sum_itemsize * columns + rows * call.sum_itemsize * call.teacher_width

    def of_chunks(self, chunks: Chunks) -> int:
        """What is held where the forward pass forms the gradients in these chunks.

        A chunk, the numbers of all tokens, the steps of dc, de where it cannot wait in the memory of the result (it has
        more rows, or XLA moves them), and a de for any cotangents, which is no result yet. What is left of the last
        chunk is a result of the forward pass. XLA lays the other chunks into its memory. It does not if they are
        larger, or if there is one other chunk, whose logits come in parts.
        """
        call, tokens, columns = self.call, max(chunks.size, chunks.last), saved_shape(1, self.call.vocabulary)[1]
        steps = 4 * math.prod(steps_shape(call.vocabulary, call.width, chunks.block)) * (chunks.last > 0)
        of_de, itemsize = chunks.rows_of_de(call.tokens), ITEMSIZE[call.left_de_dtype]
        is_result = of_de == call.tokens and (self.stores or call.left_de_dtype == call.de_dtype)
        moved = itemsize * of_de * call.width * (call.wants.e and not is_result)
        moved += 4 * math.prod(call.units_shape(of_de)) * (call.wants.e and call.divides_de)
        moved += 0 if call.one_factor else call.itemsize * call.tokens * call.width
        apart = chunks.last < chunks.size or (self.most_logits > 0 and chunks.whole == 1)
        moved += call.itemsize * chunks.last * (columns + call.width) * apart
        if self.stores and call.wants.e and call.wants.c and not chunks.last and is_result:
            # XLA gives de of all tokens no memory of a result here. It may take that of the sums.
            moved += call.width * max(itemsize * of_de - self.sums_of_de(tokens) * tokens, 0)
        by_xla = not self.stores or call.wants.bias or (call.wants.e and self.de_by_xla(tokens))
        workspace = WORKSPACE * (self.gpu is not None and by_xla) + 12 * call.vocabulary * call.wants.bias
        if not self.stores and XLA.pads_de(call, tokens, call.vocabulary, self.gpu):
            workspace += call.itemsize * call.vocabulary * call.width  # a copy of c
        if self.most_logits:  # the logits of both sides, in the memory that de takes later
            of_de = tokens * call.width * self.of_de(tokens)
            workspace += max(2 * call.sum_itemsize * columns * min(tokens, self.most_logits) - of_de, 0)
        return tokens * self.of_a_token(tokens) + steps + moved + CHUNK_NUMBERS * chunks.rows + workspace

    def least(self) -> int:
        """The least plan: nothing saved, the smallest groups."""
        of = {"copies": not self.products.stops}
        if self.engine.stops:
            return self.gathered + self.always + self.least_group(self.rows, **of)
        of["padded"] = XLA.pads(self.call, self.rows, min(FEWEST_COLUMNS, self.call.vocabulary), self.gpu)
        return max(self.gathered + self.always, XLA.bytes_besides_logits(self.call)) + self.least_group(self.rows, **of)
