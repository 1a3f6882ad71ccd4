"""The specification: the core's three numbers from the full (N, V) logits. PyTorch differentiates it, to any order."""

from typing import Any

import torch
from torch import Tensor


def statistics(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, *, scale: float,
    softcap: float | None, with_sum: bool,
) -> Tensor:  # fmt: skip
    """lse, target and, with_sum, the weighted sum of each token's logits, (2 or 3, N), float32 (float64 for float64).

    e: (N, D); c: (V, D), of any strides; bias: (V,) or None. c and bias are rounded to e's type, their gradients are
    not. columns: (N,) integers. A column of V or more names no logit: target is 0. A negative column is an ignored
    token: its numbers and gradients are 0. weights: (V,), for the weighted sum alone; None: 1. Holds several (N, V)
    arrays.
    """
    with torch.autocast(e.device.type, enabled=False):
        accumulate = torch.promote_types(e.dtype, torch.float32)
        live = columns >= 0
        e = torch.where(live[:, None], e, 0)  # a NaN in an ignored token must not reach c's gradient
        c, bias = _rounded(c, e.dtype), _rounded(bias, e.dtype)
        raw = e.to(accumulate) @ c.to(accumulate).T
        z = scale * (raw if bias is None else raw + bias.to(accumulate))
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        own = columns.clamp(0, c.shape[0] - 1).long()
        target = torch.where(columns < c.shape[0], z.gather(1, own[:, None])[:, 0], 0)
        rows = [torch.logsumexp(z, 1), target]
        if with_sum:
            w = z.new_ones(z.shape[1]) if weights is None else weights.to(accumulate)
            rows.append(torch.where(w == 0, 0, w * z).sum(1))
        return torch.where(live, torch.stack(rows), 0)


def _rounded(x: Tensor | None, dtype: torch.dtype) -> Any:
    """x rounded to dtype, in x's own type. The gradient is not rounded."""
    if x is None or x.dtype == dtype:
        return x
    own = x.detach()
    near = own.to(dtype).to(x.dtype)
    return torch.where(near == own, x, x + (near - own))  # exact, as near - own has few digits; inf - inf would be NaN
