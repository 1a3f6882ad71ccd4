"""Divergences as PyTorch operators, opaque to torch.compile, and the task of autograd.py's rules around them.

For a scalar the forward pass forms the gradients, up to the cotangent, de of 16 bits in block floating point, and the
backward pass multiplies them by it, where their last part is added. So the cotangent adds no rounding.

Under torch.compile, and where PyTorch computes alone, an operator returns the weighted sum, the numbers of each token,
and finished gradients; the backward pass multiplies these. For a loss per token, and under torch.func, the backward
pass calls the operator, with the cotangents in the weights. `cce_torch::divergence` runs JAX's program, and
`cce_torch::divergence_in_torch` is PyTorch alone.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import autograd, in_forward
from cce_torch.arguments import OF_TORCH
from cce_torch.autograd import Formed, Gradients, Recomputed, Tensors
from cce_torch.call import Distillation, DivergenceCall, Divergences, Residuals
from cce_torch.in_torch import divergence
from cce_torch.operators import of_jax, of_torch

PIECE_BYTES = 64 * 2**20  # of float32 numbers that exist at a time while 16-bit gradients are multiplied


def loss(given: Distillation, how: DivergenceCall, per_token: bool) -> tuple[Tensor, Tensor]:
    """The weighted divergences, (N,), or factor · their sum, (); and the entropies, without a gradient."""
    compiling, functions = torch.compiler.is_compiling(), torch._C._are_functorch_transforms_active()
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in given[:3]]
    forming = wanted if not functions and not per_token else [False] * 3
    in_programs = any(forming) and not compiling and how.impl not in OF_TORCH and len(given.e) > 0
    problem = _programs().Problem(given, how, forming) if in_programs else None
    if problem is None:  # a loss scale that follows must count
        how = how._replace(wide=any(forming) and given.e.dtype == torch.float16)
    task = _Divergence(how, per_token, forming, problem)
    return autograd.applied(Formed if any(forming) else Recomputed, task, *given)  # type: ignore[return-value]


class _Divergence(NamedTuple):
    """The task. Its tensors: Distillation."""

    how: DivergenceCall
    per_token: bool
    forming: Sequence[bool]  # the gradients of e, c and bias that the forward pass forms
    problem: Any  # divergences.Problem; None: the operator forms finished gradients

    called, results, differentiable = "linear_divergence", 2, 1

    def of_backward(self) -> "_Divergence":
        return self

    def forward(self, *arrays: Any) -> tuple[Tensor | None, ...]:
        given, (how, per_token, forming, problem) = Distillation(*arrays), self
        # a checkpoint forms the gradients when it runs the second time
        drops = any(forming) and not torch.compiler.is_compiling() and autograd.drops_what_is_saved()
        if problem is not None and not drops:
            return _start(given, problem)
        summed, total, entropy, *gradients = run(given, how, [False] * 3 if drops else list(forming))
        value = torch.where(given.weight == 0, 0, given.weight * total) if per_token else summed * given.factor
        return value, entropy, *(_placeholders(given, how, forming, problem) if drops else gradients)

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        if not any(self.forming):
            return given
        x = Distillation(*given)
        return x.weight, x.factor, x.e, x.c, x.bias, *found[2:]

    def finish(self, factor: Tensor, saved: Tensors, wanted: Sequence[bool], in_place: bool) -> Gradients:
        """The gradients, from what the forward pass left."""
        (weight, of_sum, e, c, bias), left, programs = saved[:5], saved[5:], in_forward.programs
        if self.problem is not None:
            way, formed, live = self.problem.way, Residuals(*left), weight != 0
            de, dc, dbias = programs().finish(way, formed, of_sum * factor, wanted, in_place, live)
            return de, dc, None if dbias is None else dbias.to(bias.dtype)
        of_token = torch.where(weight != 0, factor, 0)[:, None]  # an infinite cotangent times 0 is NaN
        factors = of_token, factor.reshape(1, 1), factor.reshape(1)
        each = zip(left, factors, (e, c, bias), wanted, strict=False)
        return [_times(x, by, like.dtype, in_place) if w else None for x, by, like, w in each]

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Gradients:
        """The gradients, from logits that are computed again."""
        given, (of_value,) = Distillation(*saved), cotangents
        if self.per_token:
            given = given._replace(weight=torch.where(given.weight == 0, 0, given.weight * of_value))
        else:
            given = given._replace(factor=given.factor * of_value)
        return run(given, self.how._replace(entropy=False), list(wanted[:3]))[3:]


def _start(given: Distillation, problem: Any) -> tuple[Tensor | None, ...]:
    """factor · Σ weight · divergence; the entropies; what is left of its gradients."""
    total, entropy, left = _programs().begin(problem, given)
    value = torch.where(given.weight == 0, 0, given.weight * total).sum() * given.factor
    return value, given.e.new_empty(0) if entropy is None else entropy, *left


def _placeholders(given: Distillation, how: DivergenceCall, forming: Sequence[bool], problem: Any) -> Tensors:
    """Tensors of the shapes of what is left, with the memory of one element each."""
    if problem is not None:
        return problem.way.left.placeholders(given.e)

    def new(shape: Any, dtype: torch.dtype) -> Tensor:
        return given.e.new_empty((), dtype=dtype).expand(shape)

    each = zip(given, forming, _types(given, how), strict=False)
    return [new((0,), given.e.dtype) if x is None or not w else new(x.shape, t) for x, w, t in each]


def _times(x: Tensor, by: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    """x · by, rounded to dtype once. by: at least float32, of x's rank."""
    if torch.compiler.is_compiling():
        return (x * by).to(dtype)
    if x.dtype == by.dtype == dtype:
        return x.mul_(by) if in_place else x * by
    found = x if in_place and x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    rows = max(PIECE_BYTES // (4 * max(x[:1].numel(), 1)), 1)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        found[part] = x[part] * (by[part] if len(by) > 1 else by)
    return found


def _types(given: Distillation, how: DivergenceCall) -> list[torch.dtype]:
    """Of the gradients of e, c and bias."""
    found = [given.e.dtype, given.c.dtype, given.c.dtype]
    return [torch.promote_types(x, torch.float32) if how.wide else x for x in found]


def run(given: Distillation, how: DivergenceCall, wanted: Sequence[bool]) -> Tensors:
    """What divergence.formed finds, by whichever impl. What is not asked for has no elements."""
    found = (of_torch_alone if how.impl in OF_TORCH else of_programs)(given, how, wanted)
    asked = True, True, how.entropy, *wanted
    return [x if w and x is not None else given.e.new_empty(0) for x, w in zip(found, asked, strict=True)]


def _fake(given: Distillation, how: DivergenceCall, wanted: Sequence[bool]) -> Tensors:
    tokens, new = given.e.shape[0], given.weight.new_empty
    found = zip(given, wanted, _types(given, how), strict=False)
    gradients = [None if x is None or not w else torch.empty_like(x, dtype=t) for x, w, t in found]
    return new(()), new(tokens), new(tokens) if how.entropy else None, *gradients


@of_jax("divergence", _fake)
def of_programs(given: Distillation, how: DivergenceCall, wanted: Sequence[bool]) -> Divergences:
    """By one of JAX's programs."""
    if not len(given.e):
        return divergence.formed(given, how, wanted, _types(given, how))
    return _programs().formed(given, how, wanted)


@of_torch("divergence_in_torch", _fake)
def of_torch_alone(given: Distillation, how: DivergenceCall, wanted: Sequence[bool]) -> Divergences:
    """By PyTorch alone."""
    return divergence.formed(given, how, wanted, _types(given, how))


@cache
def _programs() -> Any:
    """cce_torch.on_jax.divergences, which imports JAX."""
    from cce_torch.on_jax import divergences

    return divergences
