"""Statistics and dz in plain XLA, for one group of the vocabulary after another.

Forward: one matmul a group, and sums relative to a running maximum, which cannot overflow. Backward: the group's logits
are computed again and turned into dz. Held at a time: one (N, V_g) block of logits, and the exponentials or dz that XLA
makes of it. Never materialised: logits of the whole vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.engines.engine import Problem, Step, Sums
from cce_kernels.gradients import FormDz, over_groups
from cce_kernels.head import Head
from cce_kernels.mean import finite, quotient, sums_of
from cce_kernels.numbers import Cotangents, Inputs, Statistics
from cce_kernels.windows import Groups, Window


def _columns(x: jax.Array, window: Window, groups: Groups) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, window.start, groups.columns)


def _logits(inputs: Inputs, window: Window, *, head: Head, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """The group's logits before the temperature, (N, V_g), at least float32, and the column numbers, (V_g,)."""
    c_g = lax.dynamic_slice_in_dim(inputs.c, window.start, groups.columns, head.vocab_axis)
    bias_g = None if inputs.bias is None else _columns(inputs.bias, window, groups)
    columns = window.start + jnp.arange(groups.columns, dtype=jnp.int32)
    return head.whole_logits(inputs.e, c_g, bias_g, inputs.scale), columns


def sums(step: Step, problem: Problem, *_) -> Sums:
    """engine.Launched.sums: one part, with the targets' logits."""
    inputs, head, call, groups = problem.inputs, problem.head, problem.call, step.groups
    targets = inputs.targets
    zeros = jnp.zeros(targets.shape, jnp.promote_types(inputs.e.dtype, jnp.float32))

    def group(carry, window):
        before, mass, moment, target, total, weight = carry
        x, columns = _logits(inputs, window, head=head, groups=groups)
        z = inputs.divided(x)
        own = columns >= window.owned
        local = targets - window.start
        here = (targets >= window.owned) & (local < groups.columns)
        picked = jnp.take_along_axis(z, jnp.clip(local, 0, groups.columns - 1)[:, None], axis=1)[:, 0]
        target = jnp.where(here, picked, target)
        w = own.astype(z.dtype)
        if inputs.weights is not None:
            w = jnp.where(own, _columns(inputs.weights, window, groups), 0)
        if groups.overlap:
            z = jnp.where(own, z, -jnp.inf)
        largest = jnp.maximum(before, jnp.max(z, axis=1))
        peak = finite(largest)
        further, (of_mass, of_moment, of_total) = finite(before) - peak, sums_of(z, peak, w)
        share = jnp.exp(before - peak)
        if call.with_mean:
            moment = share * (moment + further * mass) + of_moment
        if call.with_sum:
            total, weight = total + further * weight + of_total, weight + jnp.sum(w)
        return largest, share * mass + of_mass, moment, target, total, weight

    asked, of_sum = zeros if call.with_mean else None, (zeros, zeros[0]) if call.with_sum else (None, None)
    largest, mass, moment, target, total, _ = over_groups(
        group, (zeros - jnp.inf, zeros, asked, zeros, *of_sum), groups
    )
    mean = None if moment is None else quotient(moment, mass)
    log_mass, peak, total, mean = (
        None if x is None else x[None] for x in (jnp.log(mass), finite(largest), total, mean)
    )
    return Sums(log_mass, target, total, None, mean=mean, reference=peak)  # type: ignore[arg-type]


def form_dz(step: Step, problem: Problem, numbers: Statistics, of: Cotangents, _) -> FormDz:
    """engine.Launched.form_dz."""
    inputs, head, groups, most = problem.inputs, problem.head, step.groups, numbers.most(problem.inputs)
    with_sums = problem.call.wants.bias
    of = jax.tree.map(lambda x: x[:, None], of)

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        x, columns = _logits(inputs, window, head=head, groups=groups)
        weights = None if inputs.weights is None else _columns(inputs.weights, window, groups)
        is_target = columns == inputs.targets[:, None]
        z = inputs.divided(x)
        log_p = (z if most is None else jnp.minimum(z, most[:, None])) - numbers.reference[:, None]
        dz = head.cotangent(x, jnp.exp(log_p), is_target, of, weights, inputs.factor_of_rows, log_p)
        if groups.overlap:
            dz = jnp.where(columns >= window.owned, dz, 0)
        return dz.astype(inputs.e.dtype), jnp.sum(dz, axis=0) if with_sums else None

    return form
