"""Every loss as plain arithmetic on the core's statistics, differentiated by PyTorch.

The same as cce_jax/losses.py, for "torch_compile" and "reference", which run without JAX.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch.call import log_p, lse_of


def columns(targets: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """The column of the logits that each target names, int32; V where the target names none, -1 where it is ignored.

    targets: int64, so that every ignore_index fits.
    """
    named = torch.where(targets < 0, vocabulary, targets).clamp(max=vocabulary)
    return torch.where(targets != ignore_index, named, -1).to(torch.int32)


class Terms(NamedTuple):
    """What the losses of N tokens depend on besides their statistics."""

    columns: Tensor  # (N,)
    class_weight: Tensor | None  # (V,)
    token_weight: Tensor | None  # (N,)
    vocabulary: int


def loss(
    statistics: Tensor, terms: Terms, num_items: Tensor | None, reduction: str, scheduled: tuple[float, float, float]
) -> tuple[Tensor, Tensor]:
    """The loss, a scalar or for "none" (N,), and lse, (N,), which is 0 for ignored tokens.

    statistics: as in call.py; scheduled: label_smoothing, z_loss and scale.
    """
    total, lse = totals(statistics, terms, scheduled)
    total = weights(terms.columns, terms.token_weight, lse.dtype) * total
    total = torch.where(terms.columns >= 0, total, 0)
    if reduction == "none":
        return total, lse
    return reduced(total.sum(), terms, num_items, reduction), lse


def totals(statistics: Tensor, terms: Terms, scheduled: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """The loss of each token before its token weight, and lse, both (N,) and 0 for ignored tokens. As for `loss`."""
    (columns, class_weight, _, vocabulary), (label_smoothing, z_loss, _) = terms, scheduled
    kept = columns >= 0
    statistics = torch.where(kept, statistics, 0)
    rows = statistics.unbind()
    (log_mass, _, target, *weighted), lse = rows, lse_of(rows)
    of_target, ce = target_weights(columns, class_weight), -log_p(target, rows)
    ce = ce if of_target is None else of_target * ce
    if weighted:
        whole = vocabulary if class_weight is None else class_weight.sum()
        ce = (1 - label_smoothing) * ce + label_smoothing / vocabulary * (whole * log_mass - weighted[0])
    poison = torch.where(columns == vocabulary, torch.nan, torch.ones_like(lse))  # a factor: gradients become NaN too
    total = ce + z_loss * lse**2 if z_loss else ce
    return torch.where(kept, poison * total, 0), lse.clone()  # which the user may change in place


class BuiltIn:
    """The built-in loss of each token, as in_forward.OfTokens."""

    called = "linear_cross_entropy"

    def __init__(self, terms: Terms, scheduled: tuple[float, float, float]) -> None:
        self.terms, self.scheduled, self.weight = terms, scheduled, terms.token_weight

    def in_order(self, order: Tensor) -> "BuiltIn":
        return BuiltIn(self.terms._replace(columns=self.terms.columns[order], token_weight=None), self.scheduled)

    def totals(self, statistics: Tensor, span: slice) -> Tensor:
        return totals(statistics, self.terms._replace(columns=self.terms.columns[span]), self.scheduled)[0]


def target_weights(columns: Tensor, class_weight: Tensor | None) -> Tensor | None:
    """The class weight of each token's target, (N,); of any class where the target names none."""
    return None if class_weight is None else class_weight[columns.clamp(0, class_weight.shape[0] - 1)]


def weights(columns: Tensor, token_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight of each token, (N,): 0 where it is ignored."""
    kept = columns >= 0
    return kept.to(dtype) if token_weight is None else torch.where(kept, token_weight.to(dtype), 0)


def reduced(value: Tensor, terms: Terms, num_items: Tensor | None, reduction: str) -> Tensor:
    """The "mean" or "sum", from the sum over the tokens. num_items: None for the default."""
    if reduction == "mean":
        value = quotient(value, items(terms, value.dtype) if num_items is None else num_items)
    return value


def items(terms: Terms, dtype: torch.dtype) -> Tensor:
    """The default of num_items, by which "mean" divides."""
    columns, class_weight, token_weight, _ = terms
    weight = weights(columns, token_weight, dtype)
    if class_weight is not None:
        of_target: Any = target_weights(columns, class_weight)
        weight = torch.where(columns >= 0, weight * of_target.to(weight.dtype), 0)
    return weight.sum()


def quotient(value: Tensor, items: Tensor) -> Tensor:
    """value / items, or 0 with gradients of 0 where there are no items."""
    items = items.to(value.dtype)
    nothing = items == 0
    return torch.where(nothing, 0, value / torch.where(nothing, 1, items))
