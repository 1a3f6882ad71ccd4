"""The mean loss in PyTorch, as people write it, and as a recipe of chunks that many pass around."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.calls import Loss

CHUNK = 1024  # tokens


def full_logits(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
    """The matmul in the type of the model, its logits cast to float32 for the cross-entropy."""
    return F.cross_entropy((e @ c.T).float(), targets)


def compiled() -> Loss:
    """Static shapes, so that a second shape in the same process is not compiled for all shapes at once."""
    return torch.compile(full_logits, dynamic=False)


def in_chunks() -> Loss:
    """A compiled function computes the logits, loss and gradients of CHUNK tokens in the forward pass.

    de is kept a chunk at a time, dc accumulated in the type of c. The backward pass multiplies both by the cotangent.
    """
    chunk = torch.compile(_chunk, dynamic=False)
    return lambda e, c, targets: _InChunks.apply(e, c, targets, chunk)


def _chunk(e: Tensor, c: Tensor, targets: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's share of the mean loss over all tokens, and of its gradients: de (CHUNK, D) and dc (V, D)."""
    z = (e @ c.T).float()
    lse = z.logsumexp(1, keepdim=True)
    is_target = torch.arange(c.shape[0], device=c.device) == targets[:, None]
    dz = ((z - lse).exp() - is_target.float()).div(tokens).to(e.dtype)
    loss = (lse[:, 0] - z.gather(1, targets[:, None])[:, 0]).sum() / tokens
    return loss, dz @ c, dz.T @ e


def policy(numbers: Any, old: Tensor, advantage: Tensor) -> Tensor:
    """GRPO's clip and an entropy bonus, as in bench/log_probs.py."""
    ratio = (numbers.log_probs - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain if numbers.entropy is None else -gain - 0.01 * numbers.entropy


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e: Tensor, c: Tensor, targets: Tensor, chunk: Any) -> Tensor:
        tokens = e.shape[0]
        loss, des, dc = e.new_zeros((), dtype=torch.float32), [], torch.zeros_like(c)
        for rows, labels in zip(e.split(CHUNK), targets.split(CHUNK), strict=True):
            part, de, dc_part = chunk(rows, c, labels, tokens)
            loss += part
            des.append(de)
            dc += dc_part
        ctx.save_for_backward(torch.cat(des), dc)
        return loss

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple:  # type: ignore[override]
        de, dc = ctx.saved_tensors
        return de * of_loss, dc * of_loss, None, None
