"""Other packages' numbers per token, policy losses and divergences, by name and setting, the default first.

Each value imports its package when it is called, so a package that is missing costs its rows alone. Tensors are
e (N, D), c (V, D), targets (N,) int64, and for a divergence the teacher's e and c.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.calls import Call, tensors, wait_for_torch
from bench.rivals import full_logits, liger, trl, verl

Numbers = Callable[..., Any]  # (e, c, targets, temperature) -> (log_probs, entropy), each (N,)
Divergence = Callable[..., Any]  # (e, c, teacher_e, teacher_c) -> the mean over tokens
Policy = Callable[..., Any]  # (e, c, targets, old, advantage) -> the mean over tokens; old, advantage (N,)

NUMBERS: dict[str, Callable[[], Numbers]] = {
    "Liger": liger.numbers,
    "verl": verl.numbers,
    "TRL": trl.numbers,
    "full logits": full_logits.numbers,
    "Liger 2048": partial(liger.numbers_in_chunks, 2048),
    "TRL 8192x65536": partial(trl.numbers, 8192, 65536),
    "full logits compiled": partial(full_logits.numbers, True),
    "verl all of dz": partial(verl.numbers, "_Total_Separate"),
    "verl in chunks 2048": partial(verl.numbers_in_chunks, 2048),
    "Liger 512": partial(liger.numbers_in_chunks, 512),
    "verl in chunks 512": partial(verl.numbers_in_chunks, 512),
}
POLICIES: dict[str, Callable[[], Policy]] = {"Liger": liger.policy, "Liger 4": partial(liger.policy, 4)}
# Of beta, as Liger and TRL have it: 0 is forward KL, 1 reverse KL, 0.5 the divergence of Jensen and Shannon.
DIVERGENCES: dict[str, Callable[[float], Divergence]] = {
    "Liger": liger.divergence,
    "TRL": trl.divergence,
    "Liger 16": partial(liger.divergence, chunk_mem_const=16),
    "TRL 8192x65536": partial(trl.divergence, tokens=8192, columns=65536),
    "Liger 4": partial(liger.divergence, chunk_mem_const=4),
    "full logits compiled": partial(full_logits.divergence, compiled=True),
    "full logits": full_logits.divergence,
}


def forward(numbers: Numbers, *given: Any) -> Call:
    """log_probs and entropy without gradients, of the arrays e, c, targets."""
    import torch

    e, c, targets = tensors(*given)
    labels = targets.long()

    def run():
        with torch.no_grad():
            return numbers(e, c, labels, 1.0)

    return Call(run, wait_for_torch)


def step(numbers: Numbers, *given: Any) -> Call:
    """The numbers, de and dc. given: the arrays e, c, targets and the two cotangents (N,)."""
    import torch

    e, c, targets, *cotangents = tensors(*given)
    leaves, labels = [e.requires_grad_(), c.requires_grad_()], targets.long()

    def run():
        found = numbers(*leaves, labels, 1.0)
        of_found = [g.to(x.dtype) for g, x in zip(cotangents, found, strict=True)]
        return [x.detach() for x in found], torch.autograd.grad(found, leaves, of_found)

    return Call(run, wait_for_torch)


def loss_step(loss: Divergence | Policy, *given: Any) -> Call:
    """The loss, and the gradients of e and c. given: arrays, of which the first two have gradients."""
    import torch

    e, c, *rest = tensors(*given)
    leaves = [e.requires_grad_(), c.requires_grad_()]
    rest = [x if x.is_floating_point() else x.long() for x in rest]

    def run():
        value = loss(*leaves, *rest)
        return value.detach(), torch.autograd.grad(value, leaves)

    return Call(run, wait_for_torch)
