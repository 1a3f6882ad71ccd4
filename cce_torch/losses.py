"""Every loss as plain arithmetic on the core's three numbers, differentiated by PyTorch.

The same as cce_jax/losses.py, for "torch_compile" and "reference", which run without JAX.
"""

import torch
from torch import Tensor


def columns(targets: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """The column of the logits that each target names, int32; V where the target names none, -1 where it is ignored.

    targets: int64, so that every ignore_index fits.
    """
    in_vocabulary = (targets >= 0) & (targets < vocabulary)
    named = torch.where(in_vocabulary, targets, vocabulary)
    return torch.where(targets != ignore_index, named, -1).to(torch.int32)


def loss(
    numbers: Tensor,
    columns: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    num_items: Tensor | None,
    *,
    vocabulary: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """The loss, a scalar or for "none" (N,), and lse, (N,), which is 0 for ignored tokens.

    numbers: (2, N), or (3, N) with the weighted sum if label_smoothing > 0; columns: (N,); class_weight: (V,);
    token_weight: (N,).
    """
    kept = columns >= 0
    lse, target, *weighted = torch.where(kept, numbers, 0).unbind()
    target_weight = None if class_weight is None else class_weight[columns.clamp(0, vocabulary - 1)]
    ce = lse - target if target_weight is None else target_weight * (lse - target)
    if weighted:
        whole = vocabulary if class_weight is None else class_weight.sum()
        ce = (1 - label_smoothing) * ce + label_smoothing / vocabulary * (whole * lse - weighted[0])
    weight = kept.to(lse.dtype) if token_weight is None else torch.where(kept, token_weight.to(lse.dtype), 0)
    poison = torch.where(columns == vocabulary, torch.nan, torch.ones_like(lse))  # a factor: gradients become NaN too
    total = ce + z_loss * lse**2 if z_loss else ce
    total = torch.where(kept, poison * weight * total, 0)
    if reduction == "none":
        return total, lse
    value = total.sum()
    if reduction == "mean":
        value = quotient(value, items(kept, columns, weight, class_weight) if num_items is None else num_items)
    return value, lse


def items(kept: Tensor, columns: Tensor, weight: Tensor, class_weight: Tensor | None) -> Tensor:
    """The default of num_items, by which "mean" divides. kept, columns, weight: of each token, weight 0 if not kept."""
    if class_weight is not None:
        of_target = class_weight[columns.clamp(0, class_weight.shape[0] - 1)]
        weight = torch.where(kept, weight * of_target.to(weight.dtype), 0)
    return weight.sum()


def quotient(value: Tensor, items: Tensor) -> Tensor:
    """value / items, or 0 with gradients of 0 where there are no items."""
    items = items.to(value.dtype)
    return torch.where(items == 0, 0, value / torch.where(items == 0, 1, items))
