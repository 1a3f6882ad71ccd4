"""Errors where XLA would have to split the kernels over devices, or JAX to lower them for several platforms.

JAX's own errors do not say what to write instead.

XLA splits a program over the devices of a mesh by Auto axes, and cannot split a kernel: it would gather the kernel's
operands on every device, or fail. The number of devices is known only when the program is lowered. So an operand of the
kernels passes through a primitive that is the identity. The lowering rule of the primitive looks at the devices. Of a
program for several platforms, such as that of a multi-platform jax.export, JAX lowers every branch for every platform.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def on_one_device(x: jax.Array, name: str) -> jax.Array:
    """x. NotImplementedError when a program is lowered in which the kernels that read x cannot be.

    name: of the public function, for the error.
    """
    return _identity.bind(x, name=name)


def _lowered(ctx: Any, x: Any, name: str) -> list[Any]:
    platforms, where = ctx.module_context.platforms, ctx.module_context.axis_context
    if len(platforms) > 1:
        raise NotImplementedError(
            f"{name}: JAX lowers kernels for one platform at a time, and this program is for {', '.join(platforms)}: "
            "export it for each platform, such as jax.export.export(..., platforms=['cuda']), or use impl='chunked'"
        )
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
