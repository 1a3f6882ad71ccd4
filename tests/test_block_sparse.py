"""Which blocks the products of a call with a gradient_tolerance leave out, held to the bound in float64.

cce_kernels/block_sparse.py states the bound (1). The exponentials are drawn from what may break it: flat rows, power
laws, rows with all of their mass in one part, sums just under and just over the bound, zeros, numbers that are not
finite, and arbitrary numbers where no token is kept.
"""

import re
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, MULTIPLE, PART, ROUNDED, Blocks, Listed, Tokens, kept_blocks
from cce_kernels.device import INTERPRETER
from cce_kernels.engines.engine import Step
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.triton.thresholds import LOWEST, ROUNDS, SPAN, WAYS
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted
from cce_kernels.plan.residuals import shapes_of_blocks
from cce_kernels.request import Request

TOLERANCES = (2.0**-9, 2.0**-5, 0.3)
SHAPES = ((256, 256, 4), (203, 256, 24), (390, 512, 8))  # n, and rows and parts of the masses: each compiled once
SIZES = (1e-12, 1e-6, 1e-3, 1.0, 1e6)  # of the mass, where the target's exponential is about 1
LOGITS = 2.0**-10  # relative: what two roundings of a logit may do to its exponential
SUMS = 2.0**-15  # relative: more than float32's roundings of a sum over parts
COARSE = 2.0 ** (SPAN / WAYS**ROUNDS)  # a threshold is too low by less than this factor


class Drawn(NamedTuple):
    """n tokens and V columns, in masses of a multiple of MULTIPLE tokens and columns."""

    p: np.ndarray  # (n, V) float32: the exponentials
    masses: np.ndarray  # (parts, rows) float32: their sums; arbitrary for all but the first `count` tokens
    targets: np.ndarray  # (n,)
    own: np.ndarray  # (n,) float32: the targets' exponentials, each off by up to LOGITS
    count: int
    finite: np.ndarray  # (n,) bool: whether the masses are


def flat(rng, p, part, tolerance) -> None:
    p[:] = 1


def power_law(rng, p, part, tolerance) -> None:
    ranks = rng.permuted(np.broadcast_to(np.arange(1.0, p.shape[1] + 1), p.shape), axis=1)
    p[:] = ranks ** -rng.uniform(0.5, 5, (len(p), 1))


def ordered(rng, p, part, tolerance) -> None:
    """Likely columns stand together, the same ones for all rows."""
    p[:] = np.arange(1.0, p.shape[1] + 1) ** -rng.uniform(0.5, 3, (len(p), 1))


def one_column(rng, p, part, tolerance) -> None:
    p[np.arange(len(p)), rng.integers(p.shape[1], size=len(p))] = 1


def one_part(rng, p, part, tolerance) -> None:
    """All rows have their mass in the same part."""
    p[:, part * PART : (part + 1) * PART] = rng.uniform(size=p[:, part * PART : (part + 1) * PART].shape)


def at_the_bound(rng, p, part, tolerance) -> None:
    """One part has all but a share of the mass: just under the tolerance, or just over."""
    small = rng.uniform(size=p.shape) < rng.choice([0.01, 0.5, 0.99], (len(p), 1))
    small[:, part * PART : (part + 1) * PART] = False
    p[:] = np.where(small, rng.uniform(0, 1, p.shape) ** rng.choice([1, 9], (len(p), 1)), 0)
    share = tolerance * (1 + rng.choice([-1, 1], (len(p), 1)) * 2.0 ** -rng.integers(2, 13, (len(p), 1)))
    large = np.arange(p.shape[1]) // PART == part
    p[:] = p * share / np.maximum(p.sum(1, keepdims=True), 1e-30) + large * (1 - share) / large.sum()


def zeros(rng, p, part, tolerance) -> None:
    p[:] = 0


def spread(rng, p, part, tolerance) -> None:
    p[:] = np.exp(rng.normal(size=p.shape) * rng.uniform(0, 20, (len(p), 1)))
    p /= p.max(1, keepdims=True)


KINDS = (flat, power_law, ordered, one_column, one_part, at_the_bound, zeros, spread)


def drawn(seed: int, kinds: list, shape: tuple[int, int, int], tolerance: float) -> Drawn:
    rng, (n, rows, parts) = np.random.default_rng(seed), shape
    vocabulary = parts * PART - int(rng.integers(MULTIPLE))
    part, kind = int(rng.integers(-(-vocabulary // PART))), rng.integers(len(kinds), size=n)
    p = np.zeros((n, vocabulary))
    for k, fill in enumerate(kinds):
        chosen = np.zeros((np.sum(kind == k), vocabulary))
        fill(rng, chosen, part, tolerance)
        p[kind == k] = chosen
    columns, token = np.arange(vocabulary), np.arange(n)
    targets = rng.integers(vocabulary, size=n)
    targets = np.where(rng.uniform(size=n) < rng.choice([0, 0.3, 1]), np.minimum(part * PART, vocabulary - 1), targets)
    in_target = rng.uniform(size=n) < rng.choice([0, 0.2])  # all of the mass
    p = np.where(in_target[:, None] & (columns // PART != targets[:, None] // PART), 0, p)
    p *= rng.choice(SIZES, (n, 1))
    own = rng.choice([1.0, 1.0, 0.1, 1e-9], n)  # less than 1 where it is a softcap's slope
    p[token, targets] = own
    outside = rng.uniform(size=n) < rng.choice([0, 0.1])
    targets[outside] = rng.choice([vocabulary, parts * PART, 2**31 - 1], np.sum(outside))
    p = p.astype(np.float32)
    own = own * (1 + rng.uniform(-LOGITS, LOGITS, n))

    masses = np.zeros((parts * PART, rows), np.float32)
    masses[:vocabulary, :n] = p.T
    masses = masses.reshape(parts, PART, rows).sum(1)
    bad = rng.uniform(size=n) < rng.choice([0, 0.01])
    masses[rng.integers(parts, size=np.sum(bad)), np.flatnonzero(bad)] = rng.choice([np.nan, np.inf], np.sum(bad))
    count = int(rng.choice([0, n, rng.integers(n + 1), rng.integers(n + 1)]))
    masses[:, count:] = rng.choice([0, 1, 1e30, -1, np.nan, np.inf], (parts, rows - count))
    targets[count:] = rng.integers(-1, vocabulary, n - count)
    own[count:] = rng.choice([1, np.nan], n - count)
    return Drawn(p, masses, targets.astype(np.int32), own.astype(np.float32), count, ~bad)


thresholds = partial(TRITON.thresholds, Step(TRITON, None), INTERPRETER)


@jax.jit
def blocks_of(masses, targets, own, count, tolerance) -> Blocks:
    return kept_blocks(masses, Tokens(targets, own, count), tolerance, thresholds)


def found(of: Drawn, tolerance: float) -> Blocks:
    blocks = blocks_of(of.masses, of.targets, of.own, jnp.full(1, of.count, jnp.int32), jnp.float32(tolerance))
    return Blocks(*(np.asarray(x) for x in blocks))  # type: ignore[arg-type]


def of_tokens(kept: np.ndarray, block, n: int) -> np.ndarray:
    """Whether each token keeps each part, (n, parts)."""
    return kept[np.arange(n) // block.tokens].repeat(block.columns // PART, axis=1)


def by_parts(of: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """The mass in each part of all columns but the target's, (n, parts) float64; and where the target's part is."""
    n, parts = len(of.p), len(of.masses)
    p = np.zeros((n, parts * PART))
    p[:, : of.p.shape[1]] = of.p
    named = of.targets < of.p.shape[1]
    p[named, of.targets[named]] = 0
    return p.reshape(n, parts, PART).sum(2), np.arange(parts) == of.targets[:, None] // PART


def check_the_bound(of: Drawn, blocks: Blocks, tolerance: float) -> None:
    """(1), for every token."""
    others, is_target = by_parts(of)
    live = np.arange(len(of.p)) < of.count
    for kept, block in zip(blocks, (DE_BLOCK, DC_BLOCK), strict=True):
        keeps = of_tokens(kept, block, len(of.p))
        left_out = np.sum(np.where(keeps, 0, others), axis=1)
        assert np.all((left_out <= tolerance * others.sum(1))[live & of.finite])
        assert np.all(keeps[is_target & live[:, None]]), "the target's part"
        assert np.all(keeps[live & ~of.finite]), "a token whose masses are not finite"
        assert not np.any(kept[np.arange(len(kept)) * block.tokens >= of.count]), "blocks without tokens"


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    shape=st.sampled_from(SHAPES),
    tolerance=st.sampled_from(TOLERANCES),
)
def test_no_token_loses_more_than_its_tolerance(seed, kinds, shape, tolerance):
    of = drawn(seed, kinds, shape, tolerance)
    check_the_bound(of, found(of, tolerance), tolerance)


@settings(max_examples=30)
@given(
    rows=st.sampled_from([256, 512]),
    parts=st.sampled_from([1, 40]),
    block=st.sampled_from([DE_BLOCK.tokens, DC_BLOCK.tokens]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_threshold_is_the_best_one_but_for_the_search(rows, parts, block, seed):
    """Whatever the scores have to do with the masses. Where `most` is less than 0, or inf, nothing is looked for."""
    rng = np.random.default_rng(seed)
    masses = np.exp(rng.normal(size=(parts, rows)) * rng.choice([0, 1, 10], rows)) * rng.choice([0, 1], (parts, rows))
    scores = np.exp(rng.normal(size=(parts, rows // block)) * rng.choice([0, 1, 5], rows // block))
    scores[rng.uniform(size=scores.shape) < rng.choice([0, 0.2])] = np.inf
    masses, scores = masses.astype(np.float32), scores.astype(np.float32)
    most = (rng.choice([1e-6, 0.01, 0.3, 1.0], rows) * masses.sum(0)).astype(np.float32)
    most[rng.uniform(size=rows) < 0.05] = rng.choice([-1, np.inf])
    got = np.asarray(searched(masses, scores, most), np.float64)
    assert np.array_equal(got[most < 0], -np.ones(np.sum(most < 0)))
    assert np.all(got[most == np.inf] == np.inf)
    for i in np.flatnonzero((most >= 0) & (most < np.inf)):
        score, mass = np.float64(scores[:, i // block]), np.float64(masses[:, i])
        sums = np.array([mass[score <= x].sum() for x in score])
        assert got[i] == 0 or mass[score <= got[i]].sum() <= most[i] * (1 + SUMS)
        beyond = np.append(score[sums > most[i] * (1 - SUMS)], np.inf)  # too large as a threshold
        best = min(beyond.min(), 2.0 ** (LOWEST + SPAN)) / COARSE * (1 - SUMS)
        assert got[i] >= best or best < 2.0**LOWEST


searched = jax.jit(thresholds)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    parts=st.sampled_from([4, 24]),
    tolerance=st.sampled_from(TOLERANCES),
)
def test_where_tokens_are_alike_no_block_keeps_what_it_need_not(seed, kind, parts, tolerance):
    """The best choice is then that of one token: the smallest masses. Tokens of another size are alike too."""
    rng, (rows, vocabulary) = np.random.default_rng(seed), (256, parts * PART)
    p = np.zeros((1, vocabulary))
    kind(rng, p, int(rng.integers(parts)), tolerance)
    target = int(rng.integers(vocabulary))
    p[0, target] = 0
    p = np.float32(np.where(np.arange(vocabulary) == target, 1.0, p)) * np.float32(rng.choice(SIZES, (rows, 1)))
    masses, targets = p.reshape(rows, parts, PART).sum(2).T, np.full(rows, target, np.int32)
    of = Drawn(p, masses, targets, p[:, target], int(rng.integers(1, rows)), np.ones(rows, bool))
    blocks = found(of, tolerance)
    check_the_bound(of, blocks, tolerance)
    own = np.float64(p[0]) / p[0, target]
    for kept, block in zip(blocks, (DE_BLOCK, DC_BLOCK), strict=True):
        of_block = own.reshape(-1, block.columns).sum(1)
        in_part = own.reshape(-1, PART).sum(1)[target // PART]
        others = np.delete(of_block, target // block.columns)
        rest = max(in_part * (1 - ROUNDED) - (1 + ROUNDED), 0) * (1 - 2.0**-10)
        most = tolerance * (1 - ROUNDED) * (1 - 2 * SUMS) * (own.sum() - in_part + rest)
        ascending = np.sort(others)
        beyond = np.append(ascending[np.cumsum(ascending) > most], np.inf)
        live = -(-of.count // block.tokens)
        best = min(most, beyond[0]) / COARSE
        best = best if best >= most * 2.0**LOWEST else 0.0
        needed = (of_block > best) | (np.arange(len(of_block)) == target // block.columns)
        assert not np.any(kept[:live] & ~needed)


def test_blocks_have_the_shapes_that_are_planned():
    """Of a chunk of 300 tokens whose masses cover 512."""
    request = Request(300, 64, 700, "bfloat16", Head(), False, Wanted(True, True, False), 0, gradient_tolerance=0.1)
    masses, (targets, own) = np.zeros((12, 512), np.float32), np.zeros((2, 300))
    shapes = jax.eval_shape(blocks_of, masses, np.int32(targets), np.float32(own), jnp.full(1, 300, jnp.int32), 0.1)
    planned = shapes_of_blocks(request, 300)
    assert planned is not None
    assert [(x.shape, x.dtype) for x in planned] == [(x.shape, x.dtype) for x in shapes]
    assert shapes_of_blocks(replace(request, gradient_tolerance=0.0), 300) is None


def test_where_jax_has_64_bits_no_array_is_float64():
    """Scores were, and the search for thresholds read twice the bytes."""
    masses, each = np.zeros((4, 256), np.float32), np.zeros(256, np.float32)
    with jax.enable_x64(True):
        traced = jax.make_jaxpr(kept_blocks, static_argnums=(2, 3))
        program = traced(masses, Tokens(np.int32(each), each, np.zeros(1, np.int32)), 0.1, thresholds)
    assert "cce_thresholds" in str(program)
    assert not re.search(r"f64\[\d", str(program))


listed = jax.jit(Listed.of)


@settings(max_examples=40)
@given(
    shape=st.sampled_from([(4, 20), (12, 1), (12, 12)]),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_lists_hold_the_kept_steps_in_order(shape, share, seed):
    kept = np.random.default_rng(seed).uniform(size=shape) < share
    steps, count, blocks, live = (np.asarray(x) for x in listed(kept))
    assert all(x.dtype == np.int32 for x in (steps, count, blocks, live))
    assert steps.shape == shape
    for of_block, own, number in zip(kept, steps, count, strict=True):
        assert np.array_equal(own[:number], np.flatnonzero(of_block))
        assert np.all(own[number:] >= 2**20), "the last step of a sum is filled up with what is beyond every array"
    assert np.array_equal(blocks[: live[0]], np.flatnonzero(kept.any(1)))
    assert blocks.shape == (shape[0],)
