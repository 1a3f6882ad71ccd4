"""The specification: the numbers (call.py) and the divergences from the full (N, V) logits.

PyTorch differentiates them, to any order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cce_torch.call import Call, Numbers, Operands, Selections, selects
from cce_torch.in_torch import blocks, divergence


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


def numbers(operands: Operands, call: Call, scale: float) -> Numbers:
    """The statistics, float32 (float64 for float64), and the selections, without a derivative.

    c of any strides. c and bias are rounded to e's type, their gradients are not. A column of V or more names no logit:
    target is 0. Holds several (N, V) arrays.
    """
    columns, weights, vocabulary = operands.columns, operands.weights, operands.c.shape[0]
    with torch.autocast(operands.e.device.type, enabled=False):
        z, live = logits(operands, call, scale), columns >= 0
        selected = _selections(z.detach(), call) if selects(call) else Selections()
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
            rows.append(_mean(z.detach() if call.mean_is_detached else z))
        return Numbers(torch.where(live, torch.stack(rows), 0), selected)


def _selections(z: Tensor, call: Call) -> Selections:
    values, ids = torch.sort(z, dim=1, descending=True, stable=True) if call.top_k else (None, None)
    values, ids = (None if x is None else x[:, : call.top_k] for x in (values, ids))
    return Selections(values, ids, z.mean(1) if call.mean_logit else None)


def _mean(z: Tensor) -> Tensor:
    """Equation (3') of logits (N, V), (N,). A logit of -inf has no share."""
    p = torch.softmax(z, 1)
    return (p * torch.where(p == 0, 0, z)).sum(1)


def _rounded(x: Tensor | None, dtype: torch.dtype) -> Any:
    """x rounded to dtype, in x's own type. The gradient is not rounded."""
    if x is None or x.dtype == dtype:
        return x
    own = x.detach()
    near = own.to(dtype).to(x.dtype)
    return torch.where(near == own, x, x + (near - own))  # exact, as near - own has few digits; inf - inf would be NaN


def gradients(
    cotangents: Tensor, operands: Operands, numbers: Tensor, call: Call, scale: float, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """de, at least float32, dc and dbias, where PyTorch does not differentiate `statistics`: of a shard.

    numbers: the statistics over the whole vocabulary. call.impl is "reference". Nothing is rounded before the results.
    """
    with torch.autocast(operands.e.device.type, enabled=False):  # a backward pass has no autocast of its own
        wide = blocks.of_type(operands, numbers.dtype)
        wide = wide._replace(e=operands.e.to(numbers.dtype))
        de, *others = blocks.gradients(cotangents, wide, numbers, call, scale, wanted)
        return [de, *(None if x is None else x.to(y.dtype) for x, y in zip(others, operands[1:3], strict=True))]  # type: ignore[union-attr]


def divergences(z: tuple[Tensor, Tensor], weight: Tensor, measure: tuple[str, float]) -> tuple[Tensor, Tensor]:
    """The divergences and the student's entropies, (N,), from its logits and the teacher's, (N, V).

    PyTorch differentiates the former, by the student's. measure: the kind, and beta.
    """
    live = weight != 0
    finite = (torch.where(live[:, None], x, 0) for x in (z[0], z[1].detach()))  # else a divergence may be infinite
    log_s, log_t = (torch.log_softmax(x, 1).to(z[0].dtype) for x in finite)
    (kind, beta), s, t = measure, torch.exp(log_s), torch.exp(log_t)

    neither = (log_s == log_t) & log_s.isinf()  # of other equal ones the difference has a derivative
    delta = torch.where(neither, 0, log_t - log_s)

    def kl(p: Tensor, log_p_over_q: Tensor) -> Tensor:
        return (p * torch.where(p > 0, log_p_over_q, 0)).sum(1)

    if kind == "jsd":
        of_s, of_t = divergence.logs_of_mixture(delta, beta)
        total = beta * kl(t, of_t) + (1 - beta) * kl(s, of_s)
    else:
        total = kl(t, delta) if kind == "forward_kl" else kl(s, -delta)
    return torch.where(live, total, 0), torch.where(live, divergence.entropy_of(log_s.detach()), 0)
