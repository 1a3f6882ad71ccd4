"""The record of a call: its options, and its tensors. Imports no JAX.

The statistics of a call are one tensor, (Call.rows, N), float32 for the JAX programs: log_mass, the reference and the
logit of the target, with label smoothing the weighted sum of the logits, and where they are asked for the logits of
given ids, a row for each id, and the logits' mean under the softmax. They are equations (1)-(3") of cce_jax/core.py, 0
for an ignored token: sums over the vocabulary are relative to the reference, which is a constant to the derivatives. So
its row of cotangents is not read.
"""

from ast import literal_eval
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """The options of a call, all but those that change from step to step: a program is compiled for each Call."""

    softcap: float | None = None
    memory_budget: int | None = None
    gradient_tolerance: float = 0.0
    ids: int = 0  # how many ids of each token have logits that are asked for
    ignore_index: int = -100
    shift: int = 0
    reduction: str = "mean"
    smooths: bool = False  # whether label_smoothing is above 0
    has_z_loss: bool = False
    precision: str | None = None
    impl: str = "auto"
    wide_dc: bool = False  # c and bias are float32 beside an e of 16 bits: their gradients are float32
    of_shard: bool = False  # c is a shard of the vocabulary: de is a part of a sum, in float32
    with_mean: bool = False  # whether the mean of the logits is asked for
    mean_is_detached: bool = False  # whether the mean gets no cotangent
    with_temperature: bool = False  # whether each token has a temperature
    top_k: int = 0  # how many of the largest logits of each token are asked for
    mean_logit: bool = False  # whether the mean of each token's logits over the vocabulary is asked for
    compiled: bool = False  # whether torch.compile traced a call that forms gradients (programs.compiled_kind)

    @property
    def rows(self) -> int:
        """The number of statistics of a token."""
        return 3 + self.smooths + self.ids + self.with_mean

    def losses(self, tokens: int) -> tuple[int, ...]:
        """The shape of the loss. There is none of a shard, whose statistics are not those of all columns."""
        return (0,) if self.of_shard else (tokens,) if self.reduction == "none" else ()

    def ids_of(self, statistics: Any) -> Any:
        """The logits of the ids, (N, K), of an array of either framework."""
        first = 3 + self.smooths
        return statistics[first : first + self.ids].T

    def selected(
        self, tokens: int, of_logits: torch.dtype = torch.float32, of_ids: torch.dtype = torch.int32
    ) -> tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]:
        """The shape and the type of each of the Selections; None: not asked for. JAX gives the types by default."""
        top = (tokens, self.top_k) if self.top_k else None
        return (
            None if top is None else (top, of_logits),
            None if top is None else (top, of_ids),
            ((tokens,), of_logits) if self.mean_logit else None,
        )

    @property
    def of_backward(self) -> "Call":
        """The call that the backward pass makes: a mean without a cotangent is nothing to it.

        The mean is the last of the statistics, so the first rows are those of this call.
        """
        return self._replace(with_mean=False, mean_is_detached=False) if self.mean_is_detached else self


# Functions, and no property of a tuple where torch.compile traces: that of PyTorch 2.9 and 2.10 cannot trace one.
def selects(call: Call) -> bool:
    """Whether selections are asked for."""
    return call.top_k > 0 or call.mean_logit


def without_selections(call: Call) -> Call:
    """The call that the backward pass makes: selections have no gradient."""
    return call._replace(top_k=0, mean_logit=False)


def lse_of(statistics: Tensor | Sequence[Tensor]) -> Tensor:
    """The log-sum-exp of each token, (N,), rounded. statistics: of its rows, as a tensor or one by one."""
    return statistics[0] + statistics[1]


def log_p(z: Tensor, statistics: Tensor | Sequence[Tensor]) -> Tensor:
    """z − lse, of logits z of the tokens, (N,) or (N, K). At most 0: z may be another product than those summed.

    statistics: as for `lse_of`.
    """
    log_mass, reference = (x if z.dim() == 1 else x[:, None] for x in statistics[:2])
    return _at_most_0((z - reference) - log_mass)


def entropy_of(log_mass: Tensor, mean: Tensor) -> Tensor:
    """The entropy of each token, (N,), at least 0, from two of the statistics."""
    return 0 - _at_most_0(mean - log_mass)


def _at_most_0(x: Tensor) -> Tensor:
    """x, or 0 with the derivative of x where that is above 0."""
    return x - x.detach().clamp(min=0)


class Selections(NamedTuple):
    """Of each token; 0 for an ignored token. None: not asked for. They have no gradient."""

    top_logits: Tensor | None = None  # (N, top_k), at least float32, in descending order
    top_ids: Tensor | None = None  # (N, top_k) integers
    mean_logit: Tensor | None = None  # (N,), at least float32


class Numbers(NamedTuple):
    """What is computed of the logits of each token."""

    statistics: Tensor  # (Call.rows, N), at least float32
    selections: Selections = Selections()


class Scheduled(NamedTuple):
    """The numbers of a call that may change from step to step, and compile nothing."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0


class Given(NamedTuple):
    """The tensors of a call on one device."""

    e: Tensor  # (N, D)
    c: Tensor  # (V, D), not copied if it is a transposed (D, V)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (..., T) int64, N in all, before the shift, which moves each row of T
    class_weight: Tensor | None = None  # (V,)
    token_weight: Tensor | None = None  # (N,)
    num_items: Tensor | None = None  # one element
    inverse_temperature: Tensor | None = None  # (N,) float32: multiplies a token's logits after softcap; not shifted
    ids: Tensor | None = None  # (N, K) int32: columns whose logits are asked for, -1: none; they are not shifted


class Residuals(NamedTuple):
    """cce_kernels.plan.residuals.Residuals in PyTorch. What is not left is None, or a tensor without elements.

    An operator takes no list of tensors: torch.autograd.grad(is_grads_batched=True) does not take one.
    """

    exponentials: Tensor | None = None
    m: Tensor | None = None
    de: Tensor | None = None
    dc: Tensor | None = None
    steps: Tensor | None = None
    dbias: Tensor | None = None
    units: Tensor | None = None
    q: Tensor | None = None


def are_left(residuals: Sequence[Tensor | None]) -> bool:
    """Whether the forward pass left something."""
    return any(x is not None and x.numel() > 0 for x in residuals)


class Saved(NamedTuple):
    """What a graph holds besides the tensors of a call."""

    statistics: Tensor
    residuals: Residuals
    left_for: Sequence[bool]  # the gradients of e, c and bias for which they are left; []: nothing is left


class Divergences(NamedTuple):
    """What the forward pass computes beside a teacher. None: not asked for."""

    summed: Tensor  # (), Σ weight · divergence
    total: Tensor  # (N,), the divergences, 0 where the weight is 0
    entropy: Tensor | None  # (N,), of the student, 0 where the weight is 0
    de: Tensor | None  # the gradients of factor times the sum
    dc: Tensor | None
    dbias: Tensor | None


class Results(NamedTuple):
    """What the forward pass computes."""

    loss: Tensor  # () or (N,), float32; of a shard (0,)
    statistics: Tensor  # (Call.rows, N) float32
    selections: Selections = Selections()
    residuals: Residuals = Residuals()


class OfResults(NamedTuple):
    """The cotangents of the loss and of the statistics; None for zero."""

    of_loss: Tensor | None
    of_statistics: Tensor | None


class OfGiven(NamedTuple):
    """The gradients of tensors of a call, in their shapes. None: not wanted."""

    e: Tensor | None
    c: Tensor | None
    bias: Tensor | None
    token_weight: Tensor | None


class Distillation(NamedTuple):
    """The tensors of a divergence on one device. c and bias may be float32 beside an e of 16 bits."""

    e: Tensor  # (N, D)
    c: Tensor  # (V, D), not copied if it is a transposed (D, V)
    bias: Tensor | None  # (V,)
    teacher_e: Tensor  # (N, D')
    teacher_c: Tensor  # (V, D')
    teacher_bias: Tensor | None  # (V,)
    weight: Tensor  # (N,) at least float32
    inverse_temperature: Tensor | None  # (N,) at least float32
    scheduled: Tensor  # (3,) float64, on the CPU: beta, the student's scale and the teacher's
    factor: Tensor  # (): multiplies the sum over the tokens


class DivergenceCall(NamedTuple):
    """The options of a divergence, all but those that change from step to step."""

    softcap: float | None
    teacher_softcap: float | None
    memory_budget: int | None
    kind: str
    precision: str | None
    impl: str
    entropy: bool  # whether the student's entropies are asked for
    wide: bool = False  # whether the gradients are float32, although e has 16 bits


class Operands(NamedTuple):
    """The tensors of the core in PyTorch alone, and on a shard of the vocabulary."""

    e: Tensor  # (N, D)
    c: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    columns: Tensor  # (N,) integers, as in losses.py
    weights: Tensor | None  # (V,), of the weighted sum; None: 1
    inverse_temperature: Tensor | None = None  # (N,) at least float32: multiplies a token's logits after softcap
    ids: Tensor | None = None  # (N, K) int32: columns whose logits are asked for; -1: none


# The first fields of each record, which are numbers, and their types as arguments of an operator. torch.compile, where
# they change, can make a constant of such an argument, but not of a number in a str.
NUMBERS: dict[type, dict[str, str]] = {
    Call: {"softcap": "float?", "memory_budget": "int?", "gradient_tolerance": "float", "number_of_ids": "int"},
    DivergenceCall: {"softcap": "float?", "teacher_softcap": "float?", "memory_budget": "int?"},
}
ENCODED = {kind: {"options": "str"} | numbers for kind, numbers in NUMBERS.items()}  # of what `encoded` returns


def encoded(options: "Call | DivergenceCall") -> tuple[str | float | None, ...]:
    """The arguments of a PyTorch operator."""
    count = len(NUMBERS[type(options)])
    return repr(tuple(options[count:])), *options[:count]


@lru_cache(maxsize=1024)
def decoded(kind: type, options: str, *numbers: Any) -> "Call | DivergenceCall":
    """The inverse of `encoded`. kind: the record."""
    return kind(*numbers, *literal_eval(options))
