"""The numbers of each token and its k largest logits, from one matmul: where the largest logits are asked for.

The logits (n, V) of a chunk of tokens are held, at least float32. XLA finds the k largest of a row by sorting the whole
row. But the k blocks of columns with the largest maxima hold the k largest logits. So only the blocks' maxima are
sorted, and then the columns of these k blocks. Where these columns are still many, each block is cut into smaller ones,
of which k are taken in the same way.

On Hopper GPUs the kernel that computes the logits also finds the blocks' maxima and the log-sum-exps
(engine.Launched.logits_and_maxima). Elsewhere XLA's matmul gives the logits, which are read twice: for the maxima, and
for the sums. The mean needs a pass of its own over the kernel's logits. The logits of targets and ids are looked up.

Order: a larger logit comes first, and among equals the lower id. This is a total order. Blocks are ordered by their
maxima, and among equals the one with the lower ids comes first. Let B be a block that is not among the first k, and x a
logit of B. Each of the first k blocks has a maximum that is larger than x, or equal to x with a lower id. So x is not
among the k largest, and ties keep the lowest ids.

A NaN logit counts as −inf. A token whose logits are all NaN so has the ids 0 to k − 1; its lse is NaN.
Held at a time: the logits of a chunk, before and after the head's functions.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.mean import finite, numbers_of
from cce_kernels.numbers import Inputs, Numbers
from cce_kernels.plan.plan import Plan
from cce_kernels.request import Request
from cce_kernels.tokens import Kept, gathered_rows, over_kept

At = Callable[[jax.Array], jax.Array]  # columns (n, K) -> the logits there

TURN = 40_000  # what the kernels cost that look into blocks once; to sort n elements costs n·(log₂ n)²
LEAST, MOST = 8, 512  # tokens of a chunk, whatever the budget: larger chunks are no faster
CHUNKS_OF_STEP = 16  # the most
MULTIPLES = 256, LEAST  # tokens: a chunk has a multiple of the first, if it has so many; else of the second


class Selections(NamedTuple):
    """Of each token; 0 for an ignored token. None: not asked for."""

    top_logits: jax.Array | None  # (N, k), at least float32, in descending order
    top_ids: jax.Array | None  # (N, k) int32
    mean_logit: jax.Array | None  # (N,), at least float32: Σ_v z_v / V


class Blocks(NamedTuple):
    """The largest logit of each block of columns."""

    maxima: jax.Array  # (n, blocks)
    width: int


@dataclass(frozen=True)
class Asked:
    """Which selections a call asks for."""

    top_k: int = 0  # at most V; 0: none
    mean_logit: bool = False


NOTHING = Asked()


def step_of(plan: Plan, tokens: int) -> Step | None:
    """The step that computes the logits of so many tokens with the maxima of blocks; None: XLA does."""
    request, engine = replace(plan.request, tokens=tokens), plan.engine
    if not (engine.offers("logits_and_maxima", request) and engine.serves(request, plan.gpu)):
        return None
    return engine.step("logits_and_maxima", request, plan.gpu, tokens)


def numbers_and_selections(inputs: Inputs, plan: Plan, asked: Asked) -> tuple[Numbers, Selections]:
    """The numbers of each token, without the sum, and what is asked for; 0 for an ignored token.

    Kept tokens come first, and steps of ignored tokens are left out. A step has several chunks where the kernel stops
    at the last kept token (tokens.over_kept).
    """
    tokens = gathered_rows(inputs.targets.size)
    size = min(_tokens(plan.request), tokens)
    step, request = step_of(plan, size), replace(plan.request, tokens=size)
    chunks = cdiv(tokens, size)
    steps = cdiv(chunks, 1 if step is None else CHUNKS_OF_STEP)
    parts = cdiv(chunks, steps)
    kept = Kept.of(inputs.targets, steps * parts * size)

    def of_chunk(start: Any) -> tuple[Numbers, Selections]:
        order = lax.dynamic_slice_in_dim(kept.order, start, size)
        own = inputs._replace(**{name: x[order] for name, x in inputs.of_tokens.items()})
        return _of_chunk(Problem(request, plan.gpu, own), step, kept.count[0] - start, asked)

    def with_chunk(i: Any, whole: Any) -> Any:
        start = i * size
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), whole, of_chunk(start))

    if chunks == 1:
        return jax.tree.map(kept.restored, of_chunk(0))
    # Zeros that wait for the count: XLA makes those of a constant as early as it likes, and then holds them.
    zero, rows = jnp.minimum(kept.count[0], 0), kept.order.size
    whole = jax.tree.map(lambda x: jnp.full((rows, *x.shape[1:]), zero, x.dtype), jax.eval_shape(of_chunk, 0))
    if steps == 1:
        found = lax.fori_loop(0, parts, with_chunk, whole)
    else:
        found = over_kept(kept.count[0], size, parts, with_chunk, whole)
    return jax.tree.map(kept.restored, found)


def largest(z: jax.Array, k: int, blocks: Blocks | None = None, at: At | None = None) -> tuple[jax.Array, jax.Array]:
    """The k largest elements of each row of z (n, V) and their columns, (n, k). k ≥ 1.

    blocks: None to look for their maxima. at: what looks up elements of z; None to index z.
    """
    (rows, columns), at = z.shape, partial(_at, z) if at is None else at
    widths = _widths(columns, k, None if blocks is None else blocks.width)
    keys = _smallest(_key(z), widths[0]) if blocks is None else -blocks.maxima
    keys, ids = _first(keys, lax.broadcasted_iota(jnp.int32, keys.shape, 1), k)
    ids *= widths[0]
    for width, part in itertools.pairwise(widths):
        ids = (ids[:, :, None] + jnp.arange(0, width, part, dtype=jnp.int32)).reshape(rows, -1)
        ids = lax.optimization_barrier(ids)  # else one kernel makes ids and keys, and XLA copies both before it sorts
        inside = (ids[:, :, None] + jnp.arange(part, dtype=jnp.int32)).reshape(rows, -1)
        candidates = jnp.where(inside < columns, _key(at(jnp.minimum(inside, columns - 1))), jnp.inf)
        keys, ids = _first(_smallest(candidates, part), ids, k)
    return -keys, ids


def ordered(z: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The first k of (z, ids), (n, m) each: a larger z first, and among equals the lower id."""
    keys, ids = _first(-z, ids, k)
    return -keys, ids


def _first(keys: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The first k of (keys, ids), (n, m) each: a smaller key first, and among equals the lower id.

    Both are keys of the sort, so that nothing depends on whether lax.top_k is stable on a device.
    """
    if k == 1:
        least = jnp.min(keys, axis=1, keepdims=True)
        return least, jnp.min(jnp.where(keys == least, ids, jnp.iinfo(ids.dtype).max), axis=1, keepdims=True)
    keys, ids = lax.sort((keys, ids), num_keys=2)
    return keys[:, :k], ids[:, :k]


def _tokens(request: Request) -> int:
    """The tokens of a chunk."""
    size = request.memory_budget // (2 * request.sum_itemsize * request.vocabulary)
    size = min(max(size, LEAST), MOST)
    return next(size // multiple * multiple for multiple in MULTIPLES if size >= multiple)


def _of_chunk(problem: Problem, step: Step | None, count: Any, asked: Asked) -> tuple[Numbers, Selections]:
    """The numbers and selections of a chunk, arbitrary for tokens from `count` on.

    step: of `logits_and_maxima`; None: XLA's matmul computes the logits.
    """
    request, _, inputs = problem
    found = _by_xla(problem, asked.top_k) if step is None else _by_kernel(problem, step, count, asked.top_k)
    targets = inputs.targets[:, None]
    target, ids = _picked(found.at, targets, request.vocabulary)[:, 0], None
    if inputs.ids is not None:
        ids = _picked(found.at, jnp.where(targets < 0, -1, inputs.ids), request.vocabulary)
    mean_logit = jnp.mean(found.logits, axis=1) if asked.mean_logit else None
    return found.numbers._replace(target=target, ids=ids), Selections(*found.top, mean_logit)


class _Found(NamedTuple):
    """What is found of a chunk's tokens by reading all their logits."""

    logits: jax.Array  # (n, V), after the temperature
    at: At  # looks up logits
    top: tuple[jax.Array, jax.Array] | tuple[None, None]  # the k largest logits and their columns, (n, k)
    numbers: Numbers  # without the target's logit


def _by_xla(problem: Problem, k: int) -> _Found:
    request, _, inputs = problem
    z, at = _divided(request.head.whole_logits(inputs.e, inputs.c, inputs.bias, inputs.scale), inputs)
    top = largest(z, k, at=at) if k else (None, None)
    peak = jnp.max(jnp.where(jnp.isnan(z), -jnp.inf, z), axis=1) if top[0] is None else top[0][:, 0]
    return _Found(z, at, top, numbers_of(z, None, finite(peak), request.numbers))


def _by_kernel(problem: Problem, step: Step, count: Any, k: int) -> _Found:
    (x, peak, log_mass), maxima = step.engine.logits_and_maxima(step, problem, count)
    z, at = _divided(x, problem.inputs)
    top = largest(z, k, Blocks(maxima, step.engine.block(step).columns), at) if k else (None, None)
    return _Found(z, at, top, numbers_of(z, None, peak, problem.request.numbers)._replace(log_mass=log_mass))


def _divided(x: jax.Array, inputs: Inputs) -> tuple[jax.Array, At]:
    """The logits after the temperature, and what looks them up: XLA would divide, and store, all of them for that."""
    return inputs.divided(x), lambda columns: inputs.divided(_at(x, columns))


def _key(z: jax.Array) -> jax.Array:
    """−z, which orders logits; ∞ for NaN."""
    return jnp.where(jnp.isnan(z), jnp.inf, -z)


def _smallest(keys: jax.Array, width: int) -> jax.Array:
    """The smallest key of each block of columns, (n, blocks)."""
    if width == 1:
        return keys
    keys = jnp.pad(keys, ((0, 0), (0, -keys.shape[1] % width)), constant_values=jnp.inf)
    return jnp.min(keys.reshape(len(keys), -1, width), axis=2)


@lru_cache
def _widths(columns: int, k: int, first: int | None = None) -> tuple[int, ...]:
    """The widths of the blocks in turn, of which the last is 1: those of the least cost.

    first: the first width, if it is known.
    """

    def cost(widths: tuple[int, ...]) -> int:
        sizes = -(-columns // widths[0]), *(k * width // part for width, part in itertools.pairwise(widths))
        powers = [(size - 1).bit_length() for size in sizes]  # XLA sorts a power of two
        return sum(2**power * power**2 + TURN for power in powers)

    powers = [2**n for n in range(10, 0, -1)]
    choices = [(*x, 1) for n in range(4) for x in itertools.combinations(powers, n)]
    return min((x for x in choices if first in (None, x[0])), key=lambda widths: (cost(widths), widths))


def _picked(at: At, columns: jax.Array, vocabulary: int) -> jax.Array:
    """The logits at columns, (n, K); 0 where there is no such column."""
    named = (columns >= 0) & (columns < vocabulary)
    return jnp.where(named, at(jnp.where(named, columns, 0)), 0)


def _at(z: jax.Array, columns: jax.Array) -> jax.Array:
    """z[i, columns[i, k]], (n, K). XLA does not check the columns."""
    return z.at[jnp.arange(len(z))[:, None], columns].get(mode="promise_in_bounds")
