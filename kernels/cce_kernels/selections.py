"""The k largest logits of each token and their ids, and the mean of its logits over the vocabulary. No gradients.

For a chunk of tokens at a time XLA's matmul gives the logits (n, V), at least float32. XLA finds the k largest of a row
by sorting the whole row. So the row is cut into blocks of about √(V/k) columns: the k blocks with the largest maxima
hold the k largest logits. Only the blocks' maxima are sorted, and then the columns of these k blocks.

Order: a larger logit comes first, and among equals the lower id. This is a total order. The blocks are ordered by their
maxima, and among equals the earlier one comes first: that is the order of the blocks' first elements. An element of a
block after the k-th comes after the first elements of k blocks, and so it is not among the k first. So ties keep the
lowest ids.

A NaN logit counts as −inf. A token whose logits are all NaN so has the ids 0 to k − 1; its lse is NaN.
Held at a time: the logits of a chunk, before and after the head's functions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.head import Head
from cce_kernels.numbers import Inputs
from cce_kernels.tokens import Kept, in_chunks

MULTIPLE = 128  # tokens: of a chunk, if it has so many
LEAST = 8  # tokens of a chunk, whatever the budget


class Selections(NamedTuple):
    """Of each token; 0 for an ignored token. None: not asked for."""

    top_logits: jax.Array | None  # (N, k), at least float32, in descending order
    top_ids: jax.Array | None  # (N, k) int32
    mean_logit: jax.Array | None  # (N,), at least float32: Σ_v z_v / V


@dataclass(frozen=True)
class Asked:
    """Which selections a call asks for."""

    top_k: int = 0  # at most V; 0: none
    mean_logit: bool = False


def selections(inputs: Inputs, head: Head, asked: Asked, memory_budget: int) -> Selections:
    """What is asked for of each token. memory_budget: the bytes of a chunk's logits.

    Kept tokens come first, and chunks of ignored tokens are left out.
    """
    tokens, kept = inputs.targets.size, Kept.of(inputs.targets, inputs.targets.size)

    def of_chunk(order: jax.Array) -> Selections:
        own = inputs._replace(**{name: x[order] for name, x in inputs.of_tokens.items()})
        z = _logits(own, head)
        top = largest(z, asked.top_k) if asked.top_k else (None, None)
        return Selections(*top, jnp.mean(z, axis=1) if asked.mean_logit else None)

    wide = jnp.promote_types(inputs.e.dtype, jnp.float32).itemsize
    size = max(memory_budget // (2 * wide * head.vocabulary(inputs.c)), LEAST)
    size = size if size < MULTIPLE else size // MULTIPLE * MULTIPLE
    found = in_chunks(of_chunk, kept.order, min(size, tokens), kept.count[0])
    return jax.tree.map(kept.restored, found)


def largest(z: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest elements of each row of z (n, V) and their columns, (n, k)."""
    rows, columns = z.shape
    z = jnp.where(jnp.isnan(z), -jnp.inf, z)
    if k == 1:
        best = jnp.argmax(z, axis=1)[:, None].astype(jnp.int32)
        return jnp.take_along_axis(z, best, axis=1), best
    width = _block(columns, k)
    blocks = -(-columns // width)
    # Columns that are added come last in the order: their logits are −inf, and their ids are the highest.
    z = jnp.pad(z, ((0, 0), (0, blocks * width - columns)), constant_values=-jnp.inf).reshape(rows, blocks, width)
    numbers = jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), (rows, blocks))
    _, first = ordered(jnp.max(z, axis=2), numbers, min(k, blocks))
    candidates = jnp.take_along_axis(z, first[:, :, None], axis=1).reshape(rows, -1)
    ids = first[:, :, None] * width + jnp.arange(width, dtype=jnp.int32)
    return ordered(candidates, ids.reshape(rows, -1), k)


def ordered(z: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The first k of (z, ids), (n, m) each: a larger z first, and among equals the lower id.

    Both are keys of the sort, so that nothing depends on whether lax.top_k is stable on a device.
    """
    z, ids = lax.sort((-z, ids), num_keys=2)
    return -z[:, :k], ids[:, :k]


def _block(columns: int, k: int) -> int:
    """The width of blocks: the power of two for which the fewest elements are sorted."""
    widths = [2**n for n in range(3, 10)]
    return min(widths, key=lambda width: -(-columns // width) + min(k * width, columns))


def _logits(inputs: Inputs, head: Head) -> jax.Array:
    raw = head.product(inputs.e, inputs.c, 1 - head.vocab_axis)
    return inputs.divided(
        head.logits(raw, None if inputs.bias is None else inputs.bias.astype(raw.dtype), inputs.scale)
    )
