"""Gradients formed in the forward pass, one chunk of tokens after another, so that the logits are computed once.

The loss is a sum over tokens, S = Σ_i total_i, that is multiplied by a factor g later. The cotangents of a token's
numbers are then g times numbers that the forward pass knows as soon as it knows the token's numbers. For each chunk:

    numbers      the chunk's log-sum-exps and targets' logits, and its exponentials P (or its dz) in one buffer
    de_i         r_i·(P·c)_i, rounded: the chunk's own rows. In float16 each is divided by a unit first, and g·unit
                 multiplies it later: weights of 10⁶ have a moderate mean, and float16 holds no sum of theirs. Beside a
                 teacher it is rounded in block floating point, so that g adds no second rounding
    dc           dc + Pᵀ·(r·e), in block floating point (cce_kernels/block_floats.py), in the memory of the result

The backward pass multiplies by g: de elementwise, and dc where it is written anyway. For that the last chunk's part of
dc is left to the backward pass, whose matmul writes g · (sum + part). dc in float32 is multiplied elementwise.
Kept tokens come first (cce_kernels/tokens.py), so that chunks at the end may have none.

With a weighted sum or a mean of the logits, dz takes the place of P: de = dz·c and dc + dzᵀ·e.

A chunk has two halves: `numbers_of`, and `gradients_of` with the cotangents of these numbers. Where the columns are a
shard of the vocabulary, the numbers are exchanged with the other shards in between. P stays relative to the shard's own
reference; r takes the log-mass of all columns. de is then a part of a sum over shards, in float32.

Where de alone is wanted, the forward pass can form it without any cotangent. With the cotangents a and t̂ of lse and of
the target's logit, the slope u of the softcap and the factor f of the inputs, scale times the inverse temperature,

    de_i = a_i·m_i + (a_i·p_i,t_i + t̂_i)·u_i,t_i·f_i·c_t_i        m_i = f_i·Σ_v≠t_i p_iv·u_iv·c_v

and m (N, D) is what the forward pass leaves. The target is left out of m, as the two terms of a confident token would
cancel each other: m's rounding would then be larger than de.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.block_floats import steps_shape
from cce_kernels.block_sparse import Blocks, Tokens, all_blocks, kept_blocks
from cce_kernels.engines.engine import Problem
from cce_kernels.engines.xla.chunk import dz_of, numbers_and_logits
from cce_kernels.exponentials import dbias_of, factors, saved_shape, scaled
from cce_kernels.forward import of_rows, reference_of
from cce_kernels.gradients import ALL_COLUMNS, De, Left, divided, multiplied
from cce_kernels.head import Head
from cce_kernels.mean import cleared, of_exponentials, relative
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Gradients, Inputs, Statistics
from cce_kernels.plan.plan import InForward, Plan
from cce_kernels.residuals import Residuals
from cce_kernels.tokens import Kept, Rows

# (the numbers of some tokens, what belongs to these tokens) -> the cotangents of the numbers, 0 for ignored tokens
CotangentsOf = Callable[[Statistics, Any], Cotangents]
# the numbers of a shard of the vocabulary, (n,) each -> the numbers of all columns
OfAllColumns = Callable[[Statistics], Statistics]


class Columns(NamedTuple):
    """What the second half of a chunk needs of its columns."""

    # exponentials, (n, V) with the padding of saved_shape, in e's type; in plain XLA logits, (n, V), at least float32
    values: jax.Array
    blocks: Blocks | None = None  # what the products keep; None: all


class Chunk(NamedTuple):
    """n tokens, kept ones first. For the others e is 0, the target -1, the temperature 1, the reference FLOAT32_MAX."""

    inputs: Inputs
    reference: jax.Array | None  # (n,): the targets' logits; None where the plan needs none, or `referenced` finds them
    count: jax.Array  # type: ignore[assignment]  # (1,) int32: how many are kept

    @classmethod
    def of(cls, inputs: Inputs, reference: jax.Array | None, count: jax.Array) -> "Chunk":
        """The chunk whose first `count` tokens are kept. The other rows of the arrays may hold anything."""
        live, inverse = jnp.arange(len(inputs.targets), dtype=jnp.int32) < count, inputs.inverse_temperature
        inverse = None if inverse is None else jnp.where(live, inverse, 1)
        e, targets = jnp.where(live[:, None], inputs.e, 0), jnp.where(live, inputs.targets, -1)
        reference = None if reference is None else jnp.where(live, reference, FLOAT32_MAX)
        return cls(inputs._replace(e=e, targets=targets, inverse_temperature=inverse), reference, count)

    @property
    def live(self) -> jax.Array:
        return self.inputs.targets >= 0


def _way(plan: Plan) -> InForward:
    assert plan.in_forward is not None
    return plan.in_forward


def begin(
    inputs: Inputs,
    of_tokens: Any,
    cotangents_of: CotangentsOf,
    plan: Plan,
    cleared: bool = False,
    reference: jax.Array | None = None,
    of_all_columns: OfAllColumns | None = None,
) -> tuple[Statistics, Residuals]:
    """The numbers of all tokens, and the gradients of S. of_tokens: a tree of arrays with a row for each token.

    cleared: what is left for the backward pass is 0, not arbitrary, where a token is ignored.
    reference, of_all_columns: for a shard of the vocabulary, forward.statistics' reference and the exchange of numbers.
    The numbers are then of all columns, and the gradients of the shard's columns. of_all_columns is called for each
    chunk.
    """
    how, call = _way(plan), plan.call
    kept, zeros = Kept.of(inputs.targets, how.chunks.rows), jnp.zeros(how.chunks.rows, call.sum_dtype)

    def chunk(start: Any, size: int) -> Formed:
        given, of_own = taken(kept, start, size, inputs, of_tokens, reference)
        given = referenced(given, plan)
        own, columns = numbers_of(given, plan)
        found = own if of_all_columns is None else of_all_columns(own)
        return Formed(found, *gradients_of(given, columns, own, found, cotangents_of(found, of_own), plan))

    asked = (zeros if one else None for one in (call.with_sum, call.with_mean))
    numbers = Statistics(zeros, zeros, zeros, *asked)
    return over_chunks(chunk, numbers, kept, plan, cleared)


def referenced(chunk: Chunk, plan: Plan, found: jax.Array | None = None) -> Chunk:
    """The chunk with its reference: as it is given, else that of a chunk whose columns are the whole vocabulary.

    found: the targets' logits, if they are known already.
    """
    forward, inputs = _way(plan).forward, chunk.inputs
    if forward is None:
        return chunk._replace(reference=None)
    if chunk.reference is not None:
        return chunk
    if found is None:
        return chunk._replace(reference=reference_of(Problem(plan.call, plan.gpu, inputs), Rows(), forward))
    of_kept = jnp.where(inputs.targets < plan.call.vocabulary, found, -FLOAT32_MAX)
    return chunk._replace(reference=jnp.where(chunk.live, of_kept, FLOAT32_MAX))


class Formed(NamedTuple):
    """What one chunk forms."""

    numbers: Any  # a tree of numbers of its tokens, (n,) each
    de: De | None
    left: Left  # its part of dc
    dbias: Any  # its part of dbias, (V,)


def taken(
    kept: Kept, start: Any, size: int, inputs: Inputs, of_tokens: Any, reference: jax.Array | None = None
) -> tuple[Chunk, Any]:
    """The chunk of the kept tokens start to start + size, and the rows of the tree `of_tokens` that belong to them."""
    order = lax.dynamic_slice_in_dim(kept.order, start, size)
    of_inputs, at, of_own = jax.tree.map(lambda x: x[order], (inputs.of_tokens, reference, of_tokens))
    return Chunk.of(inputs._replace(**of_inputs), at, jnp.clip(kept.count - start, 0, size)), of_own


def over_chunks(
    chunk: Callable[[Any, int], Formed], numbers: Any, kept: Kept, plan: Plan, cleared: bool
) -> tuple[Any, Residuals]:
    """The numbers of all tokens, and what is left of the gradients, from chunks: chunk(start, size), kept tokens first.

    numbers: zeros in place of the numbers, (rows,) each. cleared: as in `begin`.
    """
    how, call, wanted = _way(plan), plan.call, plan.call.wants
    width, vocabulary, rows = call.width, call.vocabulary, how.chunks.rows
    rows_of_de, wide = how.chunks.rows_of_de(call.tokens), call.sum_dtype

    def put(whole, part, start):
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), whole, part)

    def step(i, carry):
        numbers, formed = carry
        start = i * how.chunks.size
        found, de, left, dbias = chunk(start, how.chunks.size)
        dc, steps = formed.dc, formed.steps
        if wanted.c:
            dc, steps = add_dc(dc, steps, left, plan)
        numbers = put(numbers, found, start)
        de = None if de is None else put(formed.de, de, start)
        dbias = None if formed.dbias is None else formed.dbias + dbias
        return numbers, Residuals(de=de, dc=dc, steps=steps, dbias=dbias)

    dc, steps, of_c = None, None, (vocabulary, width) if call.head.vocab_axis == 0 else (width, vocabulary)
    if wanted.c and call.dc_dtype == wide:
        dc = jnp.zeros(of_c, call.dc_dtype)
    elif wanted.c:
        dc = lax.empty(of_c, call.dc_dtype)
        steps = jnp.zeros(steps_shape(vocabulary, width, how.chunks.block), jnp.float32)  # any integers times 0 are 0
    de: Any = None  # until all rows are there: De
    if wanted.e:
        units = jnp.zeros(call.units_shape(rows_of_de), wide) if call.divides_de else None
        de = De(jnp.zeros((rows_of_de, width), call.left_de_dtype), units)
    dbias = jnp.zeros((vocabulary,), wide) if wanted.bias else None
    formed = Residuals(de=de, dc=dc, steps=steps, dbias=dbias)
    if how.chunks.whole:
        numbers, formed = lax.fori_loop(0, how.chunks.whole, step, (numbers, formed))
    last = None
    if how.chunks.last:
        start = jnp.int32(rows - how.chunks.last)
        # The last chunk begins after the loop, so that no two chunks' buffers exist at once. Numbers of the loop say
        # so, not gradients: where jax.checkpoint drops these, JAX can remove them. But XLA inlines a loop of one step.
        if how.chunks.whole == 1:
            start, formed = lax.optimization_barrier((start, formed))
        else:
            start, numbers = lax.optimization_barrier((start, numbers))
        found, de, last, dbias = chunk(start, how.chunks.last)
        numbers = put(numbers, found, start)
        if cleared:
            live = jnp.arange(how.chunks.last) < last.count
            last = last._replace(left=jnp.where(live[:, None], last.left, 0))
        in_last = rows_of_de - how.chunks.whole * how.chunks.size
        de = None if de is None else put(formed.de, jax.tree.map(lambda x: x[:in_last], de), start)
        formed = formed._replace(de=de, dbias=None if formed.dbias is None else formed.dbias + dbias, last=last)
    if formed.de is not None:
        restored, (de, units) = how.restored, formed.de
        de = kept.restored(de) if restored is None else restored.engine.restored(restored, plan.gpu, de, kept)
        formed = formed._replace(de=de, units=None if units is None else kept.restored(units))
    if steps is not None:  # not in the result's type, in which the integers might be taken for NaN
        formed = formed._replace(dc=lax.bitcast_convert_type(formed.dc, jnp.int16))  # type: ignore[arg-type]
    return jax.tree.map(kept.restored, numbers), formed


def finish(formed: Residuals, factor: jax.Array, live: jax.Array, plan: Plan) -> Gradients:
    """The gradients of factor · S. live: (N,), the tokens that are not ignored."""
    call, de, dc, dbias = plan.call, formed.de, formed.dc, formed.dbias
    if de is not None:  # an infinite factor times the 0 of an ignored token is NaN
        de = multiplied(De(de, formed.units), jnp.where(live, factor, 0), call)
    if dc is not None and formed.last is not None:
        dc = lax.bitcast_convert_type(dc, formed.last.e.dtype)
        dc, _ = add_dc(dc, formed.steps, formed.last, plan, factor.reshape(1))
    elif dc is not None:
        dc = dc * factor.astype(dc.dtype)
    if dbias is not None:
        dbias = (dbias * factor).astype(call.dc_dtype)
    return Gradients(de, dc, dbias)


def of_any_cotangents(inputs: Inputs, plan: Plan, cleared: bool = False) -> tuple[Statistics, jax.Array]:
    """The numbers of all tokens, and m, (N, D), in e's type."""

    def of_all_but_the_target(numbers: Statistics, _: Any) -> Cotangents:
        return Cotangents(jnp.ones_like(numbers.log_mass), -jnp.exp(numbers.log_p(numbers.target)), None)

    numbers, formed = begin(inputs, (), of_all_but_the_target, plan, cleared)
    assert formed.de is not None
    return numbers, formed.de


def de_of(inputs: Inputs, numbers: Statistics, m: jax.Array, of: Cotangents, head: Head, dtype: Any) -> jax.Array:
    """de, (N, D), from `of_any_cotangents`; 0 where a token is ignored."""
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


def numbers_of(chunk: Chunk, plan: Plan) -> tuple[Statistics, Columns]:
    """The first half of a chunk: its numbers over these columns, and what `gradients_of` needs of the columns."""
    problem, how = Problem(plan.call, plan.gpu, chunk.inputs), _way(plan)
    if how.forward is None:
        numbers, logits = numbers_and_logits(problem)
        return numbers, Columns(logits, all_blocks(plan.call, len(logits)))
    of_columns, p, masses = of_rows(problem, Rows(count=chunk.count), chunk.reference, how.forward, True)
    assert p is not None
    call, step = plan.call, how.thresholds
    if masses is None or step is None:
        return of_columns, Columns(p, all_blocks(call, len(p)))
    u = jnp.ones_like(of_columns.target)
    u = u if call.head.softcap is None else call.head.slope(chunk.inputs.capped(of_columns.target))
    tokens = Tokens(chunk.inputs.targets, u, chunk.count)
    blocks = kept_blocks(masses, tokens, call.gradient_tolerance, partial(step.engine.thresholds, step, plan.gpu))
    return of_columns, Columns(p, blocks)


def gradients_of(
    chunk: Chunk, columns: Columns, own: Statistics, numbers: Statistics, of: Cotangents, plan: Plan
) -> tuple[De | None, Left, Any]:
    """The second half: the chunk's de, what is left of dc, and its part of dbias, (V,), if that is wanted.

    own, columns: of `numbers_of`; columns may be overwritten. numbers, of: over all columns, and their cotangents.
    """
    if _way(plan).forward is not None:
        return _of_exponentials(chunk, columns, own, numbers, of, plan)
    of = jax.tree.map(lambda x: cleared(x, chunk.live), of)
    dz = dz_of(chunk.inputs, columns.values, numbers, of, plan.call.head)
    return of_dz(chunk, *dz, plan, None if columns.blocks is None else columns.blocks.dc)


def add_dc(
    dc: jax.Array, steps: jax.Array | None, left: Left, plan: Plan, factor: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """engine.Launched.sum_dc, as planned."""
    step = _way(plan).dc
    return step.engine.sum_dc(step, plan.call, plan.gpu, dc, steps, left, factor)


def of_dz(
    chunk: Chunk, dz: jax.Array, dbias: Any, unit: jax.Array | None, plan: Plan, blocks: jax.Array | None = None
) -> tuple[De | None, Left, Any]:
    """What `gradients_of` returns, from dz in e's type, divided by unit, and the sums of its columns, (V,).

    dz: (n, V), or with the padding of saved_shape.
    """
    call, inputs, how, de = plan.call, chunk.inputs, _way(plan), None
    missing = ((0, 0), (0, saved_shape(1, call.vocabulary)[1] - dz.shape[1]))
    if how.de is not None:
        dz = jnp.pad(dz, missing)
    if call.wants.e:
        de = _product_with_c(chunk, dz, plan)
        de = divided(de if unit is None else de * unit, call)
        de, dz = lax.optimization_barrier((de, dz))
    dbias = dbias if unit is None or dbias is None else dbias * unit
    if how.chunks.last and how.de is None:  # the last chunk has the shape that is left on every platform
        dz = jnp.pad(dz, missing)
    return de, Left(dz, inputs.e, unit, chunk.count, blocks), dbias


def _product_with_c(chunk: Chunk, dz: jax.Array, plan: Plan) -> jax.Array:
    """dz·c, at least float32."""
    call, how, inputs = plan.call, _way(plan), chunk.inputs
    if how.de is None:
        head, contract = call.head, (((1,), (call.head.vocab_axis,)), ((), ()))
        return lax.dot_general(dz, inputs.c, contract, precision=head.precision, preferred_element_type=call.sum_dtype)
    products = how.de.engine.products(how.de, Problem(call, plan.gpu, inputs), None, chunk.count)
    sums = products.add_de(None, dz, ALL_COLUMNS).reshape(how.de.splits, *inputs.e.shape)
    return jnp.where(chunk.live[:, None], jnp.sum(sums, axis=0), 0)


def _of_exponentials(chunk: Chunk, columns: Columns, own: Statistics, numbers: Statistics, of: Cotangents, plan: Plan):
    call, how, wanted = plan.call, _way(plan), plan.call.wants
    assert how.de is not None
    p, blocks = columns
    inputs, live, tokens = chunk.inputs, chunk.live, len(chunk.inputs.e)
    problem = Problem(call, plan.gpu, inputs)
    numbers = jax.tree.map(lambda x: cleared(x, live), numbers.relative_to(own.reference))
    if how.dz is not None:
        if of.mean is not None:
            numbers = of_exponentials(*how.dz.engine.mass_and_moment(problem, p))
        p = how.dz.engine.dz_in_place(how.dz, problem, p, relative(of, numbers, live))
        r = live.astype(numbers.log_mass.dtype)  # P is dz now
    else:
        assert how.targets is not None
        r, at_target = factors(numbers, jax.tree.map(lambda x: cleared(x, live), of), inputs, call.head)
        # The matmul for dbias reads all rows. Those for de and dc read rows after the last kept one in their last step,
        # or to form rows of de that are not used.
        beyond = max(how.de.engine.depth, how.dc.engine.depth) - 1
        clear = jnp.full(1, tokens, jnp.int32) if wanted.bias else chunk.count + beyond if beyond else None
        p = how.targets.engine.saved_targets(how.targets, problem, p, at_target, clear)
        r = jnp.where(live, r if inputs.factor is None else r * inputs.factor, 0)
    de = None
    if wanted.e:
        products = how.de.engine.products(how.de, problem, None, chunk.count, None if blocks is None else blocks.de)
        sums = products.add_de(None, p, ALL_COLUMNS).reshape(how.de.splits, *inputs.e.shape)
        de = jnp.where(live[:, None], jnp.sum(sums, axis=0) * r[:, None], 0)
        de = divided(de, call)
        de, p, own = lax.optimization_barrier((de, p, inputs.e))
        inputs = inputs._replace(e=own)  # what is scaled is made once the sums for de are no more
    dbias = dbias_of(p, r, call.vocabulary) if wanted.bias else None
    e = inputs.e if how.dz is not None else scaled(inputs.e, r)
    return de, Left(p, e, None, chunk.count, None if blocks is None else blocks.dc), dbias
