"""The thresholds kernel: up to which score each token could leave out parts of the vocabulary (block_sparse.py).

    θ_i = the largest θ for which Σ_j M_ij·[score_j ≤ θ] ≤ most_i        j: parts

The search holds an interval of exponents, and takes an eighth of it in each round.
Read: the masses ROUNDS times, from L2 but for the first time. Written: 4 bytes a token.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Step
from cce_kernels.engines.order import cdiv
from cce_kernels.engines.triton.launch import How, launch
from cce_kernels.engines.triton.loads import indices, inside, load_tile, load_vector
from cce_kernels.engines.triton.tiles import THRESHOLDS, other_tiles
from cce_kernels.head import Head

LOWEST, SPAN = -14.0, 32.0  # log2 of θ is between LOWEST and LOWEST + SPAN. Lower is 0: nothing is left out
ROUNDS, WAYS = 3, 8  # in each round the interval becomes an eighth


def _kernel(how: How, masses_ref, scores_ref, most_ref, threshold_ref):
    tiles, (parts, rows) = how.tiles, masses_ref.shape
    tokens = indices(pl.program_id(0), tiles.columns)
    ok = inside(tokens, rows, tiles.columns)
    most = load_vector(most_ref, tokens, ok)
    of_block = pl.program_id(0) * tiles.columns * scores_ref.shape[1] // rows

    def narrow(_, search):
        low, step = search  # log2 of θ is in [low, low + WAYS·step)
        tried = [jnp.exp2(low + way * step) for way in range(1, WAYS)]

        def add(k, sums):
            part = indices(k, tiles.rows)
            part_ok = inside(part, parts, tiles.rows)
            found = load_tile(masses_ref, part, tokens, part_ok, ok)
            at = part, jnp.full((tiles.rows,), of_block, jnp.int32)
            score = plgpu.load(scores_ref.at[at], mask=part_ok, other=None if part_ok is None else jnp.inf)
            return tuple(
                total + jnp.sum(jnp.where(score[:, None] <= theta[None, :], found, 0.0), axis=0)
                for theta, total in zip(tried, sums, strict=True)
            )

        zeros = jnp.zeros((tiles.columns,), jnp.float32)
        sums = lax.fori_loop(jnp.int32(0), jnp.int32(cdiv(parts, tiles.rows)), add, (zeros,) * (WAYS - 1))
        fits = sum((x <= most).astype(jnp.float32) for x in sums)  # the sums grow with θ
        return low + fits * step, step / WAYS

    start = jnp.full((tiles.columns,), LOWEST, jnp.float32), jnp.float32(SPAN / WAYS)
    low, _ = lax.fori_loop(jnp.int32(0), jnp.int32(ROUNDS), narrow, start)
    threshold = jnp.where(low > LOWEST, jnp.exp2(low), 0.0)
    threshold = jnp.where(most < jnp.inf, jnp.where(most >= 0, threshold, -1.0), jnp.inf)
    plgpu.store(threshold_ref.at[tokens], threshold, mask=ok)


def thresholds(_: Step, gpu: Gpu, masses: jax.Array, scores: jax.Array, most: jax.Array) -> jax.Array:
    """engine.Launched.thresholds. A block of scores has a multiple of 16 tokens."""
    tiles = other_tiles(THRESHOLDS, gpu.interpreted)
    how, programs = How(Head(), tiles, gpu.interpreted), cdiv(most.size, tiles.columns)
    out = jax.ShapeDtypeStruct(most.shape, jnp.float32)
    return launch(_kernel, how, masses, scores, most, programs=programs, name="cce_thresholds", out_shape=out)
