"""Calls of cce_torch on the NumPy inputs of a case."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from cce_torch import linear_cross_entropy
from tests.cases import Inputs


def tensor(x: np.ndarray, device: str = "cpu") -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.tensor(x.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(x, device=device)


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def run(given: Inputs, options: dict[str, Any], impl: str, device: str = "cpu", **more) -> tuple[Any, Any, dict]:
    """loss, lse and the gradients of Σ of_loss·loss (+ Σ of_lse·lse if lse is returned), as tests.call.run."""
    options = {"precision": "highest", **options, **more}
    returned = options.pop("return_lse", False)
    arrays = {k: tensor(v, device) for k, v in given.optional.items()}
    leaves = {k: tensor(v, device).requires_grad_() for k, v in given.differentiable().items()}
    optional = {k: leaves.get(k, v) for k, v in arrays.items()}
    c = leaves["c"]
    if options.get("vocab_axis"):
        c = leaves["c"] = c.detach().T.contiguous().requires_grad_()
    targets = torch.tensor(given.targets, device=device).long()
    loss, lse = linear_cross_entropy(leaves["e"], c, targets, impl=impl, return_lse=True, **optional, **options)
    objective = (loss * tensor(given.of_loss, device)).sum()
    if returned:
        objective = objective + (lse * tensor(given.of_lse, device)).sum()
    gradients = dict(zip(leaves, torch.autograd.grad(objective, list(leaves.values())), strict=True))
    if options.get("vocab_axis"):
        assert gradients["c"].stride() == c.stride()
        gradients["c"] = gradients["c"].T
    return array(loss), array(lse), {k: array(v) for k, v in gradients.items()}
