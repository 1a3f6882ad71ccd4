"""Divergences as one PyTorch operator, opaque to torch.compile, and the autograd rule around it.

For a scalar the forward pass forms the gradients, up to the cotangent, de of 16 bits in block floating point, and the
backward pass multiplies them by it, where their last part is added. So the cotangent adds no rounding.

Under torch.compile, and where PyTorch computes alone, the operator `cce_torch::divergence` returns the weighted sum,
the numbers of each token, and finished gradients; the backward pass multiplies these. For a loss per token, and under
torch.func, the backward pass calls the operator, with the cotangents in the weights.

Numbers that people change from step to step (beta and both scales) are a tensor: as constants, torch.compile would
compile a graph for each value.
"""

from ast import literal_eval
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import in_forward, ops
from cce_torch.arguments import OF_TORCH
from cce_torch.operators import operator
from cce_torch.reverse_mode import applied, first_order
from cce_torch.torch_alone import divergence

PIECE_BYTES = 64 * 2**20  # of float32 numbers that exist at a time while 16-bit gradients are multiplied


class Given(NamedTuple):
    """The tensors of a call on one device. c and bias may be float32 beside an e of 16 bits."""

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


class How(NamedTuple):
    """The options of a call, all but those that change from step to step."""

    kind: str
    softcap: float | None
    teacher_softcap: float | None
    memory_budget: int | None
    precision: str | None
    impl: str
    entropy: bool  # whether the student's entropies are asked for
    wide: bool = False  # whether the gradients are float32, although e has 16 bits


FIELDS = len(Given._fields)


def loss(given: Given, how: How, per_token: bool) -> tuple[Tensor, Tensor]:
    """The weighted divergences, (N,), or factor · their sum, (); and the entropies, without a gradient."""
    compiling, functions = torch.compiler.is_compiling(), torch._C._are_functorch_transforms_active()
    wanted = [x is not None and x.requires_grad and torch.is_grad_enabled() for x in given[:3]]
    forming = wanted if not functions and not per_token else [False] * 3
    in_programs = any(forming) and not compiling and how.impl not in OF_TORCH and len(given.e) > 0
    problem = _programs().Problem(given, how, forming) if in_programs else None
    if problem is None:  # a loss scale that follows must count
        how = how._replace(wide=any(forming) and given.e.dtype == torch.float16)
    # torch.compile would give a forward of *arguments a ctx too where no gradient is wanted
    if compiling and not any(wanted):
        return _Divergence.forward(*given, how, per_token, forming, problem)[:2]  # type: ignore[return-value]
    return applied(_Divergence, *given, how, per_token, forming, problem)[:2]  # type: ignore[return-value]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        given, (how, per_token, forming, problem) = Given(*arguments[:FIELDS]), arguments[FIELDS:]
        # a checkpoint forms the gradients when it runs the second time
        lost = any(forming) and not torch.compiler.is_compiling() and ops.drops_what_is_saved()
        if problem is not None and not lost:
            return _start(given, problem)
        asked = [False] * 3 if lost else forming
        summed, total, entropy, *gradients = run(*given, repr(tuple(how)), *asked)
        weight = given.weight
        value = torch.where(weight == 0, 0, weight * total) if per_token else summed * given.factor
        if lost:
            gradients = _placeholders(given, how, forming, problem)
        return value, entropy, *gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        given, (ctx.how, ctx.per_token, ctx.forming, problem) = Given(*inputs[:FIELDS]), inputs[FIELDS:]
        ctx.called = "linear_divergence"
        ctx.way = None if problem is None else problem.way
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.types = [None if x is None else x.dtype for x in given[:3]]
        ctx.in_place = False
        if any(ctx.forming):
            ctx.in_place = not torch.compiler.is_compiling() and ops.may_be_overwritten()
            # e, c and bias: for the error of a second derivative
            ctx.save_for_backward(given.weight, given.factor, *given[:3], *output[2:])
        else:
            ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, of_value: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        nothing = (None,) * (FIELDS + 4)
        wanted = list(ctx.needs_input_grad[:3])
        if of_value is None or not any(wanted):
            return nothing
        apply = _recomputed if not any(ctx.forming) else _finished if ctx.way is None else partial(_added, ctx.way)
        saved, options = ctx.saved_tensors, (ctx.how, ctx.per_token, ctx.types, wanted)
        in_place = ctx.in_place and not torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]

        def run_backward(of_value: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
            return apply(of_value, saved, options, in_place)

        found = first_order(ctx.called, run_backward, (of_value, *saved))
        return *found, *nothing[3:]


def _start(given: Given, problem: Any) -> tuple[Tensor, ...]:
    """factor · Σ weight · divergence; the entropies; de, and what else is left of its gradients."""
    total, entropy, de, left = _programs().begin(problem, given)
    weight, none = given.weight, given.e.new_empty(0)
    value = torch.where(weight == 0, 0, weight * total).sum() * given.factor
    return value, none if entropy is None else entropy, none if de is None else de, *left


def _placeholders(given: Given, how: How, forming: Sequence[bool], problem: Any) -> list[Tensor]:
    """Tensors of the shapes of what is left, with the memory of one element each."""

    def new(shape: Any, dtype: torch.dtype) -> Tensor:
        return given.e.new_empty((), dtype=dtype).expand(shape)

    if problem is not None:
        way = problem.way
        of_e: Any = _programs().left_de(way) if forming[0] else ((0,), given.e.dtype)
        return [new(*of_e), *in_forward.programs().leaves_of(way.new(new))]
    each = zip(given, forming, _types(given, how), strict=False)
    return [new((0,), given.e.dtype) if x is None or not w else new(x.shape, t) for x, w, t in each]


def _added(
    way: Any, of_value: Tensor, saved: Sequence[Tensor], options: tuple, in_place: bool
) -> tuple[Tensor | None, ...]:
    """The gradients, from what the forward pass left."""
    (weight, factor, e), (de, *left), (_, _, types, wanted) = saved[:3], saved[5:], options
    factors = of_value if ops.is_batched(of_value) else None
    if factors is not None:  # the programs take no such tensor, and the gradients are linear in it
        of_value, in_place = torch.ones_like(factor), False
    factor, residuals = factor * of_value, way.residuals(left)
    of_e = None
    if wanted[0]:
        of_token = torch.where(weight != 0, factor, 0)  # an infinite cotangent times 0 is NaN
        of_e = _programs().finish_de(way, de, residuals.units, of_token, e, in_place)
    of_c, of_bias = in_forward.programs().finish(way, residuals, factor, wanted, in_place)
    found = of_e, of_c, None if of_bias is None else of_bias.to(types[2])
    if factors is None:
        return found
    return tuple(None if x is None else (factors * x).to(x.dtype) for x in found)


def _finished(of_value: Tensor, saved: Sequence[Tensor], options: tuple, in_place: bool) -> tuple[Tensor | None, ...]:
    """The gradients that the forward pass formed, times the cotangent."""
    weight, gradients, (_, _, types, wanted) = saved[0], saved[5:], options
    of_token = torch.where(weight != 0, of_value, 0)[:, None]  # an infinite cotangent times 0 is NaN
    factors = of_token, of_value.reshape(1, 1), of_value.reshape(1)
    each = zip(gradients, factors, types, wanted, strict=True)
    return tuple(_times(x, by, dtype, in_place) if w else None for x, by, dtype, w in each)


def _times(x: Tensor, by: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    """x · by, rounded to dtype once. by: at least float32, of x's rank."""
    if torch.compiler.is_compiling() or ops.is_batched(by):
        return (x * by).to(dtype)
    if x.dtype == by.dtype == dtype:
        return x.mul_(by) if in_place else x * by
    found = x if in_place and x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    rows = max(PIECE_BYTES // (4 * max(x[:1].numel(), 1)), 1)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        found[part] = x[part] * (by[part] if len(by) > 1 else by)
    return found


def _recomputed(of_value: Tensor, saved: Sequence[Any], options: tuple, _: bool) -> tuple[Tensor | None, ...]:
    """The gradients, from logits that are computed again."""
    given, (how, per_token, _, wanted) = Given(*saved), options
    weight, factor = given.weight, given.factor
    if per_token:
        given = given._replace(weight=torch.where(weight == 0, 0, weight * of_value))
    else:
        given = given._replace(factor=factor * of_value)
    found = run(*given, repr(tuple(how._replace(entropy=False))), *wanted)[3:]
    return tuple(x if w else None for x, w in zip(found, wanted, strict=True))


def _types(given: Given, how: How) -> list[torch.dtype]:
    """Of the gradients of e, c and bias."""
    found = [given.e.dtype, given.c.dtype, given.c.dtype]
    return [torch.promote_types(x, torch.float32) if how.wide else x for x in found]


TAKES = (
    "Tensor e, Tensor c, Tensor? bias, Tensor teacher_e, Tensor teacher_c, Tensor? teacher_bias, Tensor weight, "
    "Tensor? inverse_temperature, Tensor scheduled, Tensor factor, str how, bool want_e, bool want_c, bool want_bias"
)


def _read(arguments: tuple) -> tuple[Given, How, Sequence[bool]]:
    how, *wanted = arguments[FIELDS:]
    return Given(*arguments[:FIELDS]), How(*literal_eval(how)), wanted


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    given, how, wanted = _read(arguments)
    e, new = given.e, given.weight.new_empty
    found = zip(given[:3], wanted, _types(given, how), strict=True)
    gradients = [e.new_empty(0) if x is None or not w else torch.empty_like(x, dtype=t) for x, w, t in found]
    return new(()), new(e.shape[0]), new(e.shape[0] if how.entropy else 0), *gradients


@operator("divergence", TAKES, "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _fake)
def run(*arguments: Any) -> tuple[Tensor, ...]:
    """Σ weight · divergence, (); divergences and entropies, (N,); the gradients of factor times the sum.

    What is not asked for has no elements.
    """
    given, how, wanted = _read(arguments)
    found = (_alone if how.impl in OF_TORCH or not len(given.e) else _programs().formed)(given, how, wanted)
    return tuple(given.e.new_empty(0) if x is None else x for x in found)


def _alone(given: Given, how: How, wanted: Sequence[bool]) -> divergence.Found:
    beta, scale, teacher_scale = given.scheduled.tolist()
    student = divergence.Side(*given[:3], scale, how.softcap)
    teacher = divergence.Side(*given[3:6], teacher_scale, how.teacher_softcap)
    pair = divergence.Pair(student, teacher, given.weight, given.inverse_temperature)
    measure = divergence.Measure(how.kind, beta)
    asked = divergence.Asked(how.entropy, wanted, _types(given, how), how.memory_budget)
    return divergence.formed(pair, measure, given.factor, asked)


@cache
def _programs() -> Any:
    """cce_torch.on_jax.divergences, which imports JAX."""
    from cce_torch.on_jax import divergences

    return divergences
