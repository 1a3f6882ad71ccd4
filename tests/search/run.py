"""Runs a drawn call in its package, and compares all that it gives with float64.

Where a call has a gradient_tolerance the forward pass forms the gradients if the memory_budget allows it, however long
that takes: no other way leaves out anything.
"""

import sys
from functools import cache
from math import inf
from unittest import mock

import jax
import numpy as np
import torch

from cce_jax import plans
from cce_kernels import contract
from cce_kernels.device import local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs as Arrays
from cce_kernels.numbers import Wanted, WantedNumbers
from cce_kernels.plan import choose
from cce_kernels.plan.plan import Plan
from tests.search.bounds import Check, checks
from tests.search.calls import CROSS_ENTROPY, DEFAULT, Call, Program
from tests.search.data import Given, drawn_arrays
from tests.search.refusals import refusal
from tests.search.truth import truth


def engine(program: Program) -> str:
    """Which engine computes this call's logits, as a word for the summary."""
    plan = planned(program)
    if plan is None:
        return program.impl
    name = plan.engine.name
    return f"{name}, interpreted" if plan.gpu is not None and plan.gpu.interpreted else name


@mock.patch.object(choose, "DEARER", inf)
def planned(program: Program) -> Plan | None:
    """The plan of a call of linear_cross_entropy on one device; None for those that have none."""
    plain = program.impl in ("reference", "torch_compile") or program.dtype == "float64"
    if plain or program.function != CROSS_ENTROPY or program.layout != "one":
        return None
    d, v = program.width, program.vocabulary
    shapes = (program.tokens, d), (v, d) if program.vocab_axis == 0 else (d, v)
    e, c, bias = (jax.ShapeDtypeStruct(shape, program.dtype) for shape in (*shapes, (v,)))  # as the passes get them
    arrays = Arrays(e, c, bias if "bias" in program.arrays else None, None)  # type: ignore[arg-type]
    wanted = Wanted(*(name in program.wanted for name in ("e", "c", "bias")))
    static = plans.Core(
        Head(program.softcap, program.vocab_axis),
        program.impl,  # type: ignore[arg-type]
        None if program.memory_budget == DEFAULT else contract.memory_budget(program.memory_budget),
        local_gpu(),
        wide_dc=program.mixed,
        numbers=WantedNumbers(sum=program.label_smoothing > 0),
        gradient_tolerance=program.gradient_tolerance,
    )
    wanted = None if wanted == Wanted(False, False, False) else wanted
    return plans.plan_for(arrays, static, wanted, one_factor=program.reduction != "none")


def examine(call: Call) -> list[Check]:
    """The comparison of each result with the truth; none of a call that is refused as it must be.

    Raises what the call raises, and AssertionError where it is refused in other words, or not at all.
    """
    given, refused = drawn_arrays(call), refusal(call)
    try:
        found = run(call, given)
    except Exception as error:
        if refused is None or not isinstance(error, refused.errors):
            raise
        missing = [word for word in refused.words if word not in str(error)]
        if missing:
            raise AssertionError(f"it does not say {missing}: {type(error).__name__}: {error}") from error
        return []
    assert refused is None or refused.may_run, f"was to be refused, with {refused}, and ran"
    device = _device()
    try:
        return checks(found, truth(given, call.program, device, found), call.program)
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # for the processes beside this one


def run(call: Call, given: Given) -> dict[str, np.ndarray]:
    """Results and gradients by name, in the package of the call."""
    if call.program.package == "jax":
        from tests.search import run_jax

        return run_jax.run(call, given)
    from tests.search import run_torch

    return run_torch.run(call, given)


def failures(call: Call) -> list[str]:
    """What is wrong with a call, in words; an exception is too."""
    try:
        return [x.words for x in examine(call) if not x.ratio <= 1]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


@cache
def _device() -> str:
    """What computes the truth."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def forget() -> None:
    """Lets compiled programs go."""
    if module := sys.modules.get("tests.search.run_jax"):
        module.forget()
