"""Which plan a call gets: on this process' device, and on each platform that its program may be lowered for."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from cce_jax.one_device import on_one_device
from cce_kernels import contract
from cce_kernels.call import Call
from cce_kernels.default_budget import default_budget
from cce_kernels.device import H200, INTERPRETER, Gpu, cuda_gpu
from cce_kernels.engines.xla import XLA
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Wanted
from cce_kernels.plan import Chunks, Explanation, Plan, explained, logged, plan_of

Impl = Literal["auto", "cce", "chunked", "reference"]
NAMES = ("e", "c", "bias")  # what has a gradient, as in Wanted


@dataclass(frozen=True)
class Core:
    """The static part of a call of the core. gpu: the GPU that the call will run on; None if it is no CUDA device."""

    head: Head
    with_sum: bool
    impl: Impl
    memory_budget: int | None  # bytes; None for the default of the tokens and the width
    gpu: Gpu | None = None
    wide_de: bool = False  # whether de is float32, for a sum over devices
    wide_dc: bool = False  # whether c and bias are float32 beside a 16-bit e; their gradients are then float32
    gradient_tolerance: float = 0.0  # the share of dz that the products may leave out; 0: none
    may_chunk: bool = True  # whether the forward pass may take the tokens in chunks: not if XLA may split them
    debug_nans: bool = False  # jax_debug_nans: what a pass leaves for the other holds no NaN of an ignored token
    with_mean: bool = False  # whether the mean of the logits is asked for
    mean_is_detached: bool = False  # whether the mean gets no cotangent
    teacher_width: int = 0  # of the teacher of a divergence; 0: there is none
    function: str = "linear_cross_entropy"  # the public function that was called, for errors


class Decided(NamedTuple):
    """What the plans for all platforms, or for all shards of the vocabulary, share. None: not decided yet."""

    saved: int | None = None  # the number of tokens whose exponentials are saved
    last: int | None = None  # that the forward pass forms the gradients, and the tokens of its last chunk
    chunks: Chunks | None = None  # the same, and all its chunks


UNDECIDED = Decided()


def plan_for(
    inputs: Inputs, core: Core, wanted: Wanted | None, decided: Decided = UNDECIDED, one_factor: bool = False
) -> Plan:
    """The plan of a call, from arrays or their shapes.

    wanted: None for evaluation. one_factor: whether passes.begin and passes.finish will run.
    """
    gpu = INTERPRETER if core.impl == "cce" and core.gpu is None else core.gpu
    impl: Any = core.impl if gpu is not None else "chunked"
    plan = _plan(inputs, core, wanted, decided, one_factor, gpu, impl)
    if decided == UNDECIDED:
        logged(plan, impl, core.gradient_tolerance)
    return plan


def budget_of(inputs: Inputs, core: Core) -> int:
    """The bytes that a call may hold."""
    if core.memory_budget is not None:
        return core.memory_budget
    tokens, width = inputs.e.shape
    return default_budget(tokens, width, inputs.e.dtype.itemsize)


def _plan(
    inputs: Inputs, core: Core, wanted: Wanted | None, decided: Decided, one_factor: bool, gpu: Gpu | None, impl: Any
) -> Plan:
    tokens, width = inputs.e.shape
    call = Call(
        tokens=tokens,
        width=width,
        vocabulary=core.head.vocabulary(inputs.c),
        dtype=str(jnp.dtype(inputs.e.dtype)),
        head=core.head,
        with_bias=inputs.bias is not None,
        with_sum=core.with_sum,
        wanted=wanted,
        memory_budget=budget_of(inputs, core),
        wide_de=core.wide_de,
        wide_dc=core.wide_dc,
        one_factor=one_factor,
        gradient_tolerance=core.gradient_tolerance,
        may_chunk=core.may_chunk,
        with_mean=core.with_mean,
        mean_is_detached=core.mean_is_detached,
        with_temperature=inputs.inverse_temperature is not None,
        ids=0 if inputs.ids is None else inputs.ids.shape[-1],
        teacher_width=core.teacher_width,
    )
    return plan_of(call, gpu, impl, *decided)


def explanation(inputs: Inputs, core: Core, reduction: str, gradients_of: Collection[str]) -> Explanation:
    """What the plan says of a call, for people. gradients_of: as in cce_jax.explain."""
    for name in gradients_of:
        contract.choice("gradients_of", name, NAMES)
    wanted = Wanted(*(name in gradients_of for name in NAMES)) if gradients_of else None
    plan = plan_for(inputs, core, wanted, one_factor=reduction != "none")
    return explained(plan, core.impl, core.gradient_tolerance)  # type: ignore[arg-type]


def on_platform(
    run: Callable,
    inputs: Inputs,
    core: Core,
    wanted: Wanted | None,
    decided: Decided = UNDECIDED,
    one_factor: bool = False,
) -> Callable:
    """run(plan, ...), with the plan for the platform that the program is lowered for.

    A program may be lowered for a platform that this process does not have. A CUDA program is then planned for an H200.
    """
    here = plan_for(inputs, core, wanted, decided, one_factor)
    if core.impl == "chunked":
        return partial(run, here)
    shared = decided._replace(saved=here.saved)  # what is kept between the passes has one shape on all platforms
    plan = partial(_plan, inputs, core, wanted, shared, one_factor)
    on_gpu = here if core.gpu is not None else plan(cuda_gpu() or H200, core.impl)
    elsewhere = plan(INTERPRETER, "cce") if core.impl == "cce" else plan(None, "chunked")

    def on_cuda(inputs: Inputs, *others):
        if on_gpu.forward.sums.engine is not XLA:
            e, targets = (on_one_device(x, core.function) for x in (inputs.e, inputs.targets))  # no step reads neither
            inputs = inputs._replace(e=e, targets=targets)
        return run(on_gpu, inputs, *others)

    branches = on_cuda, partial(run, elsewhere)
    if core.debug_nans:  # to find a NaN, JAX runs operations one by one; a kernel by itself is a RecursionError in JAX
        branches = tuple(partial(lax.cond, True, branch, branch) for branch in branches)
    return partial(lax.platform_dependent, cuda=branches[0], default=branches[1])
