"""The kernels for Hopper that leave out blocks (cce_kernels/block_sparse.py), in the interpreter of JAX 0.11.

What is left out is not read: it holds NaN here.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_kernels.block_floats import block_of, decoded, steps_shape
from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, PART, Shape
from cce_kernels.device import H200
from cce_kernels.engines.engine import Multiplying, Part, Problem, Step
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.hopper.tiles import LOGITS, SPARSE_DE, SUMMED
from cce_kernels.exponentials import saved_shape
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Wanted
from cce_kernels.plan.residuals import shapes_of_blocks
from cce_kernels.request import Request
from cce_kernels.windows import ALL_COLUMNS, Windows
from tests.lowering import for_hopper
from tests.test_hopper import (  # noqa: F401
    INTERPRETED,
    SMALL,
    TOKENS,
    VOCABULARIES,
    WIDTH,
    adding_copies,
    error,
    interpret,
    problem,
    problem_of,
)

pytestmark = INTERPRETED
S = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16
TOLERANCE = 0.01


def request_of(tokens: int, width: int, vocabulary: int, vocab_axis: int) -> Request:
    wanted = Wanted(True, True, False)
    head = Head(vocab_axis=vocab_axis)
    return Request(tokens, width, vocabulary, "bfloat16", head, False, wanted, 0, gradient_tolerance=TOLERANCE)


def drawn_blocks(draw: np.random.Generator, request: Request, share: float) -> tuple[np.ndarray, np.ndarray]:
    every = shapes_of_blocks(request, request.tokens)
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
    tolerant = exact._replace(request=replace(exact.request, gradient_tolerance=TOLERANCE))
    kept, reference = jnp.full(1, count, jnp.int32), jnp.asarray(target, jnp.float32)

    def masses(of, save):
        return HOPPER.sums(Step(HOPPER, LOGITS, 2), of, kept, reference, save).masses

    found, blocks = np.asarray(masses(tolerant, True)), shapes_of_blocks(tolerant.request, TOKENS)
    assert blocks is not None
    assert found.shape == (blocks.de.shape[1], blocks.de.shape[0] * DE_BLOCK.tokens)
    want = np.zeros((TOKENS, len(found) * PART))
    want[:, :vocabulary] = np.exp(z - target[:, None]) * slope
    want = want.reshape(TOKENS, -1, PART).sum(2).T
    np.testing.assert_allclose(found[:, :count], want[:, :count], rtol=3e-5)
    for of, save in ((exact, True), (tolerant, False)):
        assert jax.eval_shape(partial(masses, of, save)) is None


@pytest.mark.parametrize(("tokens", "splits", "vocab_axis", "tile"), [(304, 1, 0, 0), (304, 3, 1, 2), (512, 2, 0, 1)])
def test_de_of_the_kept_blocks(tokens, splits, vocab_axis, tile, adding_copies, monkeypatch):  # noqa: F811
    """In partial sums: each takes a run of the list, also of one that is shorter than there are partial sums."""
    draw, vocabulary, width = np.random.default_rng([tokens, splits]), VOCABULARIES[vocab_axis], 192
    request, count = request_of(tokens, width, vocabulary, vocab_axis), tokens - 40
    p, c = draw.uniform(size=saved_shape(tokens, vocabulary)), draw.normal(size=(vocabulary, width))
    p[:, vocabulary:] = 0
    kept, _ = drawn_blocks(draw, request, 0.4)
    kept[0, -2:] = True  # parts of which P and c have no column
    kept[1] = False
    kept[2] = np.arange(kept.shape[1]) == 5
    p = np.where(elements(kept, DE_BLOCK, p.shape), p, np.nan)
    p[count:] = np.nan
    p, c = jnp.asarray(p, BF16), jnp.asarray(c, BF16)
    inputs = Inputs(jnp.zeros((tokens, width), BF16), c if vocab_axis == 0 else c.T, None, jnp.zeros(tokens, jnp.int32))
    step = Multiplying(HOPPER, SPARSE_DE[tile], None, Windows.whole(vocabulary, beyond=True), splits)
    if splits > 1 and tokens % SPARSE_DE[tile].of_pair[0]:
        # A partial sum's last tile adds zeros to rows of the next one. The GPU's memory system adds; what stands in its
        # place here reads and writes, which the interpreter takes for a race.
        interpret(monkeypatch, detect_races=False)
    of = HOPPER.products(step, Problem(request, SMALL, inputs), None, jnp.full(1, count, jnp.int32), jnp.asarray(kept))
    sums = np.float64(of.add_de(None, p, ALL_COLUMNS)).reshape(splits, tokens, width)
    want = np.nan_to_num(np.float64(p)[:count, :vocabulary]) @ np.float64(c)
    assert error(sums.sum(0)[:count], want) < 1e-6
    assert not sums[:, DE_BLOCK.tokens : 2 * DE_BLOCK.tokens].any(), "where no block is kept"


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize(("columns", "vocab_axis"), [(256, 0), (192, 1)])
def test_dc_of_the_kept_blocks_summed_over_chunks(columns, vocab_axis, capsys):
    """Rows of dc that no token of a chunk keeps keep their bits, and so do their steps.

    In some chunks no block is kept, or no token. Memory that nothing wrote may hold anything.
    """
    draw = np.random.default_rng([columns, vocab_axis])
    vocabulary, width, tokens = 712 if vocab_axis == 0 else 704, 192, 200
    request = request_of(tokens, width, vocabulary, vocab_axis)
    sum_dc = jax.jit(partial(HOPPER.sum_dc, Step(HOPPER, SUMMED[columns]), request, SMALL))
    arbitrary = draw.integers(2**16, size=(vocabulary, width), dtype=np.uint16).view(BF16)
    dc = jnp.asarray(arbitrary if vocab_axis == 0 else arbitrary.T)
    steps = jnp.zeros(steps_shape(vocabulary, width), jnp.float32)

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
    for count, share, of_columns in chunks:
        _, kept = drawn_blocks(draw, request, share)
        kept &= np.isin(np.arange(kept.shape[1]), of_columns)
        kept &= np.arange(len(kept))[:, None] * DC_BLOCK.tokens < count
        p, e = draw.normal(size=saved_shape(tokens, vocabulary)), draw.normal(size=(tokens, width))
        p[:, vocabulary:] = 0
        p[count:] = 0
        p, e = (np.float64(jnp.asarray(x, BF16)) for x in (p, e))
        here = elements(kept, DC_BLOCK, p.shape)
        want += np.where(here, p, 0)[:, :vocabulary].T @ e
        p = np.where(here, p, np.nan)
        e = np.where(here.any(1)[:, None], e, np.nan)
        part = Part(jnp.asarray(p, BF16), jnp.asarray(e, BF16), None, jnp.full(1, count, jnp.int32), jnp.asarray(kept))
        before = bits()
        dc, steps = sum_dc(dc, steps, part)
        alone = ~kept.any(0).repeat(DC_BLOCK.columns)
        left_alone.append(np.mean(alone[:vocabulary]))
        for x, y in zip(before, bits(), strict=True):
            assert np.array_equal(x[alone[: len(x)]], y[alone[: len(y)]])
    rest = 1 - 256 / vocabulary
    assert left_alone == pytest.approx([256 / vocabulary, 1, 1, rest, rest])
    found = decoded(dc.view(jnp.int16), steps, columns, vocab_axis).astype(BF16)
    found = np.moveaxis(np.float64(found), vocab_axis, 0)
    of_rounding = np.linalg.norm(np.float64(jnp.asarray(want, BF16)) - want, axis=1)
    assert (np.linalg.norm(found - want, axis=1) <= 1.5 * of_rounding).all()
    assert np.linalg.norm(found - want) <= 1.05 * np.linalg.norm(of_rounding)
    assert not found[256:512].any(), "what no chunk keeps"
    assert "RACE" not in capsys.readouterr().out


def test_where_jax_has_64_bits_the_kernels_lower_the_same():
    """Numbers that lists and kernels count with stay of 32 bits."""
    tokens, width, vocabulary = 512, 128, 4096
    request, columns = request_of(tokens, width, vocabulary, 0), block_of(width)

    def products(p, e, c, dc, steps, count, de_blocks, dc_blocks):
        problem, part = Problem(request, H200, Inputs(e, c, None, None)), Part(p, e, None, count, dc_blocks)  # type: ignore[arg-type]
        of = HOPPER.products(HOPPER.de_of_chunk(request, tokens, H200), problem, None, count, de_blocks)
        summed = HOPPER.sum_dc(Step(HOPPER, SUMMED[columns]), request, H200, dc, steps, part)
        return of.add_de(None, p, ALL_COLUMNS), summed

    c, every = S((vocabulary, width), BF16), shapes_of_blocks(request, tokens)
    assert every is not None
    arrays = S((tokens, vocabulary), BF16), S((tokens, width), BF16), c, c
    steps, blocks = S(steps_shape(vocabulary, width), jnp.float32), (S(x.shape, bool) for x in every)
    with jax.enable_x64(True):
        names = for_hopper(products, *arrays, steps, S((1,), jnp.int32), *blocks)
    assert sorted(names) == ["dc_sum", "de"]
