"""The logits of a drawn call in float64, what float32 may make of them, and their slope."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.search.calls import Program

BLOCK = 2**23  # logits at a time; on a GPU more, where the sums of all blocks take longest
COLDEST = 2.0**-100  # a lower temperature counts as this


@dataclass(frozen=True)
class Head:
    """How logits are made of products, and how exactly."""

    dtype: str
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, p: Program) -> "Head":
        return cls(p.dtype, 1.0 if p.logit_scale is None else p.logit_scale, p.softcap, max(p.temperature, COLDEST))

    @classmethod
    def of_teacher(cls, p: Program) -> "Head":
        scale = 1.0 if p.teacher_logit_scale is None else p.teacher_logit_scale
        return cls(p.teacher_dtype, scale, p.teacher_softcap, max(p.temperature, COLDEST))

    @property
    def eps(self) -> float:
        """Float32's distance of numbers near 1; of float64 what the truth itself is worth."""
        return 2.0**-44 if self.dtype == "float64" else 2.0**-23


@dataclass(frozen=True)
class Block:
    """The logits of some tokens, (n, V)."""

    z: Tensor  # a leaf
    slope: Tensor  # ∂z/∂y of the raw products y = e·c + b
    most: Tensor  # δz, what float32 may be off by
    usual: Tensor  # the part of it that is independent of the other logits, as a root mean square
    cut: Tensor  # the part that goes with the sum of the products, with its sign: what a tensor core cuts off of it
    log_p: Tensor
    lse: Tensor

    @property
    def p(self) -> Tensor:
        return torch.exp(self.log_p)


class Logits:
    """Of some tokens, a block of them at a time."""

    def __init__(
        self,
        e: np.ndarray,
        c: np.ndarray,
        bias: np.ndarray | None,
        head: Head,
        temperature: np.ndarray | None = None,
        device: str = "cpu",
    ):
        self.head, self.device = head, device
        self.e, self.c = self.put(e), self.put(c)
        self.bias = None if bias is None else self.put(bias)
        self.temperature = None if temperature is None else self.put(temperature)
        self.norms = self.e.norm(dim=1), self.c.norm(dim=1)

    def put(self, x: Any) -> Tensor:
        x = np.asarray(x)
        x = x.astype(np.float32) if x.dtype.itemsize == 2 else x  # exact, and half of what float64 takes to copy
        return torch.tensor(x, device=self.device).double()

    @property
    def vocabulary(self) -> int:
        return self.c.shape[0]

    def blocks(self) -> Iterator[slice]:
        rows = max(1, (BLOCK if self.device == "cpu" else 4 * BLOCK) // self.vocabulary)
        return (slice(i, i + rows) for i in range(0, self.e.shape[0], rows))

    def of(self, rows: slice) -> Block:
        head, eps = self.head, self.head.eps
        y = products = self.e[rows] @ self.c.T
        reach = self.norms[0][rows][:, None] * self.norms[1]
        if self.bias is not None:
            y, reach = y + self.bias, reach + self.bias.abs()
        y.requires_grad_()
        z = head.scale * y
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        z = z / (head.temperature if self.temperature is None else self.temperature[rows][:, None])
        (slope,) = torch.autograd.grad(z.sum(), y)
        y, z = y.detach(), z.detach()
        # A tensor core adds 16 products at a time to the sum and cuts off what lies below the largest one's last digit,
        # always towards 0. A sum of products of one sign loses up to ε of itself at each step; bounds.F doubles what is
        # counted here. Of products of float16, which have 22 digits, also most digits of the small ones are cut off.
        # Of float32's own products each is added alone, and each sum so far rounded, by a third of ε/2 or so.
        width = self.e.shape[1]
        steps = width / {"bfloat16": 32, "float16": 16}.get(head.dtype, 64)
        walk = 0.5 * steps**0.5 if head.dtype in ("bfloat16", "float16") else width**0.5 / 6
        there = torch.isfinite(y) & torch.isfinite(z)  # a bias may be −inf
        sizes = slope.abs(), y.abs(), products.detach().abs(), z.abs(), reach
        size, of_y, of_sum, of_z, reach = (torch.where(there, x, 0.0) for x in sizes)
        factors = 2 if self.temperature is None and head.temperature == 1 else 3
        most = eps * (size * (reach + 2 * of_y + steps * of_sum) + factors * of_z)
        kept = products.detach() if head.dtype in ("bfloat16", "float16") else torch.zeros_like(z)
        cut = eps * steps * size * torch.where(there, kept, 0.0)
        usual = eps * (size * (0.5 * reach + of_y + walk * of_sum) + of_z)
        slope = torch.where(there, slope, 0.0)
        lse = torch.logsumexp(z, 1)
        return Block(z.requires_grad_(), slope, most, usual, cut, torch.log_softmax(z.detach(), 1), lse)


def steepest(p: Program, e: Any, c: Any, bias: Any = None, temperature: Any = None) -> float:
    """The most that |scale| / temperature is where a sum over the vocabulary has terms that cancel; else 1.

    It has none where one logit is so far above the others that all p are 0 or 1. e: (..., D); c: (V, D).
    """
    head = Head.of(p)
    temperature = None if temperature is None else np.asarray(temperature).reshape(-1)
    logits, found = Logits(np.asarray(e).reshape(-1, p.width), np.asarray(c), bias, head, temperature), 1.0
    for rows in logits.blocks():
        x = logits.of(rows)
        at = torch.topk(x.z.detach(), min(2, p.vocabulary), dim=1)
        gap = at.values[:, 0] - at.values[:, -1] - x.most.gather(1, at.indices).sum(1)
        coldest = torch.full_like(gap, head.temperature) if temperature is None else logits.temperature[rows]
        reach = torch.where(gap < -2 * math.log(head.eps), abs(head.scale) / coldest, 1.0)
        found = max(found, float(reach.nan_to_num(1.0).amax())) if len(reach) else found
    return found
