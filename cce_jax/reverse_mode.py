"""The error for forward-mode differentiation of the core. JAX's own error does not say what works instead.

JAX differentiates the core in reverse mode, by its custom_vjp rule. In forward mode (jax.jvp, jax.jacfwd,
jax.linearize) JAX evaluates tangents, and for a custom_vjp function it only says that it cannot. So each array passes
through `reverse_mode_only` before it reaches the core. This is the identity, but its tangent passes through a primitive
that can be transposed but not evaluated. Reverse mode transposes this primitive and never evaluates it. Forward mode
evaluates it before it reaches the core, and so raises the error here.

The identity is a primitive too, not a jax.custom_jvp function. For jax.grad of a jax.vmap JAX would batch the rule of
such a function, and with it the tangent's primitive. Here an attempt to batch the tangent's primitive counts as forward
mode.
"""

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def reverse_mode_only(x: jax.Array) -> jax.Array:
    """x. TypeError if JAX evaluates the tangent of x."""
    return _identity.bind(x)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "linear_cross_entropy has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize) with impl='cce', "
        "'chunked' and 'auto'; impl='reference' has one, and holds the full logits"
    )


_tangent = Primitive("reverse_mode_only_tangent")
_tangent.def_abstract_eval(lambda x: x)
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear(_tangent, lambda cotangent: [cotangent])
batching.primitive_batchers[_tangent] = _refuse

_identity = Primitive("reverse_mode_only")
_identity.def_abstract_eval(lambda x: x)
_identity.def_impl(lambda x: x)
mlir.register_lowering(_identity, lambda _, x: [x])
ad.defjvp(_identity, lambda tangent, _: _tangent.bind(tangent))
batching.defvectorized(_identity)
