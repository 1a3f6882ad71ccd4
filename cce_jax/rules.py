"""What the derivative rules that are written by hand have in common: which gradients JAX asks for, and residuals."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cce_kernels.numbers import Inputs, Wanted
from cce_kernels.residuals import Left, Residuals

ABSENT = 1, 1, 1, 1  # no residual has so many axes


def filled(held: Residuals) -> tuple[jax.Array, ...]:
    """The arrays of held, with arrays ABSENT in place of None, so that all residuals have one tree: see `as_shape`.

    No array is a scalar, as devices keep their parts of an array one after another; and none is empty, as XLA of JAX
    0.11 crashes on an empty array that several devices share.
    """
    *residuals, last = held
    arrays = *residuals, *(last or (None,) * len(Left._fields))
    return tuple(jnp.zeros(ABSENT, bool) if x is None else jnp.atleast_1d(x) for x in arrays)


def emptied(arrays: tuple[jax.Array, ...]) -> Residuals:
    """The inverse of `filled`."""
    found = [None if x.ndim == len(ABSENT) else x for x in arrays]
    residuals, left = found[: -len(Left._fields)], Left(*found[-len(Left._fields) :])  # type: ignore[arg-type]
    return Residuals(*residuals, None if left.left is None else left)  # type: ignore[arg-type]


def as_shape(wanted: Wanted) -> jax.Array:
    """wanted, encoded in the shape of an array.

    JAX keeps a traced forward rule for each pattern of differentiated inputs, but only the last residual tree for all
    of them. Static facts in that tree would reach the wrong backward rule. The shape of a leaf reaches the right one.
    """
    return jnp.zeros((1 + wanted.e, 1 + wanted.c, 1 + wanted.bias), bool)


def from_shape(x: jax.Array) -> Wanted:
    return Wanted(*(n == 2 for n in x.shape))


def wanted_of(inputs: Inputs) -> Wanted:
    """Which gradients JAX asks for, in a rule with symbolic zeros."""
    return Wanted(*(x is not None and x.perturbed for x in (inputs.e, inputs.c, inputs.bias)))  # type: ignore[attr-defined]


def values(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.value, arrays, is_leaf=lambda x: hasattr(x, "perturbed"))


def is_symbolic_zero(x) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def first_order_only(function: Callable, name: str) -> Callable:
    """function, which raises a clear error if JAX differentiates it: that is a second derivative of the loss.

    name: of the public function.
    """

    @jax.custom_jvp
    def guarded(*arrays):
        return function(*arrays)

    @guarded.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            f"{name} has first derivatives only with impl='cce', 'chunked' and 'auto'; "
            "impl='reference' has forward-mode and higher-order derivatives, and holds the full logits"
        )

    return guarded
