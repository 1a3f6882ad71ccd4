"""Runs a drawn call in its package and compares all that it gives with float64.

Where a call has a gradient_tolerance the forward pass forms the gradients if the memory_budget allows it, however long
that takes: no other way leaves out anything.
"""

from contextlib import nullcontext
from functools import cache
from math import inf
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import cce_jax
from cce_jax import plans
from cce_kernels import contract
from cce_kernels.device import local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs as Arrays
from cce_kernels.numbers import Wanted
from cce_kernels.plan import choose
from cce_kernels.plan.plan import Plan
from tests.cases import Inputs
from tests.search.bounds import Check, checks
from tests.search.calls import DEFAULT, Call, Program
from tests.search.data import drawn_arrays, unrounded
from tests.search.truth import truth


def engine(program: Program) -> str:
    """Which engine computes this call's logits, as a word for the summary."""
    plan = planned(program)
    if plan is None:
        return program.impl
    name = plan.forward.sums.engine.name
    return f"{name}, interpreted" if plan.gpu is not None and plan.gpu.interpreted else name


@mock.patch.object(choose, "DEARER", inf)
def planned(program: Program) -> Plan | None:
    """The plan of a call; None for those that have none."""
    if program.impl in ("reference", "torch_compile"):
        return None
    d, v = program.width, program.vocabulary
    shapes = (program.tokens, d), (v, d) if program.vocab_axis == 0 else (d, v)
    e, c, bias = (jax.ShapeDtypeStruct(shape, program.dtype) for shape in (*shapes, (v,)))  # as the passes get them
    arrays = Arrays(e, c, bias if "bias" in program.arrays else None, None)  # type: ignore[arg-type]
    wanted = Wanted(*(name in program.wanted for name in ("e", "c", "bias")))
    static = plans.Core(
        Head(program.softcap, program.vocab_axis),
        program.label_smoothing > 0,
        program.impl,  # type: ignore[arg-type]
        None if program.memory_budget == DEFAULT else contract.memory_budget(program.memory_budget),
        local_gpu(),
        wide_dc=program.mixed,
        gradient_tolerance=program.gradient_tolerance,
    )
    wanted = None if wanted == Wanted(False, False, False) else wanted
    return plans.plan_for(arrays, static, wanted, one_factor=program.reduction != "none")


def examine(call: Call) -> list[Check]:
    """The comparison of each result with the truth."""
    program, given = call.program, drawn_arrays(call)
    run = run_torch if program.package == "torch" else run_jax
    found = run(program, given)
    numbers, device = _numbers()
    try:
        return checks(found, truth(given, program, numbers, device), program)
    finally:
        if device == "cuda":
            numbers.cuda.empty_cache()  # for the processes beside this one


def failures(call: Call) -> list[str]:
    """What is wrong with a call, in words; an exception is too."""
    try:
        return [x.words for x in examine(call) if not x.ratio <= 1]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


@cache
def _numbers() -> tuple[Any, str]:
    """What computes the truth: PyTorch where there is a GPU for it, else NumPy."""
    if jax.default_backend() == "gpu":
        try:
            import torch

            if torch.cuda.is_available():
                return torch, "cuda"
        except ImportError:
            pass
    return np, "cpu"


@mock.patch.object(choose, "DEARER", inf)
def run_jax(program: Program, given: Inputs) -> dict[str, np.ndarray]:
    """loss, lse and the gradients, as tests/search/bounds.py takes them."""
    every = _differentiable(program, given)
    arrays = jax.device_put(given.optional | every | {"targets": given.targets})
    wanted = {k: arrays.pop(k) for k in program.wanted}
    gradients, (loss, lse) = _jax_program(program)(wanted, arrays, given.of_loss, given.of_lse)
    results = {"loss": loss} | ({} if lse is None else {"lse": lse}) | gradients
    found = {k: np.asarray(v) for k, v in results.items()}
    if program.vocab_axis == 1 and "c" in found:
        found["c"] = found["c"].T
    return found


def _differentiable(program: Program, given: Inputs) -> dict[str, np.ndarray]:
    """The differentiable arrays in the types and in the layout of the call."""
    every = {name: unrounded(name, x, program) for name, x in given.differentiable().items()}
    return every | {"c": every["c"] if program.vocab_axis == 0 else np.ascontiguousarray(every["c"].T)}


@cache
def _jax_program(program: Program):
    def objective(wanted, others, of_loss, of_lse):
        named = wanted | others
        e, c, targets = (named.pop(name) for name in ("e", "c", "targets"))
        result = cce_jax.linear_cross_entropy(
            e, c, targets, impl=program.impl, return_lse=program.return_lse, **named, **program.options()
        )
        loss, lse = result if program.return_lse else (result, None)
        terms = {"loss": lambda: jnp.sum(loss * of_loss), "lse": lambda: jnp.sum(lse * of_lse)}
        asked = ("loss", "lse") if program.objective == "both" else (program.objective,)
        return sum(terms[name]() for name in asked), (loss, lse)

    def evaluate(wanted, *rest):
        return {}, objective(wanted, *rest)[1]

    return jax.jit(jax.grad(objective, has_aux=True) if program.wanted else evaluate)


@mock.patch.object(choose, "DEARER", inf)
def run_torch(program: Program, given: Inputs) -> dict[str, np.ndarray]:
    """As run_jax."""
    import torch

    import cce_torch
    from tests.call_torch import array, tensor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = _differentiable(program, given)
    leaves = {k: tensor(v, device).requires_grad_(k in program.wanted) for k, v in every.items()}
    named = {k: leaves[k] if k in leaves else tensor(v, device) for k, v in given.optional.items()}
    hooks = torch.autograd.graph.save_on_cpu(pin_memory=True) if program.offloaded else nullcontext()
    with hooks:
        result = cce_torch.linear_cross_entropy(
            leaves["e"],
            leaves["c"],
            torch.tensor(given.targets, device=device).long(),
            impl=program.impl,
            return_lse=program.return_lse,
            **named,
            **program.options(),
        )
    loss, lse = result if program.return_lse else (result, None)
    results = {"loss": array(loss)} | ({} if lse is None else {"lse": array(lse)})
    if program.wanted:
        terms = []
        if program.objective != "lse":
            terms.append((loss * tensor(given.of_loss, device)).sum())
        if program.objective != "loss":
            terms.append((lse * tensor(given.of_lse, device)).sum())
        found = torch.autograd.grad(sum(terms), [leaves[k] for k in program.wanted])
        results |= {k: array(x) for k, x in zip(program.wanted, found, strict=True)}
    if program.vocab_axis == 1 and "c" in results:
        results["c"] = results["c"].T
    return results


def forget() -> None:
    """Lets compiled programs go."""
    _jax_program.cache_clear()
