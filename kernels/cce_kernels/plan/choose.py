"""The one place that decides which engine computes a call, what is saved, and in which groups and tiles.

`plan_of` is arithmetic: it launches nothing and asks no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from cce_kernels.call import Call
from cce_kernels.compat import warn_if_untested
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Engine, Multiplying, Step
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.xla import XLA
from cce_kernels.exponentials import can_be_saved
from cce_kernels.numbers import Wanted
from cce_kernels.plan import budget
from cce_kernels.plan.budget import GROUP_BYTES, Bytes
from cce_kernels.plan.chunks import fastest_chunks, in_forward, least_chunks, predicted
from cce_kernels.plan.plan import Chunks, Forward, InForward, Plan, Recomputed, Saved, Times
from cce_kernels.tokens import MANY, gathered_rows
from cce_kernels.windows import Groups

Impl = Literal["auto", "cce", "chunked"]
KERNELS = (HOPPER, TRITON)  # Pallas, fastest first
SMALLER_PARTS = 0.09  # of three matmuls: what logits of 256 tokens at a time cost over 512 beside a teacher
DEARER = 1.03  # what a call with a tolerance may take, over the exact one
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
    call: Call, gpu: Gpu | None, impl: Impl, saved: int | None = None, last: int | None = None, chunks: Any = None
) -> Plan:
    """The plan of a call. ValueError if no engine of impl serves the call.

    gpu: None for a device that is no CUDA GPU. What the plan for another platform has decided already, or None: saved,
    the number of tokens whose exponentials are saved, all or 0; last, that the forward pass forms the gradients, and
    the number of tokens of its last chunk. chunks (Chunks): the same from the plan for another shard of the
    vocabulary, and all its chunks. The first plan warns of a JAX that was not tested: each new call comes by here.
    """
    warn_if_untested()
    if call.forms_dz or not can_be_saved(call):  # block_sparse.py bounds what products of exponentials leave out
        call = replace(call, gradient_tolerance=0.0)
    gathered = with_gathered_rows(call)
    asked = engines(call.itemsize, impl)
    serving = tuple(engine for engine in asked if engine.serves(gathered, gpu))
    if not serving:
        why = "; ".join(f"{engine.name}: {engine.refuses(gathered, gpu)}" for engine in asked)
        raise ValueError(f"impl={impl!r} has no engine for {call} on {gpu} ({why}); impl='chunked' computes it")
    x = _Setting(call, gpu, serving)
    if call.teacher_width:
        return _beside_a_teacher(x, last, chunks)
    forward, of_forward = _forward(x)
    plan = Plan(call, gpu, x.rows, x.finds_ignored, forward, None, held=0, least=0)
    if call.wanted is None:
        return plan
    saves = _saves(x) if saved is None or not x.engine.stops else saved > 0
    gradients, of_gradients = _saved(x) if saves else _recomputed(x)
    held = max(of_forward, of_gradients)
    decided = last is not None or chunks is not None
    may = decided or (saved is None and (call.one_factor or of_any_cotangents(call)))
    if may and chunks is None and (decided or _may_form_in_forward(x)):
        chunks = fastest_chunks(x.bytes, last)
    recomputed = gradients if isinstance(gradients, Recomputed) else _recomputed(x)[0]
    times = predicted(x.bytes, recomputed.products.groups.count, chunks, saves)
    if chunks is not None and (decided or _is_fastest_in_forward(times) or _may_leave_out(x, times)):
        gradients, held = _in_forward(x, chunks), x.bytes.of_chunks(chunks)
    if not isinstance(gradients, InForward):  # the other ways leave out nothing
        plan = replace(plan, call=replace(call, gradient_tolerance=0.0))
    return replace(plan, gradients=gradients, held=held, least=x.bytes.least(), times=times)


def selecting(plan: Plan, tokens: int) -> Step | None:
    """The step that computes the logits of so many tokens with the maxima of blocks; None: XLA does."""
    call, engine = replace(plan.call, tokens=tokens), plan.forward.sums.engine
    if not (engine.offers("logits_and_maxima", call) and engine.serves(call, plan.gpu)):
        return None
    return engine.step("logits_and_maxima", call, plan.gpu, tokens)


def with_gathered_rows(call: Call) -> Call:
    """The call as engines are asked for it: its kept tokens may be gathered into a few more rows."""
    return replace(call, tokens=gathered_rows(call.tokens))


def of_any_cotangents(call: Call) -> bool:
    """Whether one matmul before the cotangents are known gives de for all of them: de is wanted alone, and is not a
    part of a sum over devices. In float16 such a de would underflow.
    """
    alone = call.wanted == Wanted(e=True, c=False, bias=False)
    others = call.forms_dz or call.ids or call.wide_de
    return alone and not others and call.dtype != "float16"


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
    def finds_ignored(self) -> bool:
        """Whether ignored tokens are looked for: the engine stops at the last kept token, and there are many tokens."""
        many = 32 if self.gpu is not None and self.gpu.interpreted else MANY
        return self.engine.stops and self.call.tokens >= many

    @cached_property
    def gathers(self) -> bool:
        """Whether e is copied with the kept tokens first. Evaluation needs no copy if the engine takes N rows."""
        return self.finds_ignored and (self.call.wanted is not None or not self.engine.serves(self.call, self.gpu))

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

    def step(self, method: str, block: Block | None = None) -> Step:
        """The step of the first engine that has this method of engine.Launched."""
        engine = next(engine for engine in self.serving if engine.offers(method, self.call))
        return engine.step(method, self.call, self.gpu, self.rows, block)

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
        besides = XLA.bytes_besides_logits(x.call)
        groups, size = _groups(x, x.call.tokens, x.call.memory_budget - besides, x.engine)
        return Forward(Step(x.engine, groups=groups), x.gathers), besides + size
    sums = x.step("sums")
    rescue = replace(x.step("recomputed", block=Block(0, x.engine.block(sums).columns)), splits=sums.splits)
    scattered = None
    # A block whose tokens are consecutive rows of e is read at once. Another kernel, "scattered", computes the other
    # blocks. With a weighted sum there is no such kernel: `sums` looks up every row.
    if x.finds_ignored and not x.gathers and not x.call.with_sum:
        scattered = x.step("recomputed", block=x.engine.block(sums))
    return Forward(sums, x.gathers, x.step("target"), scattered, rescue), 0


def _may_form_in_forward(x: _Setting) -> bool:
    """Whether the forward pass may form the gradients of a call whose cotangents allow it.

    On a GPU from stored exponentials, or in float32. In 16 bits XLA's passes over float32 logits, and its sums of dc in
    groups, take longer than to compute the logits again. So does Triton's sum of a float32 dc: 35 and 32 ms on an H200.
    """
    if x.call.ids:  # only backward.py adds their cotangents to dz
        return False
    if not x.call.may_chunk or x.gpu is None:
        return x.call.may_chunk
    if not x.bytes.stores:
        return x.call.dtype == "float32"
    return x.engine.multiplies_fastest or x.call.dc_itemsize == 2


def _beside_a_teacher(x: _Setting, last: int | None, chunks: Any) -> Plan:
    """The plan of a divergence from a teacher: chunks of the forward pass, also for evaluation. The logits are XLA's.

    dz in bfloat16 is multiplied by the engine that sums dc of stored exponentials, where there is one.
    """
    count, chunks, least = _parts_beside_a_teacher(x.bytes, last, chunks)
    way = InForward(chunks, _sum_of_dc(x, chunks), most_logits=count.most_logits)
    if count.stores:
        size = max(chunks.size, chunks.last)
        by_xla = all(count.de_by_xla(tokens) for tokens in (chunks.size or size, chunks.last or size))
        de = (XLA if by_xla else x.engine).de_of_chunk(x.call, size, x.gpu)
        of_part = _Setting(replace(x.call, tokens=way.logits_of(size)), x.gpu, x.serving)
        logits, passes = map(of_part.step, ("whole_logits", "divergence_pass"))
        way = replace(way, de=de, restored=x.step("restored"), logits=logits, passes=passes)
    held = count.of_chunks(chunks)
    return Plan(x.call, x.gpu, x.call.tokens, True, Forward(Step(x.engine), True), way, held, min(least, held))


def _parts_beside_a_teacher(count: Bytes, last: int | None, chunks: Any) -> tuple[Bytes, Chunks, int]:
    """The bytes, with the number of tokens whose logits are held at a time; the chunks; the bytes of the least plan.

    In float16 the logits of a chunk are held at once, as all its dz are divided by one number.
    """
    parts = budget.MOST_LOGITS if count.stores and count.gpu is not None else (0,)
    each = [replace(count, most_logits=most) for most in parts]
    least = least_chunks(each[-1])
    if chunks is None:
        found = [(x, y) for x in each if (y := fastest_chunks(x, last)) is not None]
        found = found or [(each[-1], least)]
        count, chunks = min(found, key=lambda of: in_forward(*of) + (of[0].most_logits < parts[0]) * SMALLER_PARTS)
    else:
        count = next((x for x in each if x.of_chunks(chunks) <= count.call.memory_budget), each[-1])
    return count, chunks, each[-1].of_chunks(least)


def _is_fastest_in_forward(times: Times) -> bool:
    return times.in_forward < min(times.recomputed, times.saved)


def _may_leave_out(x: _Setting, times: Times) -> bool:
    """Whether the call takes at most DEARER times as long as the exact one, even if no block can be left out."""
    sparse = x.call.gradient_tolerance > 0 and x.engine.block_sparse
    return sparse and times.in_forward < DEARER * min(times.recomputed, times.saved)


def _in_forward(x: _Setting, chunks: Chunks) -> InForward:
    """How the forward pass forms the gradients in these chunks."""
    call, size, dc = x.call, max(chunks.size, chunks.last), _sum_of_dc(x, chunks)
    if not x.bytes.stores:
        return InForward(chunks, dc)
    of_chunk = _Setting(replace(call, tokens=size), x.gpu, x.serving)
    forward = replace(_forward(of_chunk)[0], gathered=True, scattered=None)
    by_xla = all(x.bytes.de_by_xla(tokens) for tokens in (chunks.size or size, chunks.last or size))
    de = (XLA if by_xla else x.engine).de_of_chunk(call, size, x.gpu)
    dz, targets = (x.step("dz_in_place"), None) if call.forms_dz else (None, x.step("saved_targets"))
    thresholds = x.step("thresholds") if call.gradient_tolerance and x.engine.block_sparse else None
    return InForward(chunks, dc, forward, de, dz, targets, x.step("restored"), thresholds)


def _sum_of_dc(x: _Setting, chunks: Chunks) -> Step:
    """The step that sums dc over chunks: by the engine that stores exponentials; else by XLA in groups of columns."""
    call = x.call
    if x.bytes.stores:
        return x.step("sum_dc")
    if x.gpu is not None and call.dc_itemsize == call.sum_itemsize:  # XLA's matmul adds to dc in place
        return Step(XLA, chunks.block, groups=Groups.whole(call.vocabulary))
    of_group = 3 * call.sum_itemsize * call.width  # a group's part of dc, in float32, and what becomes of it
    room = max(min(GROUP_BYTES // 4, call.vocabulary * of_group // 8), SMALL)
    groups = XLA.groups(call, max(chunks.size, chunks.last), room, of_group, x.gpu)
    return Step(XLA, chunks.block, groups=groups)


def _saves(x: _Setting) -> bool:
    """Whether the forward pass is to save the exponentials of all tokens."""
    call, count = x.call, x.bytes
    if call.wanted is None or not x.engine.stops or not can_be_saved(call):
        return False
    return call.memory_budget - count.gathered >= count.of_saved()


def _recomputed(x: _Setting) -> tuple[Recomputed, int]:
    """How the backward pass computes the logits again, and the bytes that it holds."""
    products, besides = x.products, x.bytes.gathered + x.bytes.always
    room = x.call.memory_budget - besides
    groups, size = _groups(x, x.rows, room, products)
    if products is XLA and _xla_copies(x, groups.columns):
        products = x.stopping if x.engine.stops else XLA
        groups, size = _groups(x, x.rows, room, products, padded=products is XLA)
    of_few = _multiplying(x, x.stopping, groups) if x.finds_ignored and not products.stops else None
    dz = replace(x.step("form_dz"), groups=groups)
    return Recomputed(dz, _multiplying(x, products, groups), of_few), besides + size


def _saved(x: _Setting) -> tuple[Saved, int]:
    """How the backward pass uses the exponentials of all tokens, and the bytes that it holds, these included."""
    count = x.bytes
    if count.direct:
        way = _of_exponentials(x)
        besides = count.bytes_besides_matmuls if way.de is None else count.besides_in_place
        return way, count.gathered + count.saved(x.rows) + besides
    besides = count.gathered + count.saved(x.rows) + count.bytes_besides_groups
    dz, room = x.step("form_dz_of_saved"), x.call.memory_budget - besides
    groups, size = _groups(x, x.rows, room, x.products, of_saved=True)
    products, of_few = _multiplying(x, x.products, groups), None
    if not x.products.stops:
        of_few = _multiplying(x, x.stopping, groups)
        if _xla_copies(x, groups.columns):
            products, of_few = of_few, None
    return Saved(products, of_few if x.finds_ignored else None, replace(dz, groups=groups)), besides + size


def _of_exponentials(x: _Setting) -> Saved:
    """The same where the exponentials are multiplied as they are."""
    call, targets = x.call, x.step("saved_targets")
    longer = x.bytes.saved(1) != 2 * call.vocabulary  # P has more columns than c, so that XLA would copy P
    by_xla = not longer and not _xla_copies(x, call.vocabulary)
    in_place = x.bytes.in_place and not (by_xla and call.memory_budget >= x.bytes.everything())
    everything = Groups.whole(call.vocabulary, beyond=in_place)
    own = _multiplying(x, x.engine, everything)
    if in_place:
        return Saved(own, targets=targets, de=x.step("de_of_saved"), restored=x.step("restored"))
    if not by_xla:
        return Saved(own, targets=targets)
    return Saved(_multiplying(x, XLA, everything), own if x.finds_ignored else None, targets=targets)


def _xla_copies(x: _Setting, columns: int) -> bool:
    """Whether XLA's matmuls with dz of so many columns, or with saved exponentials, would copy their operands."""
    return x.rows > 0 and XLA.pads(x.call, x.rows, columns, x.gpu)


def _multiplying(x: _Setting, engine: Engine, groups: Groups) -> Multiplying:
    return engine.multiplying(x.call, x.rows, groups, x.gpu)


def _groups(
    x: _Setting, tokens: int, room: int, products: Engine, *, of_saved: bool = False, padded: bool = False
) -> tuple[Groups, int]:
    """The groups in which dz of so many tokens is formed, and the bytes of one group, at most `room` if possible.

    of_saved: whether dz is formed from saved exponentials. padded: whether XLA pads dz where it pads such a matmul.
    """
    how = {"copies": not products.stops, "of_saved": of_saved}
    column = x.bytes.column(tokens, **how, padded=padded)
    groups = x.engine.groups(x.call, tokens, room, column, x.gpu)
    padded = padded and _xla_copies(x, groups.columns)  # smaller groups may need no padding
    return groups, groups.columns * x.bytes.column(tokens, **how, padded=padded)
