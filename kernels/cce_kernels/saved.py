"""Gradients from the exponentials of all tokens, which the forward pass saves (cce_kernels/exponentials.py).

The matmuls of the gradients multiply the exponentials themselves, and no logit is computed again. With a weighted sum
or a mean of the logits dz is formed from the exponentials, one group of the vocabulary at a time
(cce_kernels/gradients.py).
"""

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.arranged import Arranged
from cce_kernels.engines.engine import Multiplying
from cce_kernels.exponentials import dbias_of, factors, scaled
from cce_kernels.gradients import ALL_COLUMNS, add_groups
from cce_kernels.mean import of_exponentials, relative
from cce_kernels.numbers import Gradients
from cce_kernels.plan.plan import Saved


def gradients(run: Arranged, way: Saved, p: jax.Array) -> tuple[Gradients, jax.Array]:
    """The gradients; and p, which has been overwritten in part."""
    if way.dz is not None:
        found = run.chosen(lambda products: _of_dz(run, way, p, products), way.products, way.of_few)
        return run.finished(found), p
    r, p = _with_targets(run, way, p)
    if way.de is not None:
        return _in_place(run, way, p, r), p
    found = run.chosen(lambda products: _multiplied(run, p, r, products), way.products, way.of_few)
    return run.finished(found), p


def _of_dz(run: Arranged, way: Saved, p: jax.Array, products: Multiplying) -> Gradients:
    """The gradients where dz is formed from the exponentials."""
    assert way.dz is not None
    problem, numbers = run.problem, run.numbers
    if run.cotangents.mean is not None:
        numbers = of_exponentials(*way.dz.engine.mass_and_moment(problem, p))
    of = relative(run.cotangents, numbers, run.inputs.targets >= 0)
    form = way.dz.engine.form_dz_of_saved(way.dz, problem, p, of)
    start = run.zeros(problem)
    return add_groups(start, form, products.groups, run.products(products, problem))


def _with_targets(run: Arranged, way: Saved, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """r, and p ready for the matmuls: the targets' elements are written, and zeros for ignored tokens."""
    # clear: in so many first rows of p, the rows of ignored tokens must be 0; None: in no row. Matmuls that stop at the
    # last kept token read rows after it only in their last step.
    clear = None
    if run.are_few is None or run.wanted.bias:
        clear = jnp.full(1, p.shape[0], jnp.int32)
    elif way.de is not None:
        clear = run.count + (way.products.engine.depth - 1)
    elif not way.products.engine.stops:
        assert way.of_few is not None
        clear = jnp.where(run.are_few, run.count + (way.of_few.engine.depth - 1), p.shape[0]).astype(jnp.int32)
    assert way.targets is not None
    r, at_target = factors(run.numbers, run.cotangents, run.inputs, run.plan.call.head)
    problem, factor = run.problem_without_e, run.inputs.factor
    p = way.targets.engine.saved_targets(way.targets, problem, p, at_target, clear)
    return r if factor is None else r * factor, p


def _multiplied(run: Arranged, p: jax.Array, r: jax.Array, how: Multiplying) -> Gradients:
    """The gradients where the exponentials are multiplied as they are; de in the type of the result."""
    problem = run.problem
    e = problem.inputs.e
    de, dc, dbias = run.zeros(problem)
    if run.wanted.e:
        de = (run.products(how, problem).add_de(None, p, ALL_COLUMNS) * r[:, None]).astype(run.plan.call.de_dtype)
        r, de = lax.optimization_barrier((r, de))  # so that the scaled e and a float32 de never exist at the same time
    if dc is not None:
        dc = run.products(how, problem.with_e(scaled(e, r))).put_dc(dc, p, ALL_COLUMNS)
    return Gradients(de, dc, None if dbias is None else dbias_of(p, r, dbias.size))


def _in_place(run: Arranged, way: Saved, p: jax.Array, r: jax.Array) -> Gradients:
    """The same by kernels that write each result once.

    One buffer holds the scaled e until dc is computed, and then de, if de has e's type.
    """
    plan = run.plan
    assert way.de is not None
    buffer, dc = lax.empty((plan.rows, plan.call.width), run.inputs.e.dtype), None
    if run.wanted.c:
        buffer = scaled(run.problem.inputs.e, r)
        products = run.products(way.products, run.problem_without_e.with_e(buffer))
        dc = products.put_dc(lax.empty(run.inputs.c.shape, plan.call.dc_dtype), p, ALL_COLUMNS)
    if not run.wanted.e:
        return Gradients(None, dc, None)
    buffer, dc = lax.optimization_barrier((buffer, dc))  # dc reads the scaled e before de overwrites it
    if plan.call.de_dtype != buffer.dtype:
        buffer = lax.empty(buffer.shape, plan.call.de_dtype)
    de = way.de.engine.de_of_saved(way.de, run.problem_without_e, p, r, run.count, buffer)
    if run.kept is not None:
        assert way.restored is not None
        de = way.restored.engine.restored(way.restored, plan.gpu, de, run.kept)
    return Gradients(de, dc, None)
