"""What a user chose when patching a model."""

from dataclasses import dataclass
from typing import Any, Literal

from cce_kernels import contract
from cce_torch.api import IMPLS, PRECISIONS, Impl, Reduction


@dataclass(frozen=True)
class Settings:
    """The options of `cce_patch`, which documents them. A ValueError says what is allowed."""

    reduction: Reduction = "mean"
    impl: Impl = "auto"
    memory_budget: float | Literal["all"] | None = None
    precision: Literal["highest", "high", "medium"] | None = None
    head_adapter: bool = False

    def __post_init__(self) -> None:
        contract.choice("reduction", self.reduction, contract.REDUCTIONS)
        contract.choice("impl", self.impl, IMPLS)
        contract.choice("precision", self.precision, (None, *PRECISIONS))
        contract.memory_budget(self.memory_budget)

    def of_loss(self) -> dict[str, Any]:
        """The options that `linear_cross_entropy` takes as they are."""
        return {"impl": self.impl, "memory_budget": self.memory_budget, "precision": self.precision}
