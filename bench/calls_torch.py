"""PyTorch functions as calls, on the tensors that JAX's methods have as arrays: the same memory."""

from collections.abc import Callable, Collection

import jax
import torch
from torch import Tensor

from bench.calls import KINDS, Call

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def tensors(*arrays: jax.Array) -> tuple[Tensor, ...]:
    """The arrays as tensors, without a copy. The caller keeps the arrays."""
    return tuple(torch.from_dlpack(jax.block_until_ready(x)) for x in arrays)


def arrays(*given: Tensor) -> tuple[jax.Array, ...]:
    """Finished tensors as arrays, without a copy."""
    return tuple(jax.dlpack.from_dlpack(x.detach().contiguous()) for x in given)


def wait(result: object) -> None:
    del result
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kinds(loss: Loss, e: Tensor, c: Tensor, targets: Tensor, wanted: Collection[str] = KINDS) -> dict[str, Call]:
    """The wanted kinds. loss-bw is timed after a forward pass of its own each time, as in training: several methods
    scale their saved gradients in place or give their saved tensors' memory away, and a graph retained for a second
    backward pass would change what is measured.
    """
    e_leaf, c_leaf = e.detach().requires_grad_(), c.detach().requires_grad_()

    def gradients(value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, (e_leaf, c_leaf))

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        value = loss(e_leaf, c_leaf, targets)
        return value.detach(), gradients(value)

    calls = {
        "loss-fw": Call(lambda: (), lambda: loss(e, c, targets), wait),
        "loss-bw": Call(lambda: (loss(e_leaf, c_leaf, targets),), gradients, wait),
        "loss-fw-bw": Call(lambda: (), both, wait),
    }
    return {kind: calls[kind] for kind in KINDS if kind in wanted}
