"""What torch.compile must not trace. Importing this imports torch._dynamo, which is slow: so only graphs import it."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="accumulate_into is written by the backward pass, outside of any graph")
def run(function: Callable, *arguments: Any) -> Any:
    return function(*arguments)
