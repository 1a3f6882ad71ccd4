"""The forward pass: target → sums → rescue → saved exponentials. The plan says which engine runs each step.

    lse_i = log Σ_v exp z_iv        target_i = z_i,t_i        sum_i = Σ_v w_v z_iv

Each sum is of exp(z − reference), where the reference is the target's logit. Where such a sum overflows, the rescue
step computes that log-sum-exp again, with a running maximum. (The xla engine finds the target's logit and a running
log-sum-exp in one pass, and needs neither a reference nor a rescue.)
"""

import jax
import jax.numpy as jnp

from cce_kernels.engines.engine import Sums
from cce_kernels.exponentials import by_target
from cce_kernels.numbers import Inputs, Statistics
from cce_kernels.plan.plan import Plan
from cce_kernels.tokens import Kept, Rows


def statistics(inputs: Inputs, plan: Plan) -> tuple[Statistics, jax.Array | None]:
    """The core's numbers of each token, (N,), at least float32; and the saved exponentials, (plan.saved, V), or None.

    The target logit is 0 where the target names no column. An ignored token's numbers are arbitrary.
    """
    kept = Kept.of(inputs.targets, plan.rows) if plan.looks else None
    inputs, at = _arranged(inputs, kept, plan)
    vocabulary = plan.call.vocabulary
    sums = _sums(inputs, at, plan)
    named = (inputs.targets >= 0) & (inputs.targets < vocabulary)
    numbers = Statistics(
        sums.lse[0] if len(sums.lse) == 1 else jax.nn.logsumexp(sums.lse, axis=0),
        jnp.where(named, sums.target, 0.0),  # type: ignore[arg-type]
        None if sums.sum is None else jnp.sum(sums.sum, axis=0),
    )
    saved = None if sums.saved is None else _by_final_reference(inputs, numbers, sums.saved, plan)
    if kept is not None:
        numbers = jax.tree.map(kept.restored, numbers)
    return numbers, saved


def _arranged(inputs: Inputs, kept: Kept | None, plan: Plan) -> tuple[Inputs, Rows]:
    """The inputs with the kept tokens first in targets, and in e if e is gathered; and where kernels find rows of e."""
    if kept is None:
        return inputs, Rows()
    inputs = inputs._replace(targets=kept.gathered(inputs.targets, -1))
    if plan.forward.gathered:
        return inputs._replace(e=kept.gathered(inputs.e, 0)), Rows(count=kept.count)
    twin = plan.forward.scattered
    starts = None if twin is None else kept.starts(twin.tiles.rows)  # type: ignore[attr-defined]
    return inputs, Rows(kept.order, starts, kept.count)


def _sums(inputs: Inputs, at: Rows, plan: Plan) -> Sums:
    """The sums of every token and the logit of its target."""
    head, gpu, how = plan.call.head, plan.gpu, plan.forward
    reference = None
    if how.target is not None:
        reference = how.target.engine.target(inputs, at.order, head=head, tiles=how.target.tiles, gpu=gpu)
    sums = how.sums.engine.sums(inputs, at, reference, plan.saved, head=head, with_sum=plan.call.with_sum,
                                tiles=how.sums.tiles, splits=how.splits, gpu=gpu)  # fmt: skip
    if reference is None:
        return sums
    lse = sums.lse
    for step, relative_to, where in (
        (how.scattered, reference, at),
        (how.rescue, None, at._replace(starts=None)),
    ):
        if step is not None:
            lse = step.engine.again(inputs, where, relative_to, lse, head=head, tiles=step.tiles, gpu=gpu)
    return sums._replace(lse=lse, target=reference)


def _by_final_reference(inputs: Inputs, numbers: Statistics, saved: jax.Array, plan: Plan) -> jax.Array:
    """saved, with the exponentials written again for tokens whose reference is lse: `sums` did not know lse yet."""
    by_lse = (inputs.targets >= 0) & ~by_target(numbers, inputs.targets, plan.call.vocabulary)
    step = plan.forward.rescue
    assert step is not None
    return step.engine.replaced(inputs, numbers.lse, by_lse, saved, head=plan.call.head, tiles=step.tiles,
                                splits=plan.forward.splits, gpu=plan.gpu)  # fmt: skip
