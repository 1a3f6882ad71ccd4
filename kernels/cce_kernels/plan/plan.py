"""A plan: everything that is decided about a call before it runs, as data. choose.py makes it, blocks.py runs it."""

from dataclasses import dataclass
from typing import Any, Literal

from cce_kernels.engines.engine import Engine, Multiplying, Step
from cce_kernels.request import Request

ScheduleName = Literal["in forward", "saved", "recomputed"]


@dataclass(frozen=True)
class Forward:
    """The first half of a block: target → sums → rescue. A step is None where the engine of `sums` does not need it."""

    sums: Step
    target: Step | None = None
    rescue: Step | None = None  # sums that overflowed, and saved exponentials whose reference is lse


@dataclass(frozen=True)
class Schedule:
    """The steps of one way to the gradients: those that make dz, or write the targets' elements, and multiply it."""

    way: ScheduleName
    products: Any = None  # Multiplying; None: XLA multiplies dz of a chunk, which it forms of logits
    of_few: Multiplying | None = None  # replaces `products` where few tokens are kept
    dz: Step | None = None  # of logits or exponentials; None: exponentials are multiplied, or it has no step of its own
    targets: Step | None = None  # writes the targets' elements, where the exponentials are multiplied
    # In the forward pass, a chunk of tokens at a time:
    chunks: Any = None  # Chunks
    dc: Any = None  # the step that sums dc
    thresholds: Step | None = None  # finds what the products leave out; None: nothing
    logits: Step | None = None  # computes a student's logits beside a teacher; None: XLA does, and passes over them
    passes: Step | None = None  # over both logits
    most_logits: int = 0  # of so many tokens of a chunk logits are held at a time, beside a teacher


@dataclass(frozen=True)
class Plan:
    """Hashable: it may be a static argument of a traced function."""

    request: Request
    gpu: Any  # device.Gpu; None: no CUDA device
    engine: Engine  # which computes the logits, or those of the backward pass
    rows: int  # into which the kept tokens are gathered; the last ones may be empty
    finds_ignored: bool  # whether ignored tokens are looked for; else they are computed and masked
    forward: Forward | None  # the steps of a block; None: plain XLA holds a chunk's logits, or those beside a teacher
    gradients: Schedule | None = None  # the way to the gradients; None: none is wanted
    held: int = 0  # the most bytes that this plan holds besides inputs and results; 0 for evaluation
    time: float = 0.0  # predicted (schedules.py); 0 for evaluation

    @property
    def way(self) -> ScheduleName | None:
        return None if self.gradients is None else self.gradients.way

    @property
    def saved(self) -> int:
        """Tokens whose exponentials are saved: all rows, or 0."""
        return self.rows * (self.way == "saved")

    @property
    def in_forward(self) -> Schedule | None:
        return self.gradients if self.way == "in forward" else None
