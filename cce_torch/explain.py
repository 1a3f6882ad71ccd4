"""How a call would run, without running it."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import arguments
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
    (D, V) with vocab_axis=1, bias (V,). Only their shapes, types, layout and device are read. Raises a ValueError where
    the call would run PyTorch's own operators, and says why, such as float64; and what the call raises.
    """
    from cce_jax import plans
    from cce_kernels.plan.explanation import GRADIENTS
    from cce_torch.on_jax import kinds, programs

    contract.choice("impl", impl, ("auto", "cce", "chunked"))
    numbers = dict(softcap=softcap, label_smoothing=label_smoothing)
    numbers |= dict(memory_budget=memory_budget, gradient_tolerance=gradient_tolerance)
    options = arguments.checked(arguments.Options(reduction, impl, vocab_axis, precision, **numbers))
    given = {"e": e, "c": c} | ({} if bias is None else {"bias": bias})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            arguments.check_other(name, x, "linear_cross_entropy")
    described = [(name, (x.shape, x.dtype)) for name, x in given.items()]
    arguments.fit(options, None, None, (*described, ("targets", (e.shape[:-1], torch.int64))))
    runs: Any = arguments.resolved(impl, e)
    if runs == "torch_compile":
        try:
            arguments.resolved("cce", e)
        except (NotImplementedError, TypeError) as error:
            raise ValueError(f"this call runs PyTorch's own operators, which plan nothing, as {error}") from None
    call = Call(
        options.softcap,
        options.memory_budget,
        options.gradient_tolerance,
        reduction=reduction,
        smooths=options.label_smoothing > 0,
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
