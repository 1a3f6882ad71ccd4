"""How a call would run, without running it."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from cce_kernels import contract
from cce_torch.call import Call


def explain(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    vocab_axis: Literal[0, 1] = 0,
    impl: Literal["auto", "cce", "chunked"] = "auto",
    memory_budget: float | Literal["all"] | None = None,
    precision: Literal["highest", "high", "medium"] | None = None,
    gradients_of: Collection[str] = ("e", "c"),
    gradient_tolerance: float = 0.0,
) -> Any:
    """How `linear_cross_entropy(e, c, ...)` runs on this machine: print it, or read its fields.

    The same as cce_jax.explain, which says what the fields of the result are, for tensors: e (..., D), c (V, D), or
    (D, V) with vocab_axis=1, bias (V,). Only their shapes, types, layout and device are read. Raises ValueError where
    an option is out of its range, or the call would run PyTorch's own operators; it then says why, such as float64.
    """
    from cce_jax import plans
    from cce_kernels.plan.explanation import GRADIENTS
    from cce_torch.arguments import resolved
    from cce_torch.on_jax import kinds, programs

    contract.choice("reduction", reduction, contract.REDUCTIONS)
    contract.choice("impl", impl, ("auto", "cce", "chunked"))
    runs: Any = resolved(impl, e)
    if runs == "torch_compile":
        try:
            resolved("cce", e)
        except (NotImplementedError, TypeError) as error:
            raise ValueError(f"this call runs PyTorch's own operators, which plan nothing, as {error}") from None
    smooths = contract.number("label_smoothing", label_smoothing, low=0.0, high=1.0) > 0
    softcap, budget = contract.softcap(softcap), contract.memory_budget(memory_budget)
    call = Call(
        softcap,
        budget,
        contract.gradient_tolerance(gradient_tolerance),
        reduction=reduction,
        smooths=smooths,
        precision=precision,
        impl=runs,
        wide_dc=c.dtype != e.dtype,
    )
    kind = kinds.kind_of_tensors(e, c.T if vocab_axis else c, call)
    size = kind.sizes(e.numel() // max(e.shape[-1], 1))
    static = replace(kind.static, impl=impl)  # with "auto" the engines say why they refuse a CPU
    found = plans.explanation(kind.shapes(size, bias is not None), static, reduction, gradients_of)
    wanted = plans.wanted_of(gradients_of)
    left = programs.handover_of(kind, size, bias is not None, wanted)
    if left.at_once:
        return replace(found, gradients=GRADIENTS["in forward"], chunks=(1, size), held=found.held + left.bytes)
    return found
