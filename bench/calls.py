"""A call that can be timed, in either framework, and the three kinds of it that are.

loss-fw: the loss where nothing needs a gradient, as in evaluation. A method that takes its gradients in the forward
pass whether they are needed or not pays for them here.
loss-bw: the backward pass alone, after a forward pass that is not counted.
loss-fw-bw: the loss and both gradients, a training step's share.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

KINDS = ("loss-fw", "loss-bw", "loss-fw-bw")


class Call(NamedTuple):
    """`run(*prepare())` is the call, of which only `run` is measured; `wait` blocks until a result is there."""

    prepare: Callable[[], tuple]
    run: Callable[..., Any]
    wait: Callable[[Any], object]
    scratch: int | None = None  # bytes of temporary device memory, where the framework tells
    output: int | None = None  # bytes of results

    def __call__(self) -> Any:
        result = self.run(*self.prepare())
        self.wait(result)
        return result
