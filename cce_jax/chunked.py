"""The core in plain XLA, on any device: the vocabulary in groups whose block of logits is bounded.

Forward: one matmul a group and a running (max, sum of exponentials). Backward: the same block of logits once more,
turned into dz, and two matmuls. Holds one (N, V_g) block of logits and what XLA makes of it: its exponentials or dz. A
block takes at most BLOCK_BYTES or a third of the memory budget, but 1024 columns if those are more.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.groups import Gradients, Wanted, add_groups, fitted, over_groups, unscaled, xla_products
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.tokens import without_ignored
from cce_kernels.windows import Groups, Window, vocabulary_groups

BLOCK_BYTES = 64 * 2**20


def _groups(e: jax.Array, c: jax.Array, head: Head, memory_budget: int) -> Groups:
    logit_bytes = jnp.promote_types(e.dtype, jnp.float32).itemsize
    block = min(BLOCK_BYTES, (memory_budget - logit_bytes * e.size) // 3)  # less the sum for de
    return vocabulary_groups(vocabulary_size(c, head), block, logit_bytes * e.shape[0])


def _columns(x: jax.Array, window: Window, groups: Groups) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, window.start, groups.columns)


def _logits(e, c_g, bias, window, *, head: Head, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The group's logits, (N, V_g), at least float32, and the column numbers, (V_g,)."""
    raw = head.product(e, c_g, 1 - head.vocab_axis)
    bias_g = None if bias is None else _columns(bias, window, groups).astype(raw.dtype)
    return head.logits(raw, bias_g), window.start + jnp.arange(groups.columns, dtype=jnp.int32)


def statistics(e, c, bias, targets, weights, *, head: Head, with_sum: bool, memory_budget: int):
    """As cce_jax.core.statistics."""
    groups = _groups(e, c, head, memory_budget)
    zeros = jnp.zeros(targets.shape, jnp.promote_types(e.dtype, jnp.float32))

    def group(carry, window):
        lse, target, total = carry
        c_g = lax.dynamic_slice_in_dim(c, window.start, groups.columns, head.vocab_axis)
        z, columns = _logits(e, c_g, bias, window, head=head, groups=groups)
        own = columns >= window.owned
        local = targets - window.start
        here = (targets >= window.owned) & (local < groups.columns)
        picked = jnp.take_along_axis(z, jnp.clip(local, 0, groups.columns - 1)[:, None], axis=1)[:, 0]
        target = jnp.where(here, picked, target)
        if with_sum:
            w = own.astype(z.dtype) if weights is None else jnp.where(own, _columns(weights, window, groups), 0)
            total = total + jnp.sum(jnp.where(w == 0, 0, w * z), axis=1)
        if groups.overlap:
            z = jnp.where(own, z, -jnp.inf)
        return jnp.logaddexp(lse, jax.nn.logsumexp(z, axis=1)), target, total

    initial = (zeros - jnp.inf, zeros, zeros if with_sum else None)
    return over_groups(group, initial, groups)


def gradients(e, c, bias, targets, weights, lse, cotangents, *, head: Head, wanted: Wanted, memory_budget: int):
    """As cce_kernels.backward.gradients."""
    e, cotangents, lse = without_ignored(e, cotangents, lse, targets)
    groups = _groups(e, c, head, memory_budget)
    cotangents, unit = fitted(cotangents, weights, head, e.dtype)

    def form_dz(window):
        c_g = lax.dynamic_slice_in_dim(c, window.start, groups.columns, head.vocab_axis)
        z, columns = _logits(e, c_g, bias, window, head=head, groups=groups)
        weights_g = 1.0 if weights is None else _columns(weights, window, groups)
        dz = head.cotangent(z, jnp.exp(z - lse[:, None]), columns == targets[:, None], *cotangents[:, :, None],
                            weights=weights_g)  # fmt: skip
        if groups.overlap:
            dz = jnp.where(columns >= window.owned, dz, 0)
        return dz.astype(e.dtype), jnp.sum(dz, axis=0) if wanted.bias else None

    products = xla_products(e, c, head=head, unit=unit)
    de, dc, dbias = add_groups(Gradients.begun(e, c, head, wanted), form_dz, groups, products)
    de, dbias = (None if x is None else unscaled(x, unit, e.dtype) for x in (de, dbias))
    return de, dc, dbias
