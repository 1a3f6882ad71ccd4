"""Kernels of a divergence (cce_kernels/divergence_terms.py). Each program reads a run of columns of one token's logits.

    norms    the largest logit and Σ exp(z − largest) of both sides, with one exponential an element: where a lane meets
             a larger logit than before, it multiplies its sum by exp(before − z). Of the reverse KL Σ_v s_v·(z_v − y_v)
    pass     sums of terms, and dz, of which it writes the rows of some tokens of a chunk

Both read the 8 bytes of a student's and a teacher's logit. `pass` writes 2 bytes an element of dz.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels import divergence_terms
from cce_kernels.device import Gpu
from cce_kernels.divergence_terms import Both, Norms, Pass
from cce_kernels.engines.engine import Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_vector, tile_index, tile_mask
from cce_kernels.head import Head
from cce_kernels.numbers import FLOAT32_MAX


def _loaded(both: Both, row: jax.Array, columns: jax.Array, beyond: bool) -> Both:
    """The logits of one token, (1, columns); −inf beyond the vocabulary, so that all terms are 0. both: refs.

    beyond: whether columns may be beyond the vocabulary.
    """
    mask = (columns < both.student.shape[1])[None, :] if beyond else None
    at, other = tile_index(row, columns), None if mask is None else -jnp.inf
    x, y = (plgpu.load(ref.at[at], mask=mask, other=other) for ref in (both.student, both.teacher))
    inverse = both.inverse_temperature
    return Both(x, y, None if inverse is None else load_vector(inverse, row, None))


def _run(how: How, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This program's run of columns and its token, (1,); the first tile of the run, and the tile after its last."""
    program, tiles = pl.program_id(0), cdiv(columns, how.tiles.columns)
    run, of_run = program % how.splits, cdiv(tiles, how.splits)
    first = run * of_run
    return jnp.full((1,), program // how.splits, jnp.int32), first, jnp.minimum(first + of_run, tiles)


def _store(refs: Any, how: How, values: list[jax.Array]) -> None:
    """Number k of this program into element k of (numbers, tokens · runs)."""
    at = jnp.full((1,), pl.program_id(0), jnp.int32)
    for ref, value in zip(refs, values, strict=True):
        plgpu.store(ref.at[at], value)


def _norms_kernel(how: How, both: Both, *found_refs, moment: bool):
    size, zeros = how.tiles.columns, jnp.zeros((1, how.tiles.columns), jnp.float32)
    row, first, last = _run(how, both.student.shape[1])
    beyond = both.student.shape[1] % size > 0

    def add(largest, mass, z, values=()):
        """largest, mass and sums, with z; values: what exp(z − largest) multiplies in the sums."""
        less = z <= largest
        small = jnp.exp(-jnp.abs(z - largest))
        found = [jnp.where(less, x + small * v, x * small + v) for x, v in ((mass, 1.0), *values)]
        return jnp.maximum(largest, z), *found

    def step(j, sums):
        of_tile = _loaded(both, row, indices(j, size), beyond)
        x, y = of_tile.logits
        values = ()
        if moment:
            values = ((sums[4], jnp.where(x == -jnp.inf, 0.0, x - y)),)
        largest_s, mass_s, *moments = add(*sums[:2], x, values)
        return largest_s, mass_s, *add(*sums[2:4], y), *moments

    least = jnp.full_like(zeros, -FLOAT32_MAX)
    found = lax.fori_loop(first, last, step, (least, zeros, least, zeros, *[zeros] * moment))
    largest_s, largest_t = (jnp.max(x, axis=1) for x in (found[0], found[2]))
    share_s, share_t = jnp.exp(found[0] - largest_s[:, None]), jnp.exp(found[2] - largest_t[:, None])
    sums = [jnp.sum(x * share, axis=1) for x, share in ((found[1], share_s), (found[3], share_t))]
    sums += [jnp.sum(x * share_s, axis=1) for x in found[4:]]
    _store(found_refs, how, [largest_s, largest_t, *sums])


def divergence_norms(step: Step, gpu: Gpu, both: Both, moment: bool) -> tuple[Norms, jax.Array | None]:
    """engine.Launched.divergence_norms."""
    how, tokens = How(Head(), step.tiles, gpu.interpreted, step.splits), len(both.student)
    numbers = [jax.ShapeDtypeStruct((tokens * step.splits,), jnp.float32)] * (4 + moment)
    kernel = partial(_norms_kernel, moment=moment)
    found = launch(kernel, how, both, programs=tokens * step.splits, name="cce_divergence_norms", out_shape=numbers)
    largest_s, largest_t, *sums = (x.reshape(tokens, step.splits) for x in found)
    of_all = [jnp.max(x, axis=1) for x in (largest_s, largest_t)]
    shares = [jnp.exp(x - y[:, None]) for x, y in zip((largest_s, largest_t), of_all, strict=True)]
    mass_s, mass_t = (jnp.sum(x * share, axis=1) for x, share in zip(sums, shares, strict=False))
    norms = Norms(*of_all, jnp.log(mass_s), jnp.log(mass_t))
    if not moment:
        return norms, None
    mean = jnp.sum(sums[2] * shares[0], axis=1) / mass_s
    return norms, mean - ((norms.largest_s - norms.largest_t) + (norms.mass_s - norms.mass_t))


def _pass_kernel(how: How, of: Pass, start_ref, _, *found_refs, static: divergence_terms.Static):
    size, vocabulary = how.tiles.columns, of.both.student.shape[1]
    dz_ref, sums_refs = (found_refs[0], found_refs[1:]) if static.dz else (None, found_refs)
    columns_of_dz = vocabulary if dz_ref is None else dz_ref.shape[1]
    row, first, last = _run(how, columns_of_dz)
    beyond = cdiv(columns_of_dz, size) * size > vocabulary
    of_token = Pass(of.both, *(jax.tree.map(lambda ref: load_vector(ref, row, None), x) for x in of[1:4]), None)
    beta = None if of.beta is None else of.beta[0]

    def step(j, sums):
        columns = indices(j, size)
        both = _loaded(of.both, row, columns, beyond)
        of_tile = of_token._replace(both=both, beta=beta)
        terms, dz = of_tile.terms(static), None
        if dz_ref is not None:
            dz = of_tile.dz(static, how.head)
            if columns_of_dz > vocabulary:
                dz = jnp.where(columns < vocabulary, dz, 0.0)
            mask = tile_mask(None, inside(columns, columns_of_dz, size), (1, size))
            plgpu.store(dz_ref.at[tile_index(row + start_ref[0], columns)], dz.astype(dz_ref.dtype), mask=mask)
        return tuple(x + y for x, y in zip(sums, terms, strict=True))

    zeros = jnp.zeros((1, size), jnp.float32)
    found = lax.fori_loop(first, last, step, (zeros,) * static.sums)
    _store(sums_refs, how, [jnp.sum(x, axis=1) for x in found])


def divergence_pass(
    step: Step, gpu: Gpu, head: Head, of: Pass, dz: tuple[jax.Array, jax.Array] | None, static: Any
) -> tuple[list[jax.Array], jax.Array | None]:
    """engine.Launched.divergence_pass."""
    how, tokens = How(head, step.tiles, gpu.interpreted, step.splits), len(of.both.student)
    numbers = [jax.ShapeDtypeStruct((tokens * step.splits,), jnp.float32)] * static.sums
    whole, start = (None, None) if dz is None else dz
    out = numbers if whole is None else [jax.ShapeDtypeStruct(whole.shape, whole.dtype), *numbers]
    kernel = partial(_pass_kernel, static=static)
    shapes = {"programs": tokens * step.splits, "name": "cce_divergence_pass", "out_shape": out, "in_place": whole}
    found = launch(kernel, how, of, None if start is None else start.reshape(1), whole, **shapes)
    dz_found, sums = (None, found) if whole is None else (found[0], found[1:])
    return [jnp.sum(x.reshape(tokens, step.splits), axis=1) for x in sums], dz_found
