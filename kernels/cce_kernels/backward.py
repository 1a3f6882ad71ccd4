"""The backward pass, by the way that the plan says: recomputed.py or saved.py."""

from typing import Any

import jax

from cce_kernels import recomputed
from cce_kernels import saved as all_saved
from cce_kernels.arranged import Arranged
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
    return recomputed.gradients(run, way), None
