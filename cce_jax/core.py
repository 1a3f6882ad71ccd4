"""Three numbers per token and their derivative: the only derivative in this project that is written by hand.

With N tokens, width D and vocabulary V, embeddings e (N, D), classifier c (V, D), bias b (V,), targets t (N,) and
weights w (V,), let the logits be

    z_iv = softcap(scale · (e_i·c_v + b_v)),        softcap(y) = κ·tanh(y / κ),  or y where no softcap κ is set.

The core returns, in float32,

    lse_i    = log Σ_v exp z_iv                                                                              (1)
    target_i = z_i,t_i                                                                                       (2)
    sum_i    = Σ_v w_v z_iv                                                                                  (3)

Every loss is plain arithmetic on these numbers (cce_jax/losses.py), which JAX differentiates. The core gets the
cotangents a_i, t̂_i and s_i of (1), (2) and (3). The partial derivatives of (1)-(3) with respect to one logit are

    ∂lse_i/∂z_iv = exp(z_iv) / Σ_u exp(z_iu) = exp(z_iv − lse_i) = p_iv                                      (4)
    ∂target_i/∂z_iv = [v = t_i]           ∂sum_i/∂z_iv = w_v                                                 (5)

so by the chain rule, with y_iv = scale · (e_i·c_v + b_v) and ∂z/∂y = 1 − tanh²(y/κ) = 1 − (z/κ)²,

    dz_iv = (a_i·p_iv + t̂_i·[v = t_i] + s_i·w_v) · scale · (1 − (z_iv/κ)²)                                   (6)

is the cotangent of the raw product e_i·c_v + b_v. Since the product is bilinear,

    de_i = Σ_v dz_iv c_v           dc_v = Σ_i dz_iv e_i           db_v = Σ_i dz_iv.                          (7)

By (4) no array of size (N, V) need be kept: the backward pass computes the logits again and gets p from them and the
saved lse. The residuals are the inputs and two or three numbers a token. The columns v are independent in (6) and (7),
so they are computed one group at a time (cce_kernels/gradients.py), and every group reuses one buffer. Where the memory
budget allows it, exponentials of some or all tokens are residuals too (cce_kernels/exponentials.py).

On several devices each computes its own tokens and columns (cce_jax/devices.py).

A token whose target is negative is ignored: its three numbers are arbitrary, it contributes nothing to (7), and nothing
in its row of e, not even a NaN, reaches a gradient. A target of V or more names no logit: (2) is 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cce_jax import devices, losses, passes, settings
from cce_jax.devices import in_type_of_e
from cce_jax.passes import Core
from cce_jax.sharding import Layout
from cce_kernels.in_forward import Begun, Left
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Statistics, Wanted


def statistics(inputs: Inputs, core: Core, layout: Layout | None) -> Statistics:
    """Equations (1)-(3), of the shape of targets, differentiable in e, c and bias. e: (..., D).

    The sum is None unless core.with_sum.
    """
    if core.impl == "reference":
        return devices.whole_numbers(inputs, core, layout)
    return _statistics(core, layout, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _statistics(core: Core, layout: Layout | None, inputs: Inputs) -> Statistics:
    return devices.forward_pass(inputs, core, layout, None)[0]


@settings.defaults()
def _statistics_fwd(core: Core, layout: Layout | None, inputs):
    e, c, bias = inputs.e, inputs.c, inputs.bias
    wanted = Wanted(e=e.perturbed, c=c.perturbed, bias=bias is not None and bias.perturbed)
    inputs = jax.tree.map(lambda x: x.value, inputs, is_leaf=lambda x: hasattr(x, "perturbed"))
    run = partial(devices.forward_pass, core=core, layout=layout, wanted=wanted)
    out, held = _first_order_only(run)(inputs)
    return out, (_as_shape(wanted), inputs, out, held)


@settings.defaults()
def _statistics_bwd(core: Core, layout: Layout | None, residuals, cotangents):
    shape_of_wanted, inputs, numbers, held = residuals
    zeros = jnp.zeros_like(numbers.lse)
    of = Cotangents(*[zeros if _is_symbolic_zero(x) else x for x in cotangents])
    wanted = _from_shape(shape_of_wanted)
    found = _first_order_only(partial(devices.gradients, core=core, layout=layout, wanted=wanted))(inputs, held, of)
    return (Inputs(found.e, found.c, found.bias, None, None, None),)  # type: ignore[arg-type]


_statistics.defvjp(_statistics_fwd, _statistics_bwd, symbolic_zeros=True)


class Terms(NamedTuple):
    """What the loss of each token depends on besides the core's numbers: (N,) each, None where it is not used."""

    columns: jax.Array  # int32, as in losses.py
    target_weight: jax.Array | None
    weight: jax.Array


def summed(
    inputs: Inputs, terms: Terms, label_smoothing: Any, z_loss: Any, core: Core, loss: losses.Loss
) -> tuple[jax.Array, jax.Array]:
    """S = Σ_i weight_i · total_i over the tokens of one device, and their lse; differentiable in e, c, bias and weight.

    Where the cotangent of S arrives, those of the numbers are that factor times what the forward pass knows already. So
    the forward pass may form the gradients (cce_kernels/in_forward.py). If a cotangent of lse arrives too, its part is
    computed from logits that are computed again. e: (N, D), N ≥ 1; label_smoothing, z_loss: as in losses.totals.
    """
    return _summed(core, loss, inputs, terms, label_smoothing, z_loss)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(core: Core, loss: losses.Loss, inputs: Inputs, terms: Terms, *scalars) -> tuple[jax.Array, jax.Array]:
    numbers, _ = passes.forward_pass(in_type_of_e(inputs), core, None)
    total, lse = _totals(core, loss, inputs, scalars)(numbers, terms)
    return jnp.sum(terms.weight * total), lse


def _totals(core: Core, loss: losses.Loss, inputs: Inputs, scalars) -> Callable:
    vocabulary, (label_smoothing, z_loss) = core.head.vocabulary(inputs.c), scalars

    def totals(numbers: Statistics, terms: Terms) -> tuple[jax.Array, jax.Array]:
        return losses.totals(numbers, terms.columns, inputs.weights, terms.target_weight, vocabulary=vocabulary,
                             options=loss, label_smoothing=label_smoothing, z_loss=z_loss)  # fmt: skip

    return totals


def _cotangents_of(totals: Callable) -> Callable:
    """(numbers, terms) -> the cotangents of the numbers where that of S is 1."""

    def cotangents(numbers: Statistics, terms: Terms) -> Cotangents:
        return Cotangents(*jax.grad(lambda x: jnp.sum(terms.weight * totals(x, terms)[0]))(numbers))

    return cotangents


@settings.defaults()
def _summed_fwd(core: Core, loss: losses.Loss, inputs, terms, *scalars):
    wanted = Wanted(*(x is not None and x.perturbed for x in (inputs.e, inputs.c, inputs.bias)))
    inputs, terms, scalars = jax.tree.map(lambda x: x.value, (inputs, terms, scalars),
                                          is_leaf=lambda x: hasattr(x, "perturbed"))  # fmt: skip

    def run(inputs: Inputs, terms: Terms, scalars):
        inputs = in_type_of_e(inputs)
        totals, begun, saved = _totals(core, loss, inputs, scalars), None, None
        if not (wanted.e or wanted.c or wanted.bias):
            numbers, _ = passes.forward_pass(inputs, core, None)
        elif passes.plan_for(inputs, core, wanted, one_factor=True).in_forward is not None:
            numbers, begun = passes.begin(inputs, terms, _cotangents_of(totals), core, wanted)
        else:
            numbers, saved = passes.forward_pass(inputs, core, wanted)
        total, lse = totals(numbers, terms)
        return jnp.sum(terms.weight * total), lse, total, numbers, *_filled(begun, saved)

    value, lse, *held = _first_order_only(run)(inputs, terms, scalars)
    return (value, lse), (_as_shape(wanted), inputs, terms, scalars, *held)


@settings.defaults()
def _summed_bwd(core: Core, loss: losses.Loss, residuals, cotangents):
    shape_of_wanted, inputs, terms, scalars, total, numbers, *held = residuals
    wanted, (begun, saved) = _from_shape(shape_of_wanted), _emptied(*held)
    of_sum, of_lse = (None if _is_symbolic_zero(x) else x for x in cotangents)

    def run(inputs: Inputs, terms: Terms, scalars, of_sum, of_lse, total, numbers, begun, saved) -> Gradients:
        inputs, found = in_type_of_e(inputs), Gradients(None, None, None)
        if not (wanted.e or wanted.c or wanted.bias):
            return found
        of = Cotangents(*[None if x is None else jnp.zeros_like(x) for x in numbers])  # type: ignore[arg-type]
        if begun is not None and of_sum is not None:
            found = passes.finish(inputs, begun, of_sum, core, wanted)
            if of_lse is None:
                return found
        elif of_sum is not None:
            of = _cotangents_of(_totals(core, loss, inputs, scalars))(numbers, terms)
            of = jax.tree.map(lambda x: x * of_sum, of)
        if of_lse is not None:
            of = of._replace(lse=of.lse + jnp.where(terms.columns < 0, 0, of_lse))
        more, _ = passes.gradients(inputs, numbers, saved, of, core, wanted)
        return more if found == (None, None, None) else jax.tree.map(jnp.add, found, more)

    found = _first_order_only(run)(inputs, terms, scalars, of_sum, of_lse, total, numbers, begun, saved)
    of_weight = None if of_sum is None else jnp.where(terms.columns < 0, 0, of_sum * total)
    of_inputs = Inputs(found.e, found.c, found.bias, None, None, None)  # type: ignore[arg-type]
    return of_inputs, Terms(None, None, of_weight), None, None  # type: ignore[arg-type]


_summed.defvjp(_summed_fwd, _summed_bwd, symbolic_zeros=True)


def _filled(begun: Begun | None, saved: jax.Array | None) -> tuple[jax.Array, ...]:
    """The arrays of both, with empty arrays in place of None, so that all residuals have one tree: see `_as_shape`."""
    of_begun = (None,) * 8 if begun is None else (*begun[:4], *(begun.last or (None,) * 4))
    return tuple(jnp.zeros(0, bool) if x is None else x for x in (*of_begun, saved))


def _emptied(*arrays: jax.Array) -> tuple[Begun | None, jax.Array | None]:
    """The inverse of `_filled`."""
    *of_begun, saved = (None if x.size == 0 else x for x in arrays)
    if of_begun == [None] * 8:
        return None, saved
    last = None if of_begun[4] is None else Left(*of_begun[4:])  # type: ignore[arg-type]
    return Begun(*of_begun[:4], last), saved  # type: ignore[arg-type]


def _as_shape(wanted: Wanted) -> jax.Array:
    """wanted, encoded in the shape of an array.

    JAX keeps a traced forward rule for each pattern of differentiated inputs, but only the last residual tree for all
    of them. Static facts in that tree would reach the wrong backward rule. The shape of a leaf reaches the right one.
    """
    return jnp.zeros((1 + wanted.e, 1 + wanted.c, 1 + wanted.bias), bool)


def _from_shape(x: jax.Array) -> Wanted:
    return Wanted(*(n == 2 for n in x.shape))


def _is_symbolic_zero(x) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _first_order_only(function: Callable) -> Callable:
    """function, which raises a clear error if JAX differentiates it: that is a second derivative of the loss."""

    @jax.custom_jvp
    def guarded(*arrays):
        return function(*arrays)

    @guarded.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            "linear_cross_entropy has first derivatives only with impl='cce', 'chunked' and 'auto'; "
            "impl='reference' has forward-mode and higher-order derivatives, and holds the full logits"
        )

    return guarded
