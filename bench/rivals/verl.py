"""verl: Triton kernels for log-probabilities and entropy, and the same in chunks of PyTorch."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def numbers(backward: str = "_Split_Dlogits_N") -> Callable[..., Any]:
    """backward: how the gradients are formed, by its name in verl: from slices of dz (the default), or all of dz."""
    kernels = import_module("verl.utils.kernel.kernels")
    function = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def found(e, c, targets, temperature):
        kernels.set_backward_method(getattr(kernels.BackwardEnum, backward))
        return function(e, c, targets, temperature, "none")

    return found


def numbers_in_chunks(tokens: int = 512) -> Callable[..., Any]:
    """What verl calls its torch backend."""
    module = import_module("verl.utils.experimental.torch_functional")
    return lambda *x: module.FusedLinearForPPOFunction.apply(*x, tokens)
