"""A plan: everything that is decided about a call before it runs, as data. choose.py makes it, budget.py counts bytes.

A plan is for the kept tokens, gathered into `rows` rows, of which the last may be empty. There are three ways to the
gradients: the backward pass computes the logits again; the forward pass saves the exponentials of all tokens
(cce_kernels/exponentials.py); the forward pass forms the gradients (cce_kernels/in_forward.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cce_kernels.call import Call
from cce_kernels.engines.engine import Multiplying, Step
from cce_kernels.tokens import gathered_rows

# Of the tokens: with a smaller share kept, matmuls that stop at the last kept token beat XLA's matmuls of all tokens.
FEW_KEPT = 0.8


@dataclass(frozen=True)
class Forward:
    """Target → sums → rescue. A step is None where the engine of `sums` does not need it."""

    sums: Step
    gathered: bool  # whether e is copied with the kept tokens first; else kernels look up the row of each token
    target: Step | None = None
    scattered: Step | None = None  # where e is not gathered: the blocks whose tokens are not consecutive rows of e
    rescue: Step | None = None  # sums that overflowed, and saved exponentials whose reference is lse


@dataclass(frozen=True)
class Recomputed:
    """The backward pass computes the logits again, in groups (cce_kernels/backward.py)."""

    dz: Step
    products: Multiplying
    of_few: Multiplying | None = None  # replaces `products` where few tokens are kept


@dataclass(frozen=True)
class Saved:
    """The forward pass saves the exponentials of all tokens (cce_kernels/saved.py)."""

    products: Multiplying
    of_few: Multiplying | None = None  # replaces `products` where few tokens are kept
    dz: Step | None = None  # forms dz of the exponentials, if Call.forms_dz; None: they are multiplied
    targets: Step | None = None  # writes the targets' elements, where the exponentials are multiplied
    de: Step | None = None  # writes de in place of `products`, in the memory of the scaled e
    restored: Step | None = None  # moves rows of that de in place


class Chunks(NamedTuple):
    """The tokens, kept ones first, in chunks: `whole` of `size` tokens, then one of at most `last` tokens.

    The backward pass adds the last chunk's part of dc. last: the rows of what it is left, 0 where dc is summed in
    float32.
    """

    whole: int
    size: int
    last: int
    block: int  # columns of D that share a step where dc is summed in block floating point

    @property
    def rows(self) -> int:
        return self.whole * self.size + self.last

    def rows_of_de(self, tokens: int) -> int:
        """Of `rows`, those that may be tokens."""
        return min(self.rows, max(self.whole * self.size, gathered_rows(tokens)))


@dataclass(frozen=True)
class InForward:
    """Gradients formed in the forward pass (cce_kernels/in_forward.py)."""

    chunks: Chunks
    dc: Step  # sums dc
    forward: Forward | None = None  # the steps of a chunk whose exponentials are stored; None: its logits are, by XLA
    de: Multiplying | None = None
    dz: Step | None = None  # makes dz of the exponentials, if Call.forms_dz; None: they are multiplied
    targets: Step | None = None  # writes the targets' elements, where the exponentials are multiplied
    restored: Step | None = None  # moves rows of de in place; None: XLA copies them
    thresholds: Step | None = None  # finds what the products leave out; None: nothing
    logits: Step | None = None  # computes a student's logits beside a teacher; None: XLA does, and passes over them
    passes: Step | None = None  # over both logits
    most_logits: int = 0  # of so many tokens of a chunk logits are held at a time, beside a teacher; 0: of all

    def logits_of(self, size: int) -> int:
        """Of how many tokens of a chunk of this size the logits are held at a time."""
        return min(self.most_logits or size, size)


class Times(NamedTuple):
    """The predicted times of the three ways to the gradients, relative to the matmuls that they have in common.

    These are the matmuls of the logits and of the gradients that are wanted. inf: what the memory budget forbids.
    """

    recomputed: float  # the backward pass computes the logits again
    in_forward: float  # the forward pass forms the gradients
    saved: float  # the forward pass saves the exponentials of all tokens


@dataclass(frozen=True)
class Plan:
    """Hashable: it may be a static argument of a traced function."""

    call: Call
    gpu: Any  # device.Gpu; None: no CUDA device
    rows: int  # into which the kept tokens are gathered
    finds_ignored: bool  # whether ignored tokens are looked for; else they are computed and masked
    forward: Forward
    gradients: Recomputed | Saved | InForward | None  # the way to the gradients; None: none is wanted
    held: int  # the most bytes that this plan holds besides inputs and results; 0 for evaluation
    least: int  # the bytes that the least plan holds, whatever the budget; 0 for evaluation
    times: Times | None = None  # None for evaluation, and beside a teacher

    @property
    def saved(self) -> int:
        """Tokens whose exponentials are saved: all rows, or 0."""
        return self.rows if isinstance(self.gradients, Saved) else 0

    @property
    def in_forward(self) -> InForward | None:
        return self.gradients if isinstance(self.gradients, InForward) else None

    @property
    def saves_de(self) -> bool:
        """Whether the forward pass forms de for any cotangents (in_forward.of_any_cotangents), and saves that."""
        return self.in_forward is not None and not self.call.one_factor
