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
                               independent in (6) and (7), so they are computed one window at a time
    saved                      where the memory budget allows it, the exponentials of all tokens are a residual too
                               (cce_kernels/exponentials.py)
    in the forward pass        where (6) is known up to one factor, the forward pass forms (7), one chunk of tokens
                               after another, and the gradients are the residuals (cce_kernels/blocks.py)

On several devices each computes its own tokens and columns (cce_jax/devices.py).

A token whose target is negative is ignored: its numbers are arbitrary, but (3") is 0; it contributes nothing to (7),
and nothing in its row of e, not even a NaN, reaches a gradient. A target of V or more names no logit: (2) is 0. So is
(3") for an id that is negative, or V or more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cce_jax import devices, losses, passes, settings
from cce_jax.devices import Held
from cce_jax.errors import first_order_only
from cce_jax.losses import Loss, TokenNumbers
from cce_jax.plans import Core, plan_for
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Numbers, Wanted
from cce_kernels.plan.residuals import Residuals
from cce_kernels.selections import NOTHING as NO_SELECTIONS
from cce_kernels.selections import Asked, Selections

ABSENT = 1, 1, 1, 1  # no residual has so many axes


class Summands(NamedTuple):
    """The operands of a task."""

    inputs: Inputs  # e: (..., D), and targets of the shape of e without D
    terms: Any  # what belongs to each token, a tree: losses.Terms, or a divergence's
    common: Any  # what all tokens share, a tree: losses.Common, or a divergence's


class Task:
    """What distinguishes one kind of call from another: frozen, as it is a static argument. `run` runs it.

    Its methods say what a device computes. e is (N, D) there, and each result has N tokens.
    """

    def forward(self, of: Summands, core: Core, wanted: Wanted | None) -> tuple[jax.Array | None, Any, Any]:
        """The total of each token or None, a tree of numbers, and what is left for `backward`.

        wanted: the gradients that will be asked for; None for evaluation.
        """
        raise NotImplementedError

    def kept(self, of: Summands) -> Summands:
        """What `backward` needs of `of`."""
        return of

    def backward(self, of: Summands, left: Any, cotangents: tuple, core: Core, wanted: Wanted) -> Gradients:
        """de, dc and dbias; None where not wanted.

        cotangents: of Σ weight · total, of total and of the numbers, None where one is 0; at least one is not.
        """
        raise NotImplementedError


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run(task: Task, core: Core, of: Summands) -> Any:
    """Σ weight · total, total and the numbers of a task, differentiable once in e, c and bias."""
    return devices.forward(partial(task.forward, wanted=None), of, core)[0]


@settings.defaults()
def _run_fwd(task: Task, core: Core, of: Summands) -> tuple[Any, Any]:
    perturbed = Wanted(*(x is not None and x.perturbed for x in of.inputs[:3]))  # type: ignore[union-attr]
    wanted = perturbed if any((perturbed.e, perturbed.c, perturbed.bias)) else None
    given = jax.tree.map(lambda x: x.value, of, is_leaf=lambda x: hasattr(x, "perturbed"))
    forward = partial(devices.forward, partial(task.forward, wanted=wanted), core=core)
    results, left = first_order_only(forward, core.function)(given)
    return results, (_as_shape(perturbed), task.kept(given), _filled(left))


@settings.defaults()
def _run_bwd(task: Task, core: Core, residuals: Any, cotangents: Any) -> tuple[Any]:
    shape_of_wanted, given, filled = residuals
    wanted = Wanted(*(n == 2 for n in shape_of_wanted.shape))
    cotangents = jax.tree.map(lambda x: None if _is_zero(x) else x, cotangents, is_leaf=_is_zero)
    found = Gradients(None, None, None)
    if shape_of_wanted.size > 1 and jax.tree.leaves(cotangents):
        backward = partial(devices.backward, partial(task.backward, wanted=wanted), core=core)
        left = jax.tree.map(lambda x: None if x.ndim == len(ABSENT) else x, filled)
        found = first_order_only(backward, core.function)(given, left, cotangents)
    of_inputs: Any = Inputs(found.e, found.c, found.bias, None, None, None)  # type: ignore[arg-type]
    return (given._replace(inputs=of_inputs, terms=None, common=None),)


run.defvjp(_run_fwd, _run_bwd, symbolic_zeros=True)


def _as_shape(wanted: Wanted) -> jax.Array:
    """wanted, encoded in the shape of an array.

    JAX keeps a traced forward rule for each pattern of differentiated inputs, but only the last residual tree for all
    of them. Static facts in that tree would reach the wrong backward rule. The shape of a leaf reaches the right one.
    """
    return jnp.zeros((1 + wanted.e, 1 + wanted.c, 1 + wanted.bias), bool)


def _filled(left: Any) -> Any:
    """What is left, with arrays ABSENT in place of None, so that all residuals have one tree: see `_as_shape`.

    None is empty, as XLA of JAX 0.11 crashes on an empty array that several devices share.
    """
    return jax.tree.map(lambda x: jnp.zeros(ABSENT, bool) if x is None else x, left, is_leaf=lambda x: x is None)


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def numbers_of(inputs: Inputs, core: Core, asked: Asked = NO_SELECTIONS) -> tuple[Numbers, Selections]:
    """Equations (1)-(3"), of the shape of targets, differentiable in e, c and bias; and selections. e: (..., D).

    The sum and the mean are None unless core.numbers wants them, and ids, (..., K), unless inputs has ids. The
    selections are the k largest logits of each token, their ids, (..., k), and the mean of its logits. They have no
    gradients. Where they are asked for, the sum is not. asked.top_k is at most V.
    """
    of, task, selected = Summands(inputs, (), None), _Numbers(asked), Selections(None, None, None)
    if core.impl != "reference" and inputs.targets.size:
        found: Any = run(task, core, of)
        return found[2]
    numbers = devices.whole_numbers(of, core)  # without tokens the full logits are empty
    if asked != NO_SELECTIONS and inputs.targets.size:
        found = run(task, core, jax.tree.map(jax.lax.stop_gradient, of))
        selected = found[2][1]
    elif asked != NO_SELECTIONS:
        top = jnp.zeros((*inputs.targets.shape, asked.top_k), numbers.lse.dtype) if asked.top_k else None
        top_ids = None if top is None else top.astype(jnp.int32)
        selected = Selections(top, top_ids, numbers.lse if asked.mean_logit else None)
    return numbers, selected


@dataclass(frozen=True)
class _Numbers(Task):
    """The numbers of each token, whose cotangents arrive, and selections."""

    asked: Asked

    def forward(self, of: Summands, core: Core, wanted: Wanted | None) -> tuple[None, Any, Held]:
        if self.asked != NO_SELECTIONS:
            *found, held = devices.with_selections(of.inputs, core, self.asked)
            return None, tuple(found), held
        numbers, held = devices.of_columns(of.inputs, core, wanted)
        return None, (numbers, Selections(None, None, None)), held

    def backward(self, of: Summands, left: Held, cotangents: tuple, core: Core, wanted: Wanted) -> Gradients:
        of_numbers, zeros = Cotangents.of(cotangents[2][0]), jnp.zeros_like(left.numbers.log_mass)
        if of_numbers.mean is None:  # the entropy is only logged
            core = replace(core, numbers=replace(core.numbers, mean=False))
        lse, target = (zeros if x is None else x for x in of_numbers[:2])
        total = zeros if of_numbers.sum is None and core.numbers.sum else of_numbers.sum
        of_numbers = of_numbers._replace(lse=lse, target=target, sum=total)
        return passes.gradients(of.inputs, left.numbers, left.residuals, of_numbers, core, wanted)[0]


def summed(of: Summands, core: Core, loss: Loss) -> tuple[jax.Array, TokenNumbers]:
    """S = Σ_i weight_i · total_i and lse, differentiable in e, c, bias and weight; and the other numbers of each token.

    e: (..., D), at least one token. The inputs have no ids.

    Where the cotangent of S arrives, those of the numbers are that factor times what the forward pass knows already. So
    the forward pass may form the gradients (cce_kernels/blocks.py). If a cotangent of lse arrives too, those
    gradients are not used: one backward pass for both cotangents computes the logits again. devices.forward says over
    which devices S extends.
    """
    assert of.inputs.ids is None
    terms = devices.typed(of.terms, devices.axes_of_numbers(of.inputs, core.layout))
    given = terms._replace(weight=jax.lax.stop_gradient(terms.weight))
    found: Any = run(_Sum(loss), core, of._replace(terms=given))
    value, total, shown = found
    return _of_weights(core.function, value, terms.weight, total), shown


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_weights(function: str, value: jax.Array, weight: jax.Array, total: jax.Array) -> jax.Array:
    """value, S, which is linear in the weights: their derivative in both modes, of which `run` has only one.

    The derivative of S in the other inputs, of_value, does not know the weights: its derivative in them is an error.
    """
    return value


@partial(_of_weights.defjvp, symbolic_zeros=True)
def _(function: str, primals, tangents):
    (value, weight, total), (of_value, of_weight, _) = primals, tangents
    found = jnp.zeros_like(value)
    if not _is_zero(of_value):
        found += of_value * first_order_only(lambda _: jnp.ones_like(value), function)(weight)
    if not _is_zero(of_weight):
        found += jnp.sum(of_weight * total)
    return _of_weights(function, *primals), found  # not value, which does not know the weights either


@dataclass(frozen=True)
class _Sum(Task):
    """S, the numbers of each token, of which only lse has a derivative, and total."""

    loss: Loss

    def _cotangents_of(self, of: Summands, core: Core) -> Callable[[Numbers, losses.Terms], Cotangents]:
        return losses.cotangents_of(of.common, self.loss, core.vocabulary_of_columns(of.inputs.c))

    def forward(self, of: Summands, core: Core, wanted: Wanted | None) -> tuple[jax.Array, TokenNumbers, Held]:
        inputs, terms, common = of
        forms = wanted is not None and plan_for(inputs, core, wanted, one_factor=True).in_forward is not None
        forming = (terms, self._cotangents_of(of, core)) if forms else None
        numbers, held = devices.of_columns(inputs, core, wanted, forming)
        return *losses.totals(numbers, terms, common, self.loss, core.vocabulary_of_columns(inputs.c)), held

    def backward(self, of: Summands, left: Held, cotangents: tuple, core: Core, wanted: Wanted) -> Gradients:
        """The cotangent of total is there where the gradient of the weights is differentiated."""
        (inputs, terms, _), (numbers, residuals), (of_sum, of_total, of_shown) = of, left, cotangents
        of_lse = of_shown.lse
        if residuals.of_one_factor:
            if of_lse is None and of_total is None:
                return passes.finish(inputs, residuals, of_sum, core, wanted)
            residuals = Residuals()  # the sum of two gradients that are rounded to 16 bits would be less exact
        of_numbers, cotangents_of = Cotangents.of(jax.tree.map(jnp.zeros_like, numbers)), self._cotangents_of(of, core)
        if of_sum is not None:
            of_numbers = jax.tree.map(lambda x: x * of_sum, cotangents_of(numbers, terms))
        if of_total is not None:
            of_total = cotangents_of(numbers, terms._replace(weight=of_total))
            of_numbers = jax.tree.map(jnp.add, of_numbers, of_total)
        if of_lse is not None:
            of_numbers = of_numbers._replace(lse=of_numbers.lse + jnp.where(terms.columns < 0, 0, of_lse))
        return passes.gradients(inputs, numbers, residuals, of_numbers, core, wanted)[0]
