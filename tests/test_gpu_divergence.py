"""Divergences from a teacher on a GPU, drawn, against float64: by the engine that the plan chooses."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import test_divergence as of_jax
from tests import test_torch_divergence as of_torch
from tests.test_divergence import KINDS, STUDENT, Drawn, Ranges, held

pytestmark = pytest.mark.gpu
IMPLS, BUDGETS = ("auto", "cce", "chunked"), (0, 2**22, 2**25, None, "all")  # from chunks of few tokens to one
LARGE = Ranges(3000, (64, 512), (100, 20_000), 64, (0.05, 0.12), IMPLS, BUDGETS)
CALLS, CALLS_OF_TORCH = range(24), range(60, 72)
CONTRACT = 1.75  # times the error of rounding the true gradient


def draw(seed: int, ranges: Ranges = LARGE) -> Drawn:
    """Every sixth call has few tokens. The cotangent of a scalar rounds nothing: the gradients are rounded before."""
    x = of_jax.draw(seed, ranges if seed % 6 else replace(ranges, tokens=16))
    return of_torch.Drawn(x.arrays, x.options, x.of_tokens)


def truth(x: Drawn) -> dict[str, np.ndarray]:
    """What test_divergence.truth returns, differentiated by PyTorch in float64 on the device of the arrays."""
    of, tokens = x.options, x.arrays["e"].shape[:-1]

    def wide(name: str, dtype=None) -> torch.Tensor:
        array = x.arrays[name]
        return of_torch.tensor(array.astype(dtype or array.dtype)).double()

    weight = wide("token_weight") if "token_weight" in x.arrays else of_torch.tensor(jnp.ones(tokens)).double()
    temperature = wide("temperature") if "temperature" in x.arrays else of.get("temperature", 1.0)
    temperature = torch.as_tensor(temperature, dtype=torch.float64, device=weight.device).expand(tokens)[..., None]

    def side(prefix: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """log p and the tensors of a side, of which c and the bias are rounded to e's type."""
        dtype = x.arrays[f"{prefix}e"].dtype
        own = {name: wide(prefix + name, dtype) for name in STUDENT if prefix + name in x.arrays}
        own["e"] = torch.where(weight[..., None] == 0, 0, own["e"])
        own = {name: y.requires_grad_() for name, y in own.items()}
        z = own["e"] @ (own["c"] if of[f"{prefix}vocab_axis"] else own["c"].T) + own.get("bias", 0)
        z = z * (of[f"{prefix}logit_scale"] or 1.0)
        cap = of[f"{prefix}softcap"]
        return torch.log_softmax((z if cap is None else cap * torch.tanh(z / cap)) / temperature, -1), own

    (log_s, own), log_t, beta = side(""), side("teacher_")[0].detach(), of["beta"]

    def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return torch.sum(torch.exp(log_p) * (log_p - log_q), -1)

    if of["divergence"] == "jsd":
        log_m = torch.log(beta * torch.exp(log_t) + (1 - beta) * torch.exp(log_s))
        total = beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)
    else:
        total = kl(log_t, log_s) if of["divergence"] == "forward_kl" else kl(log_s, log_t)
    value, cotangent = weight * total, of_torch.tensor(x.of_tokens).double()
    if of["reduction"] != "none":
        items = of.get("num_items", float(weight.sum())) if of["reduction"] == "mean" else 1.0
        value, cotangent = value.sum() / (items or 1.0), x.of_scalar
    gradients = torch.autograd.grad((value * cotangent).sum(), list(own.values()))
    found = {"value": value, **dict(zip(own, gradients, strict=True))}
    if of["return_entropy"]:
        found["entropy"] = torch.where(weight == 0, 0, -torch.sum(torch.exp(log_s) * log_s, -1))
    return {name: y.detach().cpu().numpy() for name, y in found.items()}


@pytest.mark.parametrize("seed", CALLS)
def test_drawn_calls(seed):
    x = draw(seed)
    held(x, of_jax.ours(x), truth(x), CONTRACT)


@pytest.mark.parametrize("seed", CALLS_OF_TORCH)
def test_drawn_calls_of_pytorch(seed):
    """Every fourth by PyTorch alone."""
    x = draw(seed)
    held(x, of_torch.ours(x, x.options["impl"] if seed % 4 else "torch_compile"), truth(x), CONTRACT)


def test_everything_is_drawn():
    for seeds in (CALLS, CALLS_OF_TORCH):
        calls = [draw(seed) for seed in seeds]
        assert {x.options["divergence"] for x in calls} == set(KINDS)
        assert {x.options["reduction"] for x in calls} == {"mean", "sum", "none"}
        assert {x.options["impl"] for x in calls} == set(IMPLS)
        assert {x.options["memory_budget"] for x in calls} == set(BUDGETS)
        assert {x.arrays["e"].dtype.name for x in calls} == {"float32", "bfloat16", "float16"}
        by_kernels = [x for x in calls if x.arrays["e"].dtype == "bfloat16" and x.options["impl"] != "chunked"]
        assert {x.options["reduction"] == "none" for x in by_kernels} == {False, True}
        assert {"bias", "token_weight", "temperature"} <= {name for x in calls for name in x.arrays}
