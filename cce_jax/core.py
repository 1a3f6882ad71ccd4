"""Some numbers per token and their derivative: the only derivative in this project that is written by hand.

With N tokens, width D and vocabulary V, embeddings e (N, D), classifier c (V, D), bias b (V,), targets t (N,) and
weights w (V,), and τ_i = 1 / temperature of token i, let the logits be

    z_iv = τ_i · softcap(scale · (e_i·c_v + b_v)),     softcap(y) = κ·tanh(y / κ),  or y where no softcap κ is set.

The core returns a reference ρ_i, which is the target's logit or another number near the largest logits, and in float32

    log_mass_i = log Σ_v exp(z_iv − ρ_i)                                                                     (1)
    target_i   = z_i,t_i                                                                                     (2)
    sum_i      = Σ_v w_v (z_iv − ρ_i)                                                                        (3)
    mean_i     = Σ_v p_iv (z_iv − ρ_i),     p_iv = exp(z_iv − ρ_i − log_mass_i)                              (3')
    ids_ik     = z_i,id(i,k)                for K given ids of each token                                   (3")

of which (3), (3') and (3") only where they are asked for. The log-sum-exp is lse_i = ρ_i + log_mass_i, the target's
log-probability (target_i − ρ_i) − log_mass_i, the entropy −Σ_v p_iv log p_iv = log_mass_i − mean_i. So what is common
to all logits of a token is subtracted before anything is summed or rounded: numbers that are small keep their digits.

Every loss is plain arithmetic on these numbers (cce_jax/losses.py), which JAX differentiates. ρ_i is a constant to the
derivatives: no loss depends on which number it is. The core gets the cotangents a_i, t̂_i, s_i, μ_i and ι_ik of (1),
(2), (3), (3') and (3"). The partial derivatives with respect to one logit are

    ∂log_mass_i/∂z_iv = exp(z_iv − ρ_i) / Σ_u exp(z_iu − ρ_i) = p_iv                                         (4)
    ∂target_i/∂z_iv = [v = t_i]           ∂sum_i/∂z_iv = w_v                                                 (5)
    ∂mean_i/∂z_iv = p_iv + Σ_u (z_iu − ρ_i) ∂p_iu/∂z_iv = p_iv + Σ_u (z_iu − ρ_i) p_iu ([u = v] − p_iv)
                  = p_iv·(1 + z_iv − ρ_i − mean_i)                                                           (5')
    ∂ids_ik/∂z_iv = [v = id(i,k)]                                                                            (5")

so by the chain rule, with y_iv = scale · (e_i·c_v + b_v), x = z/τ and ∂x/∂y = 1 − tanh²(y/κ) = 1 − (x/κ)²,

    dz_iv = (p_iv·(a_i + μ_i·(1 + z_iv − ρ_i − mean_i)) + t̂_i·[v = t_i] + s_i·w_v + Σ_k ι_ik·[v = id(i,k)])
            · scale · τ_i · (1 − (x_iv/κ)²)                                                                  (6)

is the cotangent of the raw product e_i·c_v + b_v. (cce_kernels/mean.py has the form in which p's factor is computed.)
A temperature has no derivative. Since the product is bilinear,

    de_i = Σ_v dz_iv c_v           dc_v = Σ_i dz_iv e_i           db_v = Σ_i dz_iv.                          (7)

By (4) no array of size (N, V) need be kept: the backward pass computes the logits again and gets p from them, ρ and
log_mass. The plan chooses one of three ways to (7):

    recomputed                 the residuals are the inputs and two to four numbers a token. The columns v are
                               independent in (6) and (7), so they are computed one group at a time
    saved                      where the memory budget allows it, the exponentials of all tokens are a residual too
                               (cce_kernels/exponentials.py)
    in the forward pass        where (6) is known up to one factor, the forward pass forms (7), one chunk of tokens
                               after another, and the gradients are the residuals (cce_kernels/in_forward.py)

On several devices each computes its own tokens and columns (cce_jax/devices.py).

A token whose target is negative is ignored: its numbers are arbitrary, but (3") is 0; it contributes nothing to (7),
and nothing in its row of e, not even a NaN, reaches a gradient. A target of V or more names no logit: (2) is 0. So is
(3") for an id that is negative, or V or more.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cce_jax import devices, losses, passes, reference, rules, settings
from cce_jax.devices import Held
from cce_jax.losses import Loss, TokenNumbers
from cce_jax.plans import Core, plan_for
from cce_jax.sharding import Layout
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Statistics, Wanted
from cce_kernels.residuals import Residuals
from cce_kernels.selections import NOTHING as NO_SELECTIONS
from cce_kernels.selections import Asked, Selections

NOTHING = Wanted(e=False, c=False, bias=False)


def statistics(
    inputs: Inputs, core: Core, layout: Layout | None, asked: Asked = NO_SELECTIONS
) -> tuple[Statistics, Selections]:
    """Equations (1)-(3"), of the shape of targets, differentiable in e, c and bias; and selections. e: (..., D).

    The sum is None unless core.with_sum, the mean unless core.with_mean, and ids, (..., K), unless inputs has ids.
    The selections are the k largest logits of each token, their ids, (..., k), and the mean of its logits. They have no
    gradients. Where they are asked for, the sum is not, and there is at least one token. asked.top_k is at most V.
    """
    if core.impl != "reference":
        return _statistics(core, layout, asked, inputs)
    selected = Selections(None, None, None)
    if asked != NO_SELECTIONS:
        constants = jax.tree.map(jax.lax.stop_gradient, inputs)
        selected = _forward(constants, core, layout, asked, None)[1]
    if layout is not None:
        return devices.whole_numbers(inputs, core, layout), selected
    numbers = reference.statistics(passes.flat(inputs), core)
    return jax.tree.map(lambda x: passes.shaped_tokens(x, inputs), numbers), selected


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _statistics(core: Core, layout: Layout | None, asked: Asked, inputs: Inputs) -> tuple[Statistics, Selections]:
    return _forward(inputs, core, layout, asked, None)[:2]


@settings.defaults()
def _statistics_fwd(core: Core, layout: Layout | None, asked: Asked, inputs):
    wanted, inputs = rules.wanted_of(inputs), rules.values(inputs)
    run = partial(_forward, core=core, layout=layout, asked=asked, wanted=wanted)
    out, selected, held = rules.first_order_only(run, core.function)(inputs)
    return (out, selected), (rules.as_shape(wanted), inputs, out.log_mass, held)


@settings.defaults()
def _statistics_bwd(core: Core, layout: Layout | None, asked: Asked, residuals, of_results):
    (shape_of_wanted, inputs, log_mass, held), (cotangents, _) = residuals, of_results
    zeros, cotangents = jnp.zeros_like(log_mass), Cotangents.of(cotangents)
    if rules.is_symbolic_zero(cotangents.mean):  # the entropy is only logged
        cotangents, core = cotangents._replace(mean=None), replace(core, with_mean=False)
    ids = None if rules.is_symbolic_zero(cotangents.ids) else cotangents.ids
    of: Any = Cotangents._make(zeros if rules.is_symbolic_zero(x) else x for x in cotangents._replace(ids=ids))
    run = partial(_backward, core=core, layout=layout, wanted=rules.from_shape(shape_of_wanted))
    found = rules.first_order_only(run, core.function)(inputs, held, of)
    return (Inputs(found.e, found.c, found.bias, None, None, None),)  # type: ignore[arg-type]


_statistics.defvjp(_statistics_fwd, _statistics_bwd, symbolic_zeros=True)


def _forward(
    inputs: Inputs, core: Core, layout: Layout | None, asked: Asked, wanted: Wanted | None
) -> tuple[Statistics, Selections, Held]:
    """The numbers and selections, of the shape of targets, and what `_backward` needs. e: (..., D)."""
    if layout is not None:
        return devices.forward_pass(inputs, core, layout, asked, wanted)
    given, selected = passes.in_type_of_e(passes.flat(inputs)), Selections(None, None, None)
    if asked == NO_SELECTIONS:
        numbers, held = _on_one_device(given, core, wanted)
    else:
        numbers, selected = passes.numbers_and_selections(given, core, asked)
        held = Held(numbers, Residuals())
    return *jax.tree.map(lambda x: passes.shaped_tokens(x, inputs), (numbers, selected)), held


def _backward(
    inputs: Inputs, held: Held, of: Cotangents, core: Core, layout: Layout | None, wanted: Wanted
) -> Gradients:
    """de, dc and dbias, each with the shape and layout of its input; None where not wanted."""

    def run(given: Summands, of: tuple, left: Held, core: Core) -> Gradients:
        return passes.gradients(given.inputs, left.numbers, left.residuals, of[1], core, wanted)[0]

    return gradients_of_sum(run, Summands(inputs, (), None), (None, of), held, core, layout, wanted)


def _on_one_device(inputs: Inputs, core: Core, wanted: Wanted | None) -> tuple[Statistics, Held]:
    numbers, residuals = passes.forward_pass(inputs, core, wanted)
    return numbers, Held(numbers, residuals)


class Summands(NamedTuple):
    """What S is a sum over."""

    inputs: Inputs
    terms: Any  # losses.Terms
    common: Any  # losses.Common


def sum_over_tokens(run: Callable, of: Any, core: Core, layout: Layout | None) -> tuple[jax.Array, jax.Array, Any, Any]:
    """devices.sum_over_tokens, also on one device. of: Summands, or divergence_core's."""
    if layout is not None:
        return devices.sum_over_tokens(run, of, core, layout)
    flat = passes.flat_summands(of)
    total, shown, left = run(flat, core)
    value = jnp.sum(flat.terms.weight * total)
    return value, *jax.tree.map(lambda x: passes.shaped_tokens(x, of.inputs), (total, shown)), left


def gradients_of_sum(
    run: Callable, given: Any, of: tuple, left: Any, core: Core, layout: Layout | None, wanted: Wanted
) -> Gradients:
    """devices.gradients_of_sum, also on one device."""
    if layout is not None:
        return devices.gradients_of_sum(run, given, of, left, core, layout, wanted)
    of_sum, of_tokens = of
    of_tokens = jax.tree.map(lambda x: passes.flat_tokens(x, given.inputs), of_tokens)
    found = run(passes.flat_summands(given), (of_sum, of_tokens), left, core)
    return found._replace(e=None if found.e is None else found.e.reshape(given.inputs.e.shape))


def summed(of: Summands, core: Core, loss: Loss, layout: Layout | None) -> tuple[jax.Array, TokenNumbers]:
    """S = Σ_i weight_i · total_i and lse, differentiable in e, c, bias and weight; and the other numbers of each token.

    e: (..., D), at least one token.

    The inputs have no ids.

    Where the cotangent of S arrives, those of the numbers are that factor times what the forward pass knows already. So
    the forward pass may form the gradients (cce_kernels/in_forward.py). If a cotangent of lse arrives too, those
    gradients are not used: one backward pass for both cotangents computes the logits again. devices.sum_over_tokens
    says over which devices S extends.
    """
    inputs, terms, common = of
    assert inputs.ids is None
    terms = terms if layout is None else devices.terms_of_numbers(terms, inputs, layout)
    given = terms._replace(weight=jax.lax.stop_gradient(terms.weight))
    run: Any = partial(_summed, core, loss, layout)
    value, shown, total = run(Summands(inputs, given, common))
    return _of_weights(core.function, value, terms.weight, total), shown


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_weights(function: str, value: jax.Array, weight: jax.Array, total: jax.Array) -> jax.Array:
    """value, S, which is linear in the weights: their derivative in both modes, of which `_summed` has only one.

    The derivative of S in the other inputs, of_value, does not know the weights: its derivative in them is an error.
    """
    return value


@partial(_of_weights.defjvp, symbolic_zeros=True)
def _(function: str, primals, tangents):
    (value, weight, total), (of_value, of_weight, _) = primals, tangents
    found = jnp.zeros_like(value)
    if not rules.is_symbolic_zero(of_value):
        found += of_value * rules.first_order_only(lambda _: jnp.ones_like(value), function)(weight)
    if not rules.is_symbolic_zero(of_weight):
        found += jnp.sum(of_weight * total)
    return _of_weights(function, *primals), found  # not value, which does not know the weights either


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _summed(core: Core, loss: Loss, layout: Layout | None, of: Summands):
    """S, the numbers of each token, of which only lse has a derivative, and total."""
    value, total, shown, _ = _formed(of, core, loss, layout, NOTHING)
    return value, shown, total


@settings.defaults()
def _summed_fwd(core: Core, loss: Loss, layout: Layout | None, of: Summands):
    wanted, given = rules.wanted_of(of.inputs), rules.values(of)
    run = partial(_formed, core=core, loss=loss, layout=layout, wanted=wanted)
    value, total, shown, left = rules.first_order_only(run, core.function)(given)
    return (value, shown, total), (rules.as_shape(wanted), given, left)


@settings.defaults()
def _summed_bwd(core: Core, loss: Loss, layout: Layout | None, residuals, cotangents):
    shape_of_wanted, given, left = residuals
    of_sum, of_lse, of_total = (
        None if rules.is_symbolic_zero(x) else x for x in (cotangents[0], cotangents[1].lse, cotangents[2])
    )
    wanted, found = rules.from_shape(shape_of_wanted), Gradients(None, None, None)
    if wanted != NOTHING:
        run = partial(_gradients_of_sum, core=core, loss=loss, layout=layout, wanted=wanted)
        found = rules.first_order_only(run, core.function)(given, (of_sum, (of_lse, of_total)), left)
    return (Summands(Inputs(found.e, found.c, found.bias, None, None, None), None, None),)  # type: ignore[arg-type]


_summed.defvjp(_summed_fwd, _summed_bwd, symbolic_zeros=True)


def _formed(of: Summands, core: Core, loss: Loss, layout: Layout | None, wanted: Wanted):
    """S; the total and the numbers of each token; and what is left for `_gradients_of_sum`."""

    def run(of: Summands, core: Core):
        inputs, terms, common = of
        vocabulary = _vocabulary(inputs, core, layout)
        if wanted != NOTHING and plan_for(inputs, core, wanted, one_factor=True).in_forward is not None:
            form = passes.begin if layout is None else partial(devices.form_gradients, layout=layout)
            cotangents = losses.cotangents_of(common, loss, vocabulary)
            numbers, residuals = form(inputs, terms, cotangents, core=core, wanted=wanted)
            held = Held(numbers, residuals)
        else:
            forward = _on_one_device if layout is None else partial(devices.of_columns, layout=layout)
            numbers, held = forward(inputs, core=core, wanted=None if wanted == NOTHING else wanted)
        return *losses.totals(numbers, terms, common, loss, vocabulary), (held.numbers, rules.filled(held.residuals))

    return sum_over_tokens(run, of, core, layout)


def _gradients_of_sum(
    given: Summands, of: tuple, left: Any, core: Core, loss: Loss, layout: Layout | None, wanted: Wanted
) -> Gradients:
    """de, dc and dbias. of: the cotangents of S, and of lse and total; None: it is 0.

    That of total is there where the gradient of the weights is differentiated.
    """

    def run(given: Summands, of: tuple, left: Any, core: Core) -> Gradients:
        (inputs, terms, common), (of_sum, (of_lse, of_total)), (numbers, filled) = given, of, left
        residuals = rules.emptied(filled)
        if residuals.of_one_factor:
            if of_lse is None and of_total is None:
                return passes.finish(inputs, residuals, of_sum, core, wanted)
            residuals = Residuals()  # the sum of two gradients that are rounded to 16 bits would be less exact
        of_numbers = Cotangents.of(jax.tree.map(jnp.zeros_like, numbers))
        cotangents = losses.cotangents_of(common, loss, _vocabulary(inputs, core, layout))
        if of_sum is not None:
            of_numbers = jax.tree.map(lambda x: x * of_sum, cotangents(numbers, terms))
        if of_total is not None:
            of_numbers = jax.tree.map(jnp.add, of_numbers, cotangents(numbers, terms._replace(weight=of_total)))
        if of_lse is not None:
            of_numbers = of_numbers._replace(lse=of_numbers.lse + jnp.where(terms.columns < 0, 0, of_lse))
        return passes.gradients(inputs, numbers, residuals, of_numbers, core, wanted)[0]

    return gradients_of_sum(run, given, of, left, core, layout, wanted)


def _vocabulary(inputs: Inputs, core: Core, layout: Layout | None) -> int:
    """V, from the columns of one device."""
    return core.head.vocabulary(inputs.c) * (1 if layout is None else layout.size(layout.columns))
