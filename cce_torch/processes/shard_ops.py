"""The JAX programs of a shard (shard_programs.py) as PyTorch operators, which torch.compile does not look into.

A call that torch.compile does not trace runs the programs themselves, which takes less time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import ops
from cce_torch.call import ENCODED, Call, Operands, decoded, encoded
from cce_torch.operators import OPERANDS, define


class Held(NamedTuple):
    """What a process holds from the forward pass."""

    numbers: Tensor  # the statistics over the whole vocabulary, relative to the references of the shard's columns
    saved: Tensor | None  # exponentials


def programs() -> Any:
    """cce_torch.processes.shard_programs, which imports JAX."""
    from cce_torch.processes import shard_programs

    return shard_programs


def target(operands: Operands, saving_for: tuple[bool, ...], call: Call, scale: float) -> Tensor:
    if not torch.compiler.is_compiling():
        return programs().target(operands, saving_for, call, scale)
    return torch.ops.cce_torch.shard_target.default(*operands, saving_for, scale, *encoded(call))


def statistics(
    operands: Operands, reference: Tensor | None, saving_for: tuple[bool, ...], call: Call, scale: float
) -> tuple[Tensor, Tensor | None]:
    if not torch.compiler.is_compiling():
        return programs().statistics(operands, reference, saving_for, call, scale)
    of_call = reference, saving_for, scale, *encoded(call)
    found, saved = torch.ops.cce_torch.shard_statistics.default(*operands, *of_call)
    return found, saved if saved.numel() else None


def gradients(
    cotangents: Tensor, operands: Operands, held: Held, wanted: tuple[bool, ...], call: Call, scale: float, kind: Any
) -> Sequence[Tensor]:
    """de, dc and dbias; one that is not wanted has no elements. kind: of the forward pass, if it saved something."""
    if torch.compiler.is_compiling():
        of_call = *held, wanted, scale, *encoded(call)
        return torch.ops.cce_torch.shard_gradients.default(cotangents, *operands, *of_call)
    kind = kind or programs().kind_of_tensors(operands.e, operands.c, call)
    found = iter(programs().gradients(kind, cotangents, operands, held, wanted, scale))
    return [next(found) if w else operands.e.new_empty(0) for w in wanted]


def _read(given: tuple) -> tuple[Operands, tuple, Call]:
    """The arguments of an operator: the operands, what follows them, and the call."""
    of_operands, call = len(Operands._fields), decoded(*given[-ENCODED:])
    return Operands(*given[:of_operands]), given[of_operands:-ENCODED], call


def _target(*given: Any) -> Tensor:
    operands, (saving_for, scale), call = _read(given)
    return target(operands, tuple(saving_for), call, scale)


def _statistics(*given: Any) -> tuple[Tensor, Tensor]:
    """The statistics, and the saved exponentials, which have no elements if nothing is saved."""
    operands, (reference, saving_for, scale), call = _read(given)
    found, saved = statistics(operands, reference, tuple(saving_for), call, scale)
    return found, operands.e.new_empty(0) if saved is None else saved


def _fake_statistics(*given: Any) -> tuple[Tensor, Tensor]:
    (e, *_), _, call = _read(given)
    return e.new_empty((call.rows, e.shape[0]), dtype=torch.float32), e.new_empty(0)


def _gradients(cotangents: Tensor, *given: Any) -> tuple[Tensor, ...]:
    operands, (numbers, saved, wanted, scale), call = _read(given)
    return tuple(gradients(cotangents, operands, Held(numbers, saved), tuple(wanted), call, scale, None))


def _fake_gradients(_: Tensor, *given: Any) -> tuple[Tensor, ...]:
    operands, (_, _, wanted, _), call = _read(given)
    return tuple(ops.new_gradients(operands[:3], wanted, torch.float32, call))


def _fake_target(e: Tensor, *_: Any) -> Tensor:
    return e.new_empty(e.shape[0], dtype=torch.float32)


define("shard_target", f"{OPERANDS}, bool[] saving_for, float scale", "Tensor", _target, _fake_target)
define(
    "shard_statistics",
    f"{OPERANDS}, Tensor? reference, bool[] saving_for, float scale",
    "(Tensor, Tensor)",
    _statistics,
    _fake_statistics,
)
define(
    "shard_gradients",
    f"Tensor cotangents, {OPERANDS}, Tensor numbers, Tensor? saved, bool[] wanted, float scale",
    "(Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
