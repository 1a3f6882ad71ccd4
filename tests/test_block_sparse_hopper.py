"""The kernels for Hopper that leave out blocks (cce_kernels/block_sparse.py), in the interpreter of JAX 0.11.

What is left out is not read: it holds NaN here.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_kernels.block_floats import block_of, steps_shape
from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, PART, Runs, Shape, all_blocks
from cce_kernels.call import Call
from cce_kernels.device import H200, Gpu
from cce_kernels.engines.engine import Multiplying, Problem, Step
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.hopper.products import ExtentOfRuns
from cce_kernels.engines.hopper.tiles import DC, LOGITS, SPARSE_DE, SUMMED
from cce_kernels.engines.triton import TRITON
from cce_kernels.exponentials import saved_shape
from cce_kernels.gradients import Left
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Wanted
from cce_kernels.tokens import Rows
from cce_kernels.windows import Groups
from tests.lowering import for_hopper
from tests.test_hopper import INTERPRETED, SMALL, TOKENS, VOCABULARIES, WIDTH, adding_copies, error, problem, problem_of  # noqa: F401

pytestmark = INTERPRETED
S = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16
TOLERANCE = 0.01


def call_of(tokens: int, width: int, vocabulary: int, vocab_axis: int) -> Call:
    wanted = Wanted(True, True, False)
    head = Head(vocab_axis=vocab_axis)
    return Call(tokens, width, vocabulary, "bfloat16", head, False, False, wanted, 0, gradient_tolerance=TOLERANCE)


def drawn_blocks(draw: np.random.Generator, call: Call, share: float) -> tuple[np.ndarray, np.ndarray]:
    every = all_blocks(call, call.tokens)
    assert every is not None
    de, dc = (draw.uniform(size=x.shape) < share for x in every)
    return de, dc


def elements(kept: np.ndarray, block: Shape, shape: tuple[int, ...]) -> np.ndarray:
    """Which elements of an array of this shape the blocks hold."""
    return kept.repeat(block.tokens, axis=0).repeat(block.columns, axis=1)[: shape[0], : shape[1]]


@pytest.mark.parametrize(("vocab_axis", "softcap", "count"), [(0, None, TOKENS), (1, 5.0, 100)])
def test_masses_are_the_sums_of_the_exponentials_of_each_part(vocab_axis, softcap, count):
    head, vocabulary = Head(softcap=softcap, vocab_axis=vocab_axis), VOCABULARIES[vocab_axis]
    inputs, _ = problem(vocab_axis)
    wide = np.float64(inputs.c) if vocab_axis == 0 else np.float64(inputs.c).T
    z = np.float64(inputs.e) @ wide.T
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    target = z[np.arange(TOKENS), inputs.targets]
    slope = 1.0 if softcap is None else 1 - (z / softcap) ** 2
    exact = problem_of(inputs, head)
    tolerant = exact._replace(call=replace(exact.call, gradient_tolerance=TOLERANCE))
    rows, reference = Rows(count=jnp.full(1, count, jnp.int32)), jnp.asarray(target, jnp.float32)

    def masses(of, save):
        return HOPPER.sums(Step(HOPPER, LOGITS, 2), of, rows, reference, save).masses

    found, blocks = np.asarray(masses(tolerant, True)), all_blocks(tolerant.call, TOKENS)
    assert blocks is not None
    assert found.shape == (blocks.de.shape[1], blocks.de.shape[0] * DE_BLOCK.tokens)
    want = np.zeros((TOKENS, len(found) * PART))
    want[:, :vocabulary] = np.exp(z - target[:, None]) * slope
    want = want.reshape(TOKENS, -1, PART).sum(2).T
    np.testing.assert_allclose(found[:, :count], want[:, :count], rtol=3e-5)
    for of, save in ((exact, True), (tolerant, False)):
        assert jax.eval_shape(partial(masses, of, save)) is None


@settings(max_examples=80)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 4), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_each_kept_step_is_summed_once_for_each_tile_of_columns(blocks, steps, density, units, seed):
    """In runs whose lengths differ by one step at most; and each row block's pieces stand one after another."""
    draw = np.random.default_rng(seed)
    column_tiles = int(draw.integers(1, 15))
    number = max(1, units // column_tiles)
    kept = draw.uniform(size=(blocks, steps)) < density / 4 * draw.integers(2, size=(blocks, 1))
    runs = jax.tree.map(np.asarray, Runs.of(jnp.asarray(kept), number))
    lengths = [runs.count[first : first + pieces].sum() for first, pieces in runs.of_run]
    assert max(lengths) - min(lengths) <= 1
    for block, (first, pieces) in enumerate(runs.of_block):
        mine = runs.count[first : first + pieces]
        assert (runs.block[first : first + pieces][mine > 0] == block).all()
        assert mine.sum() == kept[block].sum()
    found = []
    for unit in range(units):
        extent = ExtentOfRuns(number, jnp.asarray(runs.of_run), 64 * column_tiles - 5, None)  # type: ignore[arg-type]
        count, at = extent.of_unit(jnp.int32(unit), units, 64)
        for n in range(int(count)):
            piece, column = (int(x) for x in at(jnp.int32(n)))
            block, first = runs.block[piece], runs.first[piece]
            found += [(block, step, column) for step in runs.steps[block, first : first + runs.count[piece]]]
    assert sorted(found) == [(i, j, k) for i, j in np.argwhere(kept) for k in range(column_tiles)]


@pytest.mark.parametrize(
    ("tokens", "width", "runs", "vocab_axis", "tile"), [(304, 704, 1, 0, 2), (304, 192, 3, 1, 2), (512, 448, 4, 0, 1)]
)
def test_de_of_the_kept_blocks(tokens, width, runs, vocab_axis, tile):
    """In runs of the same length: row blocks without steps, and with one; more tiles of columns than units."""
    gpu = replace(SMALL, multiprocessors=2 * max(2, runs * -(-width // SPARSE_DE[tile].of_pair[1])))
    draw, vocabulary = np.random.default_rng([tokens, runs]), VOCABULARIES[vocab_axis]
    call, count = call_of(tokens, width, vocabulary, vocab_axis), tokens - 40
    p, c = draw.uniform(size=saved_shape(tokens, vocabulary)), draw.normal(size=(vocabulary, width))
    p[:, vocabulary:] = 0
    kept, _ = drawn_blocks(draw, call, 0.4)
    kept[0, -2:] = True  # parts of which P and c have no column
    kept[1] = False
    kept[2] = np.arange(kept.shape[1]) == 5
    p = np.where(elements(kept, DE_BLOCK, p.shape), p, np.nan)
    p[count:] = np.nan
    p, c, r = jnp.asarray(p, BF16), jnp.asarray(c, BF16), draw.normal(size=tokens)
    found = np.float64(de_of(call, p, c if vocab_axis == 0 else c.T, kept, r, count, runs, tile, gpu))
    want = np.nan_to_num(np.float64(p)[:count, :vocabulary]) @ np.float64(c) * r[:count, None]
    assert error(found[:count], want) < 1e-6
    assert not found[DE_BLOCK.tokens : 2 * DE_BLOCK.tokens].any(), "where no block is kept"
    assert not found[count:].any(), "where no token is kept"


def de_of(call: Call, p, c, kept, r, count: int, runs: int, tile: int, gpu: Gpu) -> jax.Array:
    inputs = Inputs(jnp.zeros((call.tokens, call.width), BF16), c, None, jnp.zeros(call.tokens, jnp.int32))
    step = Multiplying(HOPPER, SPARSE_DE[tile], None, Groups.whole(call.vocabulary, beyond=True), runs=runs)
    of = Runs.of(jnp.asarray(kept), runs)
    pieces = HOPPER.de_of_runs(step, Problem(call, gpu, inputs), p, of)
    of_kept = jnp.asarray(r, jnp.float32), jnp.full(1, count, jnp.int32)
    return TRITON.summed_runs(Step(TRITON), gpu, pieces, of, *of_kept, jnp.float32)


def test_de_without_tokens():
    call, p, c = call_of(304, WIDTH, 640, 0), jnp.full((304, 640), jnp.nan, BF16), jnp.zeros((640, WIDTH), BF16)
    assert not np.asarray(de_of(call, p, c, np.zeros((4, 12), bool), np.zeros(304), 0, 2, 0, SMALL)).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("columns", "vocab_axis"), [(256, 0), (192, 1)])
def test_dc_of_the_kept_blocks_summed_over_chunks(columns, vocab_axis, capsys):
    """Rows of dc that no token of a chunk keeps keep their bits, and so do their steps; the last sum writes all rows.

    In some chunks no block is kept, or no token. Memory that nothing wrote may hold anything.
    """
    draw = np.random.default_rng([columns, vocab_axis])
    vocabulary, width, tokens = 712 if vocab_axis == 0 else 704, 192, 200
    call = call_of(tokens, width, vocabulary, vocab_axis)
    sum_dc = jax.jit(partial(HOPPER.sum_dc, Step(HOPPER, SUMMED[columns]), call, SMALL))
    arbitrary = draw.integers(2**16, size=(vocabulary, width), dtype=np.uint16).view(BF16)
    dc = jnp.asarray(arbitrary if vocab_axis == 0 else arbitrary.T)
    steps = jnp.zeros(steps_shape(vocabulary, width, columns), jnp.float32)

    def bits() -> list[np.ndarray]:
        """Of dc and of the steps, with an axis for the vocabulary first."""
        return [np.moveaxis(np.asarray(dc.view(jnp.int16)), vocab_axis, 0), np.asarray(steps).T]

    want, left_alone = np.zeros((vocabulary, width)), []
    chunks = [  # the count, the share of blocks that are kept, and the column blocks of which some are
        (tokens, 0.5, [0, 2]),
        (tokens, 0.0, []),
        (0, 0.0, []),
        (70, 0.7, [0]),
        (tokens, 0.3, [0]),
    ]
    for k, (count, share, of_columns) in enumerate(chunks):
        _, kept = drawn_blocks(draw, call, share)
        kept &= np.isin(np.arange(kept.shape[1]), of_columns)
        kept &= np.arange(len(kept))[:, None] * DC_BLOCK.tokens < count
        p, e = draw.normal(size=saved_shape(tokens, vocabulary)), draw.normal(size=(tokens, width))
        p[:, vocabulary:] = 0
        p[count:] = 0
        p, e = (np.float64(jnp.asarray(x, BF16)) for x in (p, e))
        here = elements(kept, DC_BLOCK, p.shape)
        want += 0.3 * np.where(here, p, 0)[:, :vocabulary].T @ e
        p = np.where(here, p, np.nan)
        e = np.where(here.any(1)[:, None], e, np.nan)
        left = Left(jnp.asarray(p, BF16), jnp.asarray(e, BF16), None, jnp.full(1, count, jnp.int32), jnp.asarray(kept))
        last, before = k == len(chunks) - 1, bits()
        dc, steps = sum_dc(dc, steps, left, jnp.full(1, 0.3) if last else None)
        alone = ~kept.any(0).repeat(DC_BLOCK.columns)
        left_alone.append(np.mean(alone[:vocabulary]))
        for x, y in zip(before, bits(), strict=True):
            assert last or np.array_equal(x[alone[: len(x)]], y[alone[: len(y)]])
    rest = 1 - 256 / vocabulary
    assert left_alone == pytest.approx([256 / vocabulary, 1, 1, rest, rest])
    found = np.moveaxis(np.float64(dc), vocab_axis, 0)
    of_rounding = np.linalg.norm(np.float64(jnp.asarray(want, BF16)) - want, axis=1)
    assert (np.linalg.norm(found - want, axis=1) <= 1.5 * of_rounding).all()
    assert np.linalg.norm(found - want) <= 1.05 * np.linalg.norm(of_rounding)
    assert not found[256:512].any(), "what no chunk keeps"
    assert "RACE" not in capsys.readouterr().out


def test_a_float32_dc_leaves_out_nothing(adding_copies):  # noqa: F811
    tokens, width, vocabulary = 136, 128, 320
    draw, call = np.random.default_rng(0), replace(call_of(tokens, width, vocabulary, 0), wide_dc=True)
    p, e = (jnp.asarray(draw.normal(size=(tokens, n)), BF16) for n in (vocabulary, width))
    _, kept = drawn_blocks(draw, call, 0.2)
    left = Left(p, e, None, jnp.full(1, tokens, jnp.int32), jnp.asarray(kept))
    dc, _ = HOPPER.sum_dc(Step(HOPPER, DC[2]), call, SMALL, jnp.zeros((vocabulary, width)), None, left, None)
    np.testing.assert_allclose(dc, np.float64(p).T @ np.float64(e), rtol=0, atol=1e-4)


def test_where_jax_has_64_bits_the_kernels_lower_the_same():
    """Numbers that lists and kernels count with stay of 32 bits."""
    tokens, width, vocabulary = 512, 128, 4096
    call, columns = call_of(tokens, width, vocabulary, 0), block_of(width)

    def products(p, e, c, dc, steps, count, de_blocks, dc_blocks):
        problem, left = Problem(call, H200, Inputs(e, c, None, None)), Left(p, e, None, count, dc_blocks)  # type: ignore[arg-type]
        step = HOPPER.de_of_chunk(call, tokens, H200)
        runs = Runs.of(de_blocks, step.runs)
        pieces = HOPPER.de_of_runs(step, problem, p, runs)
        de = TRITON.summed_runs(Step(TRITON), H200, pieces, runs, jnp.ones(tokens, jnp.float32), count, BF16)
        summed = HOPPER.sum_dc(Step(HOPPER, SUMMED[columns]), call, H200, dc, steps, left, None)
        return de, summed

    c, every = S((vocabulary, width), BF16), all_blocks(call, tokens)
    assert every is not None
    arrays = S((tokens, vocabulary), BF16), S((tokens, width), BF16), c, c
    steps, blocks = S(steps_shape(vocabulary, width, columns), jnp.float32), (S(x.shape, bool) for x in every)
    with jax.enable_x64(True):
        names = for_hopper(products, *arrays, steps, S((1,), jnp.int32), *blocks)
    assert sorted(names) == ["dc_sum", "de"]
