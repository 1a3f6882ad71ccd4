"""Numbers and dz in plain XLA, for one window of the vocabulary after another.

Forward: one matmul a window, and sums relative to a running maximum, which cannot overflow. Backward: its logits
are computed again and turned into dz. Held at a time: one (N, V_g) block of logits, and the exponentials or dz that XLA
makes of it. Never materialised: logits of the whole vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.engines.engine import Problem, Step, Sums, over_windows
from cce_kernels.head import Head
from cce_kernels.mean import finite, quotient, sums_of, weighted_sum_of
from cce_kernels.numbers import Cotangents, Inputs, Numbers
from cce_kernels.windows import FormDz, Window, Windows


def _columns(x: jax.Array, window: Window, windows: Windows) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, window.start, windows.columns)


def _logits(inputs: Inputs, window: Window, *, head: Head, windows: Windows) -> tuple[jax.Array, jax.Array]:
    """The window's logits before the temperature, (N, V_g), at least float32, and the column numbers, (V_g,)."""
    c_g = lax.dynamic_slice_in_dim(inputs.c, window.start, windows.columns, head.vocab_axis)
    bias_g = None if inputs.bias is None else _columns(inputs.bias, window, windows)
    columns = window.start + jnp.arange(windows.columns, dtype=jnp.int32)
    return head.whole_logits(inputs.e, c_g, bias_g, inputs.scale), columns


def sums(step: Step, problem: Problem, *_) -> Sums:
    """engine.Launched.sums: one part, with the targets' logits."""
    inputs, head, request, windows = problem.inputs, problem.head, problem.request, step.windows
    targets = inputs.targets
    zeros = jnp.zeros(targets.shape, jnp.promote_types(inputs.e.dtype, jnp.float32))

    def add(carry, window):
        before, mass, moment, target, total, weight = carry
        x, columns = _logits(inputs, window, head=head, windows=windows)
        z = inputs.divided(x)
        own = columns >= window.owned
        local = targets - window.start
        here = (targets >= window.owned) & (local < windows.columns)
        picked = jnp.take_along_axis(z, jnp.clip(local, 0, windows.columns - 1)[:, None], axis=1)[:, 0]
        target = jnp.where(here, picked, target)
        if windows.overlap:
            z = jnp.where(own, z, -jnp.inf)
        largest = jnp.maximum(before, jnp.max(z, axis=1))
        peak = finite(largest)
        further, (of_mass, of_moment) = finite(before) - peak, sums_of(z, peak)
        share = jnp.exp(before - peak)
        if request.numbers.mean:
            moment = share * (moment + further * mass) + of_moment
        if request.sums_logits:
            w = own.astype(z.dtype)
            if inputs.weights is not None:
                w = jnp.where(own, _columns(inputs.weights, window, windows), 0)
            total, weight = total + further * weight + weighted_sum_of(z, peak, w), weight + jnp.sum(w)
        return largest, share * mass + of_mass, moment, target, total, weight

    asked, of_sum = zeros if request.numbers.mean else None, (zeros, zeros[0]) if request.sums_logits else (None, None)
    largest, mass, moment, target, total, _ = over_windows(
        add, (zeros - jnp.inf, zeros, asked, zeros, *of_sum), windows
    )
    mean = None if moment is None else quotient(moment, mass)
    log_mass, peak, total, mean = (
        None if x is None else x[None] for x in (jnp.log(mass), finite(largest), total, mean)
    )
    return Sums(log_mass, target, None, mean=mean, reference=peak, sum=total)  # type: ignore[arg-type]


def form_dz(step: Step, problem: Problem, numbers: Numbers, of: Cotangents, _) -> FormDz:
    """engine.Launched.form_dz."""
    inputs, head, windows, most = problem.inputs, problem.head, step.windows, numbers.most(problem.inputs)
    with_sums = problem.request.wants.bias
    of = jax.tree.map(lambda x: x[:, None], of)

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        x, columns = _logits(inputs, window, head=head, windows=windows)
        weights = None if inputs.weights is None else _columns(inputs.weights, window, windows)
        is_target = columns == inputs.targets[:, None]
        z = inputs.divided(x)
        log_p = (z if most is None else jnp.minimum(z, most[:, None])) - numbers.reference[:, None]
        dz = head.cotangent(x, jnp.exp(log_p), is_target, of, weights, inputs.factor_of_rows, log_p)
        if windows.overlap:
            dz = jnp.where(columns >= window.owned, dz, 0)
        return dz.astype(inputs.e.dtype), jnp.sum(dz, axis=0) if with_sums else None

    return form
