"""The tokens that there is anything to compute for, moved together: those that are not ignored.

How many they are only the device knows. Kernels read that number and stop there: ignored tokens then cost nothing, and
shapes stay static.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MANY = 256  # tokens from which on it pays to look for ignored ones
ROW_MULTIPLE = 8  # the Tensor Memory Accelerator of Hopper GPUs copies this many rows at a time


def gathered_rows(tokens: int) -> int:
    """In how many rows the kept ones of so many tokens are gathered: a multiple of ROW_MULTIPLE, if there are many."""
    return -(-tokens // ROW_MULTIPLE) * ROW_MULTIPLE if tokens >= MANY else tokens


class Rows(NamedTuple):
    """Where kernels find the tokens that they compute; None stands for the obvious.

    Kernels visit the kept tokens first. The i-th of them lies in row order[i] of e; order is None where e was gathered
    or no token is looked for.
    """

    order: jax.Array | None = None  # (rows,) int32
    starts: jax.Array | None = None  # Kept.starts
    count: jax.Array | None = None  # type: ignore[assignment]  # (1,) int32: how many are kept


class Kept(NamedTuple):
    """The kept tokens and where they are; beyond `count` every number is arbitrary but valid."""

    order: jax.Array  # (rows,) int32: the kept tokens first, in their order
    place: jax.Array  # (N,) int32: where in `order` each kept token is
    live: jax.Array  # (N,) bool: whether a token is kept
    count: jax.Array  # type: ignore[assignment]  # (1,) int32

    @classmethod
    def of(cls, targets: jax.Array, rows: int) -> "Kept":
        """Those whose target is not negative, to be gathered in so many rows, at least N."""
        live = targets >= 0
        tokens = jnp.arange(targets.size, dtype=jnp.int32)
        place = jnp.cumsum(live, dtype=jnp.int32) - 1
        order = jnp.zeros(rows, jnp.int32).at[jnp.where(live, place, rows)].set(tokens, mode="drop")
        return cls(order, jnp.maximum(place, 0), live, place[-1:] + 1)

    def starts(self, block: int) -> jax.Array:
        """For each block of so many kept tokens, (blocks,), the row of e from which all of it can be read at once.

        -1 where the tokens of a block do not lie side by side, or the row is no multiple of 8.
        """
        rows = self.order.size
        first = jnp.arange(0, rows, block, dtype=jnp.int32)
        last = jnp.clip(self.count - 1, first, jnp.minimum(first + block, rows) - 1)
        start = self.order[first]
        side_by_side = (self.order[last] - start == last - first) & (start + block <= rows) & (start % 8 == 0)
        return jnp.where(side_by_side, start, -1)

    def gathered(self, x: Any, fill: float) -> Any:
        """x, an array or a tree of arrays of tokens along axis 0, with the kept tokens first and fill after them."""

        def gather(x):
            valid = (jnp.arange(self.order.size, dtype=jnp.int32) < self.count).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(valid, x[self.order], jnp.asarray(fill, x.dtype))

        return jax.tree.map(gather, x)

    def restored(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        """Gathered tokens back in place, 0 where one is ignored; x and others: consecutive parts of them."""
        found, start = x[self.place], x.shape[0]
        axes = -1, *[1] * (x.ndim - 1)
        for part in others:
            found = jnp.where((self.place < start).reshape(axes), found, part[self.place - start])
            start += part.shape[0]
        return jnp.where(self.live.reshape(axes), found, jnp.zeros((), x.dtype))
