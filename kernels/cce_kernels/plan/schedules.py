"""The schedules: of each its steps, the bytes that it holds besides the inputs and results of a call, and its time.

The memory budget bounds these bytes, saved or temporary. A very small budget is exceeded by the least plan, that of a
budget of 0. Memory goes first to what a backward pass always holds: an (N, D) float32 sum for de, some numbers a token,
XLA's workspace and a window of FEWEST_COLUMNS columns. The rest makes windows larger and so fewer: each costs about
0.15 ms besides its work. A budget that holds the exponentials of all tokens, 2·V bytes each, saves these instead.

Times are relative to XLA's matmuls of the logits and of the gradients that are wanted, which every way has, and held to
what was measured by tests/test_plan.py. A way adds:

- each chunk reads and writes the whole dc; each window of the vocabulary reads and writes the sum for de
- a chunk and a window launch small kernels
- a logit costs more than its matmul: its exponential, and its place in memory
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cce_kernels.block_floats import steps_shape
from cce_kernels.block_sparse import PART
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Costs, Engine, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.xla import NUMBERS, WORKSPACE, XLA, parts_of
from cce_kernels.exponentials import saved_shape
from cce_kernels.plan.plan import Forward, Plan, Schedule
from cce_kernels.request import ITEMSIZE, Request
from cce_kernels.tokens import MANY, Chunks, gathered_rows
from cce_kernels.windows import Windows

ID_NUMBERS = 40  # bytes of a given id of a token, for its column and dz (cce_kernels/given_ids.py)
CHUNK_NUMBERS = 96  # bytes a token, for lse and the like, where the forward pass forms the gradients
OF_TEACHER_ON_CPU = 6  # blocks of logits: those of the teacher, and what XLA's CPU compiler does not fuse
SAVED_DZ_ROWS, DZ_ROWS = 16, 64  # the fewest rows of a tile of dz: each tile stores its column sums for dbias
MOST_LOGITS = 512, 256  # tokens whose logits are held at a time beside a teacher, the fastest first
SMALLER_PARTS = 0.09  # of three matmuls: what logits of 256 tokens at a time cost over 512 beside a teacher
WINDOW_BYTES = 256 * 2**20  # the least room for a window of dz, where that is formed of saved exponentials
EVALUATED = 16 * 2**20  # the most bytes of rows of e that evaluation copies at a time
KEPT = 64 * 2**20  # bytes of a chunk's logits that a process does not give back to the operating system


@dataclass(frozen=True)
class Setting:
    """A request and the engines that serve it. The first computes the logits; the next have steps that it lacks."""

    request: Request
    gpu: Gpu | None
    serving: tuple[Engine, ...]
    most_logits: int = 0  # beside a teacher, of so many tokens of a chunk logits are held at a time; 0: of all

    @property
    def engine(self) -> Engine:
        return self.serving[0]

    @property
    def costs(self) -> Costs:
        return self.engine.costs(self.request, self.gpu)

    @property
    def stores(self) -> bool:
        """Whether the forward pass can store exponentials, and the engine sums dc. Else XLA holds a chunk's logits."""
        return self.engine.stops and self.request.can_be_saved

    @property
    def columns(self) -> int:
        """The columns of exponentials: the vocabulary, rounded up."""
        return saved_shape(1, self.request.vocabulary)[1]

    @property
    def finds_ignored(self) -> bool:
        """Whether ignored tokens are looked for: the engine stops at the last kept token, and there are many tokens."""
        return self.engine.stops and self.request.tokens >= self.many

    @property
    def many(self) -> int:
        """The fewest tokens of which ignored ones are looked for."""
        return 32 if self.gpu is not None and self.gpu.interpreted else MANY

    @cached_property
    def rows(self) -> int:
        """The rows into which kept tokens are gathered. Evaluation copies them in blocks, and this is one block."""
        request, evaluates = self.request, self.request.wanted is None
        if not self.finds_ignored:
            return request.tokens if evaluates or self.engine.stops else XLA.rows(request, self.gpu)
        rows, many = gathered_rows(request.tokens), self.many
        if not evaluates:
            return rows
        most = max(min(EVALUATED, request.memory_budget) // (request.itemsize * request.width) // many, 1) * many
        return min(rows, cdiv(rows, cdiv(rows, most) * many) * many)

    def step(self, method: str, block: Block | None = None) -> Step:
        """The step of the first engine that has this method of engine.Launched."""
        engine = next(engine for engine in self.serving if engine.offers(method, self.request))
        return engine.step(method, self.request, self.gpu, self.rows, block)

    def plan(self, forward: Forward | None, how: Schedule | None = None, held: int = 0, time: float = 0.0) -> Plan:
        sparse = how is not None and how.thresholds is not None
        request = self.request if sparse else replace(self.request, gradient_tolerance=0.0)
        return Plan(request, self.gpu, self.engine, self.rows, self.finds_ignored, forward, how, held, time)


def time_of(x: Setting, rows: int, gradients: float, more: float) -> float:
    """The time of the matmuls of so many rows, of the exponentials, and more operations, over XLA's matmuls.

    gradients: the matmuls for de and dc, each as many times as long as XLA's.
    """
    request, cost, of_matmul = x.request, x.costs, 2.0 * x.request.vocabulary * x.request.width
    time = rows * of_matmul * (cost.logits + gradients) + cost.logit * request.tokens * request.vocabulary + more
    return time / (max(request.tokens, 1) * of_matmul * (1 + request.wants.e + request.wants.c))


def column(x: Setting, former: Engine, products: Engine, tokens: int, saves: bool = False) -> int:
    """One column of a window: dz of so many tokens, a copy of c_g or dc_g, partial sums of dbias.

    former: the engine that forms dz of logits; products: that multiplies dz. saves: dz is formed of exponentials.
    """
    request = x.request
    dz = request.itemsize * tokens if saves else former.dz_bytes(request, tokens, x.gpu)
    copy = 0 if products.stops else max(request.itemsize, request.dc_itemsize) * request.width
    return dz + copy + 4 * -(-tokens // (SAVED_DZ_ROWS if saves else DZ_ROWS)) * request.wants.bias


def forward(x: Setting) -> tuple[Forward, int]:
    """The first half of a block of all tokens; the bytes of blocks of logits and of what may be held beside them."""
    request = x.request
    if x.engine.finds_target or request.sums_logits:
        tokens = x.rows if x.finds_ignored else request.tokens
        gathered = x.rows * request.width * (x.finds_ignored and x.rows != request.tokens)
        held = XLA.bytes_besides_logits(request) + request.itemsize * gathered
        of_column = column(x, XLA, XLA, tokens)
        windows = XLA.windows(request, tokens, request.memory_budget - held, of_column, x.gpu)
        return Forward(Step(XLA, windows=windows)), held + windows.columns * of_column
    sums = x.step("sums")
    rescue = replace(x.step("rescued", Block(0, x.engine.block(sums).columns)), splits=sums.splits)
    return Forward(sums, x.step("target"), rescue), 0


def backward(x: Setting, saves: bool) -> Plan:
    """The plan in which the backward pass forms the gradients, from saved exponentials or from logits again.

    Besides windows it holds a copy of e, the sum for de, numbers and XLA's workspace. A frozen e has no de whose memory
    its copy could share. saves: also the exponentials, and first de, rounded, then the scaled e.
    XLA multiplies the exponentials of all tokens, also on Hopper GPUs: by kernels a step takes up to 1.026 as long.
    There are as many partial sums of de as the budget has room for: few tokens have few tiles of de, and with partial
    sums their programs fill the GPU.
    """
    request, whole, of_column = x.request, saves and not x.request.forms_dz, 0
    x = x if saves else replace(x, serving=tuple(one for one in x.serving if one.offers("form_dz", request)))
    # The engine that multiplies only the kept tokens, and copies no part of c or dc; XLA if there is none.
    stopping = next((engine for engine in x.serving if engine.stops), XLA)
    own = x.engine if x.engine.multiplies_fastest else XLA  # the fastest where nothing is saved
    fastest = own if not whole else XLA if x.columns == request.vocabulary else stopping

    size, in_place, wants_e = x.rows * request.width, x.rows == request.tokens, saves or request.wants.e
    is_result = not x.engine.stops and in_place and request.itemsize == request.sum_itemsize
    is_result |= whole and request.wants.c and 2 * x.rows <= request.vocabulary  # XLA puts de into the memory of dc
    copied = not (wants_e and x.engine.stops and in_place)  # else the copy has a place in de
    of_e = request.itemsize * copied + request.sum_itemsize * (wants_e and not is_result)
    held = of_e * size + (NUMBERS + ID_NUMBERS * request.ids) * x.rows + WORKSPACE * (saves or own is XLA)
    held += saves * (2 * x.rows * x.columns + request.sum_itemsize * size)

    room = max(request.memory_budget - held, WINDOW_BYTES * saves)
    for engine, more in ((fastest, 0), (stopping, request.itemsize * x.rows * (stopping is XLA))):  # a second dz
        windows = Windows.whole(request.vocabulary, beyond=engine.stops and engine.multiplies_fastest)
        if not whole:
            of_column = column(x, x.engine, engine, x.rows, saves)
            windows = x.engine.windows(request, x.rows, room, of_column + more, x.gpu)
        pads = engine is XLA and XLA.pads(request, x.rows, windows.columns, x.gpu)
        if not pads:
            break
    held += windows.columns * (of_column + more * pads)

    products, of_few = engine.multiplying(request, x.rows, windows, x.gpu), None
    part = request.sum_itemsize * size * request.wants.e
    splits = min(products.splits, 1 + max(request.memory_budget - held, 0) // part) if part else 1
    if x.finds_ignored and not engine.stops:
        of_few = replace(stopping.multiplying(request, x.rows, windows, x.gpu), splits=1)
    dz = None if whole else replace(x.step("form_dz_of_saved" if saves else "form_dz"), windows=windows)
    targets, way = x.step("saved_targets") if whole else None, "saved" if saves else "recomputed"
    how = Schedule(way, replace(products, splits=splits), of_few, dz, targets)
    first, of_first = forward(x)
    more = (2.0 * request.width * x.costs.logits + x.costs.logit) * request.tokens * request.vocabulary
    more += windows.count * (8.0 * request.tokens * request.width * x.costs.byte * request.wants.e + x.costs.launches)
    time = time_of(x, request.tokens, request.wants.e + request.wants.c, 0.0 if saves else more)
    return x.plan(first, how, max(held + (splits - 1) * part, of_first), time)


def in_forward(x: Setting, chunks: Chunks | None) -> Plan:
    """The plan in which the forward pass forms the gradients in these chunks. None: in the smallest.

    XLA's matmul for de is faster than Triton's, unless XLA copies the operands: where P has more columns than c, or
    where XLA splits the sum.
    """
    chunks = chunks or smallest_chunks(x)
    request, cost, wants, size = x.request, x.costs, x.request.wants, chunks.size
    padded, first, of_de = XLA.pads_de(request, size, request.vocabulary, x.gpu), None, cost.products
    steps: dict[str, Any] = {"dc": (x.engine if x.stores else XLA).step("sum_dc", request, x.gpu, size)}
    if x.stores:
        de = x.engine if x.engine.multiplies_fastest or padded or x.columns != request.vocabulary else XLA
        steps["products"], of_de = de.de_of_chunk(request, size, x.gpu), 1.0 if de is XLA else of_de
    if x.stores and request.teacher_width:
        part = replace(x, request=replace(request, tokens=min(x.most_logits, size)))
        steps |= {"logits": part.step("whole_logits"), "passes": part.step("divergence_pass")}
        steps["most_logits"] = part.request.tokens
    elif x.stores:
        first = forward(replace(x, request=replace(request, tokens=size)))[0]
        steps |= {"dz": x.step("dz_in_place")} if request.of_mean else {"targets": x.step("saved_targets")}
        if request.gradient_tolerance and x.engine.block_sparse:
            steps["thresholds"] = x.step("thresholds")
    how = Schedule("in forward", chunks=chunks, **steps)

    of_c = request.vocabulary * request.width
    in_windows = not x.stores and (x.gpu is None or request.dc_itemsize < request.sum_itemsize)
    moved = 2 * request.dc_itemsize + 16 * in_windows  # bytes of an element of dc: XLA holds a window in float32
    more = chunks.count * (moved * cost.byte * wants.c * of_c + cost.launches)
    more += cost.new * max(request.sum_itemsize * size * request.vocabulary - KEPT, 0)
    if wants.c and not request.sums_dc_in_16_bits:  # dc begins as zeros, and is multiplied by the factor
        more += 3 * request.dc_itemsize * cost.byte * of_c
    rows = cdiv(request.tokens if x.stores else chunks.rows, cost.multiple) * cost.multiple  # kernels stop at the last
    time = time_of(x, rows, wants.c * cost.products + wants.e * of_de, more)
    return x.plan(first, how, _bytes(x, how, padded), time + SMALLER_PARTS * (0 < x.most_logits < MOST_LOGITS[0]))


def _bytes(x: Setting, how: Schedule, padded: bool) -> int:
    """What `in_forward` holds: arrays of all tokens, those of one chunk, and what XLA adds. padded: XLA.pads_de."""
    request, size, columns, wants = x.request, how.chunks.size, x.columns, x.request.wants
    width, wide, of_de = request.width, request.sum_itemsize, ITEMSIZE[request.left_de_dtype] * wants.e
    held = CHUNK_NUMBERS * how.chunks.rows + 12 * request.vocabulary * wants.bias
    held += 4 * math.prod(steps_shape(request.vocabulary, width)) * request.sums_dc_in_16_bits
    held += 4 * math.prod(request.units_shape(request.tokens)) * (wants.e and request.divides_de)
    held += request.itemsize * request.tokens * width * (not request.one_factor)  # de for any cotangents is no result
    if how.products is None:
        held += size * XLA.chunk_bytes(request, size, columns, x.gpu) + WORKSPACE * (x.gpu is not None)
        if request.teacher_width:  # its logits, and copies of its e
            held += size * wide * ((OF_TEACHER_ON_CPU if x.gpu is None else 1) * columns + 4 * request.teacher_width)
        if request.left_de_dtype != request.de_dtype:  # de cannot wait in the memory of the result
            held += of_de * request.tokens * width
        return held + request.itemsize * request.vocabulary * width * padded  # c
    by_xla = how.products.engine is XLA
    sums = 4 * size * width * wants.e * (parts_of(size, width, x.gpu) if by_xla else how.products.splits)
    # The exponentials (an evaluation beside a teacher has none), sums and scores of their masses; e, and the teacher's.
    masses = 6 * columns // PART * bool(request.gradient_tolerance)
    of_token = 2 * columns * (request.wanted is not None) + masses
    held += size * (of_token + request.itemsize * width + wide * request.teacher_width)
    # One after another in the same memory: the logits of both; the partial sums of de, and de; the scaled e.
    held += max(2 * wide * columns * how.most_logits, sums + size * width * of_de, size * width * request.itemsize)
    if wants.c and not request.sums_dc_in_16_bits:  # XLA gives de no memory of a result here, but that of the sums
        held += max(width * of_de * request.tokens - sums, 0)
    return held + WORKSPACE * (wants.bias or (wants.e and by_xla))


def fastest_chunks(x: Setting) -> Chunks | None:
    """The chunks within the budget that take the least time, about equal; None if no chunk is within the budget."""
    budget, found, least, count = max(x.request.memory_budget, 1), None, math.inf, 1
    while count <= smallest_chunks(x).count:
        plan = in_forward(x, chunks := smallest_chunks(x, count))
        if plan.held > budget:  # the bytes beside a chunk stay: it shrinks at least as much as they must
            count = max(count + 1, int(x.request.tokens * plan.held / budget / chunks.size))
            continue
        if plan.time >= least:
            break
        found, least, count = chunks, plan.time, count + 1
    return found


def smallest_chunks(x: Setting, most: int | None = None) -> Chunks:
    """At most so many chunks. They have a multiple of so many tokens, so that their parts are equal."""
    tokens, multiple = max(gathered_rows(x.request.tokens), 1), max(x.costs.multiple, x.most_logits)
    size = min(cdiv(tokens, (most or tokens) * multiple) * multiple, tokens)
    return Chunks(cdiv(tokens, size), size)
