"""The one place that decides which engine computes a call, what is saved, and in which windows and tiles.

`plan_of` is arithmetic: it launches nothing and asks no device. The first engine that serves a call computes its
logits. Each way to the gradients that the cotangents and the memory budget allow is a plan of its own, with the bytes
that it holds and its predicted time (schedules.py). The fastest of these plans is taken.
"""

from dataclasses import replace
from functools import lru_cache

from cce_kernels.compat import warn_if_untested
from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine, Step
from cce_kernels.numbers import Wanted
from cce_kernels.plan.plan import Chunks, Plan, ScheduleName
from cce_kernels.plan.schedules import MOST_LOGITS, backward, besides_windows, fastest_chunks, forward, in_forward
from cce_kernels.plan.setting import Impl, Setting, engines
from cce_kernels.request import Request
from cce_kernels.tokens import gathered_rows

DEARER = 1.03  # what a call with a tolerance may take, over the exact one
WINDOW_BYTES = 256 * 2**20  # room for a window of dz, where that is formed of saved exponentials


@lru_cache(maxsize=4096)
def plan_of(request: Request, gpu: Gpu | None, impl: Impl, way: ScheduleName | Chunks | None = None) -> Plan:
    """The plan of a call. ValueError if no engine of impl serves the call.

    gpu: None for a device that is no CUDA GPU. way: that of the plan for another platform, which this one takes if it
    can; Chunks: those of the plan for another shard of the vocabulary, in which the forward pass forms the gradients.
    The first plan warns of a JAX that was not tested: each new call comes by here.
    """
    warn_if_untested()
    if request.forms_dz or not request.can_be_saved:  # block_sparse.py bounds what products of exponentials leave out
        request = replace(request, gradient_tolerance=0.0)
    refused = refusals(request, gpu, impl)
    x = Setting(request, gpu, tuple(engine for engine, why in refused.items() if not why))
    if not x.serving:
        why = "; ".join(f"{engine.name}: {why}" for engine, why in refused.items())
        raise ValueError(f"impl={impl!r} has no engine for {request} on {gpu} ({why}); impl='chunked' computes it")
    chunks = way if isinstance(way, Chunks) else None
    if request.teacher_width:
        # Also for evaluation in chunks of the forward pass; the least ones if none fits. In float16 the logits of a
        # chunk are held at once, as all its dz are divided by one number.
        parts = [replace(x, most_logits=most) for most in (MOST_LOGITS if x.stores else (0,))]
        plans = [in_forward(part, chunks or fastest_chunks(part)) for part in parts]
        fitting = [plan for plan in plans if plan.held <= request.memory_budget]
        return min(fitting, key=lambda plan: plan.time, default=plans[-1])
    if request.wanted is None:
        return x.plan(forward(x)[0])
    if isinstance(way, Chunks) or way == "in forward":
        return in_forward(x, chunks or fastest_chunks(x))
    other = _in_backward_pass(x, way)
    may = way is None and _cotangents_allow(request) and _may_form_in_forward(x)
    if may and (chunks := fastest_chunks(x)) is not None:
        formed = in_forward(x, chunks)
        return formed if _is_faster(formed, other) else other
    return other


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


def _in_backward_pass(x: Setting, way: ScheduleName | None) -> Plan:
    """The plan of the exponentials that are saved, which need not be computed again, if the budget holds these."""
    if x.stores and way != "recomputed":
        plan = backward(x, saves=True)
        least = besides_windows(x, saves=True) + WINDOW_BYTES * x.request.forms_dz
        if way == "saved" or max(plan.held, least) <= x.request.memory_budget:
            return plan
    return backward(x, saves=False)


def _is_faster(in_forward: Plan, other: Plan) -> bool:
    """With a tolerance: whether the call takes at most DEARER times as long, even if no block can be left out."""
    return in_forward.time < other.time * (DEARER if in_forward.request.gradient_tolerance else 1.0)


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
