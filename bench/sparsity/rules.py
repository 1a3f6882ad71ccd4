"""Rules that say which blocks of the softmax a backward pass keeps, each within the same bound for every token.

Notation: p (N, V) the softmax, t_i the target of token i, M_ij the sum of p_iv over the columns v ≠ t_i of part j of
the vocabulary, T_i = Σ_j M_ij. A rule leaves out parts such that every token i has Σ_{j left out} M_ij ≤ τ·T_i. It
always keeps the part of t_i.

  pairs    each token by itself: its smallest masses are left out, as many as its bound allows
  union    a block of tokens keeps what any of its tokens alone would keep
  budget   the parts of the least scores Σ_i M_ij/(τ·T_i) are left out, as many as the bound of every token allows
  kernels  what the kernels do: budget, with weights that are raised twice (cce_kernels/block_sparse.py)

Arrays of masses are (parts, rows), as there. Blocks are (row blocks, column blocks), as there.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels import block_sparse
from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, PART, Shape

BLOCKS = (DE_BLOCK, DC_BLOCK)
INFINITY_BITS = 0x7F800000


def thresholds(masses: jax.Array, scores: jax.Array, most: jax.Array) -> jax.Array:
    """block_sparse.Thresholds to the last bit: bisects the integers that have the order of floats ≥ 0."""
    blocks = masses.reshape(*scores.shape, -1)
    # Without the barrier XLA may compute a score twice, its sum in another order, and the two differ in a last bit.
    bits = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(scores, jnp.int32))[:, :, None]

    def halve(_, ends):
        low, high = ends
        middle = low + (high - low) // 2
        fits = jnp.where(bits <= middle, blocks, 0).sum(0) <= most.reshape(low.shape)
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    low = jnp.zeros(blocks.shape[1:], jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, low + INFINITY_BITS))
    found = jax.lax.bitcast_convert_type(low, jnp.float32).reshape(-1)
    return jnp.where(most < jnp.inf, jnp.where(most >= 0, found, -1.0), jnp.inf)


def kept_by(scores: jax.Array, masses: jax.Array, most: jax.Array) -> jax.Array:
    """The parts that blocks of rows keep if parts of small scores are left out, within the bound of every row.

    scores: (parts, blocks), inf where a part must be kept. masses: (parts, rows). most: (rows,). Returns (parts,
    blocks).
    """
    found = thresholds(masses, scores, most).reshape(scores.shape[1], -1)
    return ~(scores <= found.min(1))


class Chunk(NamedTuple):
    """Tokens, and the parts of the vocabulary that have as many columns as a block."""

    masses: jax.Array  # (parts, rows) without the targets
    own: jax.Array  # (parts, rows) whether it is the target's part
    most: jax.Array  # (rows,) τ·T

    @classmethod
    def of(cls, masses: jax.Array, targets: jax.Array, tau: float, columns: int) -> "Chunk":
        """masses: of parts of PART columns."""
        wide = masses.reshape(-1, columns // PART, masses.shape[1]).sum(1)
        return cls(wide, targets // columns == jnp.arange(len(wide))[:, None], tau * wide.sum(0))

    def used(self, keep: jax.Array) -> jax.Array:
        """The largest left-out mass of a row, over what its bound allows. keep: (blocks, parts)."""
        keep = jnp.repeat(keep.T, self.masses.shape[1] // len(keep), axis=1)
        left_out = jnp.where(keep, 0, self.masses).sum(0)
        return jnp.where(left_out > 0, left_out / self.most, 0).max()

    def rules(self, tokens: int) -> dict[str, jax.Array]:
        """What all rules but "kernels" keep, (blocks, parts), by name."""

        def in_blocks(x: jax.Array) -> jax.Array:
            return x.reshape(len(x), -1, tokens)

        pairs = kept_by(jnp.where(self.own, jnp.inf, self.masses), self.masses, self.most)
        shares = jnp.where(self.masses > 0, self.masses / self.most, 0)
        scores = jnp.where(in_blocks(self.own).any(2), jnp.inf, in_blocks(shares).sum(2))
        budget = kept_by(scores, self.masses, self.most)
        return {"pairs": pairs.T, "union": in_blocks(pairs).any(2).T, "budget": budget.T}


class Found(NamedTuple):
    """Of a chunk, by the rule and the block: such as "union 16x256"."""

    blocks: dict[str, jax.Array]  # which are kept
    used: dict[str, jax.Array]  # Chunk.used


def named(rule: str, block: Shape) -> str:
    return f"{rule} {block.tokens if rule != 'pairs' else 1}x{block.columns}"


@partial(jax.jit, static_argnames="tau")
def decide(masses: jax.Array, targets: jax.Array, own: jax.Array, tau: float) -> Found:
    """masses: (parts of PART columns, rows) without the targets, whose probabilities are `own`, (rows,)."""
    rows = jnp.arange(len(targets))
    tokens = block_sparse.Tokens(targets, own, jnp.full(1, len(targets), jnp.int32))
    of_kernels = block_sparse.kept_blocks(masses.at[targets // PART, rows].add(own), tokens, tau, thresholds)
    found = Found({}, {})
    for block, kernels in zip(BLOCKS, of_kernels, strict=True):
        chunk = Chunk.of(masses, targets, tau, block.columns)
        for rule, keep in (chunk.rules(block.tokens) | {"kernels": kernels}).items():
            found.blocks[named(rule, block)], found.used[named(rule, block)] = keep, chunk.used(keep)
    return found


@partial(jax.jit, static_argnames="tau")
def keep_columns(keep: jax.Array, masses: jax.Array, tau: float) -> jax.Array:
    """Further blocks, so that each column block leaves out at most τ of its mass over all rows but the targets'.

    keep: blocks of DC_BLOCK. masses: as in `decide`. Of each column block the blocks of the largest masses are added.
    """
    row_blocks, column_blocks = keep.shape
    of_blocks = masses.reshape(column_blocks, -1, row_blocks, masses.shape[1] // row_blocks).sum((1, 3)).T
    return kept_by(jnp.where(keep, jnp.inf, of_blocks), of_blocks, tau * of_blocks.sum(0))
