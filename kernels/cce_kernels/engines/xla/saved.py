"""dz of saved exponentials P (cce_kernels/exponentials.py), elementwise.

    dz = Head.cotangent with p_iv = P_iv · exp(ρ_i − lse_i) and log p_iv = log P_iv + ρ_i − lse_i

Read and written: 2 bytes an element each, by one kernel that XLA makes. (A Triton kernel of our own took twice as long:
kernels/NOTES.md.) The rows of ignored tokens are 0, whatever P holds there, and so are P's columns from V on.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.engines.engine import Problem, Step
from cce_kernels.gradients import ALL_COLUMNS, FormDz
from cce_kernels.numbers import Cotangents
from cce_kernels.windows import Window


def form_dz_of_saved(
    step: Step, problem: Problem, saved: jax.Array, reference: jax.Array, lse: jax.Array, of: Cotangents
) -> FormDz:
    """engine.Launched.form_dz_of_saved."""
    groups, with_sums = step.groups, problem.call.wants.bias
    missing = groups.count * groups.columns - saved.shape[1] if groups.beyond else 0
    if missing > 0:
        saved = jnp.pad(saved, ((0, 0), (0, missing)))

    def form(window: Window) -> tuple[jax.Array, jax.Array | None]:
        p = lax.dynamic_slice_in_dim(saved, window.start, groups.columns, 1)
        dz = _dz(problem, p, window, reference, lse, of)
        return dz.astype(p.dtype), jnp.sum(dz, axis=0) if with_sums else None

    return form


def dz_in_place(
    _: Step, problem: Problem, saved: jax.Array, reference: jax.Array, lse: jax.Array, of: Cotangents
) -> jax.Array:
    """engine.Launched.dz_in_place."""
    return _dz(problem, saved, ALL_COLUMNS, reference, lse, of).astype(saved.dtype)


def _dz(
    problem: Problem, p: jax.Array, window: Window, reference: jax.Array, lse: jax.Array, of: Cotangents
) -> jax.Array:
    """dz (N, n), float32, of the window's columns. p: (N, n)."""
    inputs = problem.inputs
    columns, targets = window.start + jnp.arange(p.shape[1], dtype=jnp.int32), inputs.targets[:, None]
    p, shift = jnp.where(targets >= 0, p, 0).astype(jnp.float32), (reference - lse)[:, None]
    of = jax.tree.map(lambda x: x[:, None], of)
    log_p = None if of.mean is None else jnp.log(p) + shift
    weights = inputs.weights
    if weights is not None:
        weights = weights[jnp.minimum(columns, weights.size - 1)]
    dz = problem.head.cotangent(None, p * jnp.exp(shift), columns == targets, of, weights, inputs.factor_of_rows, log_p)
    return jnp.where((columns >= window.owned) & (columns < problem.call.vocabulary), dz, 0)
