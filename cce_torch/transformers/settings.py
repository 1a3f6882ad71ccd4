"""What a user chose when patching a model."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cce_kernels import contract
from cce_kernels.default_budget import default_budget
from cce_torch.arguments import IMPLS, PRECISIONS
from cce_torch.options import Impl, Reduction

SHARE = 32  # by default the loss may hold one part in so many of the GPU's memory


@dataclass(frozen=True)
class Settings:
    """The options of `cce_patch`, which documents them. A ValueError says what is allowed."""

    reduction: Reduction = "mean"
    impl: Impl = "auto"
    memory_budget: float | Literal["all"] | None = None
    precision: Literal["highest", "high", "medium"] | None = None
    gradient_tolerance: float = 0.0
    head_adapter: bool = False
    evaluation: Literal["loss", "logits"] = "loss"

    def __post_init__(self) -> None:
        contract.choice("reduction", self.reduction, contract.REDUCTIONS)
        contract.choice("impl", self.impl, IMPLS)
        contract.choice("precision", self.precision, (None, *PRECISIONS))
        contract.choice("evaluation", self.evaluation, ("loss", "logits"))
        contract.memory_budget(self.memory_budget)
        contract.gradient_tolerance(self.gradient_tolerance)

    def of_loss(self, h: Tensor) -> dict[str, Any]:
        """The options that `linear_cross_entropy` takes as they are, for the hidden states h."""
        return {
            "impl": self.impl,
            "memory_budget": self._budget(h),
            "precision": self.precision,
            "gradient_tolerance": self.gradient_tolerance,
        }

    def _budget(self, h: Tensor) -> float | Literal["all"] | None:
        """memory_budget, or its default: a share of the GPU's memory, and never less than the loss's own default.

        The unpatched model holds its logits several times, at least 10·N·V bytes. A call that saves everything holds
        2·N·V bytes. So a share of the GPU makes the patched model fast, and it still holds much less.
        """
        if self.memory_budget is not None or not h.is_cuda:
            return self.memory_budget
        share = torch.cuda.get_device_properties(h.device).total_memory // SHARE
        width = h.shape[-1]
        least = default_budget(h.numel() // width, width, h.dtype.itemsize)
        return share if share > least else None
