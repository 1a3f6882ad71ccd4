"""The kept tokens, moved to the front. A token is kept if it is not ignored: its target is not negative.

Only the device knows how many tokens are kept. Kernels read that number and stop at the last kept token, so that
ignored tokens cost nothing and shapes stay static.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MANY = 256  # tokens: with fewer, looking for ignored tokens costs more than it saves
ROW_MULTIPLE = 8  # the Tensor Memory Accelerator (TMA) of Hopper GPUs copies this many rows at a time


def gathered_rows(tokens: int) -> int:
    """The rows of the array into which kept tokens are gathered: a multiple of ROW_MULTIPLE for MANY tokens or more."""
    return -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE if tokens >= MANY else tokens


class Chunks(NamedTuple):
    """The tokens, kept ones first, in `count` chunks of `size` tokens. The last one may reach beyond the tokens."""

    count: int  # type: ignore[assignment]
    size: int

    @property
    def rows(self) -> int:
        return self.count * self.size


def in_chunks(run: Callable[[Any], Any], arrays: Any, size: int, found: Any = None) -> Any:
    """run(arrays), for `size` tokens at a time. arrays and the result: arrays, or trees, with tokens on axis 0.

    The last chunk has `size` tokens too: it may compute some tokens a second time. found: the result of any tokens, as
    shapes. None: JAX traces `run` once more to find them, which takes a large part of a second where it has kernels.
    """
    tokens = jax.tree.leaves(arrays)[0].shape[0]
    if size >= tokens:
        return run(arrays)

    def part(start: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), arrays)

    def step(i: jax.Array, whole: Any) -> Any:
        start = jnp.minimum(i * size, tokens - size)
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), whole, run(part(start)))

    found = jax.eval_shape(lambda: run(part(0))) if found is None else found
    whole = jax.tree.map(lambda x: jnp.zeros((tokens, *x.shape[1:]), x.dtype), found)
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-tokens // size)), step, whole)


def over_kept(count: jax.Array, size: int, parts: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """body(i, found) for each part i of `size` tokens until the last kept one, from found = start.

    Where the device decides when a loop ends, the host waits at each of its steps. So a step is `parts` parts, and the
    last step may visit parts that have no kept tokens.
    """

    def step(j: jax.Array, found: Any) -> Any:
        return lax.fori_loop(0, parts, lambda i, found: body(j * parts + i, found), found)

    return lax.fori_loop(0, -(-count // (size * parts)), step, start)


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

    def rows_of(self, start: Any, size: int) -> jax.Array:
        """The tokens at `size` places of `order` from start on, (size,), each once; N or more where none is kept."""
        index = start + jnp.arange(size, dtype=jnp.int32)
        order = lax.dynamic_slice_in_dim(self.order, start, size)
        return jnp.where(index < self.count, order, self.live.size + index)

    def restored(self, x: jax.Array) -> jax.Array:
        """x, whose rows are in this order, in the order of the tokens, (N, ...); 0 for ignored tokens."""
        live = self.live.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(live, x[self.position], jnp.zeros((), x.dtype))
