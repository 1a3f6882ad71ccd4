"""The two passes of the core on one device, or on the columns that a device has: each asks for a plan and runs it.

Equations are those of cce_jax/core.py. e is (N, D), and c and bias have e's type.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cce_jax import reference
from cce_jax.plans import Core, on_platform, plan_for
from cce_kernels import blocks
from cce_kernels import selections as selected
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Numbers, Wanted
from cce_kernels.plan import Plan
from cce_kernels.plan.residuals import Residuals, shapes_of
from cce_kernels.selections import Asked, Selections


def in_type_of_e(inputs: Any) -> Any:
    """The inputs, numbers.Inputs or divergence.Side, with c and bias rounded to e's type."""
    of_e = inputs.e.dtype

    def in_it(x: Any) -> Any:
        return x if x is None or x.dtype == of_e else reference.nearest(x, of_e).astype(of_e)

    return inputs._replace(c=in_it(inputs.c), bias=in_it(inputs.bias))


def target_logits(inputs: Inputs, core: Core, wanted: Wanted | None) -> jax.Array:
    """Equation (2) for a shard of the vocabulary, (N,). `forward_pass` takes the sum over all shards."""
    return on_platform(lambda plan, inputs: blocks.target(inputs, plan), inputs, core, wanted)(inputs)


def forward_pass(
    inputs: Inputs, core: Core, wanted: Wanted | None, reference: jax.Array | None = None
) -> tuple[Numbers, Residuals]:
    """Equations (1)-(3'), and what is left for `gradients`.

    wanted: the gradients that will be asked for; None if there will be none. reference: for a shard of the vocabulary,
    that of cce_kernels.blocks.numbers.
    """
    plan = plan_for(inputs, core, wanted)
    if plan.in_forward is not None:  # de for any cotangents (blocks.de_of_any_cotangents)

        def form_de(plan: Plan, inputs: Inputs):
            numbers, m = blocks.de_of_any_cotangents(inputs, plan)
            return numbers, Residuals(m=m)

        return on_platform(form_de, inputs, core, wanted, "in forward")(inputs)
    shape = shapes_of(plan).exponentials

    def run(plan: Plan, inputs: Inputs, reference: jax.Array | None):
        numbers, exponentials = blocks.numbers(inputs, plan, reference, core.debug_nans)
        if shape is not None and exponentials is None:  # this platform saves nothing, but all return one shape
            exponentials = (jnp.zeros if core.debug_nans else lax.empty)(shape.shape, shape.dtype)
        return numbers, Residuals(exponentials=exponentials)

    return on_platform(run, inputs, core, wanted, "saved" if plan.saved else "recomputed")(inputs, reference)


def gradients(
    inputs: Inputs, numbers: Numbers, residuals: Residuals, cotangents: Cotangents, core: Core, wanted: Wanted
) -> tuple[Gradients, Residuals]:
    """Equations (6) and (7): de, dc and dbias in e's type (float32 if core.wide_de, core.wide_dc), None where not
    wanted; and the residuals.

    numbers and residuals: the results of `forward_pass`. The returned residuals may have been overwritten in part; they
    still give the same gradients in another call of this function. For a shard of the vocabulary, numbers are those
    over all columns, relative to the references of the shard's own.
    """
    if residuals.m is not None:
        de = blocks.de_of_m(inputs, numbers, residuals.m, cotangents, core.head, inputs.e.dtype)
        return Gradients(de, None, None), residuals

    def run(plan: Plan, *arrays):
        inputs, numbers, exponentials, cotangents = arrays
        of_plan = exponentials if plan.saved else None
        found, overwritten = blocks.gradients(inputs, numbers, of_plan, cotangents, plan)
        return found, Residuals(exponentials=exponentials if overwritten is None else overwritten)

    saved = residuals.exponentials
    way = "recomputed" if saved is None or not saved.shape[0] else "saved"
    return on_platform(run, inputs, core, wanted, way)(inputs, numbers, saved, cotangents)


def begin(
    inputs: Inputs,
    of_tokens: Any,
    cotangents_of: blocks.CotangentsOf,
    core: Core,
    wanted: Wanted | None,
    reference: jax.Array | None = None,
    of_all_columns: blocks.OfAllColumns | None = None,
) -> tuple[Numbers, Residuals]:
    """blocks.form, where `plan_for` says so."""

    def run(plan: Plan, inputs: Inputs, of_tokens: Any, reference: jax.Array | None):
        return blocks.form(inputs, of_tokens, cotangents_of, plan, reference, of_all_columns)

    return on_platform(run, inputs, core, wanted, "in forward", one_factor=True)(inputs, of_tokens, reference)


def finish(inputs: Inputs, residuals: Residuals, factor: jax.Array, core: Core, wanted: Wanted) -> Gradients:
    """blocks.finish. residuals: of `begin` with the same inputs."""

    def run(plan: Plan, inputs: Inputs, residuals: Residuals, factor: jax.Array):
        return blocks.finish(residuals, factor, inputs.targets >= 0, plan, inputs.weights)

    return on_platform(run, inputs, core, wanted, "in forward", one_factor=True)(inputs, residuals, factor)


def numbers_and_selections(inputs: Inputs, core: Core, asked: Asked) -> tuple[Numbers, Selections]:
    """Equations (1), (2), (3') and (3"), and the largest logits of each token, their ids and the mean of all.

    Nothing is left for `gradients`.
    """
    find = selected.numbers_and_selections
    return on_platform(lambda plan, inputs: find(inputs, plan, asked), inputs, core, None)(inputs)
