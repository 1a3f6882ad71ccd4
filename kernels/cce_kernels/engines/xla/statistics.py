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
from cce_kernels.mean import mean_of, over_runs
from cce_kernels.numbers import Cotangents, Inputs
from cce_kernels.windows import Groups, Window


def _columns(x: jax.Array, window: Window, groups: Groups) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, window.start, groups.columns)


def _logits(inputs: Inputs, window: Window, *, head: Head, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The group's logits before the temperature, (N, V_g), at least float32, and the column numbers, (V_g,)."""
    c_g = lax.dynamic_slice_in_dim(inputs.c, window.start, groups.columns, head.vocab_axis)
    raw = head.product(inputs.e, c_g, 1 - head.vocab_axis)
    bias_g = None if inputs.bias is None else _columns(inputs.bias, window, groups).astype(raw.dtype)
    columns = window.start + jnp.arange(groups.columns, dtype=jnp.int32)
    return head.logits(raw, bias_g, inputs.scale), columns


def sums(step: Step, problem: Problem, *_) -> Sums:
    """engine.Launched.sums: one part, with the targets' logits."""
    inputs, head, call, groups = problem.inputs, problem.head, problem.call, step.groups
    targets = inputs.targets
    zeros = jnp.zeros(targets.shape, jnp.promote_types(inputs.e.dtype, jnp.float32))

    def group(carry, window):
        lse, target, total, mean = carry
        x, columns = _logits(inputs, window, head=head, groups=groups)
        z = inputs.divided(x)
        own = columns >= window.owned
        local = targets - window.start
        here = (targets >= window.owned) & (local < groups.columns)
        picked = jnp.take_along_axis(z, jnp.clip(local, 0, groups.columns - 1)[:, None], axis=1)[:, 0]
        target = jnp.where(here, picked, target)
        if call.with_sum:
            w = own.astype(z.dtype)
            if inputs.weights is not None:
                w = jnp.where(own, _columns(inputs.weights, window, groups), 0)
            total = total + jnp.sum(jnp.where(w == 0, 0, w * z), axis=1)
        if groups.overlap:
            z = jnp.where(own, z, -jnp.inf)
        of_group = jax.nn.logsumexp(z, axis=1)
        if call.with_mean:
            mean = over_runs(jnp.stack([lse, of_group]), jnp.stack([mean, mean_of(z)]))
        return jnp.logaddexp(lse, of_group), target, total, mean

    begin = zeros - jnp.inf, zeros, zeros if call.with_sum else None, zeros if call.with_mean else None
    lse, target, total, mean = over_groups(group, begin, groups)
    total, mean = (None if x is None else x[None] for x in (total, mean))
    return Sums(lse[None], target, total, None, mean=mean)


def form_dz(step: Step, problem: Problem, lse: jax.Array, cotangents: Cotangents, _) -> FormDz:
    """engine.Launched.form_dz."""
    inputs, head, groups = problem.inputs, problem.head, step.groups
    with_sums = problem.call.wants.bias
    of = jax.tree.map(lambda x: x[:, None], cotangents)

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        x, columns = _logits(inputs, window, head=head, groups=groups)
        weights = None if inputs.weights is None else _columns(inputs.weights, window, groups)
        is_target = columns == inputs.targets[:, None]
        log_p = inputs.divided(x) - lse[:, None]
        dz = head.cotangent(x, jnp.exp(log_p), is_target, of, weights, inputs.factor_of_rows, log_p)
        if groups.overlap:
            dz = jnp.where(columns >= window.owned, dz, 0)
        return dz.astype(inputs.e.dtype), jnp.sum(dz, axis=0) if with_sums else None

    return form
