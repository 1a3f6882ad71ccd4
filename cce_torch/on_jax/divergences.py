"""The JAX program of a divergence, on tensors of PyTorch: cce_kernels/divergence.py, which cce_jax runs as well.

One program returns the sum, the numbers of each token and the gradients of factor times the sum. As those of the loss,
it is compiled for each Kind of the student, for a padded number of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import plans
from cce_kernels import divergence
from cce_kernels.divergence import Divergence
from cce_kernels.head import Head
from cce_kernels.in_forward import finish
from cce_kernels.numbers import Wanted
from cce_torch.call import Call
from cce_torch.divergence_ops import Given, How
from cce_torch.on_jax import bridge, programs, tensors
from cce_torch.on_jax.kinds import Kind, is_exact, kind_of_tensors


@dataclass(frozen=True)
class Distilled:
    """What a program is compiled for, besides its number of tokens and the types of its arguments."""

    kind: Kind  # of the student
    of: Divergence
    teacher_width: int
    wanted: Wanted | None  # None: no gradients


def formed(given: Given, how: How, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """As cce_torch.torch_alone.divergence.formed. N ≥ 1."""
    e, c, bias, teacher_e, teacher_c, teacher_bias, weight, inverse, scheduled, factor = given
    wide_dc = c.dtype != e.dtype or how.wide
    c, bias = tensors.rounded(c, e), tensors.rounded(bias, e)
    teacher_c, teacher_bias = tensors.rounded(teacher_c, teacher_e), tensors.rounded(teacher_bias, teacher_e)
    call = Call(
        how.softcap,
        how.memory_budget,
        precision=how.precision,
        impl=how.impl,
        wide_dc=wide_dc,
        of_shard=how.wide,  # de in float32
        with_temperature=inverse is not None,
    )
    kind = kind_of_tensors(e, c, call)
    axis = 0 if teacher_c.is_contiguous() or not teacher_c.T.is_contiguous() else 1
    precision = lax.Precision.HIGHEST if is_exact(how.precision, teacher_e.dtype) else lax.Precision.DEFAULT
    of = Divergence(how.kind, Head(how.teacher_softcap, axis, precision), how.entropy)  # type: ignore[arg-type]
    asked = Wanted(*wanted) if any(wanted) else None
    tokens, key = programs.Tokens(kind, len(e)), Distilled(kind, of, teacher_e.shape[1], asked)
    new, of_c = e.new_empty, torch.float32 if wide_dc else e.dtype
    outputs = [new((), dtype=torch.float32), *(new(tokens.size, dtype=torch.float32) for _ in range(1 + how.entropy))]
    in_memory = kind.in_memory(c)
    if wanted[0]:
        outputs.append(new((tokens.size, e.shape[1]), dtype=torch.float32 if how.wide else e.dtype))
    if wanted[1]:
        outputs.append(new(in_memory.shape, dtype=of_c))
    if wanted[2]:
        outputs.append(new(len(c), dtype=of_c))
    beta, *scales = scheduled.tolist()
    inputs = [
        *(tokens.padded(e, 0), in_memory, programs.dense(bias)),
        *(
            tokens.padded(teacher_e, 0),
            programs.dense(teacher_c.T if axis else teacher_c),
            programs.dense(teacher_bias),
        ),
        *(tokens.padded(weight, 0), tokens.padded(inverse, 1), beta, *map(programs.scale_of, scales)),
        programs.dense(factor),
    ]
    found = iter(bridge.run(_program(key, tokens.size), inputs, outputs))
    summed, total, entropy, de, dc, dbias = (next(found) if w else None for w in (True, True, how.entropy, *wanted))
    de, dc = None if de is None else tokens.cut(de), None if dc is None else kind.in_order_of_c(dc)
    entropy = None if entropy is None else tokens.cut(entropy)
    return summed, None if total is None else tokens.cut(total), entropy, de, dc, dbias


@lru_cache(maxsize=programs.PROGRAMS)
def _program(key: Distilled, size: int) -> Callable:
    kind, of, teacher_width, wanted = key.kind, key.of, key.teacher_width, key.wanted
    asked = Wanted(e=False, c=False, bias=False) if wanted is None else wanted
    count = 2 + of.entropy + asked.e + asked.c + asked.bias
    core = replace(kind.static, teacher_width=teacher_width)

    def torch_divergence(*arrays: Any) -> tuple:
        (e, c, bias), (teacher_e, teacher_c, teacher_bias) = arrays[count : count + 3], arrays[count + 3 : count + 6]
        weight, inverse, beta, scale, teacher_scale, factor = arrays[count + 6 :]
        scale, teacher_scale = (None if x is None else x.reshape(1) for x in (scale, teacher_scale))
        student = divergence.Side(e, c, bias, scale)
        given = divergence.Given(
            student, divergence.Side(teacher_e, teacher_c, teacher_bias, teacher_scale), weight, inverse, beta
        )
        plan = plans.plan_for(given.inputs, core, wanted, one_factor=True)
        numbers, left = divergence.begin(given, of, plan)
        kept = weight != 0
        summed = jnp.sum(jnp.where(kept, weight * numbers.total, 0))
        found = finish(left, factor, kept, plan)
        return tuple(x for x in (summed, *numbers, *found) if x is not None)

    return programs.jitted(torch_divergence, count)
