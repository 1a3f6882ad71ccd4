"""Errors where XLA would have to split the kernels over devices, or JAX to lower them for several platforms.

JAX's own errors do not say what to write instead.

XLA splits a program over the devices of a mesh by Auto axes, and cannot split a kernel: it would gather the kernel's
operands on every device, or fail. The number of devices is known only when the program is lowered. So an operand of the
kernels passes through a primitive that is the identity. The lowering rule of the primitive looks at the devices. Of a
program for several platforms, such as that of a multi-platform jax.export, JAX lowers every branch for every platform.
"""

from typing import Any

import jax

from cce_jax.compat import identity, platforms_of, split_axes_of
from cce_kernels.compat import ignore_deprecation_of_triton


def on_one_device(x: jax.Array, name: str) -> jax.Array:
    """x. NotImplementedError when a program is lowered in which the kernels that read x cannot be.

    name: of the public function, for the error.
    """
    return _identity.bind(x, name=name)


def _lowered(ctx: Any, x: Any, name: str) -> list[Any]:
    ignore_deprecation_of_triton()  # the kernels are lowered next, and may have been traced long ago
    platforms = platforms_of(ctx)
    if len(platforms) > 1:
        raise NotImplementedError(
            f"{name}: JAX lowers kernels for one platform at a time, and this program is for {', '.join(platforms)}: "
            "export it for each platform, such as jax.export.export(..., platforms=['cuda']), or use impl='chunked'"
        )
    split = split_axes_of(ctx)
    if split:
        raise NotImplementedError(
            f"{name}: XLA cannot split the kernels over the devices of this program. Say how e and c lie, "
            f"such as {name}(..., sharding=(P({split[0]!r}), P())) where this mesh axis splits the first "
            "axis of e and all devices hold c (docs/devices.md has more), or give the mesh Explicit axes, or use "
            "impl='chunked'"
        )
    return [x]


_identity = identity("on_one_device", _lowered)
