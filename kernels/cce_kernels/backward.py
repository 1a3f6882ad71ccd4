"""The backward pass: saved tokens → other tokens → gradients. The plan says which engine runs each step.

A saved token is one whose exponentials the forward pass saved: its logits are not computed again
(cce_kernels/exponentials.py). The saved tokens' part of dc is written first; the other tokens' part is added to it.
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
from cce_kernels.gradients import ALL_COLUMNS, Beside, add_groups, begun, fitted, unscaled, without_ignored
from cce_kernels.numbers import Cotangents, Gradients, Inputs, Shard, Statistics, Wanted
from cce_kernels.plan.plan import FEW, Part, Plan
from cce_kernels.tokens import Kept


class _Tokens(NamedTuple):
    """Some of the tokens, the kept ones first."""

    e: Callable[[], jax.Array]  # gathers their embeddings at each use, so that only one copy exists at a time
    targets: jax.Array
    numbers: Statistics
    reference: jax.Array | None  # ρ of their saved exponentials; None: nothing is saved
    cotangents: Cotangents
    count: jax.Array  # type: ignore[assignment]  # (1,) int32: how many are kept

    def part(self, start: int, stop: int) -> "_Tokens":
        rows = slice(start, stop)
        given = self.targets, self.numbers, self.reference, self.cotangents
        targets, numbers, reference, cotangents = jax.tree.map(lambda x: x[rows], given)
        count = jnp.clip(self.count - start, 0, stop - start)
        return _Tokens(lambda: self.e()[rows], targets, numbers, reference, cotangents, count)


class _Saved(NamedTuple):
    """The exponentials of the saved tokens, and, if they are multiplied as they are, their factor r."""

    exponentials: jax.Array
    r: jax.Array | None


class _Pass(NamedTuple):
    """What all parts of a backward pass share."""

    inputs: Inputs
    unit: jax.Array | None  # the number that the cotangents were divided by; None: 1
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

    def given(self, tokens: _Tokens) -> Inputs:
        return self.inputs._replace(e=tokens.e(), targets=tokens.targets)

    def products(self, how: Multiplying, part: Part, e: jax.Array, tokens: _Tokens, **more):
        return how.engine.products(e, self.inputs.c, head=self.head, unit=self.unit, count=tokens.count, how=how,
                                   groups=part.groups, gpu=self.plan.gpu, **more)  # fmt: skip


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
    assert plan.backward is not None
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
    e = inputs.e
    count = jnp.full(1, plan.rows, jnp.int32) if kept is None else kept.count
    everyone = _Tokens(lambda: e if kept is None else kept.gathered(e, 0), inputs.targets, numbers, reference,
                       cotangents, count)  # fmt: skip
    run = _Pass(inputs, unit, plan)
    few = None if kept is None else count[0] < FEW * plan.rows

    ready = None if saved is None else _ready(run, saved, everyone.part(0, plan.saved), few)
    saved = None if ready is None else ready.exponentials
    if plan.backward.together:
        found = _together(run, everyone, ready)
        if found.e is not None and kept is not None:
            found = found._replace(e=plan.forward.rescue.engine.restored(found.e, kept, gpu=plan.gpu))  # type: ignore
        return found, saved
    parts = _one_after_another(run, everyone, ready, few)
    of_e = [unscaled(x.e, unit, run.type_of_de) for x in parts if x.e is not None]
    de = None if not of_e else jnp.concatenate(of_e)[: plan.call.tokens] if kept is None else kept.restored(*of_e)
    _, dc, dbias = parts[-1]
    return Gradients(de, dc, None if dbias is None else unscaled(dbias, unit, run.type_of_dc)), saved


def _ready(run: _Pass, p: jax.Array, tokens: _Tokens, few: jax.Array | None) -> _Saved:
    """The saved tokens' exponentials p, ready for the matmuls: the targets' elements and the zeros are written."""
    plan, backward, vocabulary = run.plan, run.plan.backward, run.plan.call.vocabulary
    assert backward is not None
    assert backward.saved is not None
    if backward.saved.dz is not None:
        return _Saved(p, None)
    # clear: in so many first rows of p, the rows of ignored tokens must be 0; None: in no row. Matmuls that stop at the
    # last kept token read rows after it only in their last step.
    clear = None
    if few is None or run.wanted.bias:
        clear = jnp.full(1, p.shape[0], jnp.int32)
    elif backward.together:
        clear = tokens.count + (backward.saved.products.engine.depth - 1)
    elif not backward.saved.products.engine.stops:
        clear = jnp.where(few, 0, p.shape[0]).astype(jnp.int32).reshape(1)
    assert tokens.reference is not None
    r, at_target = factors(tokens.reference, tokens.numbers, tokens.cotangents, run.head)
    step = plan.forward.rescue
    assert step is not None
    p = step.engine.ready(p, tokens.targets, at_target, clear, vocabulary=vocabulary, gpu=plan.gpu)
    return _Saved(p, r if run.inputs.scale is None else r * run.inputs.scale)


def _one_after_another(run: _Pass, everyone: _Tokens, saved: _Saved | None, few: jax.Array | None) -> list[Gradients]:
    """The gradients of the saved tokens, then of the other tokens, each with its own de. The last dc and dbias are sums
    over all tokens.
    """
    how, parts = run.plan.backward, []
    assert how is not None
    if (part := how.saved) is not None:
        assert saved is not None
        of_saved = _of_exponentials if part.dz is None else _of_saved_dz
        first = everyone.part(0, run.plan.saved)
        parts.append(_decided(few, part, partial(of_saved, run, part, first, saved)))
    if (part := how.others) is not None:
        rest = everyone.part(run.plan.saved, run.plan.rows)
        before = parts[0] if parts else None
        parts.append(_decided(few, part, partial(_of_others, run, part, rest, before, None)))
    return parts


def _decided(few: jax.Array | None, part: Part, found: Callable[[Multiplying], Gradients]) -> Gradients:
    """found(part.few) if few tokens are kept and the plan has such matmuls, else found(part.products)."""
    stopping = part.few
    if few is None or stopping is None:
        return found(part.products)
    return lax.cond(few, lambda: found(stopping), lambda: found(part.products))


def _of_others(run: _Pass, part: Part, tokens: _Tokens, before: Gradients | None, beside: Beside | None,
               how: Multiplying) -> Gradients:  # fmt: skip
    """The gradients of tokens that are not saved. dc and dbias are added to the dc and dbias in `before`.

    beside: a second term of the sum for dc; the dc in `before` is then uninitialised, and is written.
    """
    given = run.given(tokens)
    assert part.dz is not None
    count = tokens.count if how.engine.stops else None
    form = part.dz.engine.form_dz(given, tokens.numbers.lse, tokens.cotangents, count, head=run.head,
                                  groups=part.groups, wanted=run.wanted, tiles=part.dz.tiles,
                                  gpu=run.plan.gpu)  # fmt: skip
    adding = before is not None and beside is None
    products = run.products(how, part, given.e, tokens, adding=adding, beside=beside)
    return _summed(run, part, how, given, before, form, products)


def _of_saved_dz(run: _Pass, part: Part, tokens: _Tokens, saved: _Saved, how: Multiplying) -> Gradients:
    """The gradients of the saved tokens where a weighted sum is asked for: dz is formed from their exponentials."""
    given = run.given(tokens)
    assert part.dz is not None
    assert tokens.reference is not None
    form = part.dz.engine.form_dz_of_saved(saved.exponentials, given, tokens.reference, tokens.numbers.lse,
                                           tokens.cotangents, head=run.head, groups=part.groups, wanted=run.wanted,
                                           tiles=part.dz.tiles, gpu=run.plan.gpu)  # fmt: skip
    return _summed(run, part, how, given, None, form, run.products(how, part, given.e, tokens))


def _summed(run: _Pass, part: Part, how: Multiplying, given: Inputs, before: Gradients | None, form, products
            ) -> Gradients:  # fmt: skip
    """The gradients summed over the groups of the vocabulary; de is of the tokens in `given` alone."""
    start = begun(given, run.head, run.wanted, run.type_of_dc) if before is None else before
    if run.wanted.e:
        sums = how.splits * len(given.e), given.e.shape[1]
        start = start._replace(e=jnp.zeros(sums, jnp.promote_types(given.e.dtype, jnp.float32)))
    found = add_groups(start, form, part.groups, products)
    if found.e is None or how.splits == 1:
        return found
    return found._replace(e=jnp.sum(found.e.reshape(how.splits, *given.e.shape), axis=0))


def _of_exponentials(run: _Pass, part: Part, tokens: _Tokens, saved: _Saved, how: Multiplying) -> Gradients:
    """The gradients of the saved tokens where their exponentials are multiplied as they are; de in e's type."""
    given, p, r = run.given(tokens), saved.exponentials, saved.r
    assert r is not None
    de, dc, dbias = begun(given, run.head, run.wanted, run.type_of_dc)
    e = given.e
    if run.wanted.e:
        de = (run.products(how, part, e, tokens).add_de(None, p, ALL_COLUMNS) * r[:, None]).astype(run.type_of_de)
        r, de = lax.optimization_barrier((r, de))  # so that the scaled e and a float32 de never exist at the same time
    if dc is not None:
        dc = run.products(how, part, scaled(e, r), tokens).put_dc(dc, p, ALL_COLUMNS)
    if dbias is not None:
        high = r.astype(e.dtype)
        both = jnp.stack([high, (r - high).astype(e.dtype)])  # their sum holds 16 bits of r, twice as many as bfloat16
        sums = lax.dot_general(both, p, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        dbias = jnp.sum(sums, axis=0)[: dbias.size]
    return Gradients(de, dc, dbias)


def _together(run: _Pass, everyone: _Tokens, saved: _Saved | None) -> Gradients:
    """de, with the kept tokens first, and dc, one sum over saved and other tokens.

    One buffer, `place`, holds the scaled e until dc is computed, and then de, if de has e's type.
    """
    plan, how, c = run.plan, run.plan.backward, run.inputs.c
    assert how is not None
    assert how.saved is not None
    assert how.de_of_saved is not None
    assert saved is not None
    assert saved.r is not None
    first, others = everyone.part(0, plan.saved), everyone.part(plan.saved, plan.rows)
    p, r, de_of_others = saved.exponentials, saved.r, None
    place = lax.empty((plan.rows, plan.call.width), run.inputs.e.dtype)
    dc = lax.empty(c.shape, run.type_of_dc) if run.wanted.c else None
    if dc is not None:
        place = scaled(everyone.e(), jnp.pad(r, (0, plan.rows - plan.saved)))
    if how.others is not None:
        beside = Beside(p, place, first.count)
        begun_dc = Gradients(None, dc, None)
        de_of_others, dc, _ = _of_others(run, how.others, others, begun_dc, beside, how.others.products)
    elif dc is not None:
        dc = run.products(how.saved.products, how.saved, place, first).put_dc(dc, p, ALL_COLUMNS)
    if not run.wanted.e:
        return Gradients(None, dc, None)
    place, dc = lax.optimization_barrier((place, dc))  # dc reads the scaled e before de overwrites it
    if run.type_of_de != place.dtype:
        place = lax.empty(place.shape, run.type_of_de)
    step = how.de_of_saved
    de = step.engine.de_of_saved(p, r, c, first.count, place, head=run.head, tiles=step.tiles, gpu=plan.gpu)
    if de_of_others is not None:
        de = lax.dynamic_update_slice_in_dim(de, de_of_others.astype(de.dtype), plan.saved, 0)
    return Gradients(de, dc, None)
