"""A call that can be timed, in either framework: the mean loss and both gradients, a training step's share."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import lax

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[..., Any]  # of (e, c, targets)


class Call(NamedTuple):
    """`run` starts the call; `wait` blocks until its result is there."""

    run: Callable[[], Any]
    wait: Callable[[Any], object]
    scratch: int | None = None  # bytes of temporary device memory, where the framework tells
    output: int | None = None  # bytes of results

    def __call__(self) -> Any:
        result = self.run()
        self.wait(result)
        return result


def compiled(function: Callable, *arguments: Any) -> Call:
    """A function of JAX, compiled beforehand, so that nothing but the program is timed."""
    run = jax.jit(function).lower(*arguments).compile()
    memory = run.memory_analysis()
    assert memory is not None
    sizes = memory.temp_size_in_bytes, memory.output_size_in_bytes
    return Call(lambda: run(*arguments), jax.block_until_ready, *sizes)


def step(framework: str, loss: Loss, e: jax.Array, c: jax.Array, targets: jax.Array) -> Call:
    """The loss and its gradients; of PyTorch, on tensors that share the arrays' memory."""
    if framework == "jax":
        return compiled(jax.value_and_grad(loss, (0, 1)), e, c, targets)
    import torch

    leaves = [x.requires_grad_() for x in tensors(e, c)]
    (labels,) = (x.long() for x in tensors(targets))

    def run() -> "tuple[Tensor, tuple[Tensor, ...]]":
        value = loss(*leaves, labels)
        return value.detach(), torch.autograd.grad(value, leaves)

    return Call(run, wait_for_torch)


def tensors(*arrays: jax.Array) -> "tuple[Tensor, ...]":
    """The arrays as tensors, without a copy. The caller keeps the arrays."""
    import torch

    return tuple(torch.from_dlpack(jax.block_until_ready(x)) for x in arrays)


def arrays(*given: "Tensor") -> tuple[jax.Array, ...]:
    """Finished tensors as arrays, without a copy."""
    return tuple(jax.dlpack.from_dlpack(x.detach().contiguous()) for x in given)


def start_jax() -> None:
    """Start JAX without a reservation of the GPU's memory that would leave PyTorch, where it is there, too little."""
    if find_spec("torch"):
        from cce_torch.on_jax import jax_devices

        jax_devices.start()


def wait_for_torch(_: object) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


MATMULS = "z = e·cᵀ", "de = dz·c", "dc = dzᵀ·e"


def product(x: jax.Array, y: jax.Array, x_axis: int = 1, y_axis: int = 1) -> jax.Array:
    """A bare matmul, in the type of x and y: by default z = e·cᵀ."""
    return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))


def floor(e: jax.Array, c: jax.Array) -> dict[str, Call]:
    """The three bare matmuls that an exact gradient cannot do without: z, and de and dc from a dz of e's type."""
    z = jax.jit(product)(e, c)
    calls = (
        compiled(product, e, c),
        compiled(lambda z, c: product(z, c, 1, 0), z, c),
        compiled(lambda z, e: product(z, e, 0, 0), z, e),
    )
    return dict(zip(MATMULS, calls, strict=True))
