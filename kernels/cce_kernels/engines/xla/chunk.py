"""The numbers and dz of a chunk of tokens in plain XLA, from logits of the whole vocabulary.

Held at a time: the chunk's logits (n, V), at least float32, and dz (n, V), which takes their memory if it has their
type.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from cce_kernels.gradients import fitted
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Statistics


def numbers_and_dz(
    inputs: Inputs, known: Callable[[Statistics], tuple[Statistics, Cotangents]], *, head: Head, with_sum: bool
) -> tuple[Statistics, jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """The chunk's numbers; dz in e's type, divided by a unit; the column sums of dz, (V,); the unit, or None for 1.

    known: the numbers of these columns -> those of the whole vocabulary, and their cotangents. e of ignored tokens must
    be finite.
    """
    raw = head.product(inputs.e, inputs.c, 1 - head.vocab_axis)
    z = head.logits(raw, None if inputs.bias is None else inputs.bias.astype(raw.dtype), inputs.scale)
    targets = inputs.targets[:, None]
    named = (targets >= 0) & (targets < z.shape[1])
    target = jnp.take_along_axis(z, jnp.where(named, targets, 0), axis=1)
    weights, total = inputs.weights, None
    if with_sum:
        total = jnp.sum(z if weights is None else jnp.where(weights == 0, 0, weights * z), axis=1)
    numbers, of = known(Statistics(jax.nn.logsumexp(z, axis=1), jnp.where(named, target, 0)[:, 0], total))
    of, unit = fitted(of, inputs)
    of = jax.tree.map(lambda x: x[:, None], of)
    is_target = jnp.arange(z.shape[1], dtype=jnp.int32) == targets
    dz = head.cotangent(z, jnp.exp(z - numbers.lse[:, None]), is_target, of, weights, inputs.scale)
    return numbers, dz.astype(inputs.e.dtype), jnp.sum(dz, axis=0), unit
