"""Kernels of a divergence (cce_kernels/divergence_terms.py). Each program reads columns of one token's logits.

norms    the largest logit and Σ exp(z − largest), with one exponential an element: where a lane meets a larger
         logit than before, it multiplies its sum by exp(before − z). Reads 4 bytes an element
pass     sums of terms, and dz, of which it writes the rows of some tokens of a chunk. Reads the 8 bytes of a student's
         and a teacher's logit, and writes 2 bytes of dz

dz of a reverse KL or a jsd needs the token's sum of terms. So two programs read a tile: the first for the terms, and
LAG tiles later the second for dz, which still finds the logits in the L2 cache. The second waits until all tiles of its
token have stored their sums. It does not wait for ever: a GPU starts the programs in the order of their indices, and
those that it waits for have lower ones, as LAG is at least the number of a token's tiles, and wait for nothing.
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
from cce_kernels.engines.triton.logits import divided, exp, log2
from cce_kernels.numbers import FLOAT32_MAX, LOG2_E

LAG = 1024  # tiles; of 2048 columns and 8 bytes a column they take 16 MiB


def _functions(how: How) -> Functions:
    return Functions(lambda x: exp(x, how.interpret), lambda x: log2(x, how.interpret) / LOG2_E)


def _load(ref, row: jax.Array, columns: jax.Array, beyond: bool, last: bool = False) -> jax.Array:
    """The logits of one token, (1, columns); −inf beyond the vocabulary, so that all terms are 0.

    beyond: whether columns may be beyond the vocabulary. last: nothing reads them after this.
    """
    mask = (columns < ref.shape[1])[None, :] if beyond else None
    other, policy = None if mask is None else -jnp.inf, "evict_first" if last else None
    return plgpu.load(ref.at[tile_index(row, columns)], mask=mask, other=other, eviction_policy=policy)


def _run(how: How, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This program's token, (1,); the first tile of its run of columns, and the tile after its last."""
    program, tiles = pl.program_id(0), cdiv(columns, how.tiles.columns)
    run, of_run = program % how.splits, cdiv(tiles, how.splits)
    first = run * of_run
    return jnp.full((1,), program // how.splits, jnp.int32), first, jnp.minimum(first + of_run, tiles)


def _store(ref, at, value) -> None:
    """Stores value, (1,), at one index."""
    plgpu.store(ref.at[jnp.full((1,), at, jnp.int32)], value)


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
    at = pl.program_id(0)
    _store(largest_ref, at, of_all)
    _store(mass_ref, at, jnp.sum(mass * exp(largest - of_all[:, None]), axis=1))


def whole_logits(step: Step, problem: Problem, _: jax.Array) -> Whole:
    """engine.Launched.whole_logits, by XLA's matmul."""
    inputs, how, splits = problem.inputs, How.of(step, problem), step.splits
    x = problem.head.whole_logits(inputs.e, inputs.c, inputs.bias, inputs.scale).astype(jnp.float32)
    shapes = {"programs": len(x) * splits, "name": "cce_norms", "out_shape": _numbers(len(x), splits, 2)}
    largest, mass = launch(_norms_kernel, how, x, inputs.inverse_temperature, **shapes)
    return Whole.of_runs(x, *(part.reshape(len(x), splits).T for part in (largest, mass)))


def _pass_kernel(how: How, of: Pass, count_ref, start_ref, _, *found_refs, static: Static, lag: int):
    size, vocabulary, f = how.tiles.columns, of.student.logits.shape[1], _functions(how)
    dz_ref, sums_refs = (found_refs[0], found_refs[1:]) if static.dz else (None, found_refs)
    columns_of_dz = vocabulary if dz_ref is None else dz_ref.shape[1]
    program, tiles = pl.program_id(0), len(of.student.logits) * how.splits
    second, at = jnp.int32(0), program
    if static.twice:
        second = lax.rem(program, jnp.int32(2))
        at = lax.div(program, jnp.int32(2)) - second * jnp.int32(lag)
    exists, at = (at >= 0) & (at < tiles), jnp.clip(at, 0, tiles - 1)
    token = lax.div(at, jnp.int32(how.splits))
    row, columns = jnp.full((1,), token, jnp.int32), indices(lax.rem(at, jnp.int32(how.splits)), size)
    live = token < count_ref[0]

    def loaded(x):
        return None if x is None else load_vector(x, row, None)

    def norms(x: Whole) -> Whole:
        return Whole(None, loaded(x.largest), loaded(x.log_mass))

    shares = None if of.shares is None else (of.shares[0], of.shares[1])
    inverse, token_size = loaded(of.inverse_temperature), loaded(of.size)
    of_token = Pass(norms(of.student), norms(of.teacher), inverse, None, token_size, shares)

    def store_dz(dz) -> None:
        assert dz_ref is not None
        mask = tile_mask(None, inside(columns, columns_of_dz, size), (1, size))
        where = dz_ref.at[tile_index(row + start_ref[0], columns)]
        plgpu.store(where, dz.astype(dz_ref.dtype), mask=mask, eviction_policy="evict_first")

    def run(sums: bool, dz: bool) -> None:
        def of_live() -> None:
            beyond = how.splits * size > vocabulary
            x, y = (_load(side.logits, row, columns, beyond, last=dz and not sums) for side in of[:2])
            sides = of_token.student._replace(logits=x), of_token.teacher._replace(logits=y)
            of_tile = of_token._replace(student=sides[0], teacher=sides[1])
            if dz:  # before the sums: dz after them took 133 registers, which let fewer programs run at a time
                of_student = _total(sums_refs[0], token, how) if static.twice else None
                of_columns = of_tile._replace(of_student=of_student).dz(static.kind, how.head, f)
                inner = (columns < vocabulary)[None, :]
                store_dz(jnp.where(inner, of_columns, 0.0) if columns_of_dz > vocabulary else of_columns)
            if sums:
                for ref, terms in zip(sums_refs, of_tile.terms(static, f), strict=True):
                    found = jnp.sum(terms, axis=1)
                    _store(ref, at, jnp.where(found == NOT_YET, jnp.nan, found))

        def of_others() -> None:
            if sums:
                for ref in sums_refs:
                    _store(ref, at, jnp.zeros(1, jnp.float32))
            if dz:
                store_dz(jnp.zeros((1, size), jnp.float32))

        pl.when(live)(of_live)
        pl.when(~live)(of_others)

    if static.twice:
        pl.when(exists & (second == 0))(partial(run, True, False))
        pl.when(exists & (second == 1))(partial(run, False, True))
    else:
        run(True, static.dz)


NOT_YET = -jnp.inf  # stands for a sum that no program has stored


def _total(ref, token: jax.Array, how: How) -> jax.Array:
    """The sum of ref over the tiles of a token, (1,), once all are there.

    Each thread has at least one element: the sum goes through shared memory, and is the same for all of them.
    """
    tiles = jnp.arange(max(32 * how.tiles.warps, 1 << (how.splits - 1).bit_length()), dtype=jnp.int32)

    def read() -> jax.Array:
        at = ref.at[token * how.splits + tiles]
        return jnp.sum(plgpu.load(at, mask=tiles < how.splits, other=0.0, volatile=True))

    return jnp.full((1,), lax.while_loop(lambda x: x == NOT_YET, lambda _: read(), read()))


def divergence_pass(
    step: Step, problem: Problem, of: Pass, count: jax.Array, dz: tuple[jax.Array, jax.Array] | None, static: Static
) -> tuple[list[jax.Array], jax.Array | None]:
    """engine.Launched.divergence_pass."""
    (whole, start), tokens, how = (None, None) if dz is None else dz, len(of.student.logits), How.of(step, problem)
    how = how._replace(splits=cdiv(of.student.logits.shape[1] if whole is None else whole.shape[1], how.tiles.columns))
    tiles = tokens * how.splits
    out, in_place = _numbers(tokens, how.splits, static.sums), None
    if whole is not None:
        out = [jax.ShapeDtypeStruct(whole.shape, whole.dtype), *out]
        in_place = (whole, jnp.full(tiles, NOT_YET, jnp.float32)) if static.twice else whole
    lag = min(tiles, how.splits if how.interpret else max(LAG, how.splits))
    given = of, count.reshape(1), None if start is None else start.reshape(1), in_place
    shapes = {"programs": 2 * (tiles + lag) if static.twice else tiles, "out_shape": out, "in_place": in_place}
    found = launch(partial(_pass_kernel, static=static, lag=lag), how, *given, name="cce_divergence", **shapes)
    sums = found if whole is None else found[1:]
    return [jnp.sum(x.reshape(tokens, how.splits), axis=1) for x in sums], None if whole is None else found[0]
