"""The numbers and dz of a chunk of tokens in plain XLA, from logits of the whole vocabulary.

Held at a time: the chunk's logits (n, V), at least float32, and dz (n, V), which takes their memory if it has their
type.
"""

import jax
import jax.numpy as jnp

from cce_kernels.engines.engine import Problem
from cce_kernels.head import Head
from cce_kernels.mean import finite, numbers_of, relative, weighted_sum_of
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Numbers


def numbers_and_logits(problem: Problem) -> tuple[Numbers, jax.Array]:
    """The chunk's numbers over these columns, and its logits before the temperature, (n, V).

    e of ignored tokens must be finite.
    """
    inputs, head = problem.inputs, problem.head
    x = head.whole_logits(inputs.e, inputs.c, inputs.bias, inputs.scale)
    z = inputs.divided(x)
    targets = inputs.targets[:, None]
    named = (targets >= 0) & (targets < z.shape[1])
    target = jnp.take_along_axis(z, jnp.where(named, targets, 0), axis=1)
    peak, request = finite(jnp.max(z, axis=1)), problem.request
    found = numbers_of(z, jnp.where(named, target, 0)[:, 0], peak, request.numbers)
    total = weighted_sum_of(z, peak, inputs.weights) if request.sums_logits else None
    return found._replace(sum=total), x


def dz_of(inputs: Inputs, x: jax.Array, numbers: Numbers, of: Cotangents, head: Head) -> tuple[jax.Array, jax.Array]:
    """dz in e's type, and its column sums, (V,).

    x: the logits before the temperature; numbers: of the whole vocabulary; of: 0 for ignored tokens.
    """
    live = inputs.targets >= 0
    of = jax.tree.map(lambda x: x[:, None], relative(of, numbers, live))
    is_target = jnp.arange(x.shape[1], dtype=jnp.int32) == inputs.targets[:, None]
    log_p = inputs.divided(x) - jnp.where(live, numbers.reference, FLOAT32_MAX)[:, None]
    dz = head.cotangent(x, jnp.exp(log_p), is_target, of, inputs.weights, inputs.factor_of_rows, log_p)
    return dz.astype(inputs.e.dtype), jnp.sum(dz, axis=0)
