"""What both ways of the backward pass begin with: the tokens, kept ones first, and the cotangents of their numbers.

Ignored tokens come last (cce_kernels/tokens.py). XLA's matmuls of all tokens are faster than matmuls that stop at the
last kept token, unless many tokens are ignored. Only the device knows how many are ignored, so the device chooses.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels import given_ids
from cce_kernels.engines.engine import Multiplying, Problem
from cce_kernels.gradients import Products, fitted, unscaled, without_ignored
from cce_kernels.mean import cleared, relative
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Gradients, Inputs, Statistics, Wanted
from cce_kernels.plan.plan import FEW_KEPT, Plan
from cce_kernels.tokens import Kept


class Arranged(NamedTuple):
    """The tokens of a backward pass, kept ones first. e is as the caller gave it: `problem` gathers its rows."""

    plan: Plan
    inputs: Inputs
    numbers: Statistics  # the reference is FLOAT32_MAX for ignored tokens
    cotangents: Cotangents  # without those of ids
    at_ids: given_ids.AtIds | None  # dz at the given ids; None: their logits have no cotangents
    unit: jax.Array | None  # the number that the cotangents and at_ids were divided by; None: 1
    kept: Kept | None  # None: ignored tokens are not looked for
    count: jax.Array  # type: ignore[assignment]  # (1,) int32: how many tokens are kept
    are_few: jax.Array | None  # whether fewer than FEW_KEPT of the tokens are kept; None: they are not looked for

    @classmethod
    def of(cls, inputs: Inputs, numbers: Statistics, cotangents: Cotangents, plan: Plan) -> "Arranged":
        # Without the barrier XLA would reuse the forward pass's copy of the kept rows of e, and hold it between the
        # passes, or make the copy in which ignored rows are 0 before the forward pass. The barrier makes such a copy
        # depend on the forward pass's result. No array of the caller's goes through it: XLA takes what comes out for
        # another array, and may write a result of the caller's over the array while kernels still read what came out.
        # All that was gathered goes through it: else one fusion would read the order of the tokens twice, under its
        # names before and after the barrier, and XLA may write that fusion's result over the order.
        kept, at_ids, numbers = None, None, numbers._replace(sum=None)
        if cotangents.ids is not None:
            at_ids = given_ids.dz_at(inputs, numbers, cotangents, plan.call)
        inputs, numbers = inputs._replace(ids=None), numbers._replace(ids=None)
        if plan.finds_ignored:
            kept = Kept.of(inputs.targets, plan.rows)
            reference, inputs = kept.gathered(numbers.reference, FLOAT32_MAX), kept.first(inputs)
            cotangents, numbers = kept.gathered((cotangents, numbers._replace(reference=None)), 0)
            at_ids = kept.gathered(at_ids, -1)
            of_tokens = inputs.targets, inputs.inverse_temperature
            kept, numbers, cotangents, reference, at_ids, (targets, inverse) = lax.optimization_barrier(
                (kept, numbers, cotangents, reference, at_ids, of_tokens)
            )
            inputs = inputs._replace(targets=targets, inverse_temperature=inverse)
        else:
            missing = plan.rows - plan.call.tokens
            inputs, reference, cotangents = without_ignored(inputs, numbers.reference, cotangents, plan.rows)
            at_ids = jax.tree.map(lambda x: jnp.pad(x, [(0, missing), (0, 0)], constant_values=-1), at_ids)
            live = inputs.targets[: plan.call.tokens] >= 0
            numbers = jax.tree.map(lambda x: jnp.pad(cleared(x, live), (0, missing)), numbers)
        numbers = numbers._replace(reference=reference)
        cotangents, unit = fitted(cotangents, numbers, inputs)
        if at_ids is not None and unit is not None:
            at_ids = at_ids._replace(dz=at_ids.dz / unit)
        cotangents = cotangents._replace(ids=None)
        count = jnp.full(1, plan.rows, jnp.int32) if kept is None else kept.count
        are_few = None if kept is None else count[0] < FEW_KEPT * plan.rows
        return cls(plan, inputs, numbers, cotangents, at_ids, unit, kept, count, are_few)

    @property
    def relative(self) -> Cotangents:
        """The cotangents relative to exponentials of the numbers' reference."""
        return relative(self.cotangents, self.numbers, self.inputs.targets >= 0)

    @property
    def problem(self) -> Problem:
        """The problem, with the rows of e gathered: at each use, so that only one copy exists at a time."""
        problem, e = self.problem_without_e, self.inputs.e
        return problem if self.kept is None else problem.with_e(self.kept.gathered(e, 0))

    @property
    def problem_without_e(self) -> Problem:
        """The problem for steps that do not read e, whose rows are in the caller's order."""
        return Problem(self.plan.call, self.plan.gpu, self.inputs)

    @property
    def wanted(self) -> Wanted:
        return self.plan.call.wants

    def zeros(self, problem: Problem) -> Gradients:
        """de and dbias as zeros, at least float32; dc uninitialised, as the groups write all of it."""
        (e, c, *_), wanted, wide = problem.inputs, self.wanted, problem.call.sum_dtype
        return Gradients(
            jnp.zeros(e.shape, wide) if wanted.e else None,
            lax.empty(c.shape, self.plan.call.dc_dtype) if wanted.c else None,
            jnp.zeros((self.plan.call.vocabulary,), wide) if wanted.bias else None,
        )

    def products(self, how: Multiplying, problem: Problem) -> Products:
        return how.engine.products(how, problem, self.unit, self.count)

    def chosen(
        self, found: Callable[[Multiplying], Gradients], products: Multiplying, of_few: Multiplying | None
    ) -> Gradients:
        """found(of_few) if few tokens are kept and the plan has such matmuls, else found(products)."""
        if self.are_few is None or of_few is None:
            return found(products)
        return lax.cond(self.are_few, lambda: found(of_few), lambda: found(products))

    def finished(self, found: Gradients) -> Gradients:
        """The gradients times the unit, in their types; de of each token in its own row."""
        de, dc, dbias = found
        if de is not None and dc is not None:
            # So that the rows of the result de are written after dc. Until then their memory holds the gathered e,
            # from which dc is computed.
            de, dc = lax.optimization_barrier((de, dc))
        if de is not None:
            de = unscaled(de, self.unit, self.plan.call.de_dtype)
            de = de[: self.plan.call.tokens] if self.kept is None else self.kept.restored(de)
        return Gradients(de, dc, None if dbias is None else unscaled(dbias, self.unit, self.plan.call.dc_dtype))
