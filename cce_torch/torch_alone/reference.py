"""The specification: the statistics (call.py) from the full (N, V) logits. PyTorch differentiates it, to any order."""

from typing import Any

import torch
from torch import Tensor

from cce_torch.call import Call, Operands
from cce_torch.torch_alone import blocks


def logits(operands: Operands, call: Call, scale: float) -> Tensor:
    """The full logits, (N, V), float32 (float64 for float64)."""
    e, c, bias, columns, _, inverse_temperature, _ = operands
    live = columns >= 0
    with torch.autocast(e.device.type, enabled=False):
        accumulate = torch.promote_types(e.dtype, torch.float32)
        e = torch.where(live[:, None], e, 0)  # a NaN in an ignored token must not reach c's gradient
        c, bias = _rounded(c, e.dtype), _rounded(bias, e.dtype)
        raw = e.to(accumulate) @ c.to(accumulate).T
        z = blocks.capped(raw if bias is None else raw + bias.to(accumulate), scale, call.softcap)
        return z if inverse_temperature is None else z * torch.where(live, inverse_temperature, 1)[:, None]


def statistics(operands: Operands, call: Call, scale: float) -> Tensor:
    """The statistics, float32 (float64 for float64).

    c of any strides. c and bias are rounded to e's type, their gradients are not. A column of V or more names no logit:
    target is 0. Holds several (N, V) arrays.
    """
    columns, weights, vocabulary = operands.columns, operands.weights, operands.c.shape[0]
    with torch.autocast(operands.e.device.type, enabled=False):
        z, live = logits(operands, call, scale), columns >= 0
        own = columns.clamp(0, vocabulary - 1).long()
        target = torch.where(columns < vocabulary, z.gather(1, own[:, None])[:, 0], 0)
        reference = blocks.finite(z.detach().amax(1))
        ids = operands.ids  # -1: none, or one of columns that another process holds
        of_ids = () if ids is None else torch.where(ids >= 0, z.gather(1, ids.clamp(min=0).long()), 0).unbind(1)
        z = z - reference[:, None]
        rows = [torch.logsumexp(z, 1), reference, target]
        if call.smooths:
            w = z.new_ones(vocabulary) if weights is None else weights.to(z.dtype)
            rows.append(torch.where(w == 0, 0, w * z).sum(1))
        rows += of_ids
        if call.with_mean:
            rows.append(blocks.mean_of(z.detach() if call.mean_is_detached else z))
        return torch.where(live, torch.stack(rows), 0)


def _rounded(x: Tensor | None, dtype: torch.dtype) -> Any:
    """x rounded to dtype, in x's own type. The gradient is not rounded."""
    if x is None or x.dtype == dtype:
        return x
    own = x.detach()
    near = own.to(dtype).to(x.dtype)
    return torch.where(near == own, x, x + (near - own))  # exact, as near - own has few digits; inf - inf would be NaN
