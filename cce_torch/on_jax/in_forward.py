"""The two JAX programs of a "mean" or "sum" whose gradients are formed in the forward pass.

Let S be the sum of the tokens' losses, and let the loss be a function of S alone besides numbers that are no part of
the derivative rule, such as the number of items. The forward program forms the gradients of S, and leaves them as
`Residuals` (cce_kernels/in_forward.py). The backward program computes factor = of_loss · ∂loss/∂S and multiplies by it.

What lies between the programs are tensors of PyTorch, the leaves of Residuals:

    de        (N, D), of e's type
    dc        in c's shape: float32; or if dc has 16 bits the sum over all chunks but the last, as int16, with `steps`
    dbias     (V,) float32
    last      the last chunk, whose part of dc the backward program adds

The backward program writes its de and dc into the memory of these, if the caller says that nobody will read them again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import losses, passes
from cce_jax.core import Common, Terms, cotangents_of, totals_of
from cce_kernels.contract import default_budget
from cce_kernels.numbers import Statistics, Wanted
from cce_kernels.residuals import Residuals, shapes_of
from cce_torch.on_jax import bridge
from cce_torch.on_jax.programs import (
    PROGRAMS,
    Arrays,
    Call,
    Kind,
    Numbers,
    Problem,
    Tokens,
    dense,
    jitted,
    kind_of_tensors,
    named,
    padded_size,
)


@lru_cache(maxsize=PROGRAMS)
def begun_of(kind: Kind, size: int, with_bias: bool, wanted: Wanted) -> Residuals | None:
    """The shapes and types of what the forward program leaves; None where its plan forms no gradients.

    size: the number of tokens that the program is compiled for.
    """
    if not size or kind.call.loss.reduction == "none":
        return None
    inputs = kind.shapes(size, with_bias)
    plan = passes.plan_for(inputs, kind.static, wanted, one_factor=True)
    return None if plan.in_forward is None else shapes_of(plan)


def begun_of_tensors(e: Tensor, c: Tensor, bias: Tensor | None, wanted: Sequence[bool], call: Call) -> Residuals | None:
    """`begun_of` for a call on these tensors, which may be fake."""
    kind = kind_of_tensors(e, c, call)
    return begun_of(kind, kind.sizes(int(e.shape[0])), bias is not None, Wanted(*wanted))


def placeholders(e: Tensor, c: Tensor, bias: Tensor | None, wanted: Sequence[bool], call: Call) -> list[Tensor]:
    """Tensors like those that `begin` leaves, without their memory: one element each."""
    begun = begun_of_tensors(e, c, bias, wanted, call)
    return [e.new_empty((), dtype=getattr(torch, x.dtype.name)).expand(x.shape) for x in jax.tree.leaves(begun)]


def less_results(call: Call, e: Tensor, c: Tensor, wanted: Sequence[bool]) -> Call:
    """call, whose memory budget is reduced by the bytes of de and dc."""
    (tokens, width), itemsize = map(int, e.shape), e.dtype.itemsize
    budget = call.memory_budget
    if budget is None:
        budget = default_budget(tokens, width, itemsize)
    de = itemsize * width * padded_size(tokens) * wanted[0]
    dc = (4 if call.wide_dc else itemsize) * int(c.numel()) * wanted[1]
    return replace(call, memory_budget=max(budget - de - dc, 0))


_traced: set[Kind] = set()


def traced(e: Tensor, c: Tensor, bias: Tensor | None, wanted: Sequence[bool], call: Call) -> list[Tensor]:
    """`placeholders` for a graph of torch.compile. The graph needs the sizes that a Kind has chosen, so the Kind stays.

    [] where the forward pass forms no gradients.
    """
    if not e.shape[0] or not (found := placeholders(e, c, bias, wanted, call)):
        return []
    _traced.add(kind_of_tensors(e, c, call))
    return found


def begin(e, c, bias, targets, class_weight, token_weight, num_items, *, wanted: Wanted, row_length: int, call: Call,
          numbers: Numbers) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """The loss and the numbers, as programs.loss returns them, and the leaves of `begun_of`, which is not None."""
    arrays = Arrays(e, c, call, numbers)
    shapes = jax.tree.leaves(begun_of(arrays.kind, arrays.size, bias is not None, wanted))
    outputs = [
        e.new_empty((), dtype=torch.float32),
        e.new_empty((2 + call.loss.smooths, arrays.size), dtype=torch.float32),
        *(e.new_empty(x.shape, dtype=getattr(torch, x.dtype.name)) for x in shapes),
    ]
    value, statistics, *begun = bridge.run(
        _begin_program(arrays.kind, arrays.size, wanted, len(outputs)),
        arrays.inputs(e, bias, targets, class_weight, token_weight, num_items, row_length),
        outputs,
    )
    if arrays.size != arrays.tokens:
        statistics = statistics[:, : arrays.tokens].contiguous()
    return value, statistics, begun


def finish(
    kind: Kind, of_loss: Tensor, bias, targets, class_weight, token_weight, num_items, statistics: Tensor,
    begun: Sequence[Tensor | None], *, begun_for: Wanted, wanted: Wanted, of_token_weight: bool, row_length: int,
    numbers: Numbers, in_place: bool,
) -> list[Tensor]:  # fmt: skip
    """The wanted ones of de, dc, dbias and the gradient of token_weight, as programs.gradients returns them.

    of_loss: (); statistics, begun: the other results of `begin`, for the gradients `begun_for`. in_place: the results
    de and dc take the memory of begun, which is of no use afterwards.
    """
    tokens = Tokens(kind, targets.shape[0])
    shapes = begun_of(kind, tokens.size, bias is not None, begun_for)
    leaves = [dense(x) for x in begun]
    large = begun_for.e + begun_for.c  # de and dc are the first leaves
    kept = [x for x, w in zip(leaves, _of(begun_for, wanted), strict=False) if w]
    outputs = kept if in_place else [torch.empty_like(x) for x in kept]
    if wanted.bias:
        outputs = [*outputs, tokens.of_parameter(bias)]
    if of_token_weight:
        outputs = [*outputs, torch.empty(tokens.size, dtype=torch.float32, device=of_loss.device)]
    results = list(bridge.run(
        _finish_program(kind, tokens.size, bias is not None, begun_for, wanted, of_token_weight, in_place),
        [*([] if in_place else kept), *leaves[large:], dense(of_loss),
         tokens.padded(statistics, 0, axis=1) if of_token_weight else None,
         *tokens.of_loss(targets, class_weight, token_weight, num_items, row_length, numbers)],
        outputs,
    ))  # fmt: skip
    if wanted.e:
        results[0] = tokens.cut(results[0])
    if wanted.c:
        assert shapes is not None
        dc = results[int(wanted.e)]
        dc = viewed(dc, kind.dtype) if shapes.steps is not None else dc
        results[int(wanted.e)] = dc.T if kind.static.head.vocab_axis == 1 else dc
    if of_token_weight:
        results[-1] = tokens.cut(results[-1]).to(token_weight.dtype)
    return results


def _of(begun_for: Wanted, wanted: Wanted) -> list[bool]:
    """Whether each of de and dc that were formed is wanted."""
    return [w for formed, w in ((begun_for.e, wanted.e), (begun_for.c, wanted.c)) if formed]


def viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of x as another type. No view to autograd, which forbids changes of a view in place."""
    return torch.empty(0, dtype=dtype, device=x.device).set_(
        x.untyped_storage(),
        x.storage_offset(),
        x.shape,
        x.stride(),  # type: ignore[arg-type]
    )


@lru_cache(maxsize=PROGRAMS)
def _begin_program(kind: Kind, size: int, wanted: Wanted, count: int) -> Callable:
    """The forward program. size: as for programs._loss_program."""

    def torch_begin(*arrays):
        problem = Problem.of(kind, *arrays[count:])  # the first `count` are the results' memory
        inputs = problem.inputs
        target_weight = losses.target_weights(inputs.targets, inputs.weights, kind.vocabulary)
        weight = losses.weights(inputs.targets, problem.token_weight, jnp.float32)
        common = Common(problem.label_smoothing, problem.z_loss, inputs.weights)
        totals = totals_of(kind.static.head.vocabulary(inputs.c), kind.call.loss, common)
        statistics, begun = passes.begin(inputs, Terms(inputs.targets, target_weight, weight), cotangents_of(totals),
                                         kind.static, wanted)  # fmt: skip
        return *problem.results(statistics), *jax.tree.leaves(begun)

    return jitted(torch_begin, count)


@lru_cache(maxsize=PROGRAMS)
def _finish_program(
    kind: Kind, size: int, with_bias: bool, begun_for: Wanted, wanted: Wanted, of_token_weight: bool, in_place: bool
) -> Callable:  # fmt: skip
    """The backward program. size: as for programs._loss_program."""
    shapes = begun_of(kind, size, with_bias, begun_for)
    assert shapes is not None
    count, large = wanted.e + wanted.c + wanted.bias + of_token_weight, wanted.e + wanted.c
    small = len(jax.tree.leaves(shapes._replace(de=None, dc=None)))

    def torch_finish(*arrays):
        rest = (
            arrays[:large] + arrays[count:] if in_place else arrays[count:]
        )  # the first `count` are the results' memory
        formed, left, (of_loss, stacked, *others) = rest[:large], rest[large : large + small], rest[large + small :]
        formed = iter(formed)
        begun: Residuals = jax.tree.unflatten(jax.tree.structure(shapes._replace(de=None, dc=None)), left)
        begun = begun._replace(de=next(formed) if wanted.e else None, dc=next(formed) if wanted.c else None)
        inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kind.shapes(size, with_bias))  # not read
        problem = Problem.of(kind, inputs.e, inputs.c, inputs.bias, *others)
        found = passes.finish(problem.inputs, begun, _factor(problem, of_loss), kind.static, begun_for)
        de, dc = found.e if wanted.e else None, found.c if wanted.c else None
        if dc is not None and shapes.steps is not None:
            dc = lax.bitcast_convert_type(dc, jnp.int16)  # begun.dc's type, so that it is written into its memory
        results = [x for x in (de, dc, found.bias if wanted.bias else None) if x is not None]
        if of_token_weight:

            def value(token_weight):
                return problem.loss(named(Statistics, stacked), token_weight)

            results.append(problem.moved_back(jax.vjp(value, problem.token_weight)[1](of_loss)[0]))
        return tuple(results)

    return jitted(torch_finish, count)


def _factor(problem: Problem, of_loss: jax.Array) -> jax.Array:
    """of_loss · ∂loss/∂S, where S is the sum of the tokens' losses."""
    kind, columns = problem.kind, problem.inputs.targets

    def loss(total):
        target_weight = losses.target_weights(columns, problem.inputs.weights, kind.vocabulary)
        weight = losses.weights(columns, problem.token_weight, jnp.float32)
        return losses.reduced(total, columns, weight, target_weight, problem.num_items, options=kind.call.loss)

    return jax.vjp(loss, jnp.float32(0))[1](of_loss)[0]
