"""A drawn call of cce_torch with its tensors: what a transformation transforms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

Named = dict[str, Tensor]
OF_TOKENS = "e", "targets", "token_weight", "ids", "temperature", "teacher_e"  # and the arguments of fn


@dataclass(frozen=True)
class Bound:
    """The public function with its options, and tensors by the names of its arguments."""

    function: Callable[..., Any]  # of the tensors by name
    reference: Callable[..., Any]  # the same by the implementation that holds the logits
    named: Callable[[Any], Named]  # what it returns, by name
    leaves: Named  # those that may have a gradient
    others: Named
    wanted: tuple[str, ...]  # the leaves that require one
    cotangents: Named  # of the results that are differentiated
    leading: tuple[int, ...]  # the shape of the tokens
    shift: int
    seed: int
    steepest: float  # logits.steepest
    autocast_type: torch.dtype = torch.bfloat16
    backend: str = "aot_eager"
    accumulates: bool = False  # whether the function takes accumulate_into

    def __call__(self, leaves: Named | None = None, others: Named | None = None) -> Named:
        leaves = self.leaves if leaves is None else leaves
        return self.named(self.function(**leaves, **(self.others if others is None else others)))

    @cached_property
    def _coins(self) -> np.ndarray:
        return np.random.default_rng([self.seed, 7]).integers(2**31, size=4)

    def drawn(self, count: int, which: int = 0) -> int:
        """A number below count, the same at each call."""
        return int(self._coins[which]) % count

    def detached(self) -> Named:
        return {name: x.detach() for name, x in self.leaves.items()}

    def wanted_leaves(self) -> list[Tensor]:
        return [self.leaves[name] for name in self.wanted]

    def total(self, results: Named) -> Tensor:
        """The objective: the sum of the results times their cotangents."""
        every = [
            (results[name] * cotangent.to(results[name].dtype)).sum() for name, cotangent in self.cotangents.items()
        ]
        return sum(every[1:], every[0])

    def gradients(
        self, results: Named, of: Sequence[str] | None = None, factor: Tensor | None = None, **more: Any
    ) -> Named:
        """The gradients of the objective, times the factor, in these leaves or in those that are wanted."""
        of = self.wanted if of is None else of
        if not of:
            return {}
        total = self.total(results)
        found = torch.autograd.grad(total if factor is None else factor * total, [self.leaves[x] for x in of], **more)
        return dict(zip(of, found, strict=True))

    def is_of_tokens(self, name: str, x: Tensor) -> bool:
        """Whether the first axis of x is that of the tokens."""
        axes = len(self.leading) + (name in ("e", "teacher_e", "ids"))
        of_tokens = name in OF_TOKENS or name.startswith("argument")
        return of_tokens and bool(self.leading) and x.dim() == axes

    @property
    def can_reorder(self) -> bool:
        """Whether the first axis holds rows that do not depend on each other."""
        return len(self.leading) > 1 or (len(self.leading) == 1 and not self.shift)

    def reordered(self, name: str, x: Tensor) -> Tensor:
        """An argument whose tokens, or rows of tokens, are in the opposite order."""
        if not self.can_reorder or not self.is_of_tokens(name, x):
            return x
        signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(x.dtype)
        return x.flip(0) if signed is None else x.view(signed).flip(0).view(x.dtype)  # PyTorch flips no such integers

    def in_order(self, name: str, x: Tensor, k: int) -> Tensor:
        """A result or a gradient of the call (k = 0), or of the call reordered (k = 1), in the order of the call."""
        is_result = name not in self.leaves
        if k == 0 or not self.can_reorder or not (x.dim() > 0 if is_result else self.is_of_tokens(name, x)):
            return x
        return x.flip(0)

    def in_that_order(self, k: int) -> "Bound":
        """The call with the cotangents of the call (k = 0), or of the call reordered (k = 1)."""
        return replace(self, cotangents={name: self.in_order(name, x, k) for name, x in self.cotangents.items()})

    def directions(self) -> Named:
        """Of the leaves that are wanted, a drawn tensor of each leaf's type and shape."""
        generator = torch.Generator().manual_seed(self.seed)
        return {
            name: torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x)
            for name, x in self.leaves.items()
            if name in self.wanted
        }

    def unit(self) -> float:
        """What rounding to the narrowest type of the leaves costs."""
        return max(float(torch.finfo(x.dtype).eps) for x in self.leaves.values())

    def in_float64(self) -> "Bound":
        """The same numbers in float64, by the reference."""

        def wide(x: Named) -> Named:
            return {name: y.detach().double() if y.is_floating_point() else y for name, y in x.items()}

        return replace(
            self,
            function=self.reference,
            leaves=wide(self.leaves),
            others=wide(self.others),
            cotangents=wide(self.cotangents),
        )

    def noise(self, along: Named, order: int = 1) -> float:
        """What float32 may make of a product of directions with derivatives of that order, whose terms may cancel.

        Each order multiplies terms by ∂z/∂y and by a row of another array, also where rows of c are alike and the
        derivative is 0.
        """
        largest = max(float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0 for x in self.leaves.values())
        reach = sum(float(x.abs().double().sum()) for x in along.values())
        double = any(x.dtype == torch.float64 for x in self.leaves.values())
        size = sum(float(x.abs().double().sum()) for x in self.cotangents.values())
        return (1e-13 if double else 1e-5) * (1 + self.steepest * largest) ** order * reach * size
