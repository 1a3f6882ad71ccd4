"""A plan: everything that is decided of a call before it runs, as data. choose.py makes it, budget.py counts its bytes.

A plan is for the kept tokens, in `rows` rows of which the last few may be empty. The first `saved` of them have their
exponentials saved by the forward pass (cce_kernels/exponentials.py); the others' logits the backward pass computes
again.
"""

from dataclasses import dataclass
from typing import Any

from cce_kernels.call import Call
from cce_kernels.engines.engine import Engine, Multiplying, Tile
from cce_kernels.windows import Groups

FEW = 0.8  # of the tokens: with fewer kept, products that stop there are faster than XLA's of all


@dataclass(frozen=True)
class Step:
    """Who runs a kernel, in which tiles."""

    engine: Engine
    tiles: Tile


@dataclass(frozen=True)
class Forward:
    """Target → sums → rescue. None where the engine of `sums` needs no such step."""

    sums: Step
    splits: int  # runs of the vocabulary, each summed by itself
    gathered: bool  # whether e is copied with the kept tokens first; else kernels look up where each row lies
    target: Step | None = None
    scattered: Step | None = None  # where e is not gathered: blocks whose tokens do not lie side by side
    rescue: Step | None = None  # rows that overflowed, and of what is saved those that go by another reference


@dataclass(frozen=True)
class Part:
    """The gradients that some of the tokens give."""

    tokens: int
    groups: Groups  # of the vocabulary, in which dz is formed; one where exponentials are multiplied as they are
    dz: Step | None  # None: the exponentials are multiplied as they are
    products: Multiplying
    few: Multiplying | None = None  # who multiplies instead where fewer than FEW of the tokens are kept


@dataclass(frozen=True)
class Backward:
    """Saved part, then the others, whose dc is added to that of the saved part.

    together: dc of both is one sum, rounded once, by the products of the others; and e, scaled for it, lies where de
    will. Then de_of_saved is the step that gives the saved part's de.
    """

    saved: Part | None
    others: Part | None
    de_of_saved: Step | None = None

    @property
    def together(self) -> bool:
        return self.de_of_saved is not None


@dataclass(frozen=True)
class Plan:
    """Hashable: it may be a static argument of a traced function."""

    call: Call
    gpu: Any  # device.Gpu; None: no CUDA device
    rows: int  # in which the kept tokens are gathered
    looks: bool  # whether ignored tokens are looked for; else they are computed and masked
    saved: int  # tokens
    forward: Forward
    backward: Backward | None  # None: no gradient is wanted
    held: int  # bytes that the gradients' plan holds at most beside inputs and results
    least: int  # bytes that the least plan holds, whatever the budget
