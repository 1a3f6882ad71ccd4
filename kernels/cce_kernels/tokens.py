"""The kept tokens, moved to the front. A token is kept if it is not ignored: its target is not negative.

Only the device knows how many tokens are kept. Kernels read that number and stop at the last kept token, so that
ignored tokens cost nothing and shapes stay static.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.numbers import Inputs

MANY = 256  # tokens: with fewer, looking for ignored tokens costs more than it saves
ROW_MULTIPLE = 8  # the Tensor Memory Accelerator (TMA) of Hopper GPUs copies this many rows at a time


def gathered_rows(tokens: int) -> int:
    """The rows of the array into which kept tokens are gathered: a multiple of ROW_MULTIPLE for MANY tokens or more."""
    return -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE if tokens >= MANY else tokens


def in_chunks(run: Callable[[Any], Any], arrays: Any, size: int) -> Any:
    """run(arrays), for `size` tokens at a time. arrays and the result: arrays, or trees, with tokens on axis 0.

    The last chunk has `size` tokens too: it may compute some tokens a second time.
    """
    tokens = jax.tree.leaves(arrays)[0].shape[0]
    if size >= tokens:
        return run(arrays)

    def part(start: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), arrays)

    def step(i: jax.Array, whole: Any) -> Any:
        start = jnp.minimum(i * size, tokens - size)
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), whole, run(part(start)))

    of_chunk = jax.eval_shape(lambda: run(part(0)))
    whole = jax.tree.map(lambda x: jnp.zeros((tokens, *x.shape[1:]), x.dtype), of_chunk)
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-tokens // size)), step, whole)


def over_kept(count: jax.Array, size: int, parts: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """body(i, found) for each part i of `size` tokens until the last kept one, from found = start.

    Where the device decides when a loop ends, the host waits at each of its steps. So a step is `parts` parts, and the
    last step may visit parts that have no kept tokens.
    """

    def step(j: jax.Array, found: Any) -> Any:
        return lax.fori_loop(0, parts, lambda i, found: body(j * parts + i, found), found)

    return lax.fori_loop(0, -(-count // (size * parts)), step, start)


class Rows(NamedTuple):
    """Where kernels find the kept tokens in e.

    Kernels visit the kept tokens first. The i-th kept token is row order[i] of e. With order None it is row i: e was
    gathered, or ignored tokens are not looked for.
    """

    order: jax.Array | None = None  # (rows,) int32
    starts: jax.Array | None = None  # Kept.starts; None: kernels look up each row in the array `order`
    count: jax.Array | None = None  # type: ignore[assignment]  # (1,) int32: how many tokens are kept; None: all


class Kept(NamedTuple):
    """The kept tokens and where they are. From element `count` on, order holds arbitrary tokens."""

    order: jax.Array  # (rows,) int32: the kept tokens first, in their order
    position: jax.Array  # (N,) int32: where in `order` each kept token is
    live: jax.Array  # (N,) bool: whether a token is kept
    count: jax.Array  # type: ignore[assignment]  # (1,) int32

    @classmethod
    def of(cls, targets: jax.Array, rows: int) -> "Kept":
        """The tokens whose target is not negative, to be gathered into `rows` rows, at least N."""
        live = targets >= 0
        tokens = jnp.arange(targets.size, dtype=jnp.int32)
        position = jnp.cumsum(live, dtype=jnp.int32) - 1
        order = jnp.zeros(rows, jnp.int32).at[jnp.where(live, position, rows)].set(tokens, mode="drop")
        return cls(order, jnp.maximum(position, 0), live, position[-1:] + 1)

    def starts(self, block: int) -> jax.Array:
        """The first row of e of each block of `block` kept tokens, (blocks,), where the block can be read at once.

        -1 where the block's tokens are not consecutive rows of e, or the first row is not a multiple of 8.
        """
        rows = self.order.size
        first = jnp.arange(0, rows, block, dtype=jnp.int32)
        last = jnp.clip(self.count - 1, first, jnp.minimum(first + block, rows) - 1)
        start = self.order[first]
        side_by_side = (self.order[last] - start == last - first) & (start + block <= rows) & (start % 8 == 0)
        return jnp.where(side_by_side, start, -1)

    def gathered(self, x: Any, fill: float) -> Any:
        """x with the kept tokens first and fill after them. x: an array or a tree of arrays, with tokens on axis 0."""

        def gather(x):
            valid = (jnp.arange(self.order.size, dtype=jnp.int32) < self.count).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(valid, x[self.order], jnp.asarray(fill, x.dtype))

        return jax.tree.map(gather, x)

    def first(self, inputs: Inputs) -> Inputs:
        """The inputs with the kept tokens first, but for e."""
        inverse = inputs.inverse_temperature
        inverse = None if inverse is None else self.gathered(inverse, 1)
        return inputs._replace(targets=self.gathered(inputs.targets, -1), inverse_temperature=inverse)

    def restored(self, x: jax.Array) -> jax.Array:
        """The inverse of `gathered`: (N, ...), 0 for ignored tokens."""
        live = self.live.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(live, x[self.position], jnp.zeros((), x.dtype))
