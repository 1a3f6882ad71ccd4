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

from cce_jax.compat import identity_in_reverse
from cce_jax.plans import Core


def reverse_mode_only(arrays: Any, core: Core) -> Any:
    """arrays, a tree. TypeError if JAX evaluates the tangent of one, unless core is the specification's."""
    if core.impl == "reference":
        return arrays
    return jax.tree.map(lambda x: _identity.bind(x, name=core.function), arrays)


def _refuse(*_: Any, name: str, **__: Any) -> NoReturn:
    raise TypeError(
        f"{name} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize) with impl='cce', "
        "'chunked' and 'auto'; impl='reference' has one, and holds the full logits"
    )


_identity = identity_in_reverse("reverse_mode_only", _refuse)
