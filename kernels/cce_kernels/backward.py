"""The backward pass, with the numbers of the forward pass and perhaps its exponentials. The plan says how.

The exponentials of all tokens are saved: the matmuls of the gradients multiply them, and no logit is computed again
(cce_kernels/exponentials.py). With a weighted sum dz is formed from them. Nothing is saved: dz is formed from logits
that are computed again, one group of the vocabulary at a time (cce_kernels/gradients.py).

Ignored tokens come last (cce_kernels/tokens.py). XLA's matmuls of all tokens are faster than matmuls that stop at the
last kept token, unless many tokens are ignored. Only the device knows how many are ignored, so the device chooses.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.engines.engine import Multiplying
from cce_kernels.exponentials import factors, references, scaled
from cce_kernels.gradients import ALL_COLUMNS, add_groups, begun, fitted, unscaled, without_ignored
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Shard, Statistics, Wanted
from cce_kernels.plan.plan import FEW, Plan
from cce_kernels.tokens import Kept


class _Pass(NamedTuple):
    """What the steps of a backward pass share: the tokens, kept ones first, and the plan."""

    inputs: Inputs
    numbers: Statistics
    reference: jax.Array | None  # ρ of the saved exponentials; None: nothing is saved
    cotangents: Cotangents
    unit: jax.Array | None  # the number that the cotangents were divided by; None: 1
    count: jax.Array  # type: ignore[assignment]  # (1,) int32: how many tokens are kept
    few: jax.Array | None  # whether fewer than FEW of the tokens are kept; None: ignored tokens are not looked for
    plan: Plan

    @property
    def wanted(self) -> Wanted:
        assert self.plan.call.wanted is not None
        return self.plan.call.wanted

    @property
    def head(self):
        return self.plan.call.head

    @property
    def type_of_de(self):
        e = self.inputs.e.dtype
        return jnp.promote_types(e, jnp.float32) if self.plan.call.wide_de else e

    @property
    def type_of_dc(self):
        e = self.inputs.e.dtype
        return jnp.promote_types(e, jnp.float32) if self.plan.call.wide_dc else e

    def products(self, how: Multiplying, e: jax.Array):
        assert self.plan.backward is not None
        return how.engine.products(e, self.inputs.c, head=self.head, unit=self.unit, count=self.count, how=how,
                                   groups=self.plan.backward.groups, gpu=self.plan.gpu)  # fmt: skip


def gradients(
    inputs: Inputs, numbers: Statistics, saved: jax.Array | None, cotangents: Cotangents, plan: Plan,
    shard: Shard | None = None,
) -> tuple[Gradients, jax.Array | None]:  # fmt: skip
    """de, dc and dbias in e's type, None where not wanted; and saved, which has been overwritten.

    numbers and saved: the results of forward.statistics with the same plan. Ignored tokens contribute nothing.
    shard: given if the columns are a shard of the vocabulary. The cotangents are then of the numbers over all columns,
    and de is the sum over these columns alone. de is at least float32 if plan.call.wide_de, and so are dc and dbias if
    plan.call.wide_dc.
    """
    how = plan.backward
    assert how is not None
    kept, reference = None, None
    if saved is not None:
        reference = references(numbers, inputs.targets, plan.call.vocabulary, shard)
    if shard is not None:
        numbers = numbers._replace(lse=shard.lse)
    # Without the barrier XLA would reuse the forward pass's copy of the kept rows of e, and hold it between the passes,
    # or make the copy in which ignored rows are 0 before the forward pass. The barrier makes such a copy depend on the
    # forward pass's result. No array of the caller's goes through it: XLA takes what comes out for another array, and
    # may write a result of the caller's over the array while kernels still read what came out.
    if plan.looks:
        kept = Kept.of(inputs.targets, plan.rows)
        cotangents, reference = kept.gathered((cotangents, reference), 0)
        numbers = Statistics(kept.gathered(numbers.lse, jnp.inf), kept.gathered(numbers.target, 0), None)
        inputs = inputs._replace(targets=kept.gathered(inputs.targets, -1))
        kept, numbers, reference = lax.optimization_barrier((kept, numbers, reference))
    else:
        inputs, lse, cotangents = without_ignored(inputs, numbers.lse, cotangents, plan.rows)
        numbers = Statistics(lse, numbers.target, None)
    cotangents, unit = fitted(cotangents, inputs)
    count = jnp.full(1, plan.rows, jnp.int32) if kept is None else kept.count
    few = None if kept is None else count[0] < FEW * plan.rows
    e = inputs.e

    def rows_of_e() -> jax.Array:
        """Gathered at each use, so that only one copy exists at a time."""
        return e if kept is None else kept.gathered(e, 0)

    run = _Pass(inputs, numbers, reference, cotangents, unit, count, few, plan)
    if saved is None:
        found = _decided(run, partial(_of_logits, run, rows_of_e))
    elif how.dz is not None:
        found = _decided(run, partial(_of_saved_dz, run, rows_of_e, saved))
    else:
        r, saved = _ready(run, saved)
        if how.de is not None:
            return _in_place(run, rows_of_e, saved, r, kept), saved
        found = _decided(run, partial(_of_exponentials, run, rows_of_e, saved, r))
    de, dc, dbias = found
    if de is not None:
        de = unscaled(de, unit, run.type_of_de)
        de = de[: plan.call.tokens] if kept is None else kept.restored(de)
    return Gradients(de, dc, None if dbias is None else unscaled(dbias, unit, run.type_of_dc)), saved


def _decided(run: _Pass, found: Callable[[Multiplying], Gradients]) -> Gradients:
    """found(how.few) if few tokens are kept and the plan has such matmuls, else found(how.products)."""
    how = run.plan.backward
    assert how is not None
    stopping = how.few
    if run.few is None or stopping is None:
        return found(how.products)
    return lax.cond(run.few, lambda: found(stopping), lambda: found(how.products))


def _of_logits(run: _Pass, rows_of_e: Callable, products: Multiplying) -> Gradients:
    """The gradients from logits that are computed again."""
    given, how = run.inputs._replace(e=rows_of_e()), run.plan.backward
    assert how is not None
    assert how.dz is not None
    form = how.dz.engine.form_dz(given, run.numbers.lse, run.cotangents, run.count if products.engine.stops else None,
                                 head=run.head, groups=how.groups, wanted=run.wanted, tiles=how.dz.tiles,
                                 gpu=run.plan.gpu)  # fmt: skip
    return _summed(run, given, products, form)


def _of_saved_dz(run: _Pass, rows_of_e: Callable, saved: jax.Array, products: Multiplying) -> Gradients:
    """The gradients where a weighted sum is asked for: dz is formed from the saved exponentials."""
    given, how = run.inputs._replace(e=rows_of_e()), run.plan.backward
    assert how is not None
    assert how.dz is not None
    assert run.reference is not None
    form = how.dz.engine.form_dz_of_saved(saved, given, run.reference, run.numbers.lse, run.cotangents, head=run.head,
                                          groups=how.groups, wanted=run.wanted, tiles=how.dz.tiles,
                                          gpu=run.plan.gpu)  # fmt: skip
    return _summed(run, given, products, form)


def _summed(run: _Pass, given: Inputs, how: Multiplying, form) -> Gradients:
    """The gradients summed over the groups of the vocabulary."""
    assert run.plan.backward is not None
    start = begun(given, run.head, run.wanted, run.type_of_dc)
    return add_groups(start, form, run.plan.backward.groups, run.products(how, given.e))


def _ready(run: _Pass, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """r, and the saved exponentials p ready for the matmuls: the targets' elements and the zeros are written."""
    plan, how = run.plan, run.plan.backward
    assert how is not None
    # clear: in so many first rows of p, the rows of ignored tokens must be 0; None: in no row. Matmuls that stop at the
    # last kept token read rows after it only in their last step.
    clear = None
    if run.few is None or run.wanted.bias:
        clear = jnp.full(1, p.shape[0], jnp.int32)
    elif how.de is not None:
        clear = run.count + (how.products.engine.depth - 1)
    elif not how.products.engine.stops:
        assert how.few is not None
        clear = jnp.where(run.few, run.count + (how.few.engine.depth - 1), p.shape[0]).astype(jnp.int32)
    assert run.reference is not None
    r, at_target = factors(run.reference, run.numbers, run.cotangents, run.head)
    step = plan.forward.rescue
    assert step is not None
    p = step.engine.ready(p, run.inputs.targets, at_target, clear, vocabulary=plan.call.vocabulary, gpu=plan.gpu)
    return r if run.inputs.scale is None else r * run.inputs.scale, p


def _of_exponentials(
    run: _Pass, rows_of_e: Callable, p: jax.Array, r: jax.Array, how: Multiplying
) -> Gradients:  # fmt: skip
    """The gradients where the exponentials are multiplied as they are; de in the type of the result."""
    e = rows_of_e()
    de, dc, dbias = begun(run.inputs._replace(e=e), run.head, run.wanted, run.type_of_dc)
    if run.wanted.e:
        de = (run.products(how, e).add_de(None, p, ALL_COLUMNS) * r[:, None]).astype(run.type_of_de)
        r, de = lax.optimization_barrier((r, de))  # so that the scaled e and a float32 de never exist at the same time
    if dc is not None:
        dc = run.products(how, scaled(e, r)).put_dc(dc, p, ALL_COLUMNS)
    if dbias is not None:
        high = r.astype(e.dtype)
        both = jnp.stack([high, (r - high).astype(e.dtype)])  # their sum holds 16 bits of r, twice as many as bfloat16
        sums = lax.dot_general(both, p, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        dbias = jnp.sum(sums, axis=0)[: dbias.size]
    return Gradients(de, dc, dbias)


def _in_place(run: _Pass, rows_of_e: Callable, p: jax.Array, r: jax.Array, kept: Kept | None) -> Gradients:
    """The same by kernels that write each result once.

    One buffer, `place`, holds the scaled e until dc is computed, and then de, if de has e's type.
    """
    plan, how, c = run.plan, run.plan.backward, run.inputs.c
    assert how is not None
    assert how.de is not None
    place, dc = lax.empty((plan.rows, plan.call.width), run.inputs.e.dtype), None
    if run.wanted.c:
        place = scaled(rows_of_e(), r)
        dc = run.products(how.products, place).put_dc(lax.empty(c.shape, run.type_of_dc), p, ALL_COLUMNS)
    if not run.wanted.e:
        return Gradients(None, dc, None)
    place, dc = lax.optimization_barrier((place, dc))  # dc reads the scaled e before de overwrites it
    if run.type_of_de != place.dtype:
        place = lax.empty(place.shape, run.type_of_de)
    de = how.de.engine.de_of_saved(p, r, c, run.count, place, head=run.head, tiles=how.de.tiles, gpu=plan.gpu)
    if kept is not None:
        assert plan.forward.rescue is not None
        de = plan.forward.rescue.engine.restored(de, kept, gpu=plan.gpu)
    return Gradients(de, dc, None)
