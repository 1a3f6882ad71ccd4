"""The keyword arguments of linear_cross_entropy as types, which the overloads of the function and the module share."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from torch import Tensor

from cce_torch.processes.vocab_parallel import VocabParallel

Reduction = Literal["mean", "sum", "none"]
Impl = Literal["auto", "cce", "chunked", "reference", "torch_compile"]


class Options(TypedDict, total=False):
    """The keyword-only arguments of both the function and the module."""

    class_weight: Tensor | None
    logit_scale: float | None
    label_smoothing: float
    z_loss: float
    vocab_axis: Literal[0, 1]
    impl: Impl
    memory_budget: float | Literal["all"] | None
    precision: Literal["highest", "high", "medium"] | None
    check_targets: bool
    gradient_tolerance: float
    vocab_parallel: VocabParallel | None
    vocab_parallel_options: Any


class OptionsOfTokens(Options, total=False):
    """Those of the function."""

    token_weight: Tensor | None
    num_items: float | Tensor | None
    accumulate_into: Tensor | Callable[[], Tensor] | None


class OptionsOfModule(Options, total=False):
    """Those of the module: it takes all but return_lse in one way."""

    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: bool | int
