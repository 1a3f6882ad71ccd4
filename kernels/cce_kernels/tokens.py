"""The tokens that there is anything to compute for, moved together: those not ignored.

How many they are only the device knows. Kernels read the number and stop there, so in them ignored tokens cost nothing
and shapes stay static.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def without_ignored(
    e: jax.Array, cotangents: jax.Array, lse: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """e (N, D), cotangents (k, N) and lse (N,) with which ignored tokens take no part: 0, 0 and inf there.

    With lse = inf they have p = 0. With 0 a large bias would make p inf, and 0 · inf is NaN.
    """
    live = targets >= 0
    return jnp.where(live[:, None], e, 0), jnp.where(live, cotangents, 0), jnp.where(live, lse, jnp.inf)


class Kept(NamedTuple):
    """The kept tokens and where they are; beyond `count` everything is arbitrary but valid."""

    order: jax.Array  # (rows,) int32: the kept tokens first, in their order
    place: jax.Array  # (N,) int32: where in `order` each kept token is
    live: jax.Array  # (N,) bool: whether a token is kept
    count: jax.Array  # type: ignore[assignment]  # (1,) int32

    @classmethod
    def of(cls, targets: jax.Array, rows: int) -> "Kept":
        """Those whose target is not negative, to be gathered in so many rows, at least N."""
        live = targets >= 0
        tokens = jnp.arange(targets.size, dtype=jnp.int32)
        place = jnp.cumsum(live.astype(jnp.int32)) - 1
        order = jnp.zeros(rows, jnp.int32).at[jnp.where(live, place, rows)].set(tokens, mode="drop")
        return cls(order, jnp.maximum(place, 0), live, place[-1:] + 1)

    def starts(self, block: int) -> jax.Array:
        """For each block of so many kept tokens, (blocks,), the first one's place, from which on the whole block can be
        read side by side; -1 where it cannot, or not at a multiple of 8.
        """
        rows = self.order.size
        first = jnp.arange(0, rows, block, dtype=jnp.int32)
        last = jnp.clip(self.count - 1, first, jnp.minimum(first + block, rows) - 1)
        start = self.order[first]
        return jnp.where(
            (self.order[last] - start == last - first) & (start + block <= rows) & (start % 8 == 0), start, -1
        )

    def gathered(self, x: jax.Array, fill: float) -> jax.Array:
        """x, of tokens along its first axis, with the kept ones first and fill in the places beyond."""
        valid = (jnp.arange(self.order.size) < self.count).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(valid, x[self.order], jnp.asarray(fill, x.dtype))

    def restored(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        """Gathered tokens back in place, 0 where one is ignored; x and others: consecutive parts of them."""
        found, start = x[self.place], x.shape[0]
        axes = -1, *[1] * (x.ndim - 1)
        for part in others:
            found = jnp.where((self.place < start).reshape(axes), found, part[self.place - start])
            start += part.shape[0]
        return jnp.where(self.live.reshape(axes), found, jnp.zeros((), x.dtype))
