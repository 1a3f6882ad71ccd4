"""The one place that decides which engine computes a call, what is saved, and in which groups and tiles.

`plan_of` is pure arithmetic: it launches nothing and asks no device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from cce_kernels.block_floats import steps_shape
from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine, Multiplying
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.xla import XLA
from cce_kernels.exponentials import can_be_saved, saved_shape
from cce_kernels.numbers import Wanted
from cce_kernels.plan.budget import GROUP_BYTES, WORKSPACE, Bytes
from cce_kernels.plan.plan import Backward, Chunks, Forward, InForward, Part, Plan, Step
from cce_kernels.tokens import MANY, gathered_rows
from cce_kernels.windows import Groups

Impl = Literal["auto", "cce", "chunked"]
KERNELS = (HOPPER, TRITON)  # Pallas, fastest first
SAVED_MULTIPLE = 64  # tokens: matmuls that sum over tokens take them in steps of so many
LEAST_PART = 1 / 5  # of the tokens: saving fewer is slower than saving none and letting XLA multiply all tokens


def engines(itemsize: int, impl: Impl) -> Sequence[Engine]:
    """The engines that may compute a call, fastest first (docs/performance-diary.md). itemsize: of e, in bytes."""
    if impl == "chunked":
        return (XLA,)
    if impl == "cce":
        return KERNELS
    return (XLA,) if itemsize > 2 else (*KERNELS, XLA)  # with float32 Triton takes 1.4 to 2.1 times as long as XLA


def forms_gradients_in_forward() -> bool:
    """GRADIENTS_IN_FORWARD."""
    return GRADIENTS_IN_FORWARD


def needs_reference(itemsize: int, impl: Impl) -> bool:
    """Whether shards of the vocabulary must know the targets' logits before their sums, whatever the shards' sizes."""
    return not all(engine.finds_target for engine in engines(itemsize, impl))


@lru_cache(maxsize=4096)
def plan_of(
    call: Call, gpu: Gpu | None, impl: Impl, saved: int | None = None, chunks: Chunks | None = None
) -> Plan:  # fmt: skip
    """The plan of a call. ValueError if no engine of impl serves the call.

    gpu: None for a device that is no CUDA GPU. saved: the number of tokens whose exponentials are saved, if the plan
    for another platform has decided it; None: this plan decides. chunks: the same of the chunks in which the forward
    pass forms the gradients.
    """
    whole = replace(call, tokens=gathered_rows(call.tokens))
    serving = tuple(engine for engine in engines(call.itemsize, impl) if engine.serves(whole, gpu))
    if not serving:
        raise ValueError(f"impl={impl!r} has no engine for {call} on {gpu}")
    setting = _Setting(call, gpu, serving)
    undecided = saved is None and chunks is None
    if saved is None or not setting.engine.stops:
        saved = _saved_tokens(setting)
    forward, of_forward = _forward(setting)
    backward, held, least, in_forward = None, 0, 0, None
    known = call.wanted is not None and (call.one_factor or of_any_cotangents(call))
    if chunks is not None or (undecided and known and saved < whole.tokens):
        in_forward = _in_forward(setting, chunks)
        saved = saved if in_forward is None else 0
    if call.wanted is not None:
        backward, of_backward = _backward(setting, saved)
        held, least = max(of_forward, of_backward), setting.bytes.least()
        held = held if in_forward is None else in_forward.held
    return Plan(call, gpu, setting.rows, setting.looks, saved, forward, backward, held, in_forward, least)


def of_any_cotangents(call: Call) -> bool:
    """Whether one matmul before the cotangents are known gives de for all of them: de is wanted alone, and is not a
    part of a sum over devices. In float16 such a de would underflow.
    """
    alone = call.wanted == Wanted(e=True, c=False, bias=False)
    return alone and not call.with_sum and not call.wide_de and call.dtype != "float16"


@dataclass(frozen=True)
class _Setting:
    """A call and the engines that serve it. The first computes the logits; the next have methods that it lacks."""

    call: Call
    gpu: Gpu | None
    serving: tuple[Engine, ...]

    @property
    def engine(self) -> Engine:
        return self.serving[0]

    @cached_property
    def looks(self) -> bool:
        """Whether ignored tokens are looked for: the engine stops at the last kept token, and there are many tokens."""
        many = 32 if self.gpu is not None and self.gpu.interpreted else MANY
        return self.engine.stops and self.call.tokens >= many

    @cached_property
    def gathers(self) -> bool:
        """Whether e is copied with the kept tokens first. Evaluation needs no copy if the engine takes N rows."""
        return self.looks and (self.call.wanted is not None or not self.engine.serves(self.call, self.gpu))

    @cached_property
    def rows(self) -> int:
        if self.gathers:
            return gathered_rows(self.call.tokens)
        if self.call.wanted is None or self.engine.stops:
            return self.call.tokens
        return XLA.rows(self.call, self.gpu)

    @cached_property
    def bytes(self) -> Bytes:
        return Bytes(self.call, self.gpu, self.rows, self.engine, self.products)

    def offering(self, method: str) -> Engine:
        return next(engine for engine in self.serving if engine.offers(method))

    @property
    def products(self) -> Engine:
        """The engine whose matmuls of all tokens are fastest, where nothing is saved."""
        return self.engine if self.engine.multiplies_fastest else XLA

    @property
    def stopping(self) -> Engine:
        """The engine that multiplies only the kept tokens, and copies no part of c or dc."""
        return next(engine for engine in self.serving if engine.stops)


def _forward(x: _Setting) -> tuple[Forward, int]:
    """The plan of the forward pass, and the bytes of its blocks of logits and of what may be held beside them."""
    if x.engine.finds_target:
        beside = x.bytes.beside_logits
        groups, size = _groups(x, x.call.tokens, x.call.memory_budget - beside, x.engine)
        return Forward(Step(x.engine, groups), 1, x.gathers), beside + size
    tiles = x.engine.tile("sums", x.call, x.gpu)
    kernels = x.offering("again")
    rows, columns = x.engine.blocks(tiles)
    others = replace(kernels.tile("sums", x.call, x.gpu), columns=columns)
    scattered = None
    # A block whose tokens are consecutive rows of e is read at once. A twin of the kernel, "scattered", computes the
    # other blocks. With a weighted sum there is no twin: the kernel looks up every row.
    if x.looks and not x.gathers and not x.call.with_sum:
        scattered = Step(kernels, replace(others, rows=rows))
    target = Step(kernels, kernels.tile("target", x.call, x.gpu))
    return Forward(Step(x.engine, tiles), x.engine.splits(x.call, x.rows, x.gpu), x.gathers, target, scattered,
                   Step(kernels, others)), 0  # fmt: skip


# Whether the forward pass may form the gradients of a "mean" or "sum". Off until random calls on a GPU have passed with
# it; tests/test_in_forward.py and tests/test_hopper.py turn it on.
GRADIENTS_IN_FORWARD = False
CHUNK_MULTIPLE = 256  # tokens: the rows of a tile of the kernels
BLOCK = 256
# In floating-point operations of a matmul, on an H200: the time of a byte of device memory, where a matmul runs at the
# same time, and of the small kernels of a chunk or a group.
BYTE, LAUNCHES = 120.0, 4e10
CHUNK_NUMBERS = 96  # bytes a token, for lse, its place among the kept tokens and the like
NEARLY = 1.01  # of the least time: for so little a last chunk is made smaller, as it is held between the passes


def _in_forward(x: _Setting, chunks: Chunks | None) -> InForward | None:
    """How the forward pass forms the gradients, in these chunks; None: choose them, or None if that is not faster."""
    call = x.call
    exponentials = x.engine.stops and not call.with_sum and can_be_saved(call.dtype, call.head, call.with_sum)
    own = x.engine.block(call) if exponentials else 0
    if chunks is None:
        if not GRADIENTS_IN_FORWARD or (x.gpu is not None and not own):
            return None
        chunks = _chunks(x, exponentials)
        if chunks is None:
            return None
    size = max(chunks.size, chunks.last)
    everything = Groups(call.vocabulary, call.vocabulary, beyond=not x.engine.finds_target)
    of_group = 3 * call.wide * call.width  # a group's part of dc, in float32, and what becomes of it
    room = min(GROUP_BYTES // 4, call.vocabulary * of_group // 8)
    dc = Step(XLA, (XLA.groups(call, size, size, room, of_group, x.gpu), chunks.block))
    held = _bytes(x, chunks, exponentials)
    if not exponentials:
        return InForward(chunks, dc, everything, held)
    if chunks.block == own:
        dc = Step(x.engine, x.engine.tile("sum_dc", call, x.gpu, chunks.block))
    of_chunk = _Setting(replace(call, tokens=size), x.gpu, x.serving)
    restoring = next(engine for engine in x.serving if engine.offers("restored"))
    return InForward(chunks, dc, everything, held, replace(_forward(of_chunk)[0], gathered=True, scattered=None),
                     x.engine.de_of_chunk(call, size, x.gpu), restoring)  # fmt: skip


def _bytes(x: _Setting, chunks: Chunks, exponentials: bool) -> int:
    """What is held at most: a chunk, its part of de, the numbers of all tokens and the steps of dc."""
    call, tokens = x.call, max(chunks.size, chunks.last)
    assert call.wanted is not None
    columns = saved_shape(1, call.vocabulary)[1]
    if exponentials:
        of_de = 4 * (x.engine.de_of_chunk(call, tokens, x.gpu).splits + 1) * call.width * call.wanted.e
        chunk = tokens * (2 * columns + 4 * call.width + of_de)
    else:  # the logits, the exponentials and dz
        chunk = tokens * (3 * call.wide * columns + 3 * call.wide * call.width) + WORKSPACE * (x.gpu is not None)
    steps = 4 * math.prod(steps_shape(call.vocabulary, call.width, chunks.block)) * (chunks.last > 0)
    moved = call.itemsize * chunks.rows * call.width * (call.wanted.e and chunks.rows != call.tokens)
    return chunk + steps + moved + CHUNK_NUMBERS * chunks.rows


def _chunks(x: _Setting, exponentials: bool) -> Chunks | None:
    """The chunks within the budget that take the least time; None if computing the logits again takes less."""
    call = x.call
    assert call.wanted is not None
    narrow, tokens = call.wanted.c and call.of_dc == 2, gathered_rows(call.tokens)
    own = x.engine.block(call) if exponentials else 0
    of_dc = 2 * call.of_dc if own else 16 + 2 * call.of_dc  # bytes that a chunk moves for an element of dc
    found = []
    for size in range(min(CHUNK_MULTIPLE, tokens), tokens + CHUNK_MULTIPLE, CHUNK_MULTIPLE):
        count = -(-tokens // size) - narrow
        chunks = Chunks(count, size if count else 0, tokens - count * size if narrow else 0, own or BLOCK)
        if _bytes(x, chunks, exponentials) > call.memory_budget:
            break
        found.append((_time(call, chunks, of_dc), chunks))
    least = min((time for time, _ in found), default=math.inf)
    if least >= _again(call):
        return None
    fast = [chunks for time, chunks in found if time <= NEARLY * least]
    return min(fast, key=lambda chunks: (chunks.last, chunks.whole))


def _time(call: Call, chunks: Chunks, of_dc: int) -> float:
    """The predicted time of forming the gradients in these chunks, in floating-point operations of a matmul."""
    assert call.wanted is not None
    of_c, wanted = call.vocabulary * call.width, call.wanted

    def of_chunk(tokens: int) -> float:
        rows = -(-tokens // CHUNK_MULTIPLE) * CHUNK_MULTIPLE
        return (2.0 * (1 + wanted.e + wanted.c) * rows + of_dc * BYTE * wanted.c) * of_c + LAUNCHES

    return chunks.whole * of_chunk(chunks.size) + (of_chunk(chunks.last) if chunks.last else 0)


def _again(call: Call) -> float:
    """The same of a backward pass that computes the logits again."""
    assert call.wanted is not None
    groups = -(-call.tokens * call.vocabulary * call.itemsize // GROUP_BYTES)
    of_group = 8 * call.tokens * call.width * BYTE * call.wanted.e + LAUNCHES
    matmuls = 2 + call.wanted.e + call.wanted.c
    return 2.0 * matmuls * call.tokens * call.vocabulary * call.width + groups * of_group


def _saved_tokens(x: _Setting) -> int:
    """The number of tokens whose exponentials the forward pass is to save."""
    call, tokens, count = x.call, x.rows, x.bytes
    if call.wanted is None or not x.engine.stops or not can_be_saved(call.dtype, call.head, call.with_sum):
        return 0
    budget = call.memory_budget - count.gathered
    whole = math.inf
    if count.together:
        whole = count.saved(tokens) + count.beside_saved(tokens)
    elif count.direct:
        whole = count.everything() - count.gathered
    if budget >= whole:
        return tokens

    def fits(saved: int) -> bool:
        least = count.least_group(tokens, copies=True, of_saved=True)
        group = count.wanted_group(tokens - saved) if count.direct else max(GROUP_BYTES, least)
        beside = count.beside_groups(saved) + group
        if count.direct and not count.together:  # the matmuls with saved exponentials run before the groups
            beside = max(beside, count.beside_matmuls(saved))
        return count.saved(saved) + beside <= budget

    most = min((tokens - count.direct) // SAVED_MULTIPLE, budget // count.saved(SAVED_MULTIPLE))
    found = next((n * SAVED_MULTIPLE for n in range(most, 0, -1) if fits(n * SAVED_MULTIPLE)), 0)
    return found if found > LEAST_PART * tokens else 0


def _backward(x: _Setting, saved: int) -> tuple[Backward, int]:
    """The plan of the backward pass, and the bytes that it holds."""
    call, count, tokens = x.call, x.bytes, x.rows - saved
    longer = count.saved(1) != 2 * call.vocabulary  # P has more columns than c, so that XLA would copy P
    by_xla = count.direct and not longer and not _xla_copies(x, saved, call.vocabulary)
    all_by_xla = by_xla and saved == x.rows and call.memory_budget >= count.everything()
    together = saved > 0 and count.together and not all_by_xla
    of_saved, others, held, beside = None, None, 0, count.always
    if saved:
        beside = count.saved(saved) + count.beside_groups(saved)
    room = call.memory_budget - count.gathered - beside
    if saved and count.direct:
        of_saved = _whole(x, saved, by_xla, together)
        held = count.saved(saved) + (count.beside_saved(saved) if together else count.beside_matmuls(saved))
    elif saved:
        forming = x.offering("form_dz_of_saved")
        groups, size = _groups(x, saved, room, XLA, of_saved=forming)
        few, most = _multiplying(x, forming, saved, groups), _multiplying(x, XLA, saved, groups)
        if _xla_copies(x, saved, groups.columns):
            few, most = None, few
        step = Step(forming, forming.tile("saved_dz", call, x.gpu))
        of_saved, held = Part(saved, groups, step, most, few if x.looks else None), beside + size
    if tokens:
        products = x.stopping if saved else x.products
        groups, size = _groups(x, tokens, room, products, of_dc=x.rows if together else tokens)
        if products is XLA and _xla_copies(x, tokens, groups.columns):
            products = x.stopping if x.engine.stops else XLA
            groups, size = _groups(x, tokens, room, products, padded=products is XLA)
        few = None if products.stops or not x.looks else _multiplying(x, x.stopping, tokens, groups)
        others = Part(tokens, groups, Step(x.engine, x.engine.tile("form_dz", call, x.gpu)),
                      _multiplying(x, products, tokens, groups, split=saved > 0), few)  # fmt: skip
        held = max(held, beside + size)
    de_of_saved = Step(x.engine, x.engine.tile("de_of_saved", call, x.gpu, saved)) if together else None
    return Backward(of_saved, others, de_of_saved), count.gathered + held


def _xla_copies(x: _Setting, tokens: int, columns: int) -> bool:
    """Whether XLA's matmuls with dz of so many columns, or with saved exponentials, would copy their operands."""
    return tokens > 0 and XLA.pads(x.call, tokens, columns, x.gpu)


def _whole(x: _Setting, saved: int, by_xla: bool, together: bool) -> Part:
    """The part of the saved tokens, if their exponentials are multiplied as they are."""
    everything = Groups(x.call.vocabulary, x.call.vocabulary, beyond=together)
    if together:
        return Part(saved, everything, None, _multiplying(x, x.engine, saved, everything))
    few = _multiplying(x, x.offering("ready"), saved, everything)
    if not by_xla:
        return Part(saved, everything, None, few)
    return Part(saved, everything, None, _multiplying(x, XLA, saved, everything), few if x.looks else None)


def _multiplying(x: _Setting, engine: Engine, tokens: int, groups: Groups, split: bool = False) -> Multiplying:
    return engine.multiplying(x.call, tokens, groups, split, x.gpu)


def _groups(
    x: _Setting, tokens: int, room: int, products: Engine, *, of_saved: Engine | None = None, of_dc: int = 0,
    padded: bool = False,
) -> tuple[Groups, int]:  # fmt: skip
    """The groups in which dz of so many tokens is formed, and the bytes of one group, at most `room` if possible.

    of_saved: the engine that forms dz from saved exponentials; None: dz is formed from logits. of_dc: the number of
    tokens that dc sums over; 0: these tokens. padded: whether XLA pads dz where it pads such a matmul.
    """
    how = {"copies": not products.in_place, "of_saved": of_saved is not None}
    column = x.bytes.column(tokens, **how, padded=padded)
    groups = (of_saved or x.engine).groups(x.call, tokens, of_dc or tokens, room, column, x.gpu)
    padded = padded and _xla_copies(x, tokens, groups.columns)  # smaller groups may need no padding
    return groups, groups.columns * x.bytes.column(tokens, **how, padded=padded)
