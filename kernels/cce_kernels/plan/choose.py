"""The one place that decides which engine computes a call, what is saved, and in which windows and tiles.

`plan_of` is arithmetic: it launches nothing and asks no device. The first engine that serves a call computes its
logits. Each way to the gradients that the cotangents and the memory budget allow is a plan of its own, with the bytes
that it holds and its predicted time (schedules.py). The fastest of these plans is taken.
"""

from dataclasses import replace
from functools import lru_cache

from cce_kernels.compat import warn_if_untested
from cce_kernels.device import Gpu
from cce_kernels.engines import Impl, refusals
from cce_kernels.plan.plan import Plan, ScheduleName
from cce_kernels.plan.schedules import MOST_LOGITS, Setting, backward, fastest_chunks, forward, in_forward
from cce_kernels.request import Request
from cce_kernels.tokens import Chunks

DEARER = 1.03  # what a call with a tolerance may take, over the exact one


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
    if request.wanted is None and not request.teacher_width:
        return x.plan(forward(x)[0])
    chunks = way if isinstance(way, Chunks) else None
    if chunks or way == "in forward" or request.teacher_width:  # beside a teacher evaluation too
        # In float16 the logits of a chunk are held at once, as all its dz are divided by one number.
        sizes = MOST_LOGITS if request.teacher_width and x.stores else (0,)
        parts = [replace(x, most_logits=most) for most in sizes]
        plans = [in_forward(part, chunks or fastest_chunks(part)) for part in parts]
        fitting = [plan for plan in plans if plan.held <= request.memory_budget]
        return min(fitting, key=lambda plan: plan.time, default=plans[-1])
    # Exponentials that are saved need not be computed again, if the budget holds them.
    other = backward(x, saves=x.stores and way != "recomputed")
    if other.saved and way != "saved" and other.held > request.memory_budget:
        other = backward(x, saves=False)
    may = way is None and request.knows_cotangents and _may_form_in_forward(x)
    if may and (chunks := fastest_chunks(x)) is not None:
        formed = in_forward(x, chunks)
        return formed if _is_faster(formed, other) else other
    return other


def _is_faster(in_forward: Plan, other: Plan) -> bool:
    """With a tolerance: whether the call takes at most DEARER times as long, even if no block can be left out."""
    return in_forward.time < other.time * (DEARER if in_forward.request.gradient_tolerance else 1.0)


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
