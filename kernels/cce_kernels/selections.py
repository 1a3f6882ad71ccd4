"""The numbers of each token and its k largest logits, from one matmul: where the largest logits are asked for.

For a chunk of tokens at a time XLA's matmul gives the logits (n, V), at least float32. They are read twice: first for
the largest logit of each block of columns, then for the sums. The logits of targets and ids are looked up.

XLA finds the k largest of a row by sorting the whole row. But the k blocks with the largest maxima hold the k largest
logits. So only the blocks' maxima are sorted, and then the columns of these k blocks; and where one of the two is still
long, it is cut into blocks itself.

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
from cce_kernels.mean import mass_and_moment
from cce_kernels.numbers import Inputs, Statistics
from cce_kernels.tokens import Kept, in_chunks

MULTIPLE = 128  # tokens: of a chunk, if it has so many
LEAST, MOST = 8, 512  # tokens of a chunk, whatever the budget: larger chunks are no faster


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


NOTHING = Asked()


def numbers_and_selections(
    inputs: Inputs, head: Head, asked: Asked, with_mean: bool, memory_budget: int
) -> tuple[Statistics, Selections]:
    """The numbers of each token, without the sum, and what is asked for.

    with_mean: whether the numbers include the mean. memory_budget: the bytes of a chunk's logits. Kept tokens come
    first, and chunks of ignored tokens are left out. The numbers of an ignored token are 0.
    """
    tokens, kept = inputs.targets.size, Kept.of(inputs.targets, inputs.targets.size)

    def of_chunk(order: jax.Array) -> tuple[Statistics, Selections]:
        own = inputs._replace(**{name: x[order] for name, x in inputs.of_tokens.items()})
        z = own.divided(head.whole_logits(own.e, own.c, own.bias, own.scale))
        return _of_logits(z, own, asked, with_mean)

    wide = jnp.promote_types(inputs.e.dtype, jnp.float32).itemsize
    size = min(max(memory_budget // (2 * wide * head.vocabulary(inputs.c)), LEAST), MOST)
    size = size if size < MULTIPLE else size // MULTIPLE * MULTIPLE
    found = in_chunks(of_chunk, kept.order, min(size, tokens), kept.count[0])
    return jax.tree.map(kept.restored, found)


def largest(z: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest elements of each row of z (n, V) and their columns, (n, k)."""
    z, width = jnp.where(jnp.isnan(z), -jnp.inf, z), 1 if k == 1 else _block(z.shape[1], k)
    return _largest(z, z if width == 1 else _peaks(z, width), width, k)


def ordered(z: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The first k of (z, ids), (n, m) each: a larger z first, and among equals the lower id.

    Both are keys of the sort, so that nothing depends on whether lax.top_k is stable on a device.
    """
    z, ids = lax.sort((-z, ids), num_keys=2)
    return -z[:, :k], ids[:, :k]


def _of_logits(z: jax.Array, inputs: Inputs, asked: Asked, with_mean: bool) -> tuple[Statistics, Selections]:
    width, comparable = _block(z.shape[1], asked.top_k), jnp.where(jnp.isnan(z), -jnp.inf, z)
    peaks = comparable if width == 1 else _peaks(comparable, width)
    peaks = lax.optimization_barrier(peaks)  # else XLA reads all logits once more for the largest of a row
    peak = jnp.max(peaks, axis=1)
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    mass, moment = mass_and_moment(z, peak)
    mean = moment / jnp.where(mass == 0, 1, mass) if with_mean else None
    target = _picked(z, inputs.targets[:, None])[:, 0]
    ids = None if inputs.ids is None else _picked(z, jnp.where(inputs.targets[:, None] < 0, -1, inputs.ids))
    top = _largest(comparable, peaks, width, asked.top_k) if asked.top_k else (None, None)
    numbers = Statistics(peak + jnp.log(mass), target, None, mean, ids)
    return numbers, Selections(*top, jnp.mean(z, axis=1) if asked.mean_logit else None)


def _largest(z: jax.Array, peaks: jax.Array, width: int, k: int) -> tuple[jax.Array, jax.Array]:
    """`largest`, without NaN. peaks: the largest of each block of `width` columns, (n, blocks)."""
    rows, columns = z.shape
    if width == 1 and k == 1:
        best = jnp.argmax(z, axis=1)[:, None].astype(jnp.int32)
        return _at(z, best), best
    if width == 1:
        return ordered(z, jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), z.shape), k)
    _, blocks = largest(peaks, k)
    # The blocks in their order, so that of equal candidates the first wins.
    first = (blocks if k == 1 else jnp.sort(blocks, axis=1)) * width
    ids = (first[:, :, None] + jnp.arange(width, dtype=jnp.int32)).reshape(rows, -1)
    # Columns that the last block lacks come last in the order: they are −inf, and their ids are the highest.
    candidates = jnp.where(ids < columns, _at(z, jnp.minimum(ids, columns - 1)), -jnp.inf)
    top, at = largest(candidates, k)
    return top, _at(ids, at)


def _peaks(z: jax.Array, width: int) -> jax.Array:
    """The largest element of each block of columns, (n, blocks)."""
    rows, columns = z.shape
    blocks = -(-columns // width)
    z = jnp.pad(z, ((0, 0), (0, blocks * width - columns)), constant_values=-jnp.inf)
    return jnp.max(z.reshape(rows, blocks, width), axis=2)


def _block(columns: int, k: int) -> int:
    """The width of blocks: the power of two that leaves the fewest elements; 1 if these are not half as many."""

    def left(width: int) -> int:
        return -(-columns // width) + k * width

    width = min((2**n for n in range(1, 10)), key=left)
    return width if left(width) <= columns // 2 else 1


def _picked(z: jax.Array, columns: jax.Array) -> jax.Array:
    """z at columns, (n, K); 0 where there is no such column."""
    named = (columns >= 0) & (columns < z.shape[1])
    return jnp.where(named, _at(z, jnp.where(named, columns, 0)), 0)


def _at(z: jax.Array, columns: jax.Array) -> jax.Array:
    """z[i, columns[i, k]], (n, K). XLA does not check the columns."""
    return z.at[jnp.arange(len(z))[:, None], columns].get(mode="promise_in_bounds")
