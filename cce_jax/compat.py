"""What cce_jax uses of JAX that is private, or that JAX does not promise to keep: jax.extend, jax.interpreters."""

from collections.abc import Callable
from typing import Any

from jax._src.core import get_axis_env as get_axis_env  # the axes of jax.vmap around a call: nothing public tells
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def identity(name: str, lowered: Callable = lambda _, x, **__: [x]) -> Primitive:
    """A primitive that returns its argument. Public: jax.custom_jvp, which takes no lowering rule.

    lowered: its lowering rule, of the context, x and the parameters.
    """
    made = Primitive(name)
    made.def_abstract_eval(lambda x, **_: x)
    made.def_impl(lambda x, **_: x)
    mlir.register_lowering(made, lowered)
    batching.defvectorized(made)
    return made


def identity_in_reverse(name: str, refuse: Callable) -> Primitive:
    """`identity`, whose tangent JAX transposes. Where it would evaluate or batch it, it calls refuse. Public: none."""
    tangent = Primitive(f"{name}_tangent")
    tangent.def_abstract_eval(lambda x, **_: x)
    tangent.def_impl(refuse)
    mlir.register_lowering(tangent, refuse)
    ad.deflinear(tangent, lambda cotangent, **_: [cotangent])
    batching.primitive_batchers[tangent] = refuse
    made = identity(name)
    ad.defjvp(made, lambda x, _, **parameters: tangent.bind(x, **parameters))
    return made


def platforms_of(context: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule's program is lowered for. Nothing public tells."""
    return context.module_context.platforms


def split_axes_of(context: Any) -> list[str]:
    """The mesh axes over which XLA will split a lowering rule's program. Nothing public tells.

    Outside of jax.shard_map they are not known: ["data"] if there are several devices.
    """
    where = context.module_context.axis_context
    mesh = getattr(where, "mesh", None)
    if mesh is None:
        return ["data"] * (getattr(where, "num_devices", 1) not in (None, 1))
    manual = set(where.manual_axes) | set(getattr(mesh, "manual_axes", ()))
    return [a for a in mesh.axis_names if a not in manual and mesh.shape[a] > 1]
