"""The JAX programs of a shard (shard_programs.py) as PyTorch operators, which torch.compile does not look into.

A call that torch.compile does not trace runs the programs themselves, which takes less time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cce_torch import ops
from cce_torch.call import ENCODED, Call, Operands, decoded

TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe)


def programs() -> Any:
    """cce_torch.processes.shard_programs, which imports JAX."""
    from cce_torch.processes import shard_programs

    return shard_programs


def target(operands: Operands, saving_for: tuple[bool, ...], call: Call, scale: float) -> Tensor:
    if not torch.compiler.is_compiling():
        return programs().target(operands, saving_for, call, scale)
    return shard_target(*operands[:4], operands.inverse_temperature, saving_for, scale, *call.encoded())


def statistics(
    operands: Operands, reference: Tensor | None, saving_for: tuple[bool, ...], call: Call, scale: float
) -> tuple[Tensor, Tensor | None]:
    if not torch.compiler.is_compiling():
        return programs().statistics(operands, reference, saving_for, call, scale)
    found, saved = shard_statistics(*operands, reference, saving_for, scale, *call.encoded())
    return found, saved if saved.numel() else None


def gradients(
    cotangents: Tensor, operands: Operands, held: tuple, wanted: tuple[bool, ...], call: Call, scale: float, kind: Any
) -> Sequence[Tensor]:
    """de, dc and dbias; one that is not wanted has no elements. kind: of the forward pass, if it saved something."""
    if torch.compiler.is_compiling():
        return shard_gradients(cotangents, *operands, *held, wanted, scale, *call.encoded())
    kind = kind or programs().kind_of_tensors(operands.e, operands.c, call)
    found = iter(programs().gradients(kind, cotangents, operands, programs().Held(*held), wanted, scale))
    return [next(found) if w else operands.e.new_empty(0) for w in wanted]


@torch.library.custom_op("cce_torch::shard_target", mutates_args=(), tags=TAGS)
def shard_target(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    inverse_temperature: Tensor | None,
    saving_for: Sequence[bool],
    scale: float,
    options: str,
    softcap: float | None,
    memory_budget: int | None,
    gradient_tolerance: float,
) -> Tensor:
    call = decoded(options, softcap, memory_budget, gradient_tolerance)
    return target(Operands(e, c, bias, columns, None, inverse_temperature), tuple(saving_for), call, scale)


@torch.library.custom_op("cce_torch::shard_statistics", mutates_args=(), tags=TAGS)
def shard_statistics(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    weights: Tensor | None,
    inverse_temperature: Tensor | None,
    reference: Tensor | None,
    saving_for: Sequence[bool],
    scale: float,
    options: str,
    softcap: float | None,
    memory_budget: int | None,
    gradient_tolerance: float,
) -> tuple[Tensor, Tensor]:
    """The statistics, and the saved exponentials, which have no elements if nothing is saved."""
    operands = Operands(e, c, bias, columns, weights, inverse_temperature)
    call = decoded(options, softcap, memory_budget, gradient_tolerance)
    found, saved = statistics(operands, reference, tuple(saving_for), call, scale)
    return found, e.new_empty(0) if saved is None else saved


@torch.library.custom_op("cce_torch::shard_gradients", mutates_args=(), tags=TAGS)
def shard_gradients(
    cotangents: Tensor,
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    weights: Tensor | None,
    inverse_temperature: Tensor | None,
    numbers: Tensor,
    saved: Tensor | None,
    wanted: Sequence[bool],
    scale: float,
    options: str,
    softcap: float | None,
    memory_budget: int | None,
    gradient_tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = Operands(e, c, bias, columns, weights, inverse_temperature)
    call = decoded(options, softcap, memory_budget, gradient_tolerance)
    de, dc, dbias = gradients(cotangents, operands, (numbers, saved), tuple(wanted), call, scale, None)
    return de, dc, dbias


@shard_target.register_fake
def _(e, *others):
    return e.new_empty(e.shape[0], dtype=torch.float32)


@shard_statistics.register_fake
def _(e, *others):
    return e.new_empty((decoded(*others[-ENCODED:]).rows, e.shape[0]), dtype=torch.float32), e.new_empty(0)


@shard_gradients.register_fake
def _(cotangents, e, c, bias, *others):
    de, dc, dbias = ops.new_gradients((e, c, bias), others[5], torch.float32, decoded(*others[-ENCODED:]))
    return de, dc, dbias
