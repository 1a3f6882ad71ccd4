"""The error where XLA would have to split the kernels over devices. JAX's own error does not say what to write instead.

XLA splits a program over the devices of a mesh by Auto axes, and cannot split a kernel: it would gather the kernel's
operands on every device, or fail. The number of devices is known only when the program is lowered. So an operand of the
kernels passes through a primitive that is the identity. The lowering rule of the primitive looks at the devices.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def on_one_device(x: jax.Array, name: str) -> jax.Array:
    """x. NotImplementedError when a program is lowered in which XLA would have to split the kernels that read x.

    name: of the public function, for the error.
    """
    return _identity.bind(x, name=name)


def _lowered(ctx: Any, x: Any, name: str) -> list[Any]:
    where = ctx.module_context.axis_context
    mesh = getattr(where, "mesh", None)
    if mesh is not None:  # inside jax.shard_map
        manual = set(where.manual_axes) | set(getattr(mesh, "manual_axes", ()))
        split = [a for a in mesh.axis_names if a not in manual and mesh.shape[a] > 1]
    else:
        split = ["data"] * (getattr(where, "num_devices", 1) not in (None, 1))
    if split:
        raise NotImplementedError(
            f"{name}: XLA cannot split the kernels over the devices of this program. Say how e and c lie, "
            f"such as {name}(..., sharding=(P({split[0]!r}), P())) where this mesh axis splits the first "
            "axis of e and all devices hold c (docs/devices.md has more), or give the mesh Explicit axes, or use "
            "impl='chunked'"
        )
    return [x]


_identity = Primitive("on_one_device")
_identity.def_abstract_eval(lambda x, name: x)
_identity.def_impl(lambda x, name: x)
mlir.register_lowering(_identity, _lowered)
batching.defvectorized(_identity)
