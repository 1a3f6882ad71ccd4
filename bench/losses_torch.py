"""The mean loss in PyTorch: ours, and written with full logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.calls import Loss
from bench.losses_jax import budget
from cce_torch import linear_cross_entropy


def ours(impl: str = "auto", memory: str = "") -> Loss:
    """memory: the name of a budget of bench.losses_jax."""

    def loss(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(e, c, targets, impl=impl, **budget(memory, *e.shape, c.shape[0]))  # type: ignore

    return loss


def full_logits(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
    """The loss as people write it, cut_cross_entropy in its mode "torch_compile" too: the matmul in the type of the
    model, its logits cast to float32 for the cross-entropy."""
    return F.cross_entropy((e @ c.T).float(), targets)


def compiled() -> Loss:
    """Static shapes, so that a second shape in the same process is not compiled for all shapes at once."""
    return torch.compile(full_logits, dynamic=False)
