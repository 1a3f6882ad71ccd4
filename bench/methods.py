"""What is measured: each method as a jitted forward pass, backward pass and both, on the same e, c and targets."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from cce_jax import linear_cross_entropy

KINDS = ("loss-fw", "loss-bw", "loss-fw-bw")
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Compiled(NamedTuple):
    """A compiled call with the arguments to run it on."""

    run: Callable
    arguments: tuple
    scratch: int  # bytes of temporary device memory
    output: int  # bytes of results

    @classmethod
    def of(cls, function: Callable, *arguments) -> "Compiled":
        run = jax.jit(function).lower(*arguments).compile()
        memory = run.memory_analysis()
        assert memory is not None
        return cls(run, arguments, memory.temp_size_in_bytes, memory.output_size_in_bytes)


def ours(impl: str) -> Loss:
    return lambda e, c, t: linear_cross_entropy(e, c, t, impl=impl)  # type: ignore[arg-type]


def full_logits(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss as people write it: logits in the type of the model, cross-entropy in float32."""
    logits = (e @ c.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def full_float32_logits(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.matmul(e, c.T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


METHODS: dict[str, Loss] = {
    "cce_jax": ours("auto"),
    "cce_jax chunked": ours("chunked"),
    "full logits (XLA)": full_logits,
    "full float32 logits (XLA)": full_float32_logits,
}


def kinds(loss: Loss, e, c, targets) -> dict[str, Compiled]:
    """The method's three kinds. The backward pass alone is compiled from the residuals of the forward pass."""
    _, pullback = jax.vjp(lambda e, c: loss(e, c, targets), e, c)
    backward = Compiled.of(lambda pullback: pullback(jnp.float32(1)), pullback)
    return {
        "loss-fw": Compiled.of(loss, e, c, targets),
        "loss-bw": backward,
        "loss-fw-bw": Compiled.of(jax.value_and_grad(loss, (0, 1)), e, c, targets),
    }


def floor(e: jax.Array, c: jax.Array) -> dict[str, Compiled]:
    """The three bare matmuls that an exact gradient cannot do without: z, and de and dc from a dz of e's type."""

    def product(x, y, x_axis, y_axis):
        return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))

    z = jax.jit(lambda e, c: product(e, c, 1, 1))(e, c)
    return {
        "z = e·cᵀ": Compiled.of(lambda e, c: product(e, c, 1, 1), e, c),
        "de = dz·c": Compiled.of(lambda z, c: product(z, c, 1, 0), z, c),
        "dc = dzᵀ·e": Compiled.of(lambda z, e: product(z, e, 0, 0), z, e),
    }


FLOOR_OF = {
    "loss-fw": ("z = e·cᵀ",),
    "loss-bw": ("de = dz·c", "dc = dzᵀ·e"),
    "loss-fw-bw": ("z = e·cᵀ", "de = dz·c", "dc = dzᵀ·e"),
}
