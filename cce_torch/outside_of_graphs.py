"""What torch.compile must not trace. Importing this imports torch._dynamo, which is slow: see autograd.untraced."""

from collections.abc import Callable
from typing import Any

import torch

REASON = (
    "accumulate_into is written by the backward pass, and a graph would take the derivatives of torch.func and of "
    "forward mode for 0"
)


@torch.compiler.disable(reason=REASON)
def run(function: Callable, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)
