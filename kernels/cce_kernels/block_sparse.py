"""Which blocks of a chunk's exponentials the products leave out, so that a gradient costs what it is worth.

Without a weighted sum of the logits, the cotangents of token i's logits, without their scale, are

    dz_iv = a_i·p_iv·u_iv    for v ≠ t_i        dz_i,t_i = (a_i·p_i,t_i + t̂_i)·u_i,t_i

(cce_jax/core.py). Let L_i be columns without the target, and dz' be dz with 0 in these columns. If

    Σ_v∈L_i p_iv·u_iv  ≤  τ · Σ_v≠t_i p_iv·u_iv        (1)

then ‖dz_i − dz'_i‖₁ = |a_i|·Σ_v∈L_i p_iv·u_iv ≤ τ·|a_i|·Σ_v≠t_i p_iv·u_iv ≤ τ·‖dz_i‖₁, whatever a_i and t̂_i are.

The forward pass sums P_iv = exp(z_iv − ρ_i)·u_iv over each part of PART columns: the masses M_ij. (1) does not depend
on ρ, and the log-sum-exp is not needed. The products for de and for dc leave out blocks of their own shapes, each
within (1). For a block of tokens, every part j of the columns has a score, and the parts of the least scores are left
out, as many as (1) allows for every token of the block:

    score_j = Σ_i w_i·M_ij / (τ·T_i)        T_i: the sum on the right side of (1)

θ_i is the largest score that token i alone could leave out; the least θ_i of the block counts. The tokens with the
least θ_i decide, so their weights are raised: w_i ← w_i·min θ/θ_i, and the scores are formed again, WEIGHED times. A
part with the target of any token of the block has the score inf. A shard of the vocabulary takes (1) over its own
columns; the sum over all shards is (1) again.

T_i is a sum over parts less the target's own P, which in the target's part may cancel. So the difference is taken there
alone, and lowered by ROUNDED times that part: more is then kept, never less. (Float32 rounds a logit beyond 2¹³ by more
than ROUNDED. (1) then holds up to that rounding.) A token whose masses are not finite keeps everything.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

PART = 64  # columns of the vocabulary
WEIGHED = 1
ROUNDED = 2.0**-10  # of an exponential: more than what the rounding of a logit changes
LEAST = 1e-30  # so that a quotient is finite
OUTSIDE = 2**24  # a step beyond every array


class Shape(NamedTuple):
    """The size of a block."""

    tokens: int
    columns: int


DE_BLOCK, DC_BLOCK = Shape(128, 64), Shape(16, 256)
MULTIPLE = 256  # blocks cover a multiple of so many tokens and columns


class Blocks(NamedTuple):
    """Which blocks are multiplied, (row blocks, column blocks) bool."""

    de: jax.Array
    dc: jax.Array


class Tokens(NamedTuple):
    """A chunk of n tokens, of which the first `count` are kept tokens; for all others arrays may hold anything."""

    targets: jax.Array  # (n,)
    own: jax.Array  # (n,) each target's P
    count: jax.Array  # type: ignore[assignment]  # (1,) int32


# (masses (parts, rows), scores (parts, blocks), most (rows,)) -> θ (rows,): the largest for which the masses of the
# parts with scores of at most θ sum to at most `most`, or a little less
Thresholds = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def kept_blocks(masses: jax.Array, tokens: Tokens, tolerance: float, thresholds: Thresholds) -> Blocks:
    """The blocks that the products keep.

    masses: (parts, rows) float32, at least V columns and n rows, multiples of MULTIPLE.
    """
    parts, rows = masses.shape
    targets, own = (jnp.pad(x, (0, rows - x.size)) for x in (tokens.targets, tokens.own))
    live = jnp.arange(rows, dtype=jnp.int32) < tokens.count
    named = live & (targets >= 0) & (targets < parts * PART)
    part, every = jnp.where(named, targets // PART, parts), jnp.arange(rows)
    in_own = jnp.where(named, masses[jnp.minimum(part, parts - 1), every], 0.0)
    in_own, masses = jax.lax.optimization_barrier((in_own, masses))  # read before it is written: XLA makes no copy
    masses = masses.at[part, every].set(0.0, mode="drop")  # the target's part is kept: it uses up nothing of the bound
    rest = jnp.maximum(in_own * (1 - ROUNDED) - own * (1 + ROUNDED), 0.0)
    most = tolerance * (1 - ROUNDED) * (jnp.sum(masses, axis=0) + rest)
    most = jnp.where(live, jnp.where(jnp.isfinite(most), most, -1.0), jnp.inf)
    wide = jnp.sum(masses.reshape(-1, DC_BLOCK.columns // PART, rows), axis=1)
    dc = _kept(wide, jnp.where(named, targets // DC_BLOCK.columns, len(wide)), most, DC_BLOCK.tokens, thresholds)
    return Blocks(_kept(masses, part, most, DE_BLOCK.tokens, thresholds), dc)


def _kept(masses: jax.Array, own: jax.Array, most: jax.Array, block: int, thresholds: Thresholds) -> jax.Array:
    """masses: (parts, rows). own: the part of each row's target.

    most: inf where a row is not of a kept token, and less than 0 where a token keeps everything.
    """
    parts, rows = masses.shape
    own = jnp.zeros((parts, rows // block), bool).at[own, jnp.arange(rows) // block].set(True, mode="drop")
    live = most < jnp.inf
    per_mass = jnp.where(live, 1 / jnp.maximum(most, LEAST), 0.0)

    def scored(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_masses = jnp.where(live, masses * (weights * per_mass), 0.0)
        scores = jnp.where(own, jnp.inf, jnp.sum(of_masses.reshape(parts, -1, block), axis=2))
        return scores, thresholds(masses, scores, most).reshape(-1, block)

    weights = jnp.ones(rows, jnp.float32)
    scores, found = scored(weights)
    for _ in range(WEIGHED):
        least = jnp.min(found, axis=1, keepdims=True)
        weights *= jnp.where(least > 0, least / jnp.maximum(found, LEAST), 1.0).reshape(-1)
        scores, found = scored(weights)
    return (~(scores <= jnp.min(found, axis=1))).T


class Listed(NamedTuple):
    """The steps that each block of rows of a block-sparse product sums over."""

    steps: jax.Array  # (blocks, n) int32: the kept steps, in order, then OUTSIDE
    count: jax.Array  # type: ignore[assignment]  # (blocks,) int32
    blocks: jax.Array  # (blocks,) int32: the blocks with steps, in order; after `live` of them any numbers
    live: jax.Array  # (1,) int32

    @classmethod
    def of(cls, kept: jax.Array) -> "Listed":
        """kept: (blocks, n) bool."""
        count = jnp.sum(kept, axis=1, dtype=jnp.int32)
        some = count > 0
        return cls(_first(kept), count, _first(some[None])[0], jnp.sum(some, dtype=jnp.int32).reshape(1))


def _first(kept: jax.Array) -> jax.Array:
    """The indices of what is kept, first in each row, (rows, n) int32."""
    rows, n = kept.shape
    position = jnp.where(kept, jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1, n)
    row, index = (jax.lax.broadcasted_iota(jnp.int32, kept.shape, axis) for axis in (0, 1))
    return jnp.full((rows, n), OUTSIDE, jnp.int32).at[row, position].set(index, mode="drop")
