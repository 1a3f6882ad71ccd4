"""The elementwise functions of a block, compiled by torch.compile at their first use where that works."""

import functools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_uncompilable: set[str] = set()  # device types on which torch.compile has failed


def fused(function: Callable, *arguments: Any) -> Any:
    """function(*arguments), compiled by torch.compile if that works on this device. arguments: a Block, then others."""
    device = arguments[0].raw.device.type
    if device not in _uncompilable:
        from torch._dynamo import exc  # imported here: importing the compiler takes seconds

        try:
            return _compiled(function, _variant(arguments))(*arguments)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            _uncompilable.add(device)
            warnings.warn(
                f"impl='torch_compile' runs uncompiled on {device}, slower and in more memory, since torch.compile "
                f"failed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return function(*arguments)


def plain(function: Callable, *arguments: Any) -> Any:
    return function(*arguments)


def _variant(x: Any) -> Any:
    """What makes torch.compile compile again for an argument: any size but 1 shares one compilation."""
    if isinstance(x, tuple):
        return tuple(map(_variant, x))
    if not isinstance(x, Tensor):
        return x
    return x.dtype, x.device, x.is_inference(), *(n == 1 for n in x.shape)


@functools.cache
def _compiled(function: Callable, variant: tuple) -> Callable:
    """function, compiled for arguments of one variant.

    torch.compile counts compilations by a function's code, and after eight of them it runs the function uncompiled. So
    each variant has code of its own. With fullgraph=True the limit would be an error.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(own, dynamic=True, fullgraph=True)
