"""Runs a drawn call in its package and compares all that it gives with float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import cce_jax
from cce_kernels import budget, tiles
from cce_kernels.config import local_gpu
from tests.cases import Inputs
from tests.search_bounds import Check, checks
from tests.search_calls import EVERY_TOKEN, Call, Program
from tests.search_data import drawn_arrays
from tests.search_truth import truth

EVERYTHING = 2**60  # bytes


@contextmanager
def budgets_in_tokens() -> Iterator[None]:
    """A memory_budget up to EVERY_TOKEN is the number of tokens to save; on small shapes any real one saves all.

    What is never saved, as in float16, is not saved here either.
    """
    real = budget.saved_tokens

    def saved(*call: Any) -> int:
        return min(call[-1], real(*call[:-1], EVERYTHING)) if call[-1] <= EVERY_TOKEN else real(*call)

    with mock.patch.object(budget, "saved_tokens", saved):
        yield


def engine(program: Program) -> str:
    """Which kernels compute this call, as a word for the summary."""
    gpu = local_gpu()
    if program.impl == "chunked" or (program.impl == "auto" and gpu is None):
        return "xla"
    if gpu is None:
        return "interpreter"
    n, d, v = program.tokens, program.width, program.vocabulary
    e = jax.ShapeDtypeStruct((n, d), program.dtype)
    e = tiles.gathered(e) if program.wanted else e
    c = jax.ShapeDtypeStruct((v, d) if program.vocab_axis == 0 else (d, v), program.dtype)
    bias = "bias" if "bias" in program.arrays else None
    served = tiles.for_hopper(e, c, bias, program.label_smoothing > 0, gpu, interpret=False)
    return "hopper" if served else "triton"


def examine(call: Call) -> list[Check]:
    """The comparison of each result with the truth."""
    program, given = call.program, drawn_arrays(call)
    run = run_torch if program.package == "torch" else run_jax
    if program.saved is None:
        found = run(program, given)
    else:
        with budgets_in_tokens():
            found = run(program, given)
    return checks(found, truth(given, program, *_numbers()), program)


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


def run_jax(program: Program, given: Inputs) -> dict[str, np.ndarray]:
    """loss, lse and the gradients, as tests/search_bounds.py takes them."""
    every = given.differentiable() | {"c": given.c if program.vocab_axis == 0 else given.c.T}
    arrays = {k: jnp.asarray(v) for k, v in (given.optional | every | {"targets": given.targets}).items()}
    wanted = {k: arrays.pop(k) for k in program.wanted}
    gradients, (loss, lse) = _jax_program(program)(wanted, arrays, given.of_loss, given.of_lse)
    if program.vocab_axis == 1 and "c" in gradients:
        gradients["c"] = gradients["c"].T
    results = {"loss": loss} | ({} if lse is None else {"lse": lse}) | gradients
    return {k: np.asarray(v) for k, v in results.items()}


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


def run_torch(program: Program, given: Inputs) -> dict[str, np.ndarray]:
    """As run_jax."""
    import torch

    import cce_torch
    from tests.call_torch import array, tensor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = given.differentiable() | {"c": given.c if program.vocab_axis == 0 else np.ascontiguousarray(given.c.T)}
    leaves = {k: tensor(v, device).requires_grad_(k in program.wanted) for k, v in every.items()}
    named = {k: leaves[k] if k in leaves else tensor(v, device) for k, v in given.optional.items()}
    result = cce_torch.linear_cross_entropy(
        leaves["e"], leaves["c"], torch.tensor(given.targets, device=device).long(), impl=program.impl,
        return_lse=program.return_lse, **named, **program.options(),
    )  # fmt: skip
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
