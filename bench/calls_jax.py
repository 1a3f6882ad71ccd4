"""JAX functions as calls: compiled beforehand, so that nothing but the program is timed."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bench.calls import KINDS, Call

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

    def call(self) -> Call:
        return Call(lambda: self.arguments, self.run, jax.block_until_ready, self.scratch, self.output)


def kinds(loss: Loss, e, c, targets, wanted: Collection[str] = KINDS) -> dict[str, Call]:
    """The wanted kinds, compiled at the same time: most of what a benchmark of JAX waits for is XLA.

    The backward pass alone is compiled from the residuals of the forward pass, which stay on the device.
    """

    def forward_and_backward() -> Compiled:
        return Compiled.of(jax.value_and_grad(loss, (0, 1)), e, c, targets)

    def backward() -> Compiled:
        _, pullback = jax.jit(lambda e, c: jax.vjp(lambda e, c: loss(e, c, targets), e, c))(e, c)
        return Compiled.of(lambda pullback: pullback(jnp.float32(1)), pullback)

    makers = {
        "loss-fw": lambda: Compiled.of(loss, e, c, targets),
        "loss-bw": backward,
        "loss-fw-bw": forward_and_backward,
    }
    with ThreadPoolExecutor() as pool:
        futures = {kind: pool.submit(makers[kind]) for kind in KINDS if kind in wanted}
        return {kind: future.result().call() for kind, future in futures.items()}


def floor(e: jax.Array, c: jax.Array) -> dict[str, Call]:
    """The three bare matmuls that an exact gradient cannot do without: z, and de and dc from a dz of e's type."""

    def product(x, y, x_axis, y_axis):
        return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))

    z = jax.jit(lambda e, c: product(e, c, 1, 1))(e, c)
    return {
        "z = e·cᵀ": Compiled.of(lambda e, c: product(e, c, 1, 1), e, c).call(),
        "de = dz·c": Compiled.of(lambda z, c: product(z, c, 1, 0), z, c).call(),
        "dc = dzᵀ·e": Compiled.of(lambda z, e: product(z, e, 0, 0), z, e).call(),
    }


FLOOR_OF = {
    "loss-fw": ("z = e·cᵀ",),
    "loss-bw": ("de = dz·c", "dc = dzᵀ·e"),
    "loss-fw-bw": ("z = e·cᵀ", "de = dz·c", "dc = dzᵀ·e"),
}
