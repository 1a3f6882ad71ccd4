"""The gradient of the classifier and of the embeddings, one group of the vocabulary at a time.

For a group of columns the caller forms the logit cotangents dz, (N, V_g); two plain matmuls then give

    de += dz · c_g     float32, (N, D)          dc_g = dzᵀ · e     written once, in the type of c

One (N, V_g) buffer is reused by every group. No atomics, no float32 copy of dc: the same call is bit-identical.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cce_kernels.logits import Head

COLUMN_MULTIPLE = 128
FEWEST_COLUMNS = 1024
FLOAT16_LARGEST = 2.0**14  # what the largest cotangent becomes in float16, which holds 28 binary orders below it


@dataclass(frozen=True)
class Wanted:
    """Which gradients a call needs; the others cost nothing."""

    e: bool
    c: bool
    bias: bool


@dataclass(frozen=True)
class Groups:
    """`count` windows of `columns` columns that cover a vocabulary of `vocabulary`.

    The last window ends with the vocabulary, so it overlaps its neighbour where columns do not divide it; it is
    visited first, counts only the columns that are its own, and its neighbour then overwrites the rest.
    """

    vocabulary: int
    columns: int

    @property
    def count(self) -> int:
        return -(-self.vocabulary // self.columns)

    @property
    def overlap(self) -> int:
        return self.count * self.columns - self.vocabulary

    def windows(self) -> np.ndarray:
        """(count, 2) int32: where a window starts, and the first column that it counts."""
        starts = np.arange(self.count, dtype=np.int32) * self.columns
        owned = starts.copy()
        starts[-1] -= self.overlap
        return np.roll(np.stack([starts, owned], axis=1), 1, axis=0)


def vocabulary_groups(vocabulary: int, budget: int, column_bytes: int, cost: Callable[[int], float] = float) -> Groups:
    """The groups that cost least of those whose columns fit: column_bytes · V_g ≤ budget, but 1024 columns always do.

    cost(V_g): the relative time of one group of V_g columns.
    """
    most = max(budget // max(column_bytes, 1), FEWEST_COLUMNS)
    if vocabulary <= most:
        return Groups(vocabulary, vocabulary)
    sizes = range(min(FEWEST_COLUMNS, most), most + 1, COLUMN_MULTIPLE)
    return min((Groups(vocabulary, size) for size in sizes), key=lambda g: (g.count * cost(g.columns), g.count))


def grouped_gradient(
    form_dz: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
    e: jax.Array,
    c: jax.Array,
    cotangents: jax.Array,
    weights: jax.Array | None,
    *,
    head: Head,
    groups: Groups,
    wanted: Wanted,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """de, dc and dbias in the type of e, c and bias; None where not wanted.

    form_dz(window, c_g, cotangents) gives dz of the group, (N, V_g), and its column sums, (V_g,), if the bias gradient
    is wanted. cotangents: (2 or 3, N), of lse, target and sum. weights: those of the sum, (V,).
    """
    accumulate = jnp.promote_types(e.dtype, jnp.float32)
    axis = head.vocab_axis
    unit = None
    if e.dtype == jnp.float16:
        cotangents, unit = _fit_float16(cotangents, weights, head.scale)

    def unscaled(x: jax.Array) -> jax.Array:
        return (x if unit is None else x * unit).astype(e.dtype)

    def matmul(left, right, left_axis: int, right_axis: int, out) -> jax.Array:
        contract = (((left_axis,), (right_axis,)), ((), ()))
        return lax.dot_general(left, right, contract, precision=head.precision, preferred_element_type=out)

    def group(gradients: dict[str, jax.Array], window: jax.Array):
        gradients = dict(gradients)
        start = window[0]
        c_g = lax.dynamic_slice_in_dim(c, start, groups.columns, axis)
        dz, dz_sum = form_dz(window, c_g, cotangents)
        if wanted.e:
            gradients["e"] += matmul(dz, c_g, 1, axis, accumulate)
        if wanted.c:
            left, right = (dz, e) if axis == 0 else (e, dz)
            dc_g = matmul(left, right, 0, 0, c.dtype if unit is None else accumulate)
            gradients["c"] = lax.dynamic_update_slice_in_dim(gradients["c"], unscaled(dc_g), start, axis)
        if dz_sum is not None:
            gradients["bias"] = lax.dynamic_update_slice_in_dim(gradients["bias"], unscaled(dz_sum), start, 0)
        return gradients, None

    initial = {}
    if wanted.e:
        initial["e"] = jnp.zeros(e.shape, accumulate)
    if wanted.c:
        initial["c"] = lax.empty(c.shape, c.dtype)  # the groups write every row of it
    if wanted.bias:
        initial["bias"] = lax.empty((groups.vocabulary,), e.dtype)
    gradients, _ = lax.scan(group, initial, jnp.asarray(groups.windows()))
    if wanted.e:
        gradients["e"] = unscaled(gradients["e"])
    return gradients.get("e"), gradients.get("c"), gradients.get("bias")


def _fit_float16(cotangents: jax.Array, weights: jax.Array | None, scale: float) -> tuple[jax.Array, jax.Array]:
    """Cotangents scaled so that float16 holds dz without overflow and with the least underflow, and their unit."""
    size = jnp.abs(cotangents * scale)
    if size.shape[0] == 3 and weights is not None:
        size = size.at[2].multiply(jnp.max(jnp.abs(weights)))
    bound = jnp.sum(size, axis=0)
    largest = jnp.max(jnp.where(jnp.isfinite(bound), bound, 0.0), initial=0.0)
    unit = jnp.where(largest > 0, largest, 1.0) / FLOAT16_LARGEST
    return cotangents / unit, unit
