"""The derivative rule of divergences from a teacher; cce_kernels/divergence.py derives what it computes.

    S = Σ_i weight_i · total_i        where its cotangent arrives, the gradients are that factor times what the forward
                                      pass formed
    total_i                           the backward pass computes the logits again, with the cotangents as weights

Both are functions of the student's e, c and bias alone. The teacher and the weights have no gradient.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cce_jax import passes, rules, settings
from cce_jax.core import NOTHING, gradients_of_sum, sum_over_tokens
from cce_jax.plans import Core, Decided, on_platform, plan_for
from cce_jax.reference import rounded
from cce_jax.sharding import Layout
from cce_kernels import divergence
from cce_kernels.divergence import Divergence, Given, Numbers, Side
from cce_kernels.divergence_terms import entropy_terms
from cce_kernels.numbers import Gradients, Inputs, Wanted, divided
from cce_kernels.residuals import Residuals


class Terms(NamedTuple):
    """What belongs to each token."""

    weight: jax.Array  # (N,) at least float32
    teacher_e: jax.Array | None  # (N, D'); None: not needed any more


class Common(NamedTuple):
    """What all tokens share. c and bias have the type of teacher_e."""

    teacher_c: jax.Array
    teacher_bias: jax.Array | None
    teacher_scale: jax.Array | None  # (1,)
    shares: jax.Array | None  # (2,), as of divergence.Given


class Summands(NamedTuple):
    inputs: Inputs  # the student's; a token that is left out has a negative target, the others have 0
    terms: Terms
    common: Any  # Common, or None where it is not needed any more

    def weighted(self, weight: jax.Array) -> "Summands":
        """The same with other weights."""
        targets = jnp.where(weight == 0, -1, 0).astype(jnp.int32)
        return self._replace(inputs=self.inputs._replace(targets=targets), terms=self.terms._replace(weight=weight))

    @property
    def given(self) -> Given:
        (e, c, bias, _, _, scale, inverse, _), (weight, teacher_e), of = self
        assert teacher_e is not None
        teacher = Side(teacher_e, of.teacher_c, of.teacher_bias, of.teacher_scale)
        return Given(Side(e, c, bias, scale), teacher, weight, inverse, of.shares)


def divergences(
    of: Summands, core: Core, how: Divergence, layout: Layout | None, summed: bool
) -> tuple[jax.Array, Numbers]:
    """S if `summed`, else total, of the shape of targets; and the numbers of each token, without a gradient.

    e: (..., D), at least one token. S extends over the axes that the layout maps.
    """
    if core.impl == "reference":
        numbers = _reference(of, core, how)
        value = jnp.sum(of.terms.weight * numbers.total) if summed else numbers.total
    else:
        run: Any = partial(_divergences, core, how, layout, summed)
        value, numbers = run(of)
    return value, jax.tree.map(jax.lax.stop_gradient, numbers)


def _reference(of: Summands, core: Core, how: Divergence) -> Numbers:
    """From the full logits (..., V). JAX differentiates it, to any order."""
    (e, c, bias, targets, _, scale, inverse, _), (_, teacher_e), common = of
    c, bias, live = rounded(c, e.dtype), rounded(bias, e.dtype), targets >= 0

    def log_p(side: Side, head: Any) -> jax.Array:
        flat = jnp.where(live.reshape(-1)[:, None], side.e.reshape(-1, side.e.shape[-1]), 0)
        z = head.whole_logits(*side._replace(e=flat))
        z = divided(z, None if inverse is None else jnp.where(live, inverse, 1).reshape(-1))
        return jax.nn.log_softmax(jnp.where(live.reshape(-1)[:, None], z, 0))  # else 0 · inf may be NaN

    log_s = log_p(Side(e.astype(c.dtype), c, bias, scale), core.head)
    log_t = log_p(Side(teacher_e, *common[:3]), how.teacher).astype(log_s.dtype)  # type: ignore[arg-type]
    s, t = jnp.exp(log_s), jnp.exp(log_t)
    neither = (log_s == log_t) & jnp.isinf(log_s)  # of other equal ones the difference has a derivative
    gap = jnp.where(neither, 0, log_t - log_s)

    def kl(p: jax.Array, log_p_over_q: jax.Array) -> jax.Array:
        return jnp.sum(p * jnp.where(p > 0, log_p_over_q, 0), axis=1)  # the derivative of 0 times infinity is NaN

    if how.kind == "jsd":
        of_t, of_s = common.shares  # type: ignore[misc]
        total = of_t * kl(t, -_log_mixed(-gap, of_s, of_t)) + of_s * kl(s, -_log_mixed(gap, of_t, of_s))
    else:
        total = kl(t, gap) if how.kind == "forward_kl" else kl(s, -gap)
    entropy = jnp.sum(entropy_terms(log_s), axis=1) if how.entropy else None
    return jax.tree.map(lambda x: jnp.where(live, x.reshape(live.shape), 0), Numbers(total, entropy))


def _log_mixed(x: jax.Array, share: jax.Array, rest: jax.Array) -> jax.Array:
    """log(rest + share·exp(x)), where share + rest = 1. It keeps its digits where share is close to 0 or to 1.

    So does its derivative: that of expm1 has none where x is low, and the quotient of large numbers multiplies small
    probabilities to 0.
    """
    x = jnp.minimum(x, 80)  # where it is more, the probability that the result belongs to is below exp(−80)
    low, peak = x < -1, jax.lax.stop_gradient(jnp.maximum(x, 0))
    less = share * jnp.where(low, jnp.exp(jnp.where(low, x, -1)) - 1, jnp.expm1(jnp.where(low, 0, x)))
    near, large = jnp.abs(less) < 0.5, peak + jnp.log(rest * jnp.exp(-peak) + share * jnp.exp(x - peak))
    return jnp.where(near, jnp.log1p(jnp.where(near, less, 0)), large)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _divergences(core: Core, how: Divergence, layout: Layout | None, summed: bool, of: Summands):
    value, numbers, _ = _formed(of, core, how, layout, NOTHING)
    return (value if summed else numbers.total), numbers


@settings.defaults()
def _divergences_fwd(core: Core, how: Divergence, layout: Layout | None, summed: bool, of: Summands):
    wanted, given = rules.wanted_of(of.inputs), rules.values(of)
    run = partial(_formed, core=core, how=how, layout=layout, wanted=wanted if summed else NOTHING)
    value, numbers, left = rules.first_order_only(run, core.function)(given)
    if summed:  # the gradients are formed: the teacher is not needed any more
        given = given._replace(terms=given.terms._replace(teacher_e=None), common=None)
    return (value if summed else numbers.total, numbers), (rules.as_shape(wanted), given, left)


@settings.defaults()
def _divergences_bwd(core: Core, how: Divergence, layout: Layout | None, summed: bool, residuals, cotangents):
    shape_of_wanted, given, left = residuals
    cotangent, wanted = cotangents[0], rules.from_shape(shape_of_wanted)
    found = Gradients(None, None, None)
    if wanted != NOTHING and not rules.is_symbolic_zero(cotangent):
        core = replace(core, with_mean=False)
        if summed:
            run = partial(_of_factor, core=core, layout=layout, wanted=wanted)
            found = rules.first_order_only(run, core.function)(given, cotangent, left)
        else:
            run = partial(_of_cotangents, core=core, how=replace(how, entropy=False), layout=layout, wanted=wanted)
            found = rules.first_order_only(run, core.function)(given, cotangent)
    return (Summands(Inputs(found.e, found.c, found.bias, None, None, None), None, None),)  # type: ignore[arg-type]


_divergences.defvjp(_divergences_fwd, _divergences_bwd, symbolic_zeros=True)


def _begin(of: Summands, core: Core, how: Divergence, wanted: Wanted) -> tuple[Numbers, Residuals]:
    """divergence.begin on one device. e: (N, D)."""
    asked = None if wanted == NOTHING else wanted
    plan = plan_for(of.inputs, core, asked, one_factor=True)
    assert plan.in_forward is not None

    def run(plan: Any, inputs: Inputs, terms: Terms, common: Common) -> tuple[Numbers, Residuals]:
        return divergence.begin(Summands(inputs, terms, common).given, how, plan, core.debug_nans)

    shared = Decided(0, plan.in_forward.chunks.last)
    return on_platform(run, of.inputs, core, asked, shared, one_factor=True)(*of)


def _formed(
    of: Summands, core: Core, how: Divergence, layout: Layout | None, wanted: Wanted
) -> tuple[jax.Array, Numbers, Any]:
    """S, the numbers of each token, and what is left for `_of_factor`."""

    def run(of: Summands, core: Core):
        numbers, left = _begin(of, core, how, wanted)
        return numbers.total, numbers, rules.filled(left)

    value, _, numbers, left = sum_over_tokens(run, of, core, layout)
    return value, numbers, left


def _of_factor(
    given: Summands, factor: jax.Array, left: Any, core: Core, layout: Layout | None, wanted: Wanted
) -> Gradients:
    """The gradients of factor · S, from what `_formed` left."""

    def run(given: Summands, of: tuple, left: Any, core: Core) -> Gradients:
        return passes.finish(given.inputs, rules.emptied(left), of[0], core, wanted)

    return gradients_of_sum(run, given, (factor, None), left, core, layout, wanted)


def _of_cotangents(
    given: Summands, of_total: jax.Array, core: Core, how: Divergence, layout: Layout | None, wanted: Wanted
) -> Gradients:
    """The gradients of Σ of_total · total, from logits that are computed again."""

    def run(given: Summands, _: Any, left: Any, core: Core) -> Gradients:
        _, residuals = _begin(given, core, how, wanted)
        return passes.finish(given.inputs, residuals, jnp.ones((), given.terms.weight.dtype), core, wanted)

    given = given.weighted(jnp.where(given.inputs.targets >= 0, of_total, 0))
    return gradients_of_sum(run, given, (None, None), (), core, layout, wanted)
