"""The gradient of c, added to a buffer that exists, such as the main_grad of Megatron's parameters.

c reaches the loss through a task of autograd.py's rules, whose backward pass adds what it gets and hands on nothing. So
every way to the gradient ends here, whichever impl computes it, in one process or in several.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import arguments, autograd
from cce_torch.autograd import Gradients, Recomputed, Tensors

Buffer = Tensor | Callable[[], Tensor]
AT_A_TIME = 2**24  # elements of a buffer on a CPU, where PyTorch converts what it adds to the buffer's type first


def accumulated(x: arguments.Prepared, c: Tensor, buffer: Buffer, vocab_axis: int) -> arguments.Prepared:
    """x, whose c has a gradient that is added to the buffer. c: the caller's, (V, D), or (D, V) if vocab_axis is 1.

    buffer: of c's shape; or a function that the backward pass calls for it. Under torch.compile a break in the graph.
    """
    return autograd.untraced(_accumulated, x, c, buffer, vocab_axis)


def _accumulated(x: arguments.Prepared, c: Tensor, buffer: Buffer, vocab_axis: int) -> arguments.Prepared:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{x.called}: accumulate_into does not work with torch.func and torch.vmap: write loss.backward()"
        )
    if isinstance(buffer, Tensor) or not callable(buffer):
        check(buffer, c, x.called)
    if not torch.is_grad_enabled():
        return x
    if not c.requires_grad:
        raise ValueError(f"{x.called}: accumulate_into gets the gradient of c, but c requires none")
    (found,) = autograd.applied(Recomputed, _Adding(x.called, c, buffer, vocab_axis), x.c)
    return x._replace(c=found)


def check(buffer: Any, c: Tensor, function: str) -> None:
    """Raise unless the gradient of c can be added to the buffer."""
    name = "accumulate_into"
    arguments.check_tensor(name, buffer, function)
    if buffer.dtype not in arguments.FLOATING:
        allowed = ", ".join(str(x).removeprefix("torch.") for x in arguments.FLOATING)
        raise TypeError(f"{function}: {name} must be one of {allowed}, got {arguments.type_name(buffer)}")
    if buffer.shape != c.shape:
        raise ValueError(f"{function}: {name} must have c's shape, {tuple(c.shape)}, got {tuple(buffer.shape)}")
    if buffer.device != c.device:
        raise ValueError(f"{function}: {name} must be on c's device, {c.device}, got {buffer.device}")
    if buffer.requires_grad:
        raise ValueError(f"{function}: {name} requires a gradient: pass {name}.detach()")
    if any(n > 1 and step == 0 for n, step in zip(buffer.shape, buffer.stride(), strict=True)):
        raise ValueError(f"{function}: elements of {name} share memory, as expand() makes them: pass {name}.clone()")


class _Adding(NamedTuple):
    """The task: its one tensor is c, (V, D), and its result too. The graph holds the buffer."""

    called: str
    c: Tensor  # the caller's
    buffer: Buffer
    vocab_axis: int  # of the caller's c

    results = differentiable = 1

    def of_backward(self) -> "_Adding":
        return self

    def forward(self, c: Tensor) -> tuple[Tensor]:
        return (c.view_as(c),)

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        return ()

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Gradients:
        """Adds the cotangent. The gradient is None; zeros if c has Megatron's mark, which says that it was added."""
        (dc,) = cotangents
        if autograd.is_batched(dc):
            raise NotImplementedError(f"{self.called}: accumulate_into does not work with is_grads_batched=True")
        buffer: Any = self.buffer
        if not isinstance(buffer, Tensor):
            buffer = buffer()
            check(buffer, self.c, self.called)
        add(buffer.T if self.vocab_axis == 1 else buffer, dc.detach())
        if not hasattr(self.c, "grad_added_to_main_grad"):
            return (None,)
        self.c.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return (torch.zeros_like(dc) if dc.requires_grad else dc.zero_(),)  # nobody else reads dc


def add(buffer: Tensor, dc: Tensor) -> None:
    """buffer += dc, both (V, D), with no other array of this size."""
    rows = max(AT_A_TIME // max(dc.shape[1], 1), 1) if dc.device.type == "cpu" else len(dc)
    for into, part in zip(buffer.split(rows), dc.split(rows), strict=True):
        into.add_(part)
