"""Gradients from logits that the backward pass computes again, one group of the vocabulary at a time.

A group's logits are turned into dz, which two matmuls take (cce_kernels/gradients.py). Nothing is saved. Where the
logits of given ids have cotangents, dz at these ids is written over it first (cce_kernels/given_ids.py).
"""

from cce_kernels import given_ids
from cce_kernels.arranged import Arranged
from cce_kernels.engines.engine import Multiplying
from cce_kernels.gradients import add_groups
from cce_kernels.numbers import Gradients
from cce_kernels.plan.plan import Recomputed


def gradients(run: Arranged, way: Recomputed) -> Gradients:
    def found(products: Multiplying) -> Gradients:
        problem, count = run.problem, run.count if products.engine.stops else None
        form = way.dz.engine.form_dz(way.dz, problem, run.numbers.reference, run.relative, count)
        if run.at_ids is not None:
            form = given_ids.written(form, run.at_ids, run.count)
        start = run.zeros(problem)
        return add_groups(start, form, products.groups, run.products(products, problem))

    return run.finished(run.chosen(found, way.products, way.of_few))
