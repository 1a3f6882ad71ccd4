"""The error that forward mode and second derivatives get."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def refusal(function: str, impls: str = "'cce', 'chunked', 'torch_compile' and 'auto'") -> Callable[..., Any]:
    """The rule for a derivative that there is not. function: the public one's name; impls: which have none."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"{function} has first derivatives in reverse mode only with impl={impls}; impl='reference' has "
            "forward-mode and higher-order derivatives, and holds the full logits"
        )

    return refuse


def first_order(rule: Any, function: Callable, arguments: tuple, inputs: tuple[Tensor | None, ...] = ()) -> Any:
    """function(*arguments), for the backward pass of a Function. All such rules compute their gradients through this.

    If a graph of the backward pass is asked for, a derivative of the result is the error of `rule` (a Guarded), by
    whichever input of the call it is taken. inputs: those which the graph must know of, and which are not among the
    arguments: where the forward pass saved a rounded copy, or nothing. Under torch.compile, which allows no Function in
    the backward pass of another, there are no second derivatives.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*arguments)
    return rule.apply(lambda *given: function(*given[len(inputs) :]), *inputs, *arguments)


class Guarded(torch.autograd.Function):
    """function(*arguments), with an error for its own derivative."""

    generate_vmap_rule = True
    backward = jvp = staticmethod(refusal("linear_cross_entropy"))

    @staticmethod
    def forward(function: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return function(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass
