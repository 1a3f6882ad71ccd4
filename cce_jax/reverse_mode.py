"""The error that forward-mode differentiation of the core raises, in place of JAX's own, which names no way out.

JAX differentiates the core in reverse mode, by its custom_vjp rule. Asked for a derivative in forward mode (jax.jvp,
jax.jacfwd, jax.linearize), JAX evaluates tangents, and says of a custom_vjp function only that it cannot. So each array
passes through `reverse_mode_only` on its way to the core: the identity, whose tangent passes through a primitive that
has a transpose but no value. Reverse mode transposes that primitive and never evaluates it. Forward mode evaluates it,
and before it reaches the core.

The identity is a primitive too, not a jax.custom_jvp function: jax.grad of a jax.vmap would batch the rule of such a
function, and so the tangent, which is here the sign of forward mode.
"""

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def reverse_mode_only(x: jax.Array) -> jax.Array:
    """x; TypeError where its tangent is evaluated."""
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
