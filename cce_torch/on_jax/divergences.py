"""The JAX programs of a divergence, on tensors of PyTorch: cce_kernels/divergence.py, which cce_jax runs as well.

    torch_divergence          the sum, the numbers of each token, and the finished gradients of factor times the sum
    torch_begin_divergence    the numbers of each token, and what is left of the gradients for chunk_programs.finish

As those of the loss, they are compiled for each Kind of the student, for a padded number of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import plans
from cce_kernels import divergence
from cce_kernels.blocks import finish
from cce_kernels.divergence import Divergence
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted
from cce_torch.call import Call, Distillation, DivergenceCall, Divergences, Residuals
from cce_torch.on_jax import bridge, programs, tensors
from cce_torch.on_jax.chunk_programs import Way
from cce_torch.on_jax.kinds import Kind, is_exact, kind_of_tensors


@dataclass(frozen=True)
class Distilled:
    """What a program is compiled for, besides its number of tokens and the types of its arguments."""

    kind: Kind  # of the student
    of: Divergence
    teacher_width: int
    wanted: Wanted | None  # None: no gradients
    with_bias: bool

    @property
    def core(self) -> plans.Core:
        return replace(self.kind.static, teacher_width=self.teacher_width)


class Problem:
    """A call: what its programs are compiled for. It keeps no tensor."""

    def __init__(self, given: Distillation, how: DivergenceCall, wanted: Sequence[bool]) -> None:
        e, c, teacher_e, teacher_c = given.e, given.c, given.teacher_e, given.teacher_c
        call = Call(
            how.softcap,
            how.memory_budget,
            precision=how.precision,
            impl=how.impl,
            wide_dc=c.dtype != e.dtype or how.wide,
            of_shard=how.wide,  # de in float32
            with_temperature=given.inverse_temperature is not None,
        )
        self.kind = kind_of_tensors(e, tensors.rounded(c, e), call)
        self.axis = 0 if teacher_c.is_contiguous() or not teacher_c.T.is_contiguous() else 1
        precision = lax.Precision.HIGHEST if is_exact(how.precision, teacher_e.dtype) else lax.Precision.DEFAULT
        head = Head(how.teacher_softcap, self.axis, precision)
        of = Divergence(how.kind, head, how.entropy)  # type: ignore[arg-type]
        asked = Wanted(*wanted) if any(wanted) else None
        self.key = Distilled(self.kind, of, teacher_e.shape[1], asked, given.bias is not None)
        self.tokens = programs.Tokens(self.kind, len(e))

    @property
    def way(self) -> Way:
        """How `begin` forms the gradients."""
        return _way(self.key, self.tokens.size)

    def inputs(self, given: Distillation) -> list:
        """The arguments of `_given`."""
        e, c, bias, teacher_e, teacher_c, teacher_bias, weight, inverse, scheduled, _ = given
        c, bias = tensors.rounded(c, e), tensors.rounded(bias, e)
        teacher_c, teacher_bias = tensors.rounded(teacher_c, teacher_e), tensors.rounded(teacher_bias, teacher_e)
        teacher_c, (beta, *scales) = teacher_c.T if self.axis else teacher_c, scheduled.tolist()
        student = self.tokens.padded(e, 0), self.kind.in_memory(c), programs.dense(bias)
        teacher = self.tokens.padded(teacher_e, 0), programs.dense(teacher_c), programs.dense(teacher_bias)
        weight, inverse = self.tokens.padded(weight, 0), self.tokens.padded(inverse, 1)
        return [*student, *teacher, weight, inverse, beta, 1 - beta, *map(programs.scale_of, scales)]

    def numbers(self, given: Distillation) -> list[Tensor]:
        """Memory for the numbers of each token."""
        return [given.weight.new_empty(self.tokens.size, dtype=torch.float32) for _ in range(1 + self.key.of.entropy)]


def formed(given: Distillation, how: DivergenceCall, wanted: Sequence[bool]) -> Divergences:
    """As cce_torch.in_torch.divergence.formed. N ≥ 1."""
    x = Problem(given, how, wanted)
    kind, tokens = x.kind, x.tokens
    outputs = [given.e.new_empty((), dtype=torch.float32), *x.numbers(given), *tokens.of_gradients(given.e, wanted)]
    inputs = [programs.dense(given.factor), *x.inputs(given)]
    found = iter(bridge.run(_program(x.key, tokens.size), inputs, outputs))
    result = Divergences(*(next(found) if w else None for w in (True, True, how.entropy, *wanted)))  # type: ignore[arg-type]
    total, entropy, de = (None if y is None else tokens.cut(y) for y in result[1:4])
    dc = None if result.dc is None else kind.in_order_of_c(result.dc)
    return result._replace(total=total, entropy=entropy, de=de, dc=dc)


@lru_cache(maxsize=programs.PROGRAMS)
def _way(key: Distilled, size: int) -> Way:
    shapes = key.kind.shapes(size, key.with_bias)
    return Way(key.kind, plans.plan_for(shapes, key.core, key.wanted, one_factor=True))


def begin(x: Problem, given: Distillation) -> tuple[Tensor, Tensor | None, Residuals]:
    """The divergences and the entropies of the tokens, (N,), and what is left of Σ weight · divergence. N ≥ 1."""
    numbers, left = x.numbers(given), x.way.left.made(lambda shape, dtype: given.e.new_empty(shape, dtype=dtype))
    outputs = [*numbers, *(y for y in left if y is not None)]
    bridge.run(_begin_program(x.key, x.tokens.size, len(outputs)), x.inputs(given), outputs)
    total, *entropy = map(x.tokens.cut, numbers)
    return total, entropy[0] if entropy else None, left


@lru_cache(maxsize=programs.PROGRAMS)
def _program(key: Distilled, size: int) -> Callable:
    asked = Wanted(e=False, c=False, bias=False) if key.wanted is None else key.wanted
    count = 2 + key.of.entropy + asked.e + asked.c + asked.bias

    def torch_divergence(*arrays: Any) -> tuple:
        factor, given = arrays[count], _given(arrays[count + 1 :])
        numbers, left, plan = _start(key, given)
        kept = given.weight != 0
        summed = jnp.sum(jnp.where(kept, given.weight * numbers.total, 0))
        found = finish(left, factor, kept, plan)
        return tuple(x for x in (summed, *numbers, *found) if x is not None)

    return programs.jitted(torch_divergence, count)


@lru_cache(maxsize=programs.PROGRAMS)
def _begin_program(key: Distilled, size: int, count: int) -> Callable:
    def torch_begin_divergence(*arrays: Any) -> tuple:
        numbers, left, _ = _start(key, _given(arrays[count:]))
        return tuple(jax.tree.leaves((numbers, left)))

    return programs.jitted(torch_begin_divergence, count)


def _given(arrays: Sequence[Any]) -> divergence.Given:
    e, c, bias, teacher_e, teacher_c, teacher_bias, weight, inverse, beta, rest, *scales = arrays
    scale, teacher_scale = (None if x is None else x.reshape(1) for x in scales)
    student = divergence.Side(e, c, bias, scale)
    teacher = divergence.Side(teacher_e, teacher_c, teacher_bias, teacher_scale)
    return divergence.Given(student, teacher, weight, inverse, jnp.stack([beta, rest]))


def _start(key: Distilled, given: divergence.Given) -> tuple[Any, Any, Any]:
    plan = plans.plan_for(given.inputs, key.core, key.wanted, one_factor=True)
    return *divergence.begin(given, key.of, plan), plan
