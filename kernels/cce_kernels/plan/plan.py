"""A plan: everything that is decided about a call before it runs, as data. choose.py makes it.

There are three ways to the gradients (cce_kernels/blocks.py): the forward pass forms them; the forward pass saves the
exponentials of all tokens; the backward pass computes the logits again.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cce_kernels.engines.engine import Engine, Multiplying, Step
from cce_kernels.request import Request

# Of the tokens: with a smaller share kept, matmuls that stop at the last kept token beat XLA's matmuls of all tokens.
FEW_KEPT = 0.8


@dataclass(frozen=True)
class Forward:
    """The first half of a block: target → sums → rescue. A step is None where the engine of `sums` does not need it."""

    sums: Step
    target: Step | None = None
    rescue: Step | None = None  # sums that overflowed, and saved exponentials whose reference is lse


@dataclass(frozen=True)
class Recomputed:
    """The backward pass computes the logits again, a window of the vocabulary at a time."""

    dz: Step
    products: Multiplying
    of_few: Multiplying | None = None  # replaces `products` where few tokens are kept


@dataclass(frozen=True)
class Saved:
    """The forward pass saves the exponentials of all tokens, for the backward pass."""

    products: Multiplying
    of_few: Multiplying | None = None  # replaces `products` where few tokens are kept
    dz: Step | None = None  # forms dz of the exponentials, if Request.forms_dz; None: they are multiplied
    targets: Step | None = None  # writes the targets' elements, where the exponentials are multiplied


class Chunks(NamedTuple):
    """The tokens, kept ones first, in `count` chunks of `size` tokens. The last one may reach beyond the tokens."""

    count: int  # type: ignore[assignment]
    size: int

    @property
    def rows(self) -> int:
        return self.count * self.size


@dataclass(frozen=True)
class InForward:
    """The forward pass forms the gradients, a chunk of tokens at a time."""

    chunks: Chunks
    dc: Step  # sums dc
    de: Multiplying | None = None
    dz: Step | None = None  # makes dz of the exponentials, if Request.of_mean; None: they are multiplied
    targets: Step | None = None  # writes the targets' elements, where the exponentials are multiplied
    thresholds: Step | None = None  # finds what the products leave out; None: nothing
    logits: Step | None = None  # computes a student's logits beside a teacher; None: XLA does, and passes over them
    passes: Step | None = None  # over both logits
    most_logits: int = 0  # of so many tokens of a chunk logits are held at a time, beside a teacher; 0: of all

    def logits_of(self, size: int) -> int:
        """Of how many tokens of a chunk of this size the logits are held at a time."""
        return min(self.most_logits or size, size)


@dataclass(frozen=True)
class Plan:
    """Hashable: it may be a static argument of a traced function."""

    request: Request
    gpu: Any  # device.Gpu; None: no CUDA device
    engine: Engine  # which computes the logits, or those of the backward pass
    rows: int  # into which the kept tokens are gathered; the last ones may be empty
    finds_ignored: bool  # whether ignored tokens are looked for; else they are computed and masked
    forward: Forward | None  # the steps of a block; None: plain XLA holds a chunk's logits, or those beside a teacher
    gradients: Recomputed | Saved | InForward | None  # the way to the gradients; None: none is wanted
    held: int  # the most bytes that this plan holds besides inputs and results; 0 for evaluation
    time: float = 0.0  # predicted (times.py); 0 for evaluation

    @property
    def saved(self) -> int:
        """Tokens whose exponentials are saved: all rows, or 0."""
        return self.rows if isinstance(self.gradients, Saved) else 0

    @property
    def in_forward(self) -> InForward | None:
        return self.gradients if isinstance(self.gradients, InForward) else None

    @property
    def saves_de(self) -> bool:
        """Whether the forward pass forms de for any cotangents (blocks.de_of_any_cotangents), and saves that."""
        return self.in_forward is not None and not self.request.one_factor
