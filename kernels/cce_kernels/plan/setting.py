"""What a choice starts from: a request, the engines that serve it, and the rows that these compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Block, Costs, Engine, Step
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.xla import XLA
from cce_kernels.exponentials import saved_shape
from cce_kernels.plan.plan import Forward, Plan, Schedule
from cce_kernels.request import Request
from cce_kernels.tokens import MANY, gathered_rows

Impl = Literal["auto", "cce", "chunked"]
KERNELS = (HOPPER, TRITON)  # Pallas, fastest first
EVALUATED = 16 * 2**20  # the most bytes of rows of e that evaluation copies at a time


def engines(itemsize: int, impl: Impl) -> Sequence[Engine]:
    """The engines that may compute a call, fastest first (bench/engines.py). itemsize: of e, in bytes."""
    if impl == "chunked":
        return (XLA,)
    if impl == "cce":
        return KERNELS
    return (XLA,) if itemsize > 2 else (*KERNELS, XLA)  # with float32 Triton takes 1.4 to 2.1 times as long as XLA


def needs_reference(itemsize: int, impl: Impl) -> bool:
    """Whether shards of the vocabulary must know the targets' logits before their sums, whatever the shards' sizes."""
    return not all(engine.finds_target for engine in engines(itemsize, impl))


def many_on(gpu: Gpu | None) -> int:
    """The fewest tokens of which ignored ones are looked for."""
    return 32 if gpu is not None and gpu.interpreted else MANY


@dataclass(frozen=True)
class Setting:
    """A request and the engines that serve it. The first computes the logits; the next have steps that it lacks."""

    request: Request
    gpu: Gpu | None
    serving: tuple[Engine, ...]
    most_logits: int = 0  # of a part of a chunk, beside a teacher; 0: of a chunk

    @property
    def engine(self) -> Engine:
        return self.serving[0]

    @property
    def costs(self) -> Costs:
        return self.engine.costs(self.request, self.gpu)

    @property
    def products(self) -> Engine:
        """The engine whose matmuls of all tokens are fastest, where nothing is saved."""
        return self.engine if self.engine.multiplies_fastest else XLA

    @property
    def stores(self) -> bool:
        """Whether the forward pass can store exponentials, and the engine sums dc. Else XLA holds a chunk's logits."""
        return self.engine.stops and self.request.can_be_saved

    @property
    def columns(self) -> int:
        """The columns of exponentials: the vocabulary, rounded up."""
        return saved_shape(1, self.request.vocabulary)[1]

    @property
    def finds_ignored(self) -> bool:
        """Whether ignored tokens are looked for: the engine stops at the last kept token, and there are many tokens."""
        return self.engine.stops and self.request.tokens >= many_on(self.gpu)

    @cached_property
    def rows(self) -> int:
        """The rows into which kept tokens are gathered. Evaluation copies them in blocks, and this is one block."""
        request, evaluates = self.request, self.request.wanted is None
        if not self.finds_ignored:
            return request.tokens if evaluates or self.engine.stops else XLA.rows(request, self.gpu)
        rows, many = gathered_rows(request.tokens), many_on(self.gpu)
        if not evaluates:
            return rows
        most = max(min(EVALUATED, request.memory_budget) // (request.itemsize * request.width) // many, 1) * many
        return min(rows, cdiv(rows, cdiv(rows, most) * many) * many)

    def step(self, method: str, block: Block | None = None) -> Step:
        """The step of the first engine that has this method of engine.Launched."""
        engine = next(engine for engine in self.serving if engine.offers(method, self.request))
        return engine.step(method, self.request, self.gpu, self.rows, block)

    def plan(self, forward: Forward | None, how: Schedule | None = None, held: int = 0, time: float = 0.0) -> Plan:
        """The plan of one way."""
        sparse = how is not None and how.thresholds is not None
        request = self.request if sparse else replace(self.request, gradient_tolerance=0.0)
        return Plan(request, self.gpu, self.engine, self.rows, self.finds_ignored, forward, how, held, time)
