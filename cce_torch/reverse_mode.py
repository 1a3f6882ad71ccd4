"""The error that forward mode and second derivatives get."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def refuse(ctx: Any, *_: Any) -> Any:
    """The rule for a derivative that there is not. ctx.called: the public function's name."""
    raise NotImplementedError(
        f"{ctx.called} has first derivatives in reverse mode only with impl='cce', 'chunked', 'torch_compile' and "
        "'auto', and with vocab_parallel; in one process impl='reference' has forward-mode and higher-order "
        "derivatives, and holds the full logits"
    )


def applied(rule: Any, *arguments: Any) -> Any:
    """rule.apply(*arguments), where forward mode is an error. rule: a Function whose ctx has `called`."""
    return (rule if torch.compiler.is_compiling() else _with_jvp(rule)).apply(*arguments)


@cache
def _with_jvp(rule: Any) -> Any:
    """The rule for all but torch.compile, which takes none with a jvp."""
    return type(rule.__name__, (rule,), {"generate_vmap_rule": True, "jvp": staticmethod(refuse)})


def first_order(called: str, function: Callable, arguments: tuple, inputs: Sequence[Tensor | None] = ()) -> Any:
    """function(*arguments), for the backward pass of a Function. All such rules compute their gradients through this.

    If a graph of the backward pass is asked for, a derivative of the result is an error, by whichever input of the call
    it is taken. called: the public function, which the error names. inputs: those which the graph must know of, and
    which are not among the arguments: where the forward pass saved a rounded copy, or nothing. Under torch.compile,
    which allows no Function in the backward pass of another, there are no second derivatives.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function(*arguments)
    return _Guarded.apply(called, lambda *given: function(*given[len(inputs) :]), *inputs, *arguments)


class _Guarded(torch.autograd.Function):
    """function(*arguments), with an error for its own derivative."""

    generate_vmap_rule = True
    backward = jvp = staticmethod(refuse)

    @staticmethod
    def forward(called: str, function: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return function(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.called = inputs[0]
