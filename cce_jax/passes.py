"""The two passes of the core on one device, or on the columns that a device has: each asks for a plan and runs it.

Equations are those of cce_jax/core.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from cce_jax.one_device import on_one_device
from cce_kernels import backward, forward
from cce_kernels.call import Call
from cce_kernels.contract import default_budget
from cce_kernels.device import H200, INTERPRETER, Gpu, cuda_gpu
from cce_kernels.engines.xla import XLA
from cce_kernels.exponentials import saved_shape
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Shard, Statistics, Wanted
from cce_kernels.plan import Plan, plan_of

Impl = Literal["auto", "cce", "chunked", "reference"]


@dataclass(frozen=True)
class Core:
    """The static part of a call of the core. gpu: the GPU that the call will run on; None if it is no CUDA device."""

    head: Head
    with_sum: bool
    impl: Impl
    memory_budget: int | None  # bytes; None for the default of the tokens and the width
    gpu: Gpu | None = None
    wide_de: bool = False  # whether `gradients` gives de in float32, for a sum over devices
    wide_dc: bool = False  # whether c and bias are float32 beside a 16-bit e; `gradients` gives dc and dbias in float32
    debug_nans: bool = False  # jax_debug_nans: what a pass leaves for the other holds no NaN of an ignored token


def plan_for(inputs: Inputs, core: Core, wanted: Wanted | None, saved: int | None = None) -> Plan:
    """The plan of a call, from arrays or their shapes.

    wanted: None for evaluation. saved: the number of tokens whose exponentials are saved, if already decided.
    """
    gpu = INTERPRETER if core.impl == "cce" and core.gpu is None else core.gpu
    return _plan(inputs, core, wanted, saved, gpu, core.impl if gpu is not None else "chunked")


def _plan(
    inputs: Inputs, core: Core, wanted: Wanted | None, saved: int | None, gpu: Gpu | None, impl: Any
) -> Plan:  # fmt: skip
    tokens, width = inputs.e.shape
    budget = (
        default_budget(tokens, width, inputs.e.dtype.itemsize) if core.memory_budget is None else core.memory_budget
    )
    call = Call(tokens, width, core.head.vocabulary(inputs.c), str(jnp.dtype(inputs.e.dtype)), core.head,
                inputs.bias is not None, core.with_sum, wanted, budget, core.wide_de,
                core.wide_dc)  # fmt: skip
    return plan_of(call, gpu, impl, saved)


def target_logits(inputs: Inputs, core: Core, wanted: Wanted | None) -> jax.Array:
    """Equation (2) for a shard of the vocabulary, (N,). `forward_pass` takes the sum over all shards."""
    return _on_platform(lambda plan, inputs: forward.target(inputs, plan), inputs, core, wanted)(inputs)


def forward_pass(
    inputs: Inputs, core: Core, wanted: Wanted | None, reference: jax.Array | None = None
) -> tuple[Statistics, jax.Array | None]:
    """Equations (1)-(3), and the exponentials that are saved for `gradients`: of e's type, or None.

    wanted: the gradients that will be asked for; None if there will be none. reference: for a shard of the vocabulary,
    numbers.Shard.reference.
    """
    saved = saved_shape(plan_for(inputs, core, wanted).saved, core.head.vocabulary(inputs.c))

    def run(plan: Plan, inputs: Inputs, reference: jax.Array | None):
        numbers, exponentials = forward.statistics(inputs, plan, reference, core.debug_nans)
        if saved[0] and exponentials is None:  # this platform saves nothing, but all platforms return one shape
            exponentials = (jnp.zeros if core.debug_nans else lax.empty)(saved, inputs.e.dtype)
        return numbers, exponentials

    return _on_platform(run, inputs, core, wanted)(inputs, reference)


def gradients(
    inputs: Inputs, numbers: Statistics, saved: jax.Array | None, cotangents: Cotangents, core: Core, wanted: Wanted,
    shard: Shard | None = None,
) -> tuple[Gradients, jax.Array | None]:  # fmt: skip
    """Equations (6) and (7): de, dc and dbias in e's type (float32 if core.wide_de, core.wide_dc), None where not
    wanted; and saved.

    numbers and saved: the results of `forward_pass`. The returned saved may have been overwritten in part; it still
    gives the same gradients in another call of this function. shard: for a shard of the vocabulary, what the device
    must know of the other columns.
    """

    def run(plan: Plan, *arrays):
        inputs, numbers, saved, cotangents, shard = arrays
        saved_here = saved if plan.saved else None
        found, overwritten = backward.gradients(inputs, numbers, saved_here, cotangents, plan, shard)
        return found, saved if overwritten is None else overwritten

    held = 0 if saved is None else saved.shape[0]  # fewer than planned if the forward pass could not save
    return _on_platform(run, inputs, core, wanted, held)(inputs, numbers, saved, cotangents, shard)


def _on_platform(
    run: Callable, inputs: Inputs, core: Core, wanted: Wanted | None, saved: int | None = None
) -> Callable:
    """run(plan, ...), with the plan for the platform that the program is lowered for.

    A program may be lowered for a platform that this process does not have. A CUDA program is then planned for an H200.
    """
    here = plan_for(inputs, core, wanted, saved)
    if core.impl == "chunked":
        return partial(run, here)
    plan = partial(_plan, inputs, core, wanted, here.saved)  # the saved exponentials have one shape on all platforms
    on_gpu = here if core.gpu is not None else plan(cuda_gpu() or H200, core.impl)
    elsewhere = plan(INTERPRETER, "cce") if core.impl == "cce" else plan(None, "chunked")

    def on_cuda(inputs: Inputs, *others):
        if on_gpu.forward.sums.engine is not XLA:
            inputs = inputs._replace(targets=on_one_device(inputs.targets))
        return run(on_gpu, inputs, *others)

    branches = on_cuda, partial(run, elsewhere)
    if core.debug_nans:  # to find a NaN, JAX runs operations one by one; a kernel by itself is a RecursionError in JAX
        branches = tuple(partial(lax.cond, True, branch, branch) for branch in branches)
    return partial(lax.platform_dependent, cuda=branches[0], default=branches[1])
