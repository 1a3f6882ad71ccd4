"""The numbers of each token that linear_log_probs and linear_token_loss have in common, and their common arguments."""

from typing import Any

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import arguments, losses, ops, statistics
from cce_torch.arguments import Prepared, constant, flat
from cce_torch.call import Call, Given
from cce_torch.on_jax import tensors

COLDEST = 2.0**-100  # a temperature below it is raised to it: float32 does not hold the inverse of a smaller one


def of_tokens(x: Prepared, call: Call, inverse: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the targets, (N,), 0 for ignored tokens, and the statistics (call.py)."""
    scheduled = 0.0, 0.0, scale
    if x.alone:
        row_length = x.targets.shape[-1] if x.shift else 1
        tokens = flat(x.targets), None, None, None, inverse
        nll, found = ops.loss(Given(flat(x.e, 1), x.c, x.bias, *tokens, scheduled, row_length), call, True)
        return 0 - nll, found
    operands = statistics.operands_of(x)._replace(inverse_temperature=inverse)
    found = statistics.statistics(x, operands, call, scheduled)
    terms = losses.Terms(operands.columns, None, None, x.vocabulary)
    return 0 - losses.loss(found[:2], terms, None, "none", scheduled)[0], found


def inverse_temperature(temperature: Any, x: Prepared, function: str) -> Tensor | None:
    """1 / temperature of each token, (N,) at least float32; None for the number 1. function: the public one's name."""
    tokens, dtype = x.targets.shape, torch.promote_types(x.e.dtype, torch.float32)
    if not isinstance(temperature, Tensor):
        arguments.check_number("temperature", temperature, function)
        value = contract.number("temperature", temperature, low=0.0, above=True)
        if constant(value == 1):
            return None
        return x.e.new_ones(tokens.numel(), dtype=dtype) * (1 / max(value, COLDEST))
    tensors.check({"temperature": temperature})
    if temperature.requires_grad:
        raise TypeError("temperature gets no gradient, but requires one: pass temperature.detach()")
    if temperature.is_complex() or temperature.dtype == torch.bool:
        raise TypeError(f"temperature must be real, got temperature {arguments.type_name(temperature)}")
    shape = tuple(temperature.shape)
    if len(shape) > len(tokens) or any(n not in (1, m) for n, m in zip(shape[::-1], tokens[::-1], strict=False)):
        raise ValueError(
            f"temperature must be a number, or broadcast to the shape of e without its last axis, {tuple(tokens)}, got "
            f"temperature {shape}"
        )
    if temperature.device != x.e.device and temperature.numel() != 1:
        raise ValueError(f"all tensors must be on one device, got e {x.e.device}, temperature {temperature.device}")
    inverse = 1 / temperature.to(x.e.device, dtype)
    return inverse.expand(tokens).reshape(-1)


def refuse_dtensors(given: dict[str, Any], function: str) -> None:
    if tensors.has_dtensor(given):
        name = next(name for name, x in given.items() if type(x).__name__ == "DTensor")
        raise TypeError(
            f"{name} is a DTensor, and {function} takes plain tensors: pass to_local() of each tensor, and "
            "vocab_parallel=VocabParallel.from_dtensor(c) if c is split by rows"
        )
