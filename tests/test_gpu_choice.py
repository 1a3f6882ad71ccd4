"""The way to the gradients that a plan predicts to be the fastest, held to measured times of drawn calls on a GPU."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.calls import Call
from bench.data import Shape, trained
from bench.measure import in_turns
from cce_jax import linear_cross_entropy
from cce_kernels.plan import Plan, choose, plan_of

pytestmark = pytest.mark.gpu

CALLS = 12
WIDTHS = 768, 1024, 2048, 2304, 3072, 4096, 5120
VOCABULARIES = 32000, 49152, 65536, 128256, 151936, 200064, 256000
DEARER = 1.03  # what a wrong choice may cost


@dataclass(frozen=True)
class Drawn:
    shape: Shape
    memory_budget: int
    vocab_axis: Literal[0, 1]
    mixed: bool  # c is float32

    @classmethod
    def of(cls, number: int) -> "Drawn":
        """A call of at most 2⁴³ multiplications in each matmul."""
        rng = np.random.default_rng([1, number])
        shape = Shape(256 * int(2 ** rng.uniform(2, 8)), int(rng.choice(WIDTHS)), int(rng.choice(VOCABULARIES)))
        budget = int(2 ** rng.uniform(26, 30))
        drawn = cls(shape, budget, 0 if rng.uniform() < 0.5 else 1, bool(rng.uniform() < 0.4))
        return drawn if math.prod(shape) <= 2**43 else cls.of(number + CALLS)

    def compiled(self, in_forward: bool) -> tuple[list[tuple[Plan, Plan]], jax.stages.Lowered]:
        """The program that forms the gradients in the forward pass, or one that does not; and what was predicted."""
        tokens, width, vocabulary = self.shape
        c_shape, predicted = (vocabulary, width) if self.vocab_axis == 0 else (width, vocabulary), []

        def loss(e, c, targets):
            return linear_cross_entropy(e, c, targets, vocab_axis=self.vocab_axis, memory_budget=self.memory_budget)

        def is_faster(formed: Plan, other: Plan) -> bool:
            predicted.append((formed, other))
            return in_forward

        shapes = (
            jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
            jax.ShapeDtypeStruct(c_shape, jnp.float32 if self.mixed else jnp.bfloat16),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        with mock.patch.object(choose, "_is_faster", is_faster):
            plan_of.cache_clear()
            jax.clear_caches()
            lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes)
        plan_of.cache_clear()
        return predicted, lowered

    def arrays(self) -> tuple[jax.Array, ...]:
        e, c, targets = trained(self.shape)
        c = c if self.vocab_axis == 0 else c.T
        return e, c.astype(jnp.float32) if self.mixed else c, targets


def test_alone_the_way_that_is_predicted_to_be_fastest_is():
    """Within 3 %; of the ways that the budget allows."""
    drawn = [Drawn.of(number) for number in range(CALLS)]
    lowered = [(call, in_forward, *call.compiled(in_forward)) for call in drawn for in_forward in (False, True)]
    with ThreadPoolExecutor(12) as pool:
        programs = list(pool.map(lambda x: x[3].compile(), lowered))
    print("\nshape, budget in MiB, axis, type of c: predicted without and in the forward pass; measured, ms")
    wrong = []
    for call, (_, _, predicted, _), *ways in zip(drawn, lowered[::2], programs[::2], programs[1::2], strict=True):
        if not predicted:  # the budget holds no chunk
            continue
        plans, arrays = predicted[-1], call.arrays()
        named = zip(("without", "formed"), ways, strict=True)
        calls = {name: Call(partial(way, *arrays), jax.block_until_ready) for name, way in named}
        without, formed = in_turns(calls, 3).values()
        chooses, (in_time, others) = choose._is_faster(*plans), (plan.time for plan in plans)
        tokens, width, vocabulary = call.shape
        print(
            f"{tokens}x{width}x{vocabulary} {call.memory_budget // 2**20} {call.vocab_axis} "
            f"{'float32' if call.mixed else 'bfloat16'}: {others:.3f} {in_time:.3f}; "
            f"{without:.2f} {formed:.2f}",
            flush=True,
        )
        if (formed if chooses else without) > DEARER * min(without, formed):
            wrong.append((call, plans, without, formed))
    assert not wrong
