"""The one place that decides which engine computes a call, what is saved, and in which windows and tiles.

`plan_of` is arithmetic: it launches nothing and asks no device. The first engine that serves a call computes its
logits. Each way to the gradients that the cotangents and the memory budget allow is a plan of its own, with the bytes
that it holds (budget.py) and its predicted time (times.py). The fastest of these plans is taken.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from cce_kernels.compat import warn_if_untested
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Engine, Multiplying, Step
from cce_kernels.engines.xla import XLA
from cce_kernels.numbers import Wanted
from cce_kernels.plan import budget, times
from cce_kernels.plan.plan import Chunks, Forward, InForward, Plan, Recomputed, Saved
from cce_kernels.plan.setting import Impl, Setting, engines
from cce_kernels.plan.times import fastest_chunks, smallest_chunks
from cce_kernels.request import Request
from cce_kernels.tokens import gathered_rows
from cce_kernels.windows import Windows

DEARER = 1.03  # what a call with a tolerance may take, over the exact one


@lru_cache(maxsize=4096)
def plan_of(
    request: Request, gpu: Gpu | None, impl: Impl, saved: int | None = None, forms: bool = False, chunks: Any = None
) -> Plan:
    """The plan of a call. ValueError if no engine of impl serves the call.

    gpu: None for a device that is no CUDA GPU. What the plan for another platform has decided already, or None: saved,
    the number of tokens whose exponentials are saved, all or 0; forms, that the forward pass forms the gradients.
    chunks (Chunks): the same from the plan for another shard of the vocabulary, and its chunks. The first plan warns of
    a JAX that was not tested: each new call comes by here.
    """
    warn_if_untested()
    if request.forms_dz or not request.can_be_saved:  # block_sparse.py bounds what products of exponentials leave out
        request = replace(request, gradient_tolerance=0.0)
    refused = refusals(request, gpu, impl)
    serving = tuple(engine for engine, why in refused.items() if not why)
    if not serving:
        why = "; ".join(f"{engine.name}: {why}" for engine, why in refused.items())
        raise ValueError(f"impl={impl!r} has no engine for {request} on {gpu} ({why}); impl='chunked' computes it")
    x = Setting(request, gpu, serving)
    plan = _planned(x, saved, forms, chunks)
    if isinstance(plan.gradients, Recomputed) and not x.engine.offers("form_dz", request):
        forming = tuple(engine for engine in serving if engine.offers("form_dz", request))
        plan = _planned(replace(x, serving=forming), saved, forms, chunks)
    return plan


def refusals(request: Request, gpu: Gpu | None, impl: Impl) -> dict[Engine, str]:
    """The engines of impl, and why each does not serve a call: its kept tokens may be gathered into a few more rows."""
    request = replace(request, tokens=gathered_rows(request.tokens))
    return {engine: engine.refuses(request, gpu) for engine in engines(request.itemsize, impl)}


def selecting(plan: Plan, tokens: int) -> Step | None:
    """The step that computes the logits of so many tokens with the maxima of blocks; None: XLA does."""
    request, engine = replace(plan.request, tokens=tokens), plan.engine
    if not (engine.offers("logits_and_maxima", request) and engine.serves(request, plan.gpu)):
        return None
    return engine.step("logits_and_maxima", request, plan.gpu, tokens)


def _planned(x: Setting, saved: int | None, forms: bool, chunks: Any) -> Plan:
    """`plan_of` with the engines that x names."""
    if x.request.teacher_width:
        return _beside_a_teacher(x, chunks)
    if x.request.wanted is None:
        return _plan(x, _forward(x)[0])
    decided, in_forward = forms or chunks is not None, None
    if decided or (saved is None and _cotangents_allow(x.request) and _may_form_in_forward(x)):
        chunks = chunks or fastest_chunks(x) or (smallest_chunks(x) if forms else None)
        in_forward = None if chunks is None else _in_forward(x, chunks)
    if in_forward is not None and decided:
        return in_forward
    other = _saved(x, saved) or _recomputed(x)  # what is saved need not be computed again
    return in_forward if in_forward is not None and _is_faster(in_forward, other) else other


def _is_faster(in_forward: Plan, other: Plan) -> bool:
    """With a tolerance: whether the call takes at most DEARER times as long, even if no block can be left out."""
    dearer = DEARER if in_forward.request.gradient_tolerance else 1.0
    return in_forward.time < dearer * other.time


def _cotangents_allow(request: Request) -> bool:
    """Whether the forward pass knows the cotangents up to one factor, or one matmul gives de for all of them: where de
    is wanted alone, and is not a part of a sum over devices. In float16 such a de would underflow.
    """
    alone = request.wanted == Wanted(e=True, c=False, bias=False)
    others = request.forms_dz or request.ids or request.wide_de
    return request.one_factor or (alone and not others and request.dtype != "float16")


def _may_form_in_forward(x: Setting) -> bool:
    """Whether the forward pass may form the gradients of a call whose cotangents allow it.

    On a GPU from stored exponentials, or in float32. In 16 bits XLA's passes over float32 logits, and its sums of dc in
    windows, take longer than to compute the logits again. So does Triton's sum of a float32 dc: 35 and 32 ms on a H200.
    """
    if x.request.ids or not x.request.may_chunk:  # only recomputed dz has the cotangents of given ids
        return False
    if x.gpu is None or not x.stores:
        return x.gpu is None or x.request.dtype == "float32"
    return x.engine.multiplies_fastest or x.request.dc_itemsize == 2


def _plan(x: Setting, forward: Forward | None, how: Any = None, held: int = 0, time: float = 0.0) -> Plan:
    """The plan of one way."""
    sparse = isinstance(how, InForward) and how.thresholds is not None
    request = x.request if sparse else replace(x.request, gradient_tolerance=0.0)
    return Plan(request, x.gpu, x.engine, x.rows, x.finds_ignored, forward, how, held, time)


def _forward(x: Setting) -> tuple[Forward, int]:
    """The first half of a block of all tokens; the bytes of blocks of logits and of what may be held beside them."""
    if x.engine.finds_target or x.request.sums_logits:
        by_xla, tokens = replace(x, serving=(XLA,)), x.rows if x.finds_ignored else x.request.tokens
        held = XLA.bytes_besides_logits(x.request) + x.finds_ignored * budget.copy_of_e(x)
        column = budget.column(by_xla, tokens, XLA)
        windows = XLA.windows(x.request, tokens, x.request.memory_budget - held, column, x.gpu)
        return Forward(Step(XLA, windows=windows)), held + windows.columns * column
    sums = x.step("sums")
    rescue = replace(x.step("rescued", Block(0, x.engine.block(sums).columns)), splits=sums.splits)
    return Forward(sums, x.step("target"), rescue), 0


def _in_forward(x: Setting, chunks: Chunks) -> Plan:
    """The forward pass forms the gradients in these chunks."""
    request, held, time = x.request, budget.in_forward(x, chunks), times.in_forward(x, chunks)
    dc = (x.engine if x.stores else XLA).step("sum_dc", request, x.gpu, chunks.size)
    how = InForward(chunks, dc, most_logits=x.most_logits)
    if not x.stores:
        return _plan(x, None, how, held, time)
    how = replace(how, de=x.de_of_chunk(chunks.size))
    if request.teacher_width:
        part = replace(x, request=replace(request, tokens=how.logits_of(chunks.size)))
        how = replace(how, logits=part.step("whole_logits"), passes=part.step("divergence_pass"))
        return _plan(x, None, how, held, time)
    of_chunk = replace(x, request=replace(request, tokens=chunks.size))
    steps = {"dz": x.step("dz_in_place")} if request.of_mean else {"targets": x.step("saved_targets")}
    if request.gradient_tolerance and x.engine.block_sparse:
        steps["thresholds"] = x.step("thresholds")
    return _plan(x, _forward(of_chunk)[0], replace(how, **steps), held, time)


def _beside_a_teacher(x: Setting, chunks: Any) -> Plan:
    """A divergence from a teacher: in chunks of the forward pass, also for evaluation; the least ones if none fits.

    In float16 the logits of a chunk are held at once, as all its dz are divided by one number.
    """
    parts = [replace(x, most_logits=most) for most in (budget.MOST_LOGITS if x.stores else (0,))]
    plans = [_in_forward(part, chunks or fastest_chunks(part) or smallest_chunks(part)) for part in parts]
    fitting = [plan for plan in plans if plan.held <= x.request.memory_budget]
    return min(fitting, key=lambda plan: plan.time, default=plans[-1])


def _saved(x: Setting, saved: int | None) -> Plan | None:
    """The forward pass saves the exponentials of all tokens; None if it may not. saved: as in plan_of.

    XLA multiplies the exponentials of all tokens, also on Hopper GPUs: by kernels a step takes up to 1.026 as long.
    """
    if not x.stores or saved == 0:
        return None
    request, held = x.request, budget.saved(x)
    room, vocabulary = request.memory_budget - held, request.vocabulary
    if request.forms_dz:
        column = budget.column(x, x.rows, x.products, saved=True)
        windows = x.engine.windows(request, x.rows, room, column, x.gpu)
        size = windows.columns * column
        engine = x.stopping if _xla_copies(x, x.products, windows.columns) else x.products
        least, steps = max(size, budget.WINDOW_BYTES), {"dz": replace(x.step("form_dz_of_saved"), windows=windows)}
    else:
        engine = x.stopping if x.columns != vocabulary or _xla_copies(x, XLA, vocabulary) else XLA
        windows, size = Windows.whole(vocabulary, beyond=engine.stops and engine.multiplies_fastest), 0
        least, steps = 0, {"targets": x.step("saved_targets")}
    if saved is None and room < least:
        return None
    products, of_few, held = _multiplied(x, engine, windows, held + size)
    return _plan(x, _forward(x)[0], Saved(products, of_few, **steps), held, times.saved(x))


def _recomputed(x: Setting) -> Plan:
    """The backward pass computes the logits again."""
    held, engine, (forward, of_forward) = budget.recomputed(x), x.products, _forward(x)
    room, column = x.request.memory_budget - held, budget.column(x, x.rows, engine)
    windows = x.engine.windows(x.request, x.rows, room, column, x.gpu)
    if _xla_copies(x, engine, windows.columns):
        engine = x.stopping
        padded = x.request.itemsize * x.rows * (engine is XLA)  # a second dz; of c_g one copy is counted already
        column = budget.column(x, x.rows, engine) + padded
        windows = x.engine.windows(x.request, x.rows, room, column, x.gpu)
    products, of_few, held = _multiplied(x, engine, windows, held + windows.columns * column)
    how = Recomputed(replace(x.step("form_dz"), windows=windows), products, of_few)
    return _plan(x, forward, how, max(held, of_forward), times.recomputed(x, windows.count))


def _xla_copies(x: Setting, engine: Engine, columns: int) -> bool:
    """Whether XLA's matmuls with dz of so many columns, or with saved exponentials, would copy their operands."""
    return engine is XLA and x.rows > 0 and XLA.pads(x.request, x.rows, columns, x.gpu)


def _multiplied(x: Setting, engine: Engine, windows: Windows, held: int) -> tuple[Multiplying, Multiplying | None, int]:
    """The matmuls; those for where few of many tokens are kept, or None if the first stop themselves; the bytes held.

    With as many partial sums of de as the budget has room for: few tokens have few tiles of de, and with partial sums
    their programs fill the GPU. held: without them.
    """
    request, of_few = x.request, None
    products = engine.multiplying(request, x.rows, windows, x.gpu)
    part = request.sum_itemsize * x.rows * request.width * request.wants.e
    splits = min(products.splits, 1 + max(request.memory_budget - held, 0) // part) if part else 1
    if x.finds_ignored and not engine.stops:
        of_few = replace(x.stopping.multiplying(request, x.rows, windows, x.gpu), splits=1)
    return replace(products, splits=splits), of_few, held + (splits - 1) * part
