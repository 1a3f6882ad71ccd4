"""The backward pass, by the way that the plan says: from saved exponentials (saved.py), or from logits computed again.

The latter are computed one group of the vocabulary at a time. A group's logits are turned into dz, which two matmuls
take (cce_kernels/gradients.py). Nothing is saved. Where the logits of given ids have cotangents, dz at these ids is
written over it first (cce_kernels/given_ids.py).
"""

from typing import Any

import jax

from cce_kernels import given_ids
from cce_kernels import saved as all_saved
from cce_kernels.arranged import Arranged
from cce_kernels.engines.engine import Multiplying
from cce_kernels.gradients import add_groups
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Statistics
from cce_kernels.plan.plan import Plan, Recomputed, Saved


def gradients(
    inputs: Inputs, numbers: Statistics, saved: Any, cotangents: Cotangents, plan: Plan
) -> tuple[Gradients, jax.Array | None]:
    """de, dc and dbias in e's type, None where not wanted; and saved, which has been overwritten.

    numbers and saved (an array or None): the results of forward.statistics with the same plan. Ignored tokens
    contribute nothing.
    If the columns are a shard of the vocabulary, numbers and cotangents are those over all columns, but the reference
    is the shard's own, and de is the sum over these columns alone. de is at least float32 if plan.call.wide_de, and so
    are dc and dbias if plan.call.wide_dc.
    """
    way = plan.gradients
    run = Arranged.of(inputs, numbers, cotangents, plan)
    if isinstance(way, Saved):
        assert saved is not None
        return all_saved.gradients(run, way, saved)
    assert isinstance(way, Recomputed)
    return _recomputed(run, way), None


def _recomputed(run: Arranged, way: Recomputed) -> Gradients:
    def found(products: Multiplying) -> Gradients:
        problem, count = run.problem, run.count if products.engine.stops else None
        form = way.dz.engine.form_dz(way.dz, problem, run.numbers, run.relative, count)
        if run.at_ids is not None:
            form = given_ids.written(form, run.at_ids, run.count)
        start = run.zeros(problem)
        return add_groups(start, form, products.groups, run.products(products, problem))

    return run.finished(run.chosen(found, way.products, way.of_few))
