"""Errors that say what works instead, where JAX's own errors do not.

**Kernels that XLA would have to split.** XLA splits a program over the devices of a mesh by Auto axes, and cannot split
a kernel: it would gather the kernel's operands on every device, or fail. The number of devices is known only when the
program is lowered. So an operand of the kernels passes through a primitive that is the identity. The lowering rule of
the primitive looks at the devices. Of a program for several platforms, such as that of a multi-platform jax.export, JAX
lowers every branch for every platform.

**Forward mode.** JAX differentiates the core in reverse mode, by its custom_vjp rule. In forward mode (jax.jvp,
jax.jacfwd, jax.linearize) JAX evaluates tangents, and for a custom_vjp function it only says that it cannot. So each
array passes through `reverse_mode_only` before it reaches the core. This is the identity, but its tangent passes
through a primitive that can be transposed but not evaluated. Reverse mode transposes this primitive and never evaluates
it. Forward mode evaluates it before it reaches the core, and so raises the error here.

That identity is a primitive too, not a jax.custom_jvp function. For jax.grad of a jax.vmap JAX would batch the rule of
such a function, and with it the tangent's primitive. Here an attempt to batch the tangent's primitive counts as forward
mode.

`name` is always the name of the public function that was called.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import jax

from cce_jax.compat import get_axis_env, identity, identity_in_reverse, platforms_of, split_axes_of
from cce_kernels.compat import ignore_deprecation_of_triton


def on_one_device(x: jax.Array, name: str) -> jax.Array:
    """x. NotImplementedError when a program is lowered in which the kernels that read x cannot be."""
    return _on_one_device.bind(x, name=name)


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


_on_one_device = identity("on_one_device", _lowered)


def reverse_mode_only(arrays: Any, name: str) -> Any:
    """arrays, a tree. NoForwardMode if JAX evaluates the tangent of one."""
    return jax.tree.map(lambda x: _reverse_mode_only.bind(x, name=name), arrays)


class NoForwardMode(TypeError, NotImplementedError):
    """A derivative in forward mode is asked for, as jax.hessian does of the gradient."""


def _refuse(*_: Any, name: str, **__: Any) -> NoReturn:
    raise NoForwardMode(
        f"{name} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize) with impl='cce', "
        "'chunked' and 'auto'; impl='reference' has one, and holds the full logits"
    )


_reverse_mode_only = identity_in_reverse("reverse_mode_only", _refuse)


def first_order_only(function: Callable, name: str) -> Callable:
    """function. NotImplementedError if JAX differentiates it: that is a second derivative of the loss."""

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


def no_explicit_vmap(name: str) -> None:
    """NotImplementedError inside a jax.vmap over an axis of arrays that an Explicit mesh axis splits.

    This mesh axis then stays Explicit in jax.shard_map, where JAX batches the operations of a pass with types that do
    not fit, such as those of lax.dynamic_update_slice.
    """
    if taken := tuple(get_axis_env().explicit_mesh_axis_names):
        raise NotImplementedError(
            f"{name} inside a jax.vmap over an axis that the Explicit mesh axis {taken[0]!r} splits: "
            "call it without jax.vmap, as e may have any number of axes and reduction='none' gives a loss for each "
            f"token; or give the mesh Auto axes and write jax.vmap(..., spmd_axis_name={taken[0]!r}); or use "
            "impl='reference'"
        )
