"""The one place that decides which engine computes a call, what is saved, and in which groups and tiles.

`plan_of` is pure arithmetic: it launches nothing and asks no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from cce_kernels.call import Call
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine, Multiplying
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.xla import XLA
from cce_kernels.exponentials import can_be_saved
from cce_kernels.numbers import Wanted
from cce_kernels.plan.budget import GROUP_BYTES, Bytes
from cce_kernels.plan.chunks import fastest_chunks, predicted
from cce_kernels.plan.plan import Backward, Chunks, Forward, InForward, Plan, Step, Times
from cce_kernels.tokens import MANY, gathered_rows
from cce_kernels.windows import Groups

Impl = Literal["auto", "cce", "chunked"]
KERNELS = (HOPPER, TRITON)  # Pallas, fastest first
SMALL = 4 * 2**20  # bytes: a group of dc may have so many even if dc is small


def engines(itemsize: int, impl: Impl) -> Sequence[Engine]:
    """The engines that may compute a call, fastest first (bench/engines.py). itemsize: of e, in bytes."""
    if impl == "chunked":
        return (XLA,)
    if impl == "cce":
        return KERNELS
    return (XLA,) if itemsize > 2 else (*KERNELS, XLA)  # with float32 Triton takes 1.4 to 2.1 times as long as XLA


def needs_reference(itemsize: int, impl: Impl) -> bool:
    """Whether shards of the vocabulary must know the targets' logits before their sums, whatever the shards' sizes."""
    return not all(engine.finds_target for engine in engines(itemsize, impl))


@lru_cache(maxsize=4096)
def plan_of(
    call: Call, gpu: Gpu | None, impl: Impl, saved: int | None = None, last: int | None = None,
    chunks: Chunks | None = None,
) -> Plan:  # fmt: skip
    """The plan of a call. ValueError if no engine of impl serves the call.

    gpu: None for a device that is no CUDA GPU. What the plan for another platform has decided already, or None: saved,
    the number of tokens whose exponentials are saved, all or 0; last, that the forward pass forms the gradients, and
    the number of tokens of its last chunk. chunks: the same from the plan for another shard of the vocabulary, and all
    its chunks.
    """
    gathered = with_gathered_rows(call)
    serving = tuple(engine for engine in engines(call.itemsize, impl) if engine.serves(gathered, gpu))
    if not serving:
        raise ValueError(f"impl={impl!r} has no engine for {call} on {gpu}")
    setting = _Setting(call, gpu, serving)
    decides = saved is None
    saves = _saves(setting) if saved is None or not setting.engine.stops else saved > 0
    forward, of_forward = _forward(setting)
    if call.wanted is None:
        return Plan(call, gpu, setting.rows, setting.looks, 0, forward, None, 0, None, 0)
    backward, of_backward = _backward(setting, saves)
    held, in_forward, times = max(of_forward, of_backward), None, None
    decided = last is not None or chunks is not None
    if decided or (decides and (call.one_factor or of_any_cotangents(call))):
        if chunks is None and (decided or _may_form_in_forward(setting)):
            chunks = fastest_chunks(setting.bytes, last)
        again = _backward(setting, False)[0] if saves else backward
        times = predicted(setting.bytes, again.groups.count, chunks, saves)
        if chunks is not None and (decided or _is_fastest_in_forward(times)):
            in_forward = _in_forward(setting, chunks)
            saves, backward, held = False, again, in_forward.held
    return Plan(call, gpu, setting.rows, setting.looks, setting.rows * saves, forward, backward, held, in_forward,
                setting.bytes.least(), times)  # fmt: skip


def with_gathered_rows(call: Call) -> Call:
    """The call as engines are asked for it: its kept tokens may be gathered into a few more rows."""
    return replace(call, tokens=gathered_rows(call.tokens))


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


def _may_form_in_forward(x: _Setting) -> bool:
    """Whether the forward pass may form the gradients of a call whose cotangents allow it.

    On a GPU from stored exponentials, or in float32. In 16 bits XLA's passes over float32 logits, and its sums of dc in
    groups, take longer than to compute the logits again. So does Triton's sum of a float32 dc: 35 and 32 ms on an H200.
    """
    if not x.call.may_chunk or x.gpu is None:
        return x.call.may_chunk
    if not x.bytes.stores:
        return x.call.dtype == "float32"
    return x.engine.multiplies_fastest or x.call.of_dc == 2


def _is_fastest_in_forward(times: Times) -> bool:
    return times.in_forward < min(times.again, times.saved)


def _in_forward(x: _Setting, chunks: Chunks) -> InForward:
    """How the forward pass forms the gradients in these chunks."""
    call, size = x.call, max(chunks.size, chunks.last)
    everything = Groups(call.vocabulary, call.vocabulary, beyond=not x.engine.finds_target)
    held, dc = x.bytes.of_chunks(chunks), _sum_of_dc(x, chunks)
    if not x.bytes.stores:
        return InForward(chunks, dc, everything, held)
    of_chunk = _Setting(replace(call, tokens=size), x.gpu, x.serving)
    forward = replace(_forward(of_chunk)[0], gathered=True, scattered=None)
    sizes = {chunks.size or size, chunks.last or size}
    by_xla = all(x.bytes.de_by_xla(tokens) for tokens in sizes)
    de = Multiplying(XLA, None, None) if by_xla else x.engine.de_of_chunk(call, size, x.gpu)
    forming = x.offering("form_dz_in_place") if call.with_sum else None
    dz = None if forming is None else Step(forming, forming.tile("saved_dz", call, x.gpu))
    return InForward(chunks, dc, everything, held, forward, de, dz, x.offering("restored"))


def _sum_of_dc(x: _Setting, chunks: Chunks) -> Step:
    """The step that sums dc over chunks: by the engine that stores exponentials; else by XLA in groups of columns."""
    call = x.call
    if x.bytes.stores:
        return Step(x.engine, x.engine.tile("sum_dc", call, x.gpu))
    if x.gpu is not None and call.of_dc == call.wide:  # XLA's matmul adds to dc in place
        return Step(XLA, (Groups(call.vocabulary, call.vocabulary), chunks.block))
    of_group = 3 * call.wide * call.width  # a group's part of dc, in float32, and what becomes of it
    room = max(min(GROUP_BYTES // 4, call.vocabulary * of_group // 8), SMALL)
    groups = XLA.groups(call, max(chunks.size, chunks.last), room, of_group, x.gpu)
    return Step(XLA, (groups, chunks.block))


def _saves(x: _Setting) -> bool:
    """Whether the forward pass is to save the exponentials of all tokens."""
    call, count = x.call, x.bytes
    if call.wanted is None or not x.engine.stops or not can_be_saved(call.dtype, call.head, call.with_sum):
        return False
    return call.memory_budget - count.gathered >= count.of_saved()


def _backward(x: _Setting, saves: bool) -> tuple[Backward, int]:
    """The plan of the backward pass, and the bytes that it holds."""
    count, tokens = x.bytes, x.rows
    if saves and count.direct:
        how = _of_exponentials(x)
        beside = count.beside_matmuls if how.de is None else count.scaled_e
        return how, count.gathered + count.saved(tokens) + beside
    if saves:
        beside = count.saved(tokens) + count.beside_groups
        forming = x.offering("form_dz_of_saved")
        room = x.call.memory_budget - count.gathered - beside
        groups, size = _groups(x, tokens, room, XLA, of_saved=forming)
        step = Step(forming, forming.tile("saved_dz", x.call, x.gpu))
        few, most = _multiplying(x, forming, groups), _multiplying(x, XLA, groups)
        if _xla_copies(x, groups.columns):
            few, most = None, few
        return Backward(groups, step, most, few if x.looks else None), count.gathered + beside + size
    products, room = x.products, x.call.memory_budget - count.gathered - count.always
    groups, size = _groups(x, tokens, room, products)
    if products is XLA and _xla_copies(x, groups.columns):
        products = x.stopping if x.engine.stops else XLA
        groups, size = _groups(x, tokens, room, products, padded=products is XLA)
    few = None if products.stops or not x.looks else _multiplying(x, x.stopping, groups)
    step = Step(x.engine, x.engine.tile("form_dz", x.call, x.gpu))
    return Backward(groups, step, _multiplying(x, products, groups), few), count.gathered + count.always + size


def _of_exponentials(x: _Setting) -> Backward:
    """The plan of the backward pass where the exponentials of all tokens are multiplied as they are."""
    call, tokens = x.call, x.rows
    longer = x.bytes.saved(1) != 2 * call.vocabulary  # P has more columns than c, so that XLA would copy P
    by_xla = not longer and not _xla_copies(x, call.vocabulary)
    in_place = x.bytes.in_place and not (by_xla and call.memory_budget >= x.bytes.everything())
    everything = Groups(call.vocabulary, call.vocabulary, beyond=in_place)
    if in_place:
        de = Step(x.engine, x.engine.tile("de_of_saved", call, x.gpu, tokens))
        return Backward(everything, None, _multiplying(x, x.engine, everything), de=de)
    few = _multiplying(x, x.engine, everything)
    if not by_xla:
        return Backward(everything, None, few)
    return Backward(everything, None, _multiplying(x, XLA, everything), few if x.looks else None)


def _xla_copies(x: _Setting, columns: int) -> bool:
    """Whether XLA's matmuls with dz of so many columns, or with saved exponentials, would copy their operands."""
    return x.rows > 0 and XLA.pads(x.call, x.rows, columns, x.gpu)


def _multiplying(x: _Setting, engine: Engine, groups: Groups) -> Multiplying:
    return engine.multiplying(x.call, x.rows, groups, x.gpu)


def _groups(
    x: _Setting, tokens: int, room: int, products: Engine, *, of_saved: Engine | None = None, padded: bool = False
) -> tuple[Groups, int]:
    """The groups in which dz of so many tokens is formed, and the bytes of one group, at most `room` if possible.

    of_saved: the engine that forms dz from saved exponentials; None: dz is formed from logits. padded: whether XLA pads
    dz where it pads such a matmul.
    """
    how = {"copies": not products.in_place, "of_saved": of_saved is not None}
    column = x.bytes.column(tokens, **how, padded=padded)
    groups = (of_saved or x.engine).groups(x.call, tokens, room, column, x.gpu)
    padded = padded and _xla_copies(x, groups.columns)  # smaller groups may need no padding
    return groups, groups.columns * x.bytes.column(tokens, **how, padded=padded)
