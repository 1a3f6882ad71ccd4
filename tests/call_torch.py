"""Calls of cce_torch on the NumPy inputs of a case; and in parts: of the vocabulary, of the tokens."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch

from cce_kernels.plan import choose
from cce_kernels.tokens import Chunks
from cce_torch import linear_cross_entropy
from cce_torch.in_torch import blocks, compiled
from tests.cases import Inputs
from tests.tolerance import error


def tensor(x: np.ndarray, device: str = "cpu") -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.tensor(x.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(x, device=device)


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def run(given: Inputs, options: dict[str, Any], impl: str, device: str = "cpu", **more) -> tuple[Any, Any, dict]:
    """loss, lse and the gradients of Σ of_loss·loss (+ Σ of_lse·lse if lse is returned), as tests.call.run."""
    options = {"precision": "highest", **options, **more}
    returned = options.pop("return_lse", False)
    arrays = {k: tensor(v, device) for k, v in given.optional.items()}
    leaves = {k: tensor(v, device).requires_grad_() for k, v in given.differentiable().items()}
    optional = {k: leaves.get(k, v) for k, v in arrays.items()}
    c = leaves["c"]
    if options.get("vocab_axis"):
        c = leaves["c"] = c.detach().T.contiguous().requires_grad_()
    targets = torch.tensor(given.targets, device=device).long()
    loss, lse = linear_cross_entropy(leaves["e"], c, targets, impl=impl, return_lse=True, **optional, **options)
    objective = (loss * tensor(given.of_loss, device)).sum()
    if returned:
        objective = objective + (lse * tensor(given.of_lse, device)).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(objective, list(leaves.values())), strict=True))
    if options.get("vocab_axis"):
        assert gradients["c"].stride() == c.stride()
        gradients["c"] = gradients["c"].T
    return array(loss), array(lse), {k: array(v) for k, v in gradients.items()}


def assert_same_bits(found: Iterable[torch.Tensor], want: Iterable[torch.Tensor], what: str = "") -> None:
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype, what
        assert torch.equal(x, y), what


def assert_near(found: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> None:
    """But for float32 sums in another order."""
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        assert error(x.detach().float(), y.detach().float()) <= 1e-6


@contextmanager
def small_blocks(narrow: bool = False) -> Iterator[None]:
    """impl="torch_compile" in windows of 64 columns, its functions as they are: to compile them takes seconds.

    narrow: with matmuls of 16-bit operands that give float32, as CUDA has them.
    """
    with (
        mock.patch.object(compiled, "_compiled", lambda function, variant: function),
        mock.patch.object(blocks, "_windows", _windows_of_64),
        mock.patch.object(blocks, "_multiplies", (lambda *_: True) if narrow else blocks._multiplies),
        mock.patch.object(blocks, "product", _wide_product),
    ):
        yield


def run_uncompiled() -> None:
    """From now on impl="torch_compile" runs its functions as they are in this process, on a CPU."""
    compiled._uncompilable.add("cpu")


def _wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.to(blocks.sum_type(left)) @ right.to(blocks.sum_type(right))


def _windows_of_64(e: torch.Tensor, c: torch.Tensor, memory_budget: int | None) -> Iterator[slice]:
    return (slice(start, min(start + 64, len(c))) for start in range(0, len(c), 64))


@contextmanager
def formed_in_forward(wherever: bool = True) -> Iterator[None]:
    """wherever: the forward pass forms gradients where the budget allows it, whatever is predicted to be faster."""
    with mock.patch.object(choose, "_is_faster", return_value=True) if wherever else nullcontext():
        forget()
        yield
    forget()


@contextmanager
def in_chunks(size: int | None) -> Iterator[list[str]]:
    """Calls form their gradients in the forward pass, in chunks of so many tokens. Yields the programs that run.

    size: None for the chunks that the plan chooses.
    """
    from cce_torch.on_jax import bridge

    ran, run = [], bridge.run

    def chunks_of(x: Any) -> Chunks:
        return Chunks(-(-x.request.tokens // size), size)

    def recorded(program: Any, *arguments: Any, **options: Any) -> Any:
        ran.append(program.__wrapped__.__name__)
        return run(program, *arguments, **options)

    with (
        mock.patch.object(choose, "fastest_chunks", chunks_of if size else choose.fastest_chunks),
        mock.patch.object(choose, "_may_form_in_forward", return_value=True),
        mock.patch.object(choose, "_is_faster", return_value=True),
        mock.patch.object(bridge, "run", recorded),
    ):
        forget()
        yield ran
    forget()


def forget() -> None:
    """Lets plans go, and the programs that follow from them."""
    from cce_torch.on_jax import chunk_programs, programs

    choose.plan_of.cache_clear()
    programs.handover_of.cache_clear()
    chunk_programs._chunks.cache_clear()
    chunk_programs._way.cache_clear()
