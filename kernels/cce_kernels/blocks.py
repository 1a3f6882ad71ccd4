"""Blocks of the logits in two halves, and the loops over them by which each schedule computes numbers and gradients.

A block is some tokens, kept ones first (cce_kernels/tokens.py), by all columns of the vocabulary.

    first half    `numbers_of`: the numbers of its tokens, and its columns: exponentials P
                  (cce_kernels/exponentials.py), or in plain XLA its logits
    between       the numbers of all columns, where devices share the vocabulary; their cotangents, from the loss
    second half   `gradients_of`: P gets its exact elements at the targets, or becomes dz in its own memory where dz is
                  no multiple of P. Two matmuls then give de, rounded, and the block's part of dc

A schedule says how the matrix is cut, and when the halves run:

    in forward    chunks of tokens, both halves in the forward pass (`form`, `finish`)
    saved         one block: the first half in the forward pass (`numbers`), the second in the backward pass
                  (`gradients`)
    recomputed    the numbers of one block in the forward pass (`numbers`); in the backward pass dz of a window of the
                  vocabulary at a time, from logits that are computed again (`gradients`)

Where kernels compute, the first half is target → sums → rescue → exponentials of other references:

    log_mass_i = log Σ_v exp(z_iv − ρ_i)     target_i = z_i,t_i     mean_i = Σ_v p_iv (z_iv − ρ_i)

The logits of given ids and the weighted sum of the logits are computed apart from these steps
(cce_kernels/given_ids.py, weighted_sum.py).
The reference ρ is the target's logit. Where a sum of exp(z − ρ) overflows, or there is no target, the rescue step
computes the token again, relative to a running maximum. With a mean, a token whose lse is more than LARGEST above the
target's logit is rescued too. At the end these references become others:
    of a rescued token      the maximum with a mean, lse without one
    of any other token      lse, where it is more than LARGEST above the target's logit
(The xla engine finds the target's logit and a running maximum in one pass. The maximum is its reference: it needs no
rescue.)

In the forward pass: the loss is a sum over tokens, S = Σ_i total_i, that is multiplied by a factor g later. The
cotangents of a token's numbers are then g times numbers that the forward pass knows as soon as it knows the token's
numbers. Each chunk writes its rows of de and adds to dc, in block floating point (cce_kernels/block_floats.py), in the
memory of the result. The backward pass multiplies by g, elementwise, and rounds. In float16 each row of de is divided
by a unit first, and g·unit multiplies it later: weights of 10⁶ have a moderate mean, and float16 holds no sum of
theirs. Beside a teacher it is rounded in block floating point, so that g adds no second rounding. Where the columns are
a shard of the vocabulary, P stays relative to the shard's own reference; r takes the log-mass of all columns. de is
then a part of a sum over shards, in float32. What a weighted sum of the logits adds is of rank one
(cce_kernels/weighted_sum.py).

Saved: P must stay as it is. So where dz is no multiple of P, dz of a window of the vocabulary at a time is formed of P.

Where de alone is wanted, the forward pass can form it without any cotangent. With the cotangents a and t̂ of lse and of
the target's logit, the slope u of the softcap and the factor f of the inputs, scale times the inverse temperature,

    de_i = a_i·m_i + (a_i·p_i,t_i + t̂_i)·u_i,t_i·f_i·c_t_i        m_i = f_i·Σ_v≠t_i p_iv·u_iv·c_v

and m (N, D) is what the forward pass leaves. The target is left out of m, as the two terms of a confident token would
cancel each other: m's rounding would then be larger than de.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels import given_ids, weighted_sum
from cce_kernels.block_floats import decoded, steps_shape
from cce_kernels.block_sparse import Blocks, Tokens, kept_blocks
from cce_kernels.engines.engine import Multiplying, Part, Problem, Step, Sums
from cce_kernels.engines.xla.chunk import dz_of, numbers_and_logits
from cce_kernels.exponentials import LARGEST, factors, saved_shape, scaled, sum_of_rows
from cce_kernels.gradients import De, add_windows, divided, fitted, multiplied, summed_parts, unscaled
from cce_kernels.head import Head
from cce_kernels.mean import cleared, of_exponentials, over_runs, relative
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Gradients, Inputs, Numbers
from cce_kernels.plan.plan import Forward, Plan, Schedule
from cce_kernels.plan.residuals import Residuals
from cce_kernels.tokens import Kept, gathered_rows, in_chunks
from cce_kernels.weighted_sum import Weighted, of_vocabulary
from cce_kernels.windows import ALL_COLUMNS, FormDz

# Of the tokens: with a smaller share kept, matmuls that stop at the last kept token beat XLA's matmuls of all tokens.
FEW_KEPT = 0.8

# (the numbers of some tokens, what belongs to these tokens) -> the cotangents of the numbers, 0 for ignored tokens
CotangentsOf = Callable[[Numbers, Any], Cotangents]
# the numbers of a shard of the vocabulary, (n,) each -> the numbers of all columns
OfAllColumns = Callable[[Numbers], Numbers]


class Block(NamedTuple):
    """n tokens, kept ones first. For the others e is 0, the target -1, the temperature 1, the reference FLOAT32_MAX."""

    inputs: Inputs
    reference: jax.Array | None  # (n,): of a shard of the vocabulary, the targets' logits; None: `numbers_of` finds it
    count: jax.Array  # type: ignore[assignment]  # (1,) int32: how many are kept
    weighted: Weighted | None = None  # of the vocabulary; None: its sums add nothing of rank one

    @classmethod
    def of(
        cls, inputs: Inputs, reference: jax.Array | None, count: jax.Array, weighted: Weighted | None = None
    ) -> "Block":
        """The block whose first `count` tokens are kept. The other rows of the arrays may hold anything."""
        live, inverse = jnp.arange(len(inputs.targets), dtype=jnp.int32) < count, inputs.inverse_temperature
        inverse = None if inverse is None else jnp.where(live, inverse, 1)
        e, targets = jnp.where(live[:, None], inputs.e, 0), jnp.where(live, inputs.targets, -1)
        reference = None if reference is None else jnp.where(live, reference, FLOAT32_MAX)
        return cls(inputs._replace(e=e, targets=targets, inverse_temperature=inverse), reference, count, weighted)

    @property
    def live(self) -> jax.Array:
        return self.inputs.targets >= 0

    def problem(self, plan: Plan) -> Problem:
        return Problem(plan.request, plan.gpu, self.inputs)


def taken(
    kept: Kept,
    start: Any,
    size: int,
    inputs: Inputs,
    of_tokens: Any,
    reference: jax.Array | None = None,
    weighted: Weighted | None = None,
) -> tuple[Block, Any]:
    """The block of the kept tokens start to start + size, and the rows of the tree `of_tokens` that belong to them."""
    rows = lax.dynamic_slice_in_dim(kept.order, start, size)
    of_inputs, at, of_own = jax.tree.map(lambda x: x[rows], (inputs.of_tokens, reference, of_tokens))
    return Block.of(inputs._replace(**of_inputs), at, jnp.clip(kept.count - start, 0, size), weighted), of_own


# The first half


class Columns(NamedTuple):
    """What the second half of a block needs of its columns."""

    # exponentials, (n, V) with the padding of saved_shape, in e's type; in plain XLA logits, (n, V), at least float32
    values: jax.Array
    blocks: Blocks | None = None  # what the products keep; None: all


def numbers_of(block: Block, plan: Plan) -> tuple[Numbers, Columns]:
    """The first half of a block: its numbers over these columns, and what `gradients_of` needs of the columns."""
    problem, how, masses = block.problem(plan), _in_chunks(plan), None
    if plan.forward is None:
        of_columns, values = numbers_and_logits(problem)
    else:
        of_columns, values, masses = _from_sums(problem, block.count, block.reference, plan.forward, save=True)
        assert values is not None
    of_columns = _with_weighted_sum(block.inputs, of_columns, block.weighted, block.reference is not None, plan)
    request, step = plan.request, how.thresholds
    if masses is None or step is None:
        return of_columns, Columns(values)
    u = jnp.ones_like(of_columns.target)
    u = u if request.head.softcap is None else request.head.slope(block.inputs.capped(of_columns.target))
    tokens = Tokens(block.inputs.targets, u, block.count)
    blocks = kept_blocks(masses, tokens, request.gradient_tolerance, partial(step.engine.thresholds, step, plan.gpu))
    return of_columns, Columns(values, blocks)


def _with_weighted_sum(
    inputs: Inputs, numbers: Numbers, weighted: Weighted | None, is_shard: bool, plan: Plan
) -> Numbers:
    """The numbers with the weighted sum, if that is linear."""
    if weighted is None:
        return numbers
    moves = plan.forward is not None and plan.forward.target is not None and not is_shard
    return numbers._replace(sum=weighted_sum.of_tokens(inputs, numbers, weighted, plan.request, plan.gpu, moves))


def _from_sums(
    problem: Problem, count: jax.Array | None, reference: jax.Array | None, how: Forward, save: bool
) -> tuple[Numbers, jax.Array | None, jax.Array | None]:
    """The numbers of tokens of which the first `count` are kept; what is saved, and its masses.

    Those of other tokens are arbitrary. count: None for all. reference: of a shard of the vocabulary; None if this
    finds it.
    """
    if how.target is None:
        reference = None
    elif reference is None:
        reference = _reference_of(problem, how)
    sums, rescued = _rescued_sums(problem, count, reference, how, save)
    assert sums.target is not None
    numbers = _of_parts(sums, reference)
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


def _named(problem: Problem) -> jax.Array:
    """Whether each token's target names a column."""
    targets = problem.inputs.targets
    return (targets >= 0) & (targets < problem.request.vocabulary)


def _reference_of(problem: Problem, how: Forward) -> jax.Array:
    """Each token's reference, (rows,), as engine.Launched.target finds it."""
    assert how.target is not None
    return how.target.engine.target(how.target, problem)


def _rescued_sums(
    problem: Problem, count: jax.Array | None, reference: jax.Array | None, how: Forward, save: bool
) -> tuple[Sums, jax.Array | None]:
    """The sums of every token and the logit of its target; and which tokens were rescued, None if no step rescues."""
    sums = how.sums.engine.sums(how.sums, problem, count, reference, save)
    if reference is None:
        return sums, None
    assert how.rescue is not None
    sums = sums._replace(reference=jnp.broadcast_to(reference, sums.log_mass.shape), target=reference)
    if problem.inputs.factor is not None:
        # The target's logit is of another matmul. The roundings of two very large ones can make every term 0.
        lost = _named(problem) & (jnp.max(sums.log_mass, axis=0) < -LARGEST)
        sums = sums._replace(log_mass=jnp.where(lost, jnp.inf, sums.log_mass))
    rescued = ~jnp.all(sums.log_mass < jnp.inf, axis=0)
    return how.rescue.engine.rescued(how.rescue, problem, count, sums), rescued


def _of_parts(sums: Sums, reference: jax.Array | None) -> Numbers:
    """The numbers over all parts, each token's relative to one reference; the target is that of sums."""
    log_mass, of_parts, mean = sums.log_mass, sums.reference, sums.mean
    assert of_parts is not None
    assert sums.target is not None
    if reference is None:  # of the xla engine, which has one part
        total, mean = (None if x is None else x[0] for x in (sums.sum, mean))
        return Numbers(log_mass[0], of_parts[0], sums.target, total, mean)
    numbers = over_runs(Numbers(log_mass, of_parts, sums.target[None], None, mean))
    of_all, peak = numbers.log_mass, numbers.reference
    near = of_all <= LARGEST
    if mean is None:  # relative to lse a rescued token's e is scaled by about 1: its dz is not rounded once more
        near &= peak == reference
    return numbers.relative_to(jnp.where(near, peak, peak + of_all))


# The second half


class Parts(NamedTuple):
    """What a block adds to the gradients; None: not wanted."""

    de: De | None
    dc: Part
    dbias: Any = None  # (V,)
    q: Any = None  # to Residuals.q


def gradients_of(block: Block, columns: Columns, own: Numbers, numbers: Numbers, of: Cotangents, plan: Plan) -> Parts:
    """The second half of a block.

    own, columns: of the first half; columns may be overwritten. numbers, of: over all columns, and their cotangents.
    """
    inputs, of_sum = block.inputs, None
    of = jax.tree.map(lambda x: cleared(x, block.live), of)
    if block.weighted is not None:
        of_sum, of = weighted_sum.of_raw(of, inputs), of._replace(sum=None)
    if plan.forward is not None:
        found = _of_exponentials(block, columns, own, numbers, of, of_sum, plan)
    else:
        of, unit = fitted(of, numbers, inputs)
        found = of_dz(block, *dz_of(inputs, columns.values, numbers, of, plan.request.head), unit, plan, of_sum)
    if of_sum is None:
        return found
    wanted, q, dbias = plan.request.wants, None, found.dbias
    if wanted.c:
        q = sum_of_rows(inputs.e, of_sum)
    if wanted.bias:
        dbias += of_vocabulary(jnp.sum(of_sum), inputs.weights, 0)
    return found._replace(dbias=dbias, q=q)


def of_dz(
    block: Block, dz: jax.Array, dbias: Any, unit: jax.Array | None, plan: Plan, of_sum: jax.Array | None = None
) -> Parts:
    """What a block adds to the gradients, from dz in e's type, divided by unit, and the sums of its columns, (V,).

    dz: (n, V), or with the padding of saved_shape. of_sum: as of `_de`.
    """
    request, inputs, de = plan.request, block.inputs, None
    if _in_chunks(plan).products is not None:
        dz = jnp.pad(dz, ((0, 0), (0, saved_shape(1, request.vocabulary)[1] - dz.shape[1])))
    if request.wants.e:
        found = _product_with_c(block, dz, plan)
        de = _de(block, found if unit is None else found * unit, of_sum, plan)
        de, dz = lax.optimization_barrier((de, dz))
    dbias = dbias if unit is None or dbias is None else dbias * unit
    return Parts(de, Part(dz, inputs.e, unit, block.count), dbias)


def _of_exponentials(
    block: Block, columns: Columns, own: Numbers, numbers: Numbers, of: Cotangents, of_sum: jax.Array | None, plan: Plan
) -> Parts:
    how, wanted = _in_chunks(plan), plan.request.wants
    assert how.products is not None
    p, blocks = columns
    inputs, live, problem = block.inputs, block.live, block.problem(plan)
    blocks_of_de, blocks_of_dc = (None, None) if blocks is None else blocks
    numbers = jax.tree.map(lambda x: cleared(x, live), numbers.relative_to(own.reference))
    if how.targets is None:
        assert how.dz is not None
        numbers = of_exponentials(*how.dz.engine.mass_and_moment(problem, p))
        p = how.dz.engine.dz_in_place(how.dz, problem, p, relative(of, numbers, live))
        r = live.astype(numbers.log_mass.dtype)  # P is dz now
    else:
        # The matmul for dbias reads all rows. Those for de and dc read rows after the last kept one in their last step,
        # or to form rows of de that are not used.
        beyond = max(how.dc.engine.depth, how.products.engine.depth) - 1
        clear = jnp.full(1, len(p), jnp.int32) if wanted.bias else block.count + beyond if beyond else None
        r, p = _with_targets(block, p, numbers, of, how.targets, clear, plan)
    de = None
    if wanted.e:
        de = _de(block, _product_with_c(block, p, plan, blocks_of_de) * r[:, None], of_sum, plan)
        de, p, e = lax.optimization_barrier((de, p, inputs.e))
        inputs = inputs._replace(e=e)  # what is scaled is made once the sums for de are no more
    dbias = sum_of_rows(p, r)[: plan.request.vocabulary] if wanted.bias else None
    e = inputs.e if how.targets is None else scaled(inputs.e, r)
    return Parts(de, Part(p, e, None, block.count, blocks_of_dc), dbias)


def _with_targets(
    block: Block, p: jax.Array, numbers: Numbers, of: Cotangents, step: Step, clear: jax.Array | None, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """r, and P ready for the matmuls: the targets' elements are written, and zeros for ignored tokens.

    clear: in so many first rows of P, (1,), the rows of ignored tokens must be 0; None: in no row.
    """
    r, at_target = factors(numbers, of, block.inputs, plan.request.head)
    p = step.engine.saved_targets(step, block.problem(plan), p, at_target, clear)
    factor = block.inputs.factor
    return jnp.where(block.live, r if factor is None else r * factor, 0), p


def _product_with_c(block: Block, dz: jax.Array, plan: Plan, blocks: jax.Array | None = None) -> jax.Array:
    """dz·c, or P·c, at least float32. blocks: of dz, that are multiplied; None: all."""
    request, how, inputs = plan.request, _in_chunks(plan), block.inputs
    if how.products is None:
        head, contract = request.head, (((1,), (request.head.vocab_axis,)), ((), ()))
        return lax.dot_general(
            dz, inputs.c, contract, precision=head.precision, preferred_element_type=request.sum_dtype
        )
    products = how.products.engine.products(how.products, block.problem(plan), None, block.count, blocks)
    return summed_parts(products.add_de(None, dz, ALL_COLUMNS), how.products.splits)


def _de(block: Block, found: jax.Array, of_sum: jax.Array | None, plan: Plan) -> De:
    """de of a block, rounded, from what dz·c gives, (n, D), at least float32. of_sum: weighted_sum.of_raw, or None."""
    if of_sum is not None:
        assert block.weighted is not None
        found += of_sum[:, None] * block.weighted.c
    return divided(jnp.where(block.live[:, None], found, 0), plan.request)


# In the forward pass


def _in_chunks(plan: Plan) -> Schedule:
    assert plan.in_forward is not None
    return plan.in_forward


def form(
    inputs: Inputs,
    of_tokens: Any,
    cotangents_of: CotangentsOf,
    plan: Plan,
    reference: jax.Array | None = None,
    of_all_columns: OfAllColumns | None = None,
) -> tuple[Numbers, Residuals]:
    """The numbers of all tokens, and the gradients of S. of_tokens: a tree of arrays with a row for each token.

    reference, of_all_columns: for a shard of the vocabulary, the reference of `numbers` and the exchange of numbers.
    The numbers are then of all columns, and the gradients of the shard's columns. of_all_columns is called for each
    chunk.
    """
    chunks, request = _in_chunks(plan).chunks, plan.request
    kept, zeros = Kept.of(inputs.targets, chunks.rows), jnp.zeros(chunks.rows, request.sum_dtype)
    weighted = weighted_sum.weighted(inputs, request)

    def chunk(start: Any) -> tuple[Numbers, Parts]:
        block, of_own = taken(kept, start, chunks.size, inputs, of_tokens, reference, weighted)
        own, columns = numbers_of(block, plan)
        found = own if of_all_columns is None else of_all_columns(own)
        return found, gradients_of(block, columns, own, found, cotangents_of(found, of_own), plan)

    numbers = Numbers.filled(zeros, request.numbers)
    return over_chunks(chunk, numbers, kept, plan)


def over_chunks(
    chunk: Callable[[Any], tuple[Any, Parts]], numbers: Any, kept: Kept, plan: Plan
) -> tuple[Any, Residuals]:
    """The numbers of all tokens, and the gradients up to a factor, from chunks: chunk(start), kept tokens first.

    numbers: zeros in place of the numbers, (rows,) each.
    """
    chunks, request, wanted = _in_chunks(plan).chunks, plan.request, plan.request.wants
    size, wide = chunks.size, request.sum_dtype

    def step(i: Any, carry: tuple[Any, Residuals]) -> tuple[Any, Residuals]:
        numbers, left = carry
        start = i * size
        found, (de, part, dbias, q) = chunk(start)
        dc, steps = left.dc, left.steps
        if dc is not None:
            dc, steps = add_dc(dc, steps, part, plan)
        numbers = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), numbers, found)
        own = De(left.de, left.units)  # type: ignore[arg-type]
        if de is not None:
            rows = kept.rows_of(start, size)
            own = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop", unique_indices=True), own, de)
        dbias, q = (None if x is None else x + y for x, y in ((left.dbias, dbias), (left.q, q)))
        return numbers, Residuals(de=own.values, dc=dc, steps=steps, dbias=dbias, units=own.units, q=q)

    dc, steps, of_c = None, None, (request.vocabulary, request.width)
    of_c = of_c if request.head.vocab_axis == 0 else of_c[::-1]
    if request.sums_dc_in_16_bits:
        dc = lax.empty(of_c, request.dc_dtype)
        steps = jnp.zeros(steps_shape(request.vocabulary, request.width), jnp.float32)  # any integers times 0 are 0
    elif wanted.c:
        dc = jnp.zeros(of_c, wide)
    de = jnp.zeros((request.tokens, request.width), request.left_de_dtype) if wanted.e else None
    units = jnp.zeros(request.units_shape(request.tokens), wide) if wanted.e and request.divides_de else None
    dbias = jnp.zeros((request.vocabulary,), wide) if wanted.bias else None
    q = jnp.zeros(request.width, wide) if wanted.c and request.sum_is_linear else None
    left = Residuals(de=de, dc=dc, steps=steps, dbias=dbias, units=units, q=q)
    numbers, left = lax.fori_loop(0, chunks.count, step, (numbers, left))
    if steps is not None:  # not in the result's type, in which the integers might be taken for NaN
        left = left._replace(dc=lax.bitcast_convert_type(left.dc, jnp.int16))  # type: ignore[arg-type]
    return jax.tree.map(kept.restored, numbers), left


def add_dc(dc: jax.Array, steps: jax.Array | None, part: Part, plan: Plan) -> tuple[jax.Array, jax.Array | None]:
    """engine.Launched.sum_dc, as planned."""
    step = _in_chunks(plan).dc
    return step.engine.sum_dc(step, plan.request, plan.gpu, dc, steps, part)


def finish(
    left: Residuals, factor: jax.Array, live: jax.Array, plan: Plan, weights: jax.Array | None = None
) -> Gradients:
    """The gradients of factor · S. live: (N,), the tokens that are not ignored. weights: of the weighted sum."""
    request, de, dc, dbias = plan.request, left.de, left.dc, left.dbias
    if de is not None:  # an infinite factor times the 0 of an ignored token is NaN
        de = multiplied(De(de, left.units), jnp.where(live, factor, 0), request)
    if dc is not None:
        if left.steps is not None:
            step = _in_chunks(plan).dc
            dc = decoded(dc, left.steps, step.engine.columns_of_a_step(step), request.head.vocab_axis)
        if left.q is not None:
            dc += of_vocabulary(left.q, weights, request.head.vocab_axis)
        dc = (dc * factor.astype(dc.dtype)).astype(request.dc_dtype)
    if dbias is not None:
        dbias = (dbias * factor).astype(request.dc_dtype)
    return Gradients(de, dc, dbias)


def de_of_any_cotangents(inputs: Inputs, plan: Plan) -> tuple[Numbers, jax.Array]:
    """The numbers of all tokens, and m, (N, D), in e's type."""

    def of_all_but_the_target(numbers: Numbers, _: Any) -> Cotangents:
        return Cotangents(jnp.ones_like(numbers.log_mass), -jnp.exp(numbers.log_p(numbers.target)), None)

    numbers, left = form(inputs, (), of_all_but_the_target, plan)
    assert left.de is not None
    return numbers, left.de


def de_of_m(inputs: Inputs, numbers: Numbers, m: jax.Array, of: Cotangents, head: Head, dtype: Any) -> jax.Array:
    """de, (N, D), from `de_of_any_cotangents`; 0 where a token is ignored."""
    targets = inputs.targets
    live = targets >= 0
    named = live & (targets < head.vocabulary(inputs.c))
    column = jnp.where(named, targets, 0)
    c = inputs.c[column] if head.vocab_axis == 0 else inputs.c[:, column].T
    p = jnp.where(live, jnp.exp(numbers.log_p(numbers.target)), 0)
    of_target = of.lse * p + of.target
    if head.softcap is not None:
        of_target = of_target * head.slope(inputs.capped(numbers.target))
    if inputs.factor is not None:
        of_target = of_target * inputs.factor
    de = of.lse[:, None] * m + jnp.where(named, of_target, 0)[:, None] * c
    return jnp.where(live[:, None], de, 0).astype(dtype)


# Saved, and recomputed


def target(inputs: Inputs, plan: Plan) -> jax.Array:
    """The logit of each token's target, (N,), at least float32: 0 where the target names no column, or is ignored.

    For a shard of the vocabulary: `numbers` takes the sum of these logits over all shards. Returns zeros where this
    plan needs no reference: all platforms share one traced program.
    """
    if plan.forward is None or plan.forward.target is None:
        return jnp.zeros(inputs.targets.shape, jnp.promote_types(inputs.e.dtype, jnp.float32))

    def found(block: Block) -> tuple[jax.Array, None]:
        assert plan.forward is not None
        problem = block.problem(plan)
        return jnp.where(_named(problem), _reference_of(problem, plan.forward), 0.0), None

    return _by_blocks(found, inputs, plan, _one_of_each(plan))[0]


def numbers(
    inputs: Inputs, plan: Plan, reference: jax.Array | None = None, clears: bool = False
) -> tuple[Numbers, jax.Array | None]:
    """The core's numbers of each token, (N,), at least float32; and the saved exponentials, (plan.saved, V), or None.

    A logit of a target or an id that names no column is 0, and so are those of an ignored token's ids. Its other
    numbers and its exponentials are arbitrary; if `clears`, they are 0. reference: if the columns are a shard of the
    vocabulary, the target's logit, whichever shard has it; −FLOAT32_MAX where none has it. The numbers are then of the
    shard's columns, and log_mass is −inf where their exponentials underflow relative to the reference.
    """

    def first_half(block: Block) -> tuple[Numbers, jax.Array | None]:
        assert plan.forward is not None
        count = block.count if plan.finds_ignored else None
        found, saved, _ = _from_sums(block.problem(plan), count, block.reference, plan.forward, save=plan.saved > 0)
        if clears:
            found = jax.tree.map(lambda x: jnp.where(block.live, x, 0), found)
            saved = None if saved is None else jnp.where(block.live[:, None], saved, 0)
        return found, saved

    one, request = _one_of_each(plan), plan.request
    numbers = Numbers.filled(one, replace(request.numbers, sum=request.sums_logits))
    found, saved = _by_blocks(first_half, inputs, plan, numbers, reference)
    weighted = weighted_sum.weighted(inputs, request)
    found = _with_weighted_sum(inputs, found, weighted, reference is not None, plan)
    if inputs.ids is not None:
        found = found._replace(ids=given_ids.logits(inputs, found if reference is None else None, request, plan.gpu))
    return found, saved


def _one_of_each(plan: Plan) -> Any:
    """A number of one token, as a shape."""
    return jax.ShapeDtypeStruct((1,), plan.request.sum_dtype)


def _by_blocks(
    found: Callable[[Block], tuple[Any, Any]], inputs: Inputs, plan: Plan, one: Any, reference: jax.Array | None = None
) -> tuple[Any, Any]:
    """The numbers of all tokens, and what else is kept: found(block) of blocks of plan.rows tokens, kept ones first.

    one: the numbers of one token, as shapes. Only evaluation has several blocks, of which nothing else is kept. Where
    ignored tokens are not looked for, there is one block in the order of the tokens, and the rows of ignored ones may
    hold anything.
    """
    inputs = inputs._replace(ids=None)
    if not plan.finds_ignored:
        reference = None if reference is None else jnp.where(inputs.targets < 0, FLOAT32_MAX, reference)
        return found(Block(inputs, reference, jnp.full(1, inputs.targets.size, jnp.int32)))
    size, count = plan.rows, -(-gathered_rows(inputs.targets.size) // plan.rows)
    kept, others = Kept.of(inputs.targets, count * size), None

    def of_block(start: Any) -> tuple[Any, Any]:
        return found(taken(kept, start, size, inputs, (), reference)[0])

    if count == 1:
        numbers, others = of_block(0)
    else:
        rows = jnp.arange(count * size, dtype=jnp.int32)
        numbers = in_chunks(lambda rows: of_block(rows[0])[0], rows, size, one)
    return jax.tree.map(kept.restored, numbers), others


def gradients(
    inputs: Inputs, numbers: Numbers, saved: Any, cotangents: Cotangents, plan: Plan
) -> tuple[Gradients, jax.Array | None]:
    """de, dc and dbias in e's type, None where not wanted; and saved, which has been overwritten.

    numbers and saved (an array or None): the results of `numbers` with the same plan. Ignored tokens contribute
    nothing. If the columns are a shard of the vocabulary, numbers and cotangents are those over all columns, but the
    reference is the shard's own, and de is the sum over these columns alone. de is at least float32 if
    plan.request.wide_de, and so are dc and dbias if plan.request.wide_dc.
    """
    how, request, wanted, at_ids = plan.gradients, plan.request, plan.request.wants, None
    assert how is not None
    numbers = numbers._replace(sum=None)
    if cotangents.ids is not None:
        at_ids = given_ids.dz_at(inputs, numbers, cotangents, request)
    kept, block, with_e, (numbers, of, at_ids) = _in_backward_pass(inputs, numbers, cotangents, at_ids, plan)
    of, unit = fitted(of, numbers, block.inputs)
    of = of._replace(ids=None)
    if at_ids is not None and unit is not None:
        at_ids = at_ids._replace(dz=at_ids.dz / unit)
    are_few = None if kept is None or how.of_few is None else kept.count < FEW_KEPT * plan.rows
    if how.targets is not None:
        clear = _rows_to_clear(block, how, are_few, plan)
        r, saved = _with_targets(block, saved, numbers, of, how.targets, clear, plan)
        dbias = sum_of_rows(saved, r)[: request.vocabulary] if wanted.bias else None
        de, dc = _by_either(are_few, how, lambda products: _of_saved(with_e(), saved, r, plan, products))
    else:

        def over_windows(products: Multiplying) -> Any:
            block = with_e()
            if how.way == "saved":
                form = _dz_of_saved(block, numbers, of, saved, how, plan)
            else:
                assert how.dz is not None
                form = _dz_of_logits(block, numbers, of, at_ids, how.dz, products.engine.stops, plan)
            return _over_windows(block, form, products, unit, plan)

        de, dc, dbias = _by_either(are_few, how, over_windows)
    if de is not None and dc is not None:
        # So that the rows of the result de are written after dc. Until then their memory holds the gathered e, from
        # which dc is computed.
        de, dc = lax.optimization_barrier((de, dc))
    if de is not None:
        de = unscaled(de, unit, request.de_dtype)
        de = de[: request.tokens] if kept is None else kept.restored(de)
    return Gradients(de, dc, None if dbias is None else unscaled(dbias, unit, request.dc_dtype)), saved


def _in_backward_pass(
    inputs: Inputs, numbers: Numbers, of: Cotangents, at_ids: given_ids.AtIds | None, plan: Plan
) -> tuple[Kept | None, Block, Callable[[], Block], tuple[Numbers, Cotangents, Any]]:
    """Four things that the backward pass begins with:

    - Kept; None if ignored tokens are not looked for
    - the block of all tokens for steps that do not read e: its rows of e are the caller's
    - what gives the block with its own rows of e; it is called at each use, so that only one copy exists at a time
    - the numbers and cotangents of the tokens, 0 for ignored ones; and dz at ids, none for ignored ones

    The reference of an ignored token is FLOAT32_MAX, which makes P = 0. With 0 a large bias would make P inf, and
    0 · inf is NaN.
    """
    # Without the barrier XLA would reuse the forward pass's copy of the kept rows of e, and hold it between the passes,
    # or make the copy in which ignored rows are 0 before the forward pass. The barrier makes such a copy depend on the
    # forward pass's result. No array of the caller's goes through it: XLA takes what comes out for another array, and
    # may write a result of the caller's over the array while kernels still read what came out. All that was gathered
    # goes through it: else one fusion would read the order of the tokens twice, under its names before and after the
    # barrier, and XLA may write that fusion's result over the order.
    kept = Kept.of(inputs.targets, plan.rows) if plan.finds_ignored else None
    rows, missing, inverse = jnp.arange(plan.rows, dtype=jnp.int32), plan.rows - plan.request.tokens, None
    live = rows < kept.count if kept is not None else jnp.pad(inputs.targets >= 0, (0, missing))

    def own(x: jax.Array, kept: Kept | None, live: jax.Array, fill: float = 0) -> jax.Array:
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if kept is None else x[kept.order]
        return jnp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(fill, x.dtype))

    targets, reference = own(inputs.targets, kept, live, -1), own(numbers.reference, kept, live, FLOAT32_MAX)
    if inputs.inverse_temperature is not None:
        inverse = own(inputs.inverse_temperature, kept, live, 1)
    of_tokens = jax.tree.map(lambda x: own(x, kept, live), (numbers._replace(reference=None, ids=None), of))
    at_ids = jax.tree.map(lambda x: own(x, kept, live, -1), at_ids)
    kept, targets, reference, inverse, (numbers, of), at_ids = lax.optimization_barrier(
        (kept, targets, reference, inverse, of_tokens, at_ids)
    )
    count = jnp.full(1, plan.rows, jnp.int32) if kept is None else kept.count
    given = inputs._replace(targets=targets, inverse_temperature=inverse, ids=None)

    def with_e() -> Block:
        return Block(given._replace(e=own(inputs.e, kept, targets >= 0)), reference, count)

    return kept, Block(given, reference, count), with_e, (numbers._replace(reference=reference), of, at_ids)


def _by_either(are_few: jax.Array | None, how: Schedule, found: Callable[[Multiplying], Any]) -> Any:
    """found(how.of_few) if few tokens are kept, else found(how.products). are_few: (1,) bool; None: no choice.

    XLA's matmuls of all tokens are faster than matmuls that stop at the last kept token, unless many tokens are
    ignored. Only the device knows how many are.
    """
    if are_few is None or how.of_few is None:
        return found(how.products)
    return lax.cond(are_few[0], partial(found, how.of_few), partial(found, how.products))


def _rows_to_clear(block: Block, how: Schedule, are_few: jax.Array | None, plan: Plan) -> jax.Array | None:
    """In how many first rows of P, (1,), those of ignored tokens must be 0; None: in no row.

    XLA's matmuls read all rows, and kernels in their last step rows after the last kept one.
    """
    stopping = how.products if how.of_few is None else how.of_few
    if plan.request.wants.bias or not plan.finds_ignored or not stopping.engine.stops:
        return jnp.full(1, plan.rows, jnp.int32)
    clear = block.count + (stopping.engine.depth - 1)
    if are_few is not None:
        return jnp.where(are_few, clear, plan.rows)
    return clear if stopping.engine.depth > 1 else None


def _of_saved(
    block: Block, p: jax.Array, r: jax.Array, plan: Plan, how: Multiplying
) -> tuple[jax.Array | None, jax.Array | None]:
    """de, in the type of the result, and dc, where the exponentials are multiplied as they are."""
    request, problem, de, dc = plan.request, block.problem(plan), None, None
    if request.wants.e:
        products = how.engine.products(how, problem, None, block.count)
        de = (summed_parts(products.add_de(None, p, ALL_COLUMNS), how.splits) * r[:, None]).astype(request.de_dtype)
        r, de = lax.optimization_barrier((r, de))  # the scaled e is made once the sums are no more
    if request.wants.c:
        problem = problem.with_e(scaled(block.inputs.e, r))
        products = how.engine.products(how, problem, None, block.count)
        dc = products.put_dc(lax.empty(block.inputs.c.shape, request.dc_dtype), p, ALL_COLUMNS)
    return de, dc


def _dz_of_logits(
    block: Block, numbers: Numbers, of: Cotangents, at_ids: Any, step: Step, stops: bool, plan: Plan
) -> FormDz:
    """stops: whether the matmuls with dz stop at the last kept token; at_ids: given_ids.AtIds, or None."""
    problem, count = block.problem(plan), block.count if stops else None
    form = step.engine.form_dz(step, problem, numbers, relative(of, numbers, block.live), count)
    return form if at_ids is None else given_ids.written(form, at_ids, block.count)


def _dz_of_saved(block: Block, numbers: Numbers, of: Cotangents, saved: jax.Array, how: Schedule, plan: Plan) -> FormDz:
    problem, step = block.problem(plan), how.dz
    assert step is not None
    if of.mean is not None:
        numbers = of_exponentials(*step.engine.mass_and_moment(problem, saved))
    return step.engine.form_dz_of_saved(step, problem, saved, relative(of, numbers, block.live))


def _over_windows(
    block: Block, form: FormDz, how: Multiplying, unit: jax.Array | None, plan: Plan
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """de and dbias, at least float32, and dc, from dz of one window of the vocabulary after another."""
    (e, c, *_), request = block.inputs, plan.request
    wanted, wide = request.wants, request.sum_dtype
    start = Gradients(
        jnp.zeros((how.splits * len(e), e.shape[1]), wide) if wanted.e else None,
        lax.empty(c.shape, request.dc_dtype) if wanted.c else None,  # the windows write all of it
        jnp.zeros((request.vocabulary,), wide) if wanted.bias else None,
    )
    products = how.engine.products(how, block.problem(plan), unit, block.count)
    de, dc, dbias = add_windows(start, form, how.windows, products)
    return None if de is None else summed_parts(de, how.splits), dc, dbias
