"""The two passes of the core on one device, or on the columns that a device has: each asks for a plan and runs it.

Equations are those of cce_jax/core.py.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_jax.one_device import on_one_device
from cce_kernels import backward, contract, forward, in_forward
from cce_kernels.call import Call
from cce_kernels.device import H200, INTERPRETER, Gpu, cuda_gpu
from cce_kernels.engines.xla import XLA
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Shard, Statistics, Wanted
from cce_kernels.plan import Chunks, Explanation, Plan, explained, logged, plan_of
from cce_kernels.residuals import Residuals, shapes_of

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
    wide_de: bool = False  # whether `gradients` gives de in float32, for a sum over devices
    wide_dc: bool = False  # whether c and bias are float32 beside a 16-bit e; `gradients` gives dc and dbias in float32
    may_chunk: bool = True  # whether the forward pass may take the tokens in chunks: not if XLA may split them
    debug_nans: bool = False  # jax_debug_nans: what a pass leaves for the other holds no NaN of an ignored token


class Decided(NamedTuple):
    """What the plans for all platforms, or for all shards of the vocabulary, share. None: not decided yet."""

    saved: int | None = None  # the number of tokens whose exponentials are saved
    last: int | None = None  # that the forward pass forms the gradients, and the tokens of its last chunk
    chunks: Chunks | None = None  # the same, and all its chunks


UNDECIDED = Decided()


def plan_for(
    inputs: Inputs, core: Core, wanted: Wanted | None, decided: Decided = UNDECIDED, one_factor: bool = False
) -> Plan:  # fmt: skip
    """The plan of a call, from arrays or their shapes.

    wanted: None for evaluation. one_factor: whether `begin` and `finish` will run.
    """
    gpu = INTERPRETER if core.impl == "cce" and core.gpu is None else core.gpu
    impl: Any = core.impl if gpu is not None else "chunked"
    plan = _plan(inputs, core, wanted, decided, one_factor, gpu, impl)
    if decided == UNDECIDED:
        logged(plan, impl)
    return plan


def _plan(
    inputs: Inputs, core: Core, wanted: Wanted | None, decided: Decided, one_factor: bool, gpu: Gpu | None, impl: Any
) -> Plan:  # fmt: skip
    tokens, width = inputs.e.shape
    budget = core.memory_budget
    if budget is None:
        budget = contract.default_budget(tokens, width, inputs.e.dtype.itemsize)
    call = Call(tokens, width, core.head.vocabulary(inputs.c), str(jnp.dtype(inputs.e.dtype)), core.head,
                inputs.bias is not None, core.with_sum, wanted, budget, core.wide_de, core.wide_dc,
                one_factor, core.may_chunk)  # fmt: skip
    return plan_of(call, gpu, impl, *decided)


def explanation(inputs: Inputs, core: Core, reduction: str, gradients_of: Collection[str]) -> Explanation:
    """What the plan says of a call, for people. gradients_of: as in cce_jax.explain."""
    for name in gradients_of:
        contract.choice("gradients_of", name, NAMES)
    wanted = Wanted(*(name in gradients_of for name in NAMES)) if gradients_of else None
    plan = plan_for(inputs, core, wanted, one_factor=reduction != "none")
    return explained(plan, core.impl if plan.gpu is not None else "chunked")  # type: ignore[arg-type]


def target_logits(inputs: Inputs, core: Core, wanted: Wanted | None) -> jax.Array:
    """Equation (2) for a shard of the vocabulary, (N,). `forward_pass` takes the sum over all shards."""
    return _on_platform(lambda plan, inputs: forward.target(inputs, plan), inputs, core, wanted)(inputs)


def forward_pass(
    inputs: Inputs, core: Core, wanted: Wanted | None, reference: jax.Array | None = None
) -> tuple[Statistics, Residuals]:
    """Equations (1)-(3), and what is left for `gradients`.

    wanted: the gradients that will be asked for; None if there will be none. reference: for a shard of the vocabulary,
    numbers.Shard.reference.
    """
    plan = plan_for(inputs, core, wanted)
    if plan.saves_de:
        assert plan.in_forward is not None

        def form_de(plan: Plan, inputs: Inputs):
            numbers, m = in_forward.of_any_cotangents(inputs, plan, core.debug_nans)
            return numbers, Residuals(m=m)

        return _on_platform(form_de, inputs, core, wanted, Decided(0, plan.in_forward.chunks.last))(inputs)
    shape = shapes_of(plan).exponentials

    def run(plan: Plan, inputs: Inputs, reference: jax.Array | None):
        numbers, exponentials = forward.statistics(inputs, plan, reference, core.debug_nans)
        if shape is not None and exponentials is None:  # this platform saves nothing, but all return one shape
            exponentials = (jnp.zeros if core.debug_nans else lax.empty)(shape.shape, shape.dtype)
        return numbers, Residuals(exponentials=exponentials)

    return _on_platform(run, inputs, core, wanted, Decided(plan.saved))(inputs, reference)


def gradients(
    inputs: Inputs, numbers: Statistics, residuals: Residuals, cotangents: Cotangents, core: Core, wanted: Wanted,
    shard: Shard | None = None,
) -> tuple[Gradients, Residuals]:  # fmt: skip
    """Equations (6) and (7): de, dc and dbias in e's type (float32 if core.wide_de, core.wide_dc), None where not
    wanted; and the residuals.

    numbers and residuals: the results of `forward_pass`. The returned residuals may have been overwritten in part; they
    still give the same gradients in another call of this function. shard: for a shard of the vocabulary, what the
    device must know of the other columns.
    """
    if residuals.m is not None:
        de = in_forward.de_of(inputs, numbers, residuals.m, cotangents, core.head, inputs.e.dtype)
        return Gradients(de, None, None), residuals

    def run(plan: Plan, *arrays):
        inputs, numbers, exponentials, cotangents, shard = arrays
        of_plan = exponentials if plan.saved else None
        found, overwritten = backward.gradients(inputs, numbers, of_plan, cotangents, plan, shard)
        return found, Residuals(exponentials=exponentials if overwritten is None else overwritten)

    saved = residuals.exponentials
    rows = 0 if saved is None else saved.shape[0]  # fewer than planned if the forward pass could not save
    return _on_platform(run, inputs, core, wanted, Decided(rows))(inputs, numbers, saved, cotangents, shard)


def begin(
    inputs: Inputs, of_tokens: Any, cotangents_of: in_forward.CotangentsOf, core: Core, wanted: Wanted,
    reference: jax.Array | None = None, of_all_columns: in_forward.OfAllColumns | None = None,
) -> tuple[Statistics, Residuals]:  # fmt: skip
    """in_forward.begin, where `plan_for` says so."""
    plan = plan_for(inputs, core, wanted, one_factor=True)
    assert plan.in_forward is not None

    def run(plan: Plan, inputs: Inputs, of_tokens: Any, reference: jax.Array | None):
        return in_forward.begin(inputs, of_tokens, cotangents_of, plan, core.debug_nans, reference, of_all_columns)

    shared = Decided(0, plan.in_forward.chunks.last)
    return _on_platform(run, inputs, core, wanted, shared, one_factor=True)(inputs, of_tokens, reference)


def finish(
    inputs: Inputs, residuals: Residuals, factor: jax.Array, core: Core, wanted: Wanted
) -> Gradients:  # fmt: skip
    """in_forward.finish. residuals: of `begin` with the same inputs."""
    plan = plan_for(inputs, core, wanted, one_factor=True)
    assert plan.in_forward is not None

    def run(plan: Plan, inputs: Inputs, residuals: Residuals, factor: jax.Array):
        return in_forward.finish(residuals, factor, inputs.targets >= 0, plan)

    shared = Decided(0, plan.in_forward.chunks.last)
    return _on_platform(run, inputs, core, wanted, shared, one_factor=True)(inputs, residuals, factor)


def _on_platform(
    run: Callable, inputs: Inputs, core: Core, wanted: Wanted | None, decided: Decided = UNDECIDED,
    one_factor: bool = False,
) -> Callable:  # fmt: skip
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
            inputs = inputs._replace(targets=on_one_device(inputs.targets))
        return run(on_gpu, inputs, *others)

    branches = on_cuda, partial(run, elsewhere)
    if core.debug_nans:  # to find a NaN, JAX runs operations one by one; a kernel by itself is a RecursionError in JAX
        branches = tuple(partial(lax.cond, True, branch, branch) for branch in branches)
    return partial(lax.platform_dependent, cuda=branches[0], default=branches[1])
