"""Which plan a call gets: on this process' device, and on each platform that its program may be lowered for."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from cce_jax.errors import on_one_device
from cce_jax.sharding import NOWHERE_SPLIT, Layout
from cce_kernels import contract
from cce_kernels.default_budget import default_budget
from cce_kernels.device import H200, INTERPRETER, Gpu, cuda_gpu
from cce_kernels.engines.xla import XLA
from cce_kernels.head import Head
from cce_kernels.numbers import NO_OTHERS, Inputs, Wanted, WantedNumbers
from cce_kernels.plan import Explanation, Plan, ScheduleName, explained, logged, plan_of
from cce_kernels.request import Request
from cce_kernels.tokens import Chunks

Impl = Literal["auto", "cce", "chunked", "reference"]
NAMES = ("e", "c", "bias")  # what has a gradient, as in Wanted


@dataclass(frozen=True)
class Core:
    """The static part of a call, for which its program is compiled. A field that Request has too means the same."""

    head: Head
    impl: Impl
    memory_budget: int | None  # bytes; None for the default of the tokens and the width
    gpu: Gpu | None = None  # that the call will run on; None if it is no CUDA device
    wide_de: bool = False
    wide_dc: bool = False
    gradient_tolerance: float = 0.0
    may_chunk: bool = True
    debug_nans: bool = False  # jax_debug_nans: what a pass leaves for the other holds no NaN of an ignored token
    numbers: WantedNumbers = NO_OTHERS
    teacher_width: int = 0
    function: str = "linear_cross_entropy"  # the public function that was called, for errors
    one_platform: bool = False  # whether the program will run on `gpu`, or on the CPU where that is None, alone
    layout: Layout = NOWHERE_SPLIT
    ignore_index: int = -100
    shift: int = 0

    def vocabulary(self, c: Any) -> int:
        """V. c: the caller's, which is one device's part inside jax.shard_map."""
        return self.layout.whole_vocabulary(c, self.head.vocab_axis)

    def vocabulary_of_columns(self, c: Any) -> int:
        """V. c: of one device, gathered over the axes over which it is."""
        return self.head.vocabulary(c) * self.layout.size(self.layout.columns)


SHARED = {x.name for x in fields(Request)} & {x.name for x in fields(Core)} - {"memory_budget"}


def request_of(inputs: Inputs, core: Core, wanted: Wanted | None, one_factor: bool) -> Request:
    """What a plan is made from, of arrays or their shapes. The arguments are those of `plan_for`."""
    (tokens, width), budget = inputs.e.shape, core.memory_budget
    return Request(
        tokens=tokens,
        width=width,
        vocabulary=core.head.vocabulary(inputs.c),
        dtype=str(jnp.dtype(inputs.e.dtype)),
        with_bias=inputs.bias is not None,
        wanted=wanted,
        memory_budget=default_budget(tokens, width, inputs.e.dtype.itemsize) if budget is None else budget,
        one_factor=one_factor,
        with_temperature=inputs.inverse_temperature is not None,
        ids=0 if inputs.ids is None else inputs.ids.shape[-1],
        **{name: getattr(core, name) for name in SHARED},
    )


def plan_for(
    inputs: Inputs,
    core: Core,
    wanted: Wanted | None,
    way: ScheduleName | Chunks | None = None,
    one_factor: bool = False,
) -> Plan:
    """The plan of a call, from arrays or their shapes.

    wanted: None for evaluation. way: as for plan_of. one_factor: whether passes.begin and passes.finish will run.
    """
    gpu = INTERPRETER if core.impl == "cce" and core.gpu is None else core.gpu
    impl: Any = core.impl if gpu is not None else "chunked"
    plan = plan_of(request_of(inputs, core, wanted, one_factor), gpu, impl, way)
    if way is None:
        logged(plan, impl, core.gradient_tolerance)
    return plan


def stops(inputs: Inputs, core: Core) -> bool:
    """Whether the kernels of a call for one platform stop at the last kept token, so that padding costs no time."""
    gpu = INTERPRETER if core.impl == "cce" and core.gpu is None else core.gpu
    impl: Any = core.impl if gpu is not None else "chunked"
    return plan_of(request_of(inputs, core, None, one_factor=False), gpu, impl).engine.stops


def wanted_of(gradients_of: Collection[str]) -> Wanted | None:
    """Which gradients a call of `explain` means. ValueError for a name of none."""
    for name in gradients_of:
        contract.choice("gradients_of", name, NAMES)
    return Wanted(*(name in gradients_of for name in NAMES)) if gradients_of else None


def explanation(inputs: Inputs, core: Core, reduction: str, gradients_of: Collection[str]) -> Explanation:
    """What the plan says of a call, for people. gradients_of: as in cce_jax.explain."""
    plan = plan_for(inputs, core, wanted_of(gradients_of), one_factor=reduction != "none")
    return explained(plan, core.impl, core.gradient_tolerance)  # type: ignore[arg-type]


def on_platform(
    run: Callable,
    inputs: Inputs,
    core: Core,
    wanted: Wanted | None,
    way: ScheduleName | None = None,
    one_factor: bool = False,
) -> Callable:
    """run(plan, ...), with the plan for the platform that the program is lowered for.

    A program may be lowered for a platform that this process does not have. A CUDA program is then planned for an H200.
    JAX traces the program for all platforms, so with core.one_platform there is only one.
    """
    here = plan_for(inputs, core, wanted, way, one_factor)
    if core.impl == "chunked" or core.one_platform:
        return partial(run, here)
    request = request_of(inputs, core, wanted, one_factor)
    way = way or ("saved" if here.saved else "recomputed")  # what is left between the passes has one shape everywhere
    on_gpu = here if core.gpu is not None else plan_of(request, cuda_gpu() or H200, core.impl, way)  # type: ignore[arg-type]
    elsewhere = plan_of(request, *((INTERPRETER, "cce") if core.impl == "cce" else (None, "chunked")), way)

    def on_cuda(inputs: Inputs, *others):
        if on_gpu.engine is not XLA:
            e, targets = (on_one_device(x, core.function) for x in (inputs.e, inputs.targets))  # no step reads neither
            inputs = inputs._replace(e=e, targets=targets)
        return run(on_gpu, inputs, *others)

    branches = on_cuda, partial(run, elsewhere)
    if core.debug_nans:  # to find a NaN, JAX runs operations one by one; a kernel by itself is a RecursionError in JAX
        branches = tuple(partial(lax.cond, True, branch, branch) for branch in branches)
    return partial(lax.platform_dependent, cuda=branches[0], default=branches[1])
