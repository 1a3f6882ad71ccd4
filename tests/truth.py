"""The truth of every test: the definition of the loss in PyTorch and float64, differentiated by PyTorch."""

from typing import Any

import numpy as np
import torch

from tests.cases import Inputs


def losses(
    e,
    c,
    targets,
    *,
    bias=None,
    ignore_index=-100,
    softcap=None,
    reduction="mean",
    shift=0,
    logit_scale=None,
    class_weight=None,
    label_smoothing=0.0,
    z_loss=0.0,
    token_weight=None,
    num_items=None,
):
    """(loss, lse) of tensors, straight from the definition."""
    vocabulary, shift = c.shape[0], int(shift)
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
        token_weight = None if token_weight is None else token_weight[..., shift:]
    kept = targets != ignore_index
    z = e @ c.T
    z = z if bias is None else z + bias
    z = z if logit_scale is None else logit_scale * z
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    w = torch.ones(vocabulary, dtype=z.dtype) if class_weight is None else class_weight
    m = torch.ones(targets.shape, dtype=z.dtype) if token_weight is None else token_weight
    lse = torch.logsumexp(z, -1)
    t = torch.where(kept, targets, 0)
    nll = lse - torch.gather(z, -1, t[..., None])[..., 0]
    smooth = (w * (lse[..., None] - z)).sum(-1) / vocabulary
    ce = (1 - label_smoothing) * w[t] * nll + label_smoothing * smooth
    total = torch.where(kept, m * (ce + z_loss * lse**2), 0.0)
    lse = torch.where(kept, lse, 0.0)
    if reduction == "none":
        return total, lse
    if reduction == "sum":
        return total.sum(), lse
    items = torch.where(kept, m * w[t], 0.0).sum() if num_items is None else torch.tensor(num_items, dtype=z.dtype)
    return (total.sum() / items if items != 0 else 0.0 * total.sum()), lse


def truth(given: Inputs, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """loss, lse and the gradients of Σ of_loss·loss (+ Σ of_lse·lse if lse is returned), in float64."""
    options = dict(options)
    returned = options.pop("return_lse", False)
    leaves = {k: torch.tensor(np.float64(v), requires_grad=True) for k, v in given.differentiable().items()}
    optional = {k: leaves.get(k, torch.tensor(np.float64(v))) for k, v in given.optional.items()}
    loss, lse = losses(leaves["e"], leaves["c"], torch.tensor(given.targets).long(), **optional, **options)
    objective = (loss * torch.tensor(np.float64(given.of_loss))).sum()
    if returned:
        objective = objective + (lse * torch.tensor(np.float64(given.of_lse))).sum()
    gradients = torch.autograd.grad(objective, list(leaves.values()))
    return loss.detach().numpy(), lse.detach().numpy(), dict(zip(leaves, (g.numpy() for g in gradients), strict=True))
