"""Statistics and dz in plain XLA, for one group of the vocabulary after another.

Forward: one matmul a group and a running log-sum-exp, which needs no reference and cannot overflow. Backward: the
group's logits are computed again and turned into dz. Held at a time: one (N, V_g) block of logits, and the exponentials
or dz that XLA makes of it. Never materialised: logits of the whole vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.engines.engine import Problem, Step, Sums
from cce_kernels.gradients import FormDz, over_groups
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs
from cce_kernels.windows import Groups, Window


def _columns(x: jax.Array, window: Window, groups: Groups) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, window.start, groups.columns)


def _logits(inputs: Inputs, window: Window, *, head: Head, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The group's logits, (N, V_g), at least float32, and the column numbers, (V_g,)."""
    c_g = lax.dynamic_slice_in_dim(inputs.c, window.start, groups.columns, head.vocab_axis)
    raw = head.product(inputs.e, c_g, 1 - head.vocab_axis)
    bias_g = None if inputs.bias is None else _columns(inputs.bias, window, groups).astype(raw.dtype)
    columns = window.start + jnp.arange(groups.columns, dtype=jnp.int32)
    return head.logits(raw, bias_g, inputs.scale), columns


def sums(step: Step, problem: Problem, *_) -> Sums:
    """engine.Launched.sums: one part, with the targets' logits."""
    inputs, head, with_sum, groups = problem.inputs, problem.head, problem.call.with_sum, step.groups
    targets = inputs.targets
    zeros = jnp.zeros(targets.shape, jnp.promote_types(inputs.e.dtype, jnp.float32))

    def group(carry, window):
        lse, target, total = carry
        z, columns = _logits(inputs, window, head=head, groups=groups)
        own = columns >= window.owned
        local = targets - window.start
        here = (targets >= window.owned) & (local < groups.columns)
        picked = jnp.take_along_axis(z, jnp.clip(local, 0, groups.columns - 1)[:, None], axis=1)[:, 0]
        target = jnp.where(here, picked, target)
        if with_sum:
            w = own.astype(z.dtype)
            if inputs.weights is not None:
                w = jnp.where(own, _columns(inputs.weights, window, groups), 0)
            total = total + jnp.sum(jnp.where(w == 0, 0, w * z), axis=1)
        if groups.overlap:
            z = jnp.where(own, z, -jnp.inf)
        return jnp.logaddexp(lse, jax.nn.logsumexp(z, axis=1)), target, total

    lse, target, total = over_groups(group, (zeros - jnp.inf, zeros, zeros if with_sum else None), groups)
    return Sums(lse[None], target, None if total is None else total[None], None)


def form_dz(step: Step, problem: Problem, lse: jax.Array, cotangents: Cotangents, _) -> FormDz:
    """engine.Launched.form_dz."""
    inputs, head, groups = problem.inputs, problem.head, step.groups
    with_sums = problem.call.wants.bias
    of = jax.tree.map(lambda x: x[:, None], cotangents)

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        z, columns = _logits(inputs, window, head=head, groups=groups)
        weights = None if inputs.weights is None else _columns(inputs.weights, window, groups)
        is_target = columns == inputs.targets[:, None]
        dz = head.cotangent(z, jnp.exp(z - lse[:, None]), is_target, of, weights, inputs.scale)
        if groups.overlap:
            dz = jnp.where(columns >= window.owned, dz, 0)
        return dz.astype(inputs.e.dtype), jnp.sum(dz, axis=0) if with_sums else None

    return form
