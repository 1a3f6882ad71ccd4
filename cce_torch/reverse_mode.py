"""The error that forward mode and second derivatives get."""

from collections.abc import Callable
from typing import Any


def refusal(function: str, impls: str = "'cce', 'chunked', 'torch_compile' and 'auto'") -> Callable[..., Any]:
    """The rule for a derivative that there is not. function: the public one's name; impls: which have none."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"{function} has first derivatives in reverse mode only with impl={impls}; impl='reference' has "
            "forward-mode and higher-order derivatives, and holds the full logits"
        )

    return refuse
