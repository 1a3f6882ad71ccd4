"""The rule that tells JAX the derivative of the core's numbers: the two passes of core.py, on one device or several."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from cce_jax import devices
from cce_jax.core import Core
from cce_jax.sharding import Layout
from cce_kernels.numbers import Cotangents, Inputs, Statistics, Wanted


def statistics(inputs: Inputs, core: Core, layout: Layout | None) -> Statistics:
    """Equations (1)-(3) of core.py, of the shape of targets, differentiable in e, c and bias. e: (..., D).

    The sum is None unless core.with_sum.
    """
    if core.impl == "reference":
        return devices.whole_numbers(inputs, core, layout)
    return _statistics(core, layout, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _statistics(core: Core, layout: Layout | None, inputs: Inputs) -> Statistics:
    return devices.forward_pass(inputs, core, layout, None)[0]


def _statistics_fwd(core: Core, layout: Layout | None, inputs):
    e, c, bias = inputs.e, inputs.c, inputs.bias
    wanted = Wanted(e=e.perturbed, c=c.perturbed, bias=bias is not None and bias.perturbed)
    inputs = jax.tree.map(lambda x: x.value, inputs, is_leaf=lambda x: hasattr(x, "perturbed"))
    run = partial(devices.forward_pass, core=core, layout=layout, wanted=wanted)
    out, held = _first_order_only(run)(inputs)
    return out, (_as_shape(wanted), inputs, out, held)


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
