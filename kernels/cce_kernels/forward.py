"""The forward pass: target → sums → rescue → saved exponentials. The plan says which engine runs each step.

    log_mass_i = log Σ_v exp(z_iv − ρ_i)     target_i = z_i,t_i     sum_i = Σ_v w_v (z_iv − ρ_i)
    mean_i = Σ_v p_iv (z_iv − ρ_i)

The logits of given ids are computed apart from these steps (cce_kernels/given_ids.py).
The reference ρ is the target's logit. Where a sum of exp(z − ρ) overflows, or there is no target, the rescue step
computes the token again, relative to a running maximum. With a mean, a token whose lse is more than LARGEST above the
target's logit is rescued too. At the end these references become others:
    of a rescued token      the maximum with a mean, lse without one
    of any other token      lse, where it is more than LARGEST above the target's logit
(The xla engine finds the target's logit and a running maximum in one pass. The maximum is its reference: it needs no
rescue.)
"""

import jax
import jax.numpy as jnp

from cce_kernels import given_ids
from cce_kernels.engines.engine import Problem, Sums
from cce_kernels.exponentials import LARGEST
from cce_kernels.mean import over_runs
from cce_kernels.numbers import FLOAT32_MAX, Inputs, Statistics, origin_of
from cce_kernels.plan.plan import Forward, Plan
from cce_kernels.tokens import Kept, Rows


def target(inputs: Inputs, plan: Plan) -> jax.Array:
    """The logit of each token's target, (N,), at least float32: 0 where the target names no column, or is ignored.

    For a shard of the vocabulary: `statistics` takes the sum of these logits over all shards. Returns zeros where this
    plan needs no reference: all platforms share one traced program.
    """
    if plan.forward.target is None:
        return jnp.zeros(inputs.targets.shape, jnp.promote_types(inputs.e.dtype, jnp.float32))
    kept = Kept.of(inputs.targets, plan.rows) if plan.finds_ignored else None
    inputs, at = _arranged(inputs, kept, plan)
    problem = Problem(plan.call, plan.gpu, inputs)
    found = jnp.where(_named(problem), reference_of(problem, at, plan.forward), 0.0)
    return found if kept is None else kept.restored(found)


def statistics(
    inputs: Inputs, plan: Plan, reference: jax.Array | None = None, cleared: bool = False
) -> tuple[Statistics, jax.Array | None]:
    """The core's numbers of each token, (N,), at least float32; and the saved exponentials, (plan.saved, V), or None.

    A logit of a target or an id that names no column is 0, and so are those of an ignored token's ids. Its other
    numbers and its exponentials are arbitrary; if `cleared`, they are 0.
    reference: if the columns are a shard of the vocabulary, the target's logit, whichever shard has it; −FLOAT32_MAX
    where none has it. The numbers are then of the shard's columns, and log_mass is −inf where their exponentials
    underflow relative to the reference.
    """
    kept = Kept.of(inputs.targets, plan.rows) if plan.finds_ignored else None
    of_caller, is_shard = inputs, reference is not None
    inputs, at = _arranged(inputs, kept, plan)
    problem = Problem(plan.call, plan.gpu, inputs)
    if plan.forward.target is None:
        reference = None
    elif reference is None:
        reference = reference_of(problem, at, plan.forward)
    else:
        given = reference if kept is None else kept.gathered(reference, 0)
        reference = jnp.where(inputs.targets < 0, FLOAT32_MAX, given)
    numbers, saved, _ = of_rows(problem, at, reference, plan.forward, plan.saved > 0)
    if cleared:
        live = inputs.targets >= 0
        numbers = jax.tree.map(lambda x: jnp.where(live, x, 0), numbers)
        saved = None if saved is None else jnp.where(live[:, None], saved, 0)
    if kept is not None:
        numbers = jax.tree.map(kept.restored, numbers)
    if of_caller.ids is not None:
        of_all = None if is_shard else numbers
        numbers = numbers._replace(ids=given_ids.logits(of_caller, of_all, plan.call, plan.gpu))
    return numbers, saved


def of_rows(
    problem: Problem, at: Rows, reference: jax.Array | None, how: Forward, save: bool
) -> tuple[Statistics, jax.Array | None, jax.Array | None]:
    """`statistics` of tokens whose kept ones come first, in that order; and the masses of what is saved.

    reference: None if `how` finds the targets.
    """
    sums, rescued = _sums(problem, at, reference, how, save)
    assert sums.target is not None
    numbers = _of_parts(sums, problem, reference)
    numbers = numbers._replace(target=jnp.where(_named(problem), sums.target, 0.0))
    if sums.saved is None:
        return numbers, None, None
    # Saved again: tokens that have another reference now than `sums` knew, and all that were rescued. A rescued token
    # keeps its reference if its target has the largest logit. Two matmuls rounded this logit so differently that its
    # exponential was infinite.
    assert how.rescue is not None
    assert rescued is not None
    others = (problem.inputs.targets >= 0) & ((numbers.reference != reference) | rescued)
    saved = how.rescue.engine.saved_again(how.rescue, problem, numbers.reference, others, sums.saved)
    return numbers, saved, sums.masses


def _of_parts(sums: Sums, problem: Problem, reference: jax.Array | None) -> Statistics:
    """The numbers over all parts, each token's relative to one reference; the target is that of sums."""
    log_mass, of_parts, total, mean = sums.log_mass, sums.reference, sums.sum, sums.mean
    assert of_parts is not None
    assert sums.target is not None
    total = None if total is None else jnp.sum(total, axis=0)
    if reference is None:  # of the xla engine, which has one part
        return Statistics(log_mass[0], of_parts[0], sums.target, total, None if mean is None else mean[0])
    peak = jnp.max(of_parts, axis=0)
    further = of_parts - peak
    of_all = jax.nn.logsumexp(log_mass + further, axis=0)
    mean = None if mean is None else over_runs(log_mass + further, mean + further)
    numbers = Statistics(of_all, peak, sums.target, None, mean)
    near = of_all <= LARGEST
    if mean is None:  # relative to lse a rescued token's e is scaled by about 1: its dz is not rounded once more
        near &= peak == reference
    numbers = numbers.relative_to(jnp.where(near, peak, peak + of_all))
    if total is not None:
        weights = problem.inputs.weights
        weight = problem.call.vocabulary if weights is None else jnp.sum(weights)
        total += (origin_of(reference) - numbers.reference) * weight
    return numbers._replace(sum=total)


def _arranged(inputs: Inputs, kept: Kept | None, plan: Plan) -> tuple[Inputs, Rows]:
    """The inputs with the kept tokens first in targets, and in e if e is gathered; and where kernels find rows of e.

    The inputs have no ids: no kernel reads them.
    """
    inputs = inputs._replace(ids=None)
    if kept is None:
        return inputs, Rows()
    inputs = kept.first(inputs)
    if plan.forward.gathered:
        return inputs._replace(e=kept.gathered(inputs.e, 0)), Rows(count=kept.count)
    scattered = plan.forward.scattered
    starts = None if scattered is None else kept.starts(scattered.tiles.rows)
    return inputs, Rows(kept.order, starts, kept.count)


def _named(problem: Problem) -> jax.Array:
    """Whether each token's target names a column."""
    targets = problem.inputs.targets
    return (targets >= 0) & (targets < problem.call.vocabulary)


def reference_of(problem: Problem, at: Rows, how: Forward) -> jax.Array:
    """Each token's reference, (rows,), as engine.Launched.target finds it. The kept tokens come first."""
    assert how.target is not None
    return how.target.engine.target(how.target, problem, at.order)


def _sums(
    problem: Problem, at: Rows, reference: jax.Array | None, how: Forward, save: bool
) -> tuple[Sums, jax.Array | None]:
    """The sums of every token and the logit of its target; and which tokens were rescued, None if no step rescues."""
    sums = how.sums.engine.sums(how.sums, problem, at, reference, save)
    if reference is None:
        return sums, None
    assert how.rescue is not None
    sums = sums._replace(reference=jnp.broadcast_to(reference, sums.log_mass.shape), target=reference)
    if how.scattered is not None:
        sums = how.scattered.engine.recomputed(how.scattered, problem, at, reference, sums)
    if problem.inputs.factor is not None:
        # The target's logit is of another matmul. The roundings of two very large ones can make every term 0.
        lost = _named(problem) & (jnp.max(sums.log_mass, axis=0) < -LARGEST)
        sums = sums._replace(log_mass=jnp.where(lost, jnp.inf, sums.log_mass))
    rescued = ~jnp.all(sums.log_mass < jnp.inf, axis=0)
    return how.rescue.engine.recomputed(how.rescue, problem, at._replace(starts=None), None, sums), rescued
