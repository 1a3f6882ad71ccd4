"""A drawn call by full float32 logits and PyTorch's own functions: what the bounds of the search must allow."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tests.search.calls import CROSS_ENTROPY, DIVERGENCE, LOG_PROBS, Program
from tests.search.data import Given
from tests.search.functions import function_of
from tests.search.terms import _Shown


def _logits(e: Tensor, c: Tensor, bias: Tensor | None, scale: float | None, softcap: float | None) -> Tensor:
    z = e.float() @ c.float().T
    z = z if bias is None else z + bias.float()
    z = z if scale is None else scale * z
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def run(p: Program, given: Given) -> dict[str, np.ndarray]:
    """Results and gradients by name, of a call without top_k and predicted. Gradients are rounded to their types."""

    def tensor(x: np.ndarray) -> Tensor:
        return torch.tensor(x.astype(np.float32) if x.dtype.kind == "V" or x.dtype.itemsize == 2 else x)

    e, c = tensor(given.e).requires_grad_(), tensor(given.c).requires_grad_()
    optional = {name: tensor(x) for name, x in given.optional.items()}
    bias = optional.get("bias")
    weight = optional.get("token_weight")
    leaves = {"e": e, "c": c} | ({} if bias is None else {"bias": bias.requires_grad_()})
    if "token_weight" in p.wanted and weight is not None:
        leaves["token_weight"] = weight.requires_grad_()
    heat = p.temperature if given.temperature is None else tensor(given.temperature)
    before = (..., slice(None, -p.shift)) if p.shift else (...,)
    after = (..., slice(p.shift, None)) if p.shift else (...,)
    targets = torch.tensor(given.targets.astype(np.int64))[after]
    rows = e[(*before, slice(None))]
    if p.function == DIVERGENCE:
        kept = torch.ones(p.leading, dtype=torch.bool) if weight is None else weight != 0
    else:
        kept = (targets != p.ignore_index) | (not p.targets)
    rows = rows[kept]
    heat = heat[before][kept][:, None] if isinstance(heat, Tensor) else heat
    log_p = torch.log_softmax(_logits(rows, c, bias, p.logit_scale, p.softcap) / heat, -1)
    lse = torch.logsumexp(_logits(rows, c, bias, p.logit_scale, p.softcap) / heat, -1)
    entropy = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1)
    own = targets[kept]
    valid = (own >= 0) & (own < p.vocabulary)
    target = log_p.gather(-1, torch.where(valid, own, 0)[:, None])[:, 0]
    target = torch.where(valid, target, torch.nan)
    m = torch.ones(own.shape) if weight is None else weight[after][kept]
    found: dict[str, Any] = {"lse": lse, "entropy": entropy, "log_probs": target}
    if p.function == LOG_PROBS and given.ids is not None:
        ids = torch.tensor(given.ids.astype(np.int64))[(*before, slice(None))][kept]
        inside = (ids >= 0) & (ids < p.vocabulary)
        of_ids = log_p.gather(-1, torch.where(inside, ids, 0))
        found["id_log_probs"] = torch.where(inside, of_ids, -torch.inf)
    items = m.sum()
    if p.function == CROSS_ENTROPY:
        w = optional.get("class_weight", torch.ones(p.vocabulary))
        each = -(1 - p.label_smoothing) * w[torch.where(valid, own, 0)] * target
        if p.label_smoothing:
            each = each - p.label_smoothing / p.vocabulary * (w * log_p).sum(-1)
        each, items = each + p.z_loss * lse**2, (m * w[torch.where(valid, own, 0)]).sum()
    elif p.function == DIVERGENCE:
        teacher = {name: tensor(x) for name, x in given.teacher.items()}
        of_t = teacher["e"][kept]
        z = _logits(of_t, teacher["c"], teacher.get("bias"), p.teacher_logit_scale, p.teacher_softcap)
        each = _divergence(log_p, torch.log_softmax(z / heat, -1), p)
    elif p.fn:
        arguments = [tensor(x)[kept] for x in given.arguments]
        each = function_of(p.fn, torch)(_Shown(target, lse, entropy), *arguments)
    else:
        each = torch.zeros(())
    total = m * each
    if p.reduction != "none":
        items = items if p.num_items is None else torch.tensor(p.num_items)
        total = total.sum() if p.reduction == "sum" else total.sum() / items if items else 0 * total.sum()
    found["loss"] = total
    objective = torch.zeros(())
    for name, cotangent in given.cotangents.items():
        y, g = found[name], torch.tensor(cotangent)
        g = g if g.dim() == 0 else g[kept]
        objective = objective + torch.where(y == -torch.inf, 0.0, y * g).sum()
    results = {name: _placed(found[name], kept) for name in p.results if name in found}
    if not p.differentiates:
        return results
    wanted = torch.autograd.grad(objective, [leaves[name] for name in p.wanted])
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    for name, x in zip(p.wanted, wanted, strict=True):
        rounded = x.to(kinds[p.type_of(name)])
        results[name] = rounded.float().numpy().astype(_NUMPY[p.type_of(name)])
    return results


def _placed(x: Tensor, kept: Tensor) -> np.ndarray:
    if x.dim() == 0:
        return x.detach().numpy()
    whole = torch.zeros((*kept.shape, *x.shape[1:]))
    whole[kept] = x.detach()
    return whole.numpy()


def _divergence(log_s: Tensor, log_t: Tensor, p: Program) -> Tensor:
    s, t = log_s.exp(), log_t.exp()

    def kl(p: Tensor, of_p: Tensor, of_q: Tensor) -> Tensor:
        return torch.where(p > 0, p * (of_p - of_q), 0.0).sum(-1)

    if p.divergence == "forward_kl":
        return kl(t, log_t, log_s)
    if p.divergence == "reverse_kl":
        return kl(s, log_s, log_t)
    log_m = torch.logaddexp(np.log(p.beta) + log_t, np.log1p(-p.beta) + log_s)
    return p.beta * kl(t, log_t, log_m) + (1 - p.beta) * kl(s, log_s, log_m)


_NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
