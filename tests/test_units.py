"""The arithmetic around the kernels: windows, orders, splits, configurations."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_kernels import given_ids, weighted_sum
from cce_kernels.device import H200, Gpu
from cce_kernels.engines.order import SCRATCH_BYTES, grouped_order, vocabulary_splits
from cce_kernels.engines.triton.tiles import SAFE, TileConfig, tiles_for
from cce_kernels.engines.xla import multiple, parts_of
from cce_kernels.float16 import FLOAT16_LARGEST
from cce_kernels.gradients import fitted
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Numbers, Wanted
from cce_kernels.plan import Plan, plan_of
from cce_kernels.plan.schedules import WINDOW_BYTES
from cce_kernels.tokens import Kept, over_kept
from cce_kernels.windows import FEWEST_COLUMNS, Windows, vocabulary_windows
from tests.plans import request_of, whole_bytes

pytestmark = pytest.mark.usefixtures("hopper_kernels_in_every_jax")


@given(st.integers(1, 500), st.integers(1, 500))
def test_windows_own_every_column_once_and_overwrite_in_order(vocabulary, columns):
    windows = Windows(vocabulary, min(columns, vocabulary))
    owner = np.zeros(vocabulary, int)
    written = np.full(vocabulary, -1)
    for k, start, owned in map(windows.window, range(windows.count)):
        assert 0 <= start <= owned
        assert start + windows.columns <= vocabulary
        owner[owned : start + windows.columns] += 1
        written[start : start + windows.columns] = k
    assert (owner == 1).all()
    # The last to write a column is the window that owns it, so no gradient is lost under an overlap.
    for k, start, owned in map(windows.window, range(windows.count)):
        assert (written[owned : start + windows.columns] == k).all()


@given(st.integers(1, 300_000), st.integers(0, 2**30), st.integers(1, 2**17), st.booleans())
def test_windows_fit_their_budget(vocabulary, budget, column_bytes, beyond):
    windows = vocabulary_windows(vocabulary, budget, column_bytes, beyond=beyond)
    assert windows.columns * column_bytes <= budget or windows.columns <= FEWEST_COLUMNS
    assert 0 <= windows.overlap < windows.columns <= vocabulary
    assert (windows.count - 1) * windows.columns + windows.last == vocabulary + windows.overlap


def test_what_a_short_last_window_costs():
    """One that ends with the vocabulary costs what its columns do; one that overlaps its neighbour, what all do."""

    def waves(_: Windows, columns: int) -> float:
        return -(-columns // 2500) + 0.1

    assert vocabulary_windows(5000, 4096, 1, waves, 1024, beyond=True) == Windows(5000, 3072, beyond=True)
    assert vocabulary_windows(5000, 4096, 1, waves, 1024) == Windows(5000, 2048)


@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 17))
def test_grouped_order_visits_every_tile_once(row_blocks, column_blocks, row_group):
    programs = row_blocks * column_blocks
    order = grouped_order(jnp.arange(400), row_blocks, column_blocks, row_group)  # of one size, to be compiled once
    rows, columns = (np.asarray(x)[:programs] for x in order)
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == programs
    assert rows.max() < row_blocks
    assert columns.max() < column_blocks


@given(st.integers(1, 600), st.integers(1, 1100))
def test_splits_fill_the_gpu_within_their_scratch(row_blocks, column_tiles):
    splits = vocabulary_splits(row_blocks, column_tiles, 128 * row_blocks, H200.multiprocessors)
    assert 1 <= splits <= column_tiles
    assert splits == 1 or 4 * splits * 128 * row_blocks <= SCRATCH_BYTES
    waves = -(-row_blocks * splits // H200.multiprocessors)
    whole = row_blocks * column_tiles / H200.multiprocessors
    if whole > 50 and splits > 1:
        assert waves * column_tiles / splits < 1.07 * whole


@pytest.mark.parametrize("change", [{"rows": 96}, {"columns": 8}, {"depth": 0}, {"warps": 3}, {"stages": 0}])
def test_a_tile_config_is_validated(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        TileConfig(**{"rows": 128, "columns": 128, "depth": 32, "warps": 4, "stages": 2, **change})


def test_an_unknown_gpu_gets_tiles_that_fit_every_gpu():
    for itemsize in (2, 4):
        tiles = tiles_for(itemsize, 4096, Gpu("99.0", 1))
        assert tiles is SAFE[itemsize]
        for tile in tiles:  # what the pipelined loads of both operands take of shared memory
            assert (tile.rows + tile.columns) * tile.depth * itemsize * tile.stages <= 99 * 1024


def test_xla_copies_what_it_pads():
    """Two matmuls for which tests/test_held.py found copies, where it can compile for a GPU, in so many parts."""
    for rows, columns, inner, parts in ((1024, 1024, 128264, 4), (4096, 256, 15092, 2)):
        assert parts_of(rows, columns, H200) in (parts, 2 * parts)
        assert multiple(rows, columns, 2, H200) == 8 * parts_of(rows, columns, H200)
        assert inner % multiple(rows, columns, 2, H200), "XLA pads"
        assert multiple(8192, 8192, 2, H200) == 1, "its tiles fill the GPU"
        assert multiple(rows, columns, 2, None) == 1


HEADS = st.builds(Head, softcap=st.sampled_from([None, 30.0]))
SIZES = st.builds(lambda power, part: int(2**power * part), st.integers(0, 17), st.floats(1, 2))
VOCABULARIES = SIZES | SIZES.map(lambda n: -(-n // 256) * 256) | SIZES.map(lambda n: -(-n // 8) * 8)
SHAPES = st.tuples(SIZES, st.integers(1, 16_384), VOCABULARIES)
MULTIPLES = st.integers(2, 256).map(lambda n: 64 * n)
HOPPER_SHAPES = st.tuples(st.integers(256, 2**18), MULTIPLES, MULTIPLES | st.integers(2, 2048).map(lambda n: 128 * n))
SHARES = st.floats(0, 1.5)  # of what saving everything and larger windows take
WANTED = st.builds(Wanted, *[st.booleans()] * 3)
OTHER = Gpu("8.9", 132)  # of the engines for GPUs Triton alone serves it


def planned(shape, memory_budget: int, head: Head | None = None, *, gpu: Gpu = OTHER, **call) -> Plan:
    return plan_of(request_of(shape, memory_budget, head, **call), gpu, "cce")


@settings(max_examples=300)
@given(SHAPES | HOPPER_SHAPES, HEADS, st.booleans(), WANTED, st.sampled_from([OTHER, H200]), SHARES, SHARES)
def test_a_larger_budget_saves_no_less(shape, head, with_sum, wanted, gpu, one, other):
    budgets = (int(share * (whole_bytes(*shape) + WINDOW_BYTES)) for share in sorted((one, other)))
    less, more = (planned(shape, budget, head, gpu=gpu, with_sum=with_sum, wanted=wanted).saved for budget in budgets)
    assert less <= more


@settings(max_examples=300)
@given(SHAPES, HEADS, st.booleans(), WANTED)
def test_all_is_saved_from_whole_bytes_on(shape, head, with_sum, wanted):
    enough, kind = whole_bytes(*shape, wanted.c), {"with_sum": with_sum, "wanted": wanted}
    if not with_sum:
        plan = planned(shape, enough, head, **kind)
        assert plan.saved == plan.rows
        assert planned(shape, enough - 1, head, **kind).saved == 0
    else:
        plan = planned(shape, 2 * enough + 2**30, head, **kind)
        assert plan.saved == (0 if head.softcap else plan.rows)


@pytest.mark.parametrize(("softcap", "with_sum", "tokens"), [(0.1, False, 128), (1e4, False, 128), (30.0, True, 0)])
def test_under_a_softcap_exponentials_are_saved_unless_a_weighted_sum_needs_the_logit(softcap, with_sum, tokens):
    assert planned((128, 16, 4096), 2**40, Head(softcap=softcap), with_sum=with_sum).saved == tokens


@pytest.mark.parametrize(
    ("impl", "dtype", "gpu", "engine"),
    [
        ("auto", "bfloat16", H200, "hopper"),
        ("auto", "bfloat16", OTHER, "triton"),
        ("auto", "float32", H200, "xla"),
        ("cce", "float32", H200, "triton"),
        ("chunked", "bfloat16", H200, "xla"),
        ("auto", "bfloat16", None, "xla"),
        ("auto", "bfloat16", Gpu("7.5", 40), "xla"),
    ],
)
def test_which_engine_computes_a_call(impl, dtype, gpu, engine):
    assert plan_of(request_of((512, 128, 4096), 0, dtype=dtype), gpu, impl).engine.name == engine


@given(st.lists(st.integers(-3, 5), min_size=24, max_size=24))
def test_kept_tokens_come_first_and_go_back(targets):
    targets = np.array(targets, np.int32)
    live = targets >= 0
    for x in (np.arange(1, 25, dtype=np.float32), np.arange(1, 49, dtype=np.int32).reshape(-1, 2)):
        (count,), gathered, restored = moved(targets, x)
        assert count == live.sum()
        assert gathered.dtype == restored.dtype == x.dtype
        np.testing.assert_array_equal(gathered[:count], x[live])
        np.testing.assert_array_equal(restored, np.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, 0))


@given(st.integers(0, 40), st.sampled_from([(1, 1), (1, 4), (3, 2), (7, 1), (8, 5)]))
def test_parts_until_the_last_kept_token(count, sizes):
    """Each pair of sizes is a program."""
    size, parts = sizes
    visits = np.asarray(visited(count, size, parts))
    whole = -(-count // (size * parts)) * parts  # steps have all of their parts
    np.testing.assert_array_equal(visits, np.where(np.arange(visits.size) < whole, np.arange(visits.size) + 1, 0))


@partial(jax.jit, static_argnums=(1, 2))
def visited(count, size, parts):
    return over_kept(count, size, parts, lambda i, found: found.at[i].add(i + 1), jnp.zeros(48, jnp.int32))


@jax.jit
def moved(targets, x):
    """The number of kept tokens; x gathered; and put back, something else where no kept token is."""
    kept = Kept.of(targets, targets.size)
    gathered, beyond = x[kept.order], jnp.arange(24) >= kept.count
    return kept.count, gathered, kept.restored(jnp.where(beyond.reshape(-1, *[1] * (x.ndim - 1)), 99, gathered))


def test_ids_of_ignored_tokens_name_no_column():
    given = Inputs(jnp.ones((2, 4)), jnp.ones((9, 4)), None, jnp.array([-1, 2]), ids=jnp.array([[1, 9], [3, 9]]))
    np.testing.assert_array_equal(given_ids.columns_of(given, Head()), [[-1, -1], [3, -1]])


@pytest.mark.parametrize("target", [0, 1, 2, 3])
def test_ids_lose_what_lse_lost(target):
    """Where each logit of the engine is closer to 0 by the same share, as tensor cores make it."""
    z, kept = jnp.array([-40.0, 41.0, 60.0, 2.0]), 1 - 2.0**-10
    given = Inputs(jnp.ones((1, 1)), z[:, None], None, jnp.array([target]), ids=jnp.array([[1, 3]]))
    numbers = Numbers(jnp.zeros(1), kept * jnp.array([60.0]), kept * z[None, target])
    call = request_of((1, 1, 4), 0, dtype="float32")
    found = given_ids.logits(given, numbers, replace(call, ids=2), None)
    lost = 60.0 * 2.0**-10 * min(1, abs(float(z[target])) / 60)  # no more than the target's logit
    np.testing.assert_allclose(found, [[41.0 - lost, 2.0 - lost]], rtol=1e-6)


@pytest.mark.parametrize("weights", [None, jnp.array([0.0, 0.5, 2.0, 1.0])], ids=["1", "each"])
def test_the_weighted_sum_is_moved_by_what_the_matmul_has_lost(weights):
    """So that lse minus a logit loses nothing; in 16 bits, where what is lost is in proportion to a logit."""
    z, kept = jnp.array([-40.0, 41.0, 60.0, 2.0], jnp.bfloat16), 1 - 2.0**-10
    given = Inputs(jnp.ones((1, 1), z.dtype), z[:, None], None, jnp.array([2]), weights)
    numbers = Numbers(jnp.zeros(1), kept * jnp.array([60.0]), kept * z[None, 2].astype(jnp.float32))
    call = request_of((1, 1, 4), 0, with_sum=True)
    of = weighted_sum.weighted(given, call)
    found = [weighted_sum.of_tokens(given, numbers, of, call, None, moves)[0] for moves in (True, False)]
    each = np.ones(4) if weights is None else np.asarray(weights)
    expected = np.sum(each * (np.asarray(z, np.float64) - 60))
    np.testing.assert_allclose(found, [expected, expected + each.sum() * 60 * 2.0**-10], rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-41, 1e-30, 1.0])
def test_cotangents_of_any_size_have_a_unit_that_no_gpu_takes_for_0(size):
    """Some GPU programs take numbers below the least normal one for 0: a unit of 1e-45 made gradients inf."""
    of = jnp.full(3, size, jnp.float32)
    inputs = Inputs(jnp.ones((3, 2), jnp.float16), jnp.ones((5, 2), jnp.float16), None, jnp.zeros(3, jnp.int32))
    divided, unit = fitted(Cotangents(of, -of, None), Numbers(of, of, of), inputs)
    assert unit is not None
    assert unit >= 100 * jnp.finfo(jnp.float32).tiny
    assert jnp.all(jnp.abs(divided.lse) <= FLOAT16_LARGEST)
