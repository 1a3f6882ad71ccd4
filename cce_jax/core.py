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

import jax
import jax.numpy as jnp

from cce_jax import devices, settings
from cce_jax.passes import Core
from cce_jax.sharding import Layout
from cce_kernels.numbers import Cotangents, Inputs, Statistics, Wanted


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
