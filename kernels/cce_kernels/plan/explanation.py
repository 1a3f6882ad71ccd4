"""What a plan says of a call, for people: the engine, the way to the gradients, chunks, bytes, predicted time."""

import logging
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from cce_kernels.contract import EVERYTHING
from cce_kernels.engines import Impl, refusals
from cce_kernels.plan.plan import Plan

log = logging.getLogger("cce_kernels")
MIB = 2**20
GRADIENTS = {
    "recomputed": "from logits that the backward pass computes again",
    "saved": "from exponentials that the forward pass saves",
    "in forward": "in the forward pass",
}


@dataclass(frozen=True)
class Explanation:
    """How a call runs.

    engine: which engine computes the logits ("hopper", "triton" or "xla"). refused: why each faster engine does not.
    gradients: how they are formed; None for evaluation. chunks: the chunks of tokens in which the forward pass forms
    them, as (how many, tokens of each); None for the other ways. held: the most bytes that the call holds besides its
    inputs, its results and a few numbers for each token. memory_budget: in bytes. time: the predicted time of forward
    and backward, divided by that of the matrix products alone that the call cannot do without; None for evaluation. It
    is large for small calls, which take as long as their launches. leaves_out: whether the products leave out blocks,
    as a gradient_tolerance allows; None without a tolerance.
    """

    engine: str
    refused: dict[str, str]
    gradients: str | None
    chunks: tuple[int, int] | None
    held: int
    memory_budget: int
    time: float | None
    leaves_out: bool | None

    def __str__(self) -> str:
        lines = [f"engine: {self.engine}", *(f"  not {name}: {why}" for name, why in self.refused.items())]
        if self.gradients is None:
            return "\n".join([*lines, "gradients: none, as in evaluation; no time is predicted for it"])
        number, size = self.chunks or (0, 0)
        chunks = f", {number} chunk{'s' * (number != 1)} of {size} token{'s' * (size != 1)}" * (number > 0)
        budget = "all" if self.memory_budget >= EVERYTHING else f"{self.memory_budget / MIB:.0f} MiB"
        lines += [f"gradients: {self.gradients}{chunks}", f"memory: {self.held / MIB:.0f} MiB; memory_budget: {budget}"]
        if self.time is not None:
            large = "more than 10 times the matrix products alone, which take little of this call's time"
            time = f"{self.time:.2f} of the matrix products alone" if self.time <= 10 else large
            lines.append(f"predicted time: {time}")
        if self.leaves_out is not None:
            nothing = "does nothing here; only the engine hopper leaves out blocks, in the forward pass"
            lines.append(f"gradient_tolerance: {'blocks are left out of the products' if self.leaves_out else nothing}")
        return "\n".join(lines)


def explained(plan: Plan, impl: Impl, gradient_tolerance: float) -> Explanation:
    """gradient_tolerance: what the user gave. That of the plan's call is 0 where the plan leaves out nothing."""
    request, how = plan.request, plan.gradients
    faster = takewhile(lambda x: x[0] is not plan.engine, refusals(request, plan.gpu, impl).items())
    refused = {engine.name: why or engine.lacks("form_dz", request) for engine, why in faster}
    chunks = None if how is None or how.chunks is None else tuple(how.chunks)
    leaves_out = None if how is None or not gradient_tolerance else how.thresholds is not None
    time = None if request.teacher_width else plan.time or None  # the teacher's logits are in no prediction
    gradients, budget = GRADIENTS[plan.way] if plan.way else None, request.memory_budget
    return Explanation(plan.engine.name, refused, gradients, chunks, plan.held, budget, time, leaves_out)


def logged(plan: Plan, impl: Impl, gradient_tolerance: float) -> None:
    """Logs a plan once, in one line, at the level INFO."""
    if log.isEnabledFor(logging.INFO):
        _logged(plan, impl, gradient_tolerance)


@lru_cache(maxsize=4096)
def _logged(plan: Plan, impl: Impl, gradient_tolerance: float) -> None:
    n, d, v = plan.request.tokens, plan.request.width, plan.request.vocabulary
    told = str(explained(plan, impl, gradient_tolerance)).replace("\n", "; ")
    log.info("%s×%s×%s %s: %s", n, d, v, plan.request.dtype, told)
