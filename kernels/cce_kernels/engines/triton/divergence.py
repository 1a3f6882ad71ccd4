"""Kernels of a divergence (cce_kernels/divergence_terms.py). Each program reads a run of columns of one token's logits.

norms    the largest logit and Σ exp(z − largest), with one exponential an element: where a lane meets a larger
         logit than before, it multiplies its sum by exp(before − z). Reads 4 bytes an element
terms    sums of terms. Reads the 8 bytes of a student's and a teacher's logit
dz       the same, and dz, of which it writes the rows of some tokens of a chunk: 2 bytes an element
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.divergence_terms import Functions, Pass, Static, Whole
from cce_kernels.engines.engine import Problem, Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_vector, tile_index, tile_mask
from cce_kernels.engines.triton.logits import divided, exp2_shifted, log2
from cce_kernels.numbers import FLOAT32_MAX, LOG2_E


def _functions(how: How) -> Functions:
    def exp(x: jax.Array) -> jax.Array:
        return exp2_shifted(x, jnp.zeros_like(x), interpret=how.interpret)

    return Functions(exp, lambda x: log2(x, how.interpret) / LOG2_E)


def _load(ref, row: jax.Array, columns: jax.Array, beyond: bool) -> jax.Array:
    """The logits of one token, (1, columns); −inf beyond the vocabulary, so that all terms are 0.

    beyond: whether columns may be beyond the vocabulary.
    """
    mask = (columns < ref.shape[1])[None, :] if beyond else None
    return plgpu.load(ref.at[tile_index(row, columns)], mask=mask, other=None if mask is None else -jnp.inf)


def _run(how: How, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This program's token, (1,); the first tile of its run of columns, and the tile after its last."""
    program, tiles = pl.program_id(0), cdiv(columns, how.tiles.columns)
    run, of_run = program % how.splits, cdiv(tiles, how.splits)
    first = run * of_run
    return jnp.full((1,), program // how.splits, jnp.int32), first, jnp.minimum(first + of_run, tiles)


def _store(refs, values) -> None:
    at = jnp.full((1,), pl.program_id(0), jnp.int32)
    for ref, value in zip(refs, values, strict=True):
        plgpu.store(ref.at[at], value)


def _numbers(tokens: int, splits: int, count: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((tokens * splits,), jnp.float32)] * count


def _norms_kernel(how: How, x_ref, inverse_ref, largest_ref, mass_ref):
    size, exp = how.tiles.columns, _functions(how).exp
    row, first, last = _run(how, x_ref.shape[1])
    inverse = None if inverse_ref is None else load_vector(inverse_ref, row, None)[:, None]
    beyond = x_ref.shape[1] % size > 0

    def step(j, carry):
        largest, mass = carry
        z = divided(_load(x_ref, row, indices(j, size), beyond), inverse)
        less = exp(-jnp.abs(z - largest))
        return jnp.maximum(largest, z), jnp.where(z <= largest, mass + less, mass * less + 1)

    begin = jnp.full((1, size), -FLOAT32_MAX, jnp.float32), jnp.zeros((1, size), jnp.float32)
    largest, mass = lax.fori_loop(first, last, step, begin)
    of_all = jnp.max(largest, axis=1)
    _store((largest_ref, mass_ref), (of_all, jnp.sum(mass * exp(largest - of_all[:, None]), axis=1)))


def whole_logits(step: Step, problem: Problem, _: jax.Array) -> Whole:
    """engine.Launched.whole_logits, by XLA's matmul."""
    inputs, how, splits = problem.inputs, How.of(step, problem), step.splits
    x = problem.head.whole_logits(inputs.e, inputs.c, inputs.bias, inputs.scale).astype(jnp.float32)
    shapes = {"programs": len(x) * splits, "name": "cce_norms", "out_shape": _numbers(len(x), splits, 2)}
    largest, mass = launch(_norms_kernel, how, x, inputs.inverse_temperature, **shapes)
    return Whole.of_runs(x, *(part.reshape(len(x), splits).T for part in (largest, mass)))


def _pass_kernel(how: How, of: Pass, count_ref, start_ref, _, *found_refs, static: Static):
    size, vocabulary, f = how.tiles.columns, of.student.logits.shape[1], _functions(how)
    dz_ref, sums_refs = (found_refs[0], found_refs[1:]) if static.dz else (None, found_refs)
    columns_of_dz = vocabulary if dz_ref is None else dz_ref.shape[1]
    row, first, last = _run(how, columns_of_dz)
    beyond = cdiv(columns_of_dz, size) * size > vocabulary

    def loaded(x):
        return None if x is None else load_vector(x, row, None)

    def norms(x: Whole) -> Whole:
        return Whole(None, loaded(x.largest), loaded(x.log_mass))

    beta = None if of.beta is None else of.beta[0]
    inverse, of_student, token_size = map(loaded, of[2:5])
    of_token = Pass(norms(of.student), norms(of.teacher), inverse, of_student, token_size, beta)

    def store(columns, dz) -> None:
        assert dz_ref is not None
        mask = tile_mask(None, inside(columns, columns_of_dz, size), (1, size))
        plgpu.store(dz_ref.at[tile_index(row + start_ref[0], columns)], dz.astype(dz_ref.dtype), mask=mask)

    def step(j, sums):
        columns = indices(j, size)
        x, y = (_load(side.logits, row, columns, beyond) for side in of[:2])
        sides = of_token.student._replace(logits=x), of_token.teacher._replace(logits=y)
        of_tile = of_token._replace(student=sides[0], teacher=sides[1])
        if dz_ref is not None:
            dz = of_tile.dz(static.kind, how.head, f)
            store(columns, jnp.where((columns < vocabulary)[None, :], dz, 0.0) if columns_of_dz > vocabulary else dz)
        return tuple(x + y for x, y in zip(sums, of_tile.terms(static, f), strict=True))

    def clear(j, carry):
        if dz_ref is not None:
            store(indices(j, size), jnp.zeros((1, size), jnp.float32))
        return carry

    live, zeros = pl.program_id(0) // how.splits < count_ref[0], jnp.zeros((1, size), jnp.float32)
    found = lax.fori_loop(first, jnp.where(live, last, first), step, (zeros,) * static.sums)
    lax.fori_loop(jnp.where(live, last, first), last, clear, jnp.int32(0))
    _store(sums_refs, [jnp.sum(x, axis=1) for x in found])


def divergence_pass(
    step: Step, problem: Problem, of: Pass, count: jax.Array, dz: tuple[jax.Array, jax.Array] | None, static: Static
) -> tuple[list[jax.Array], jax.Array | None]:
    """engine.Launched.divergence_pass."""
    (whole, start), tokens = (None, None) if dz is None else dz, len(of.student.logits)
    numbers = _numbers(tokens, step.splits, static.sums)
    out = numbers if whole is None else [jax.ShapeDtypeStruct(whole.shape, whole.dtype), *numbers]
    kernel, name = partial(_pass_kernel, static=static), "cce_divergence_dz" if static.dz else "cce_divergence_terms"
    given = of, count.reshape(1), None if start is None else start.reshape(1), whole
    shapes = {"programs": tokens * step.splits, "name": name, "out_shape": out, "in_place": whole}
    found = launch(kernel, How.of(step, problem), *given, **shapes)
    sums = found if whole is None else found[1:]
    return [jnp.sum(x.reshape(tokens, step.splits), axis=1) for x in sums], None if whole is None else found[0]
