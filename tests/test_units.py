"""The arithmetic around the kernels: windows, orders, splits, configurations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_kernels import budget
from cce_kernels.config import H200, SAFE, Gpu, TileConfig, tile_config
from cce_kernels.groups import Wanted
from cce_kernels.logits import Head
from cce_kernels.tiles import SCRATCH_BYTES, grouped_order, vocabulary_splits
from cce_kernels.tokens import Kept
from cce_kernels.windows import FEWEST_COLUMNS, Groups, vocabulary_groups


@given(st.integers(1, 500), st.integers(1, 500))
def test_windows_own_every_column_once_and_overwrite_in_order(vocabulary, columns):
    groups = Groups(vocabulary, min(columns, vocabulary))
    owner = np.zeros(vocabulary, int)
    written = np.full(vocabulary, -1)
    for k, start, owned in map(groups.window, range(groups.count)):
        assert 0 <= start <= owned
        assert start + groups.columns <= vocabulary
        owner[owned : start + groups.columns] += 1
        written[start : start + groups.columns] = k
    assert (owner == 1).all()
    # The last to write a column is the window that owns it, so no gradient is lost under an overlap.
    for k, start, owned in map(groups.window, range(groups.count)):
        assert (written[owned : start + groups.columns] == k).all()


@given(st.integers(1, 300_000), st.integers(0, 2**30), st.integers(1, 2**17), st.booleans())
def test_groups_fit_their_budget(vocabulary, budget, column_bytes, beyond):
    groups = vocabulary_groups(vocabulary, budget, column_bytes, beyond=beyond)
    assert groups.columns * column_bytes <= budget or groups.columns <= FEWEST_COLUMNS
    assert 0 <= groups.overlap < groups.columns <= vocabulary
    assert (groups.count - 1) * groups.columns + groups.last == vocabulary + groups.overlap


def test_what_a_short_last_group_costs():
    """One that ends with the vocabulary costs what its columns do; one that overlaps its neighbour, what all do."""

    def waves(columns: int) -> float:
        return -(-columns // 2500) + 0.1

    assert vocabulary_groups(5000, 4096, 1, waves, 1024, beyond=True) == Groups(5000, 3072, beyond=True)
    assert vocabulary_groups(5000, 4096, 1, waves, 1024) == Groups(5000, 2048)


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
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        itemsize = jnp.dtype(dtype).itemsize
        tiles = tile_config(dtype, 4096, Gpu("99.0", 1))
        assert tiles is SAFE[itemsize]
        assert all(tile.shared_memory(itemsize) <= 99 * 1024 for tile in tiles)


MIB = 2**20
HEADS = st.builds(Head, softcap=st.sampled_from([None, 30.0]))
SIZES = st.builds(lambda power, part: int(2**power * part), st.integers(0, 17), st.floats(1, 2))
VOCABULARIES = SIZES | SIZES.map(lambda n: -(-n // 256) * 256) | SIZES.map(lambda n: -(-n // 8) * 8)
SHAPES = st.tuples(SIZES, st.integers(1, 16_384), VOCABULARIES)
SHARES = st.floats(0, 1.5)  # of what saving everything and larger groups take
EVERY = Wanted(True, True, True)
WANTED = st.builds(Wanted, *[st.booleans()] * 3)


def share_of(shape, share: float) -> int:
    return int(share * (budget.whole_bytes(*shape) + budget.GROUP_BYTES))


def saved(shape, head, with_sum, memory_budget, wanted=EVERY, on_hopper=False, dtype=jnp.bfloat16) -> int:
    return budget.saved_tokens(*shape, dtype, head, with_sum, wanted, on_hopper, memory_budget)


def exponentials(tokens: int, vocabulary: int) -> int:
    """Bytes; rows start at multiples of 16."""
    return 16 * tokens * -(-vocabulary // 8)


def gathered(tokens: int) -> int:
    return tokens if tokens < 256 else -(-tokens // 8) * 8


def least(tokens: int, width: int) -> int:
    """What any backward pass holds: the sum for de, numbers of each token, XLA's workspace, a group of 1024 columns."""
    return 4 * tokens * width + 256 * tokens + 32 * MIB + 2 * FEWEST_COLUMNS * (tokens + width)


def matmuls_hold(tokens: int, width: int, vocabulary: int, of_c: bool) -> int:
    """Beside P of so many tokens, a workspace and de, rounded or not; de in float32 lies where dc will, if it can."""
    if of_c and vocabulary >= 2 * tokens:
        return 2 * tokens * width + 32 * MIB
    return 4 * tokens * width + max(2 * tokens * width, 32 * MIB)


@settings(max_examples=300)
@given(SHAPES, HEADS, st.booleans(), WANTED, st.booleans(), SHARES)
def test_what_is_held_is_within_the_budget(shape, head, with_sum, wanted, on_hopper, share):
    """Groups of columns, and what is saved, beside what any backward pass holds."""
    (tokens, width, vocabulary), memory_budget = (gathered(shape[0]), *shape[1:]), share_of(shape, share)
    count = saved(shape, head, with_sum, memory_budget, wanted, on_hopper)
    assert 0 <= count <= tokens
    direct = count > 0 and budget.linear(head, with_sum)
    held = exponentials(count, vocabulary)
    scaled = 2 * tokens * width if wanted.c and not wanted.e else 0  # in de's place otherwise, on Hopper
    if direct:
        held += scaled if on_hopper else 256 * tokens + matmuls_hold(count, width, vocabulary, wanted.c)
    if not direct or count < tokens:
        others = tokens - count if direct else tokens
        groups = budget.group_of(
            others, tokens=tokens, saved=count, width=width, vocabulary=vocabulary, dtype=jnp.bfloat16, direct=direct,
            wanted=wanted, memory_budget=memory_budget, copies=not direct, on_hopper=on_hopper, interpret=False,
            tiles=tile_config(jnp.bfloat16, width, H200).dz,
        )  # fmt: skip
        assert (groups.vocabulary, groups.beyond) == (vocabulary, on_hopper)
        if direct:  # rounded de of what is saved, and e, a sum in parts and dz of the others; nothing is copied
            of_saved = scaled if on_hopper else 2 * count * width
            beside = of_saved + 6 * others * width + 256 * tokens + 2 * groups.columns * others
        else:
            workspace = 0 if on_hopper and count == 0 else 32 * MIB  # of XLA's matmuls, as are copies
            copied = 0 if on_hopper else width
            beside = 4 * tokens * width + 256 * tokens + workspace + 2 * groups.columns * (tokens + copied)
        held = max(held, exponentials(count, vocabulary) + beside)
    assert held <= max(memory_budget, least(tokens, width))


@settings(max_examples=300)
@given(SHAPES, HEADS, st.booleans(), WANTED, st.booleans(), SHARES, SHARES)
def test_a_larger_budget_saves_no_less(shape, head, with_sum, wanted, on_hopper, one, other):
    less, more = (share_of(shape, share) for share in sorted((one, other)))
    rest = wanted, on_hopper
    assert saved(shape, head, with_sum, less, *rest) <= saved(shape, head, with_sum, more, *rest)


@settings(max_examples=300)
@given(SHAPES, HEADS, st.booleans(), WANTED)
def test_all_is_saved_from_whole_bytes_on(shape, head, with_sum, wanted):
    tokens, enough = gathered(shape[0]), budget.whole_bytes(*shape, wanted.c)
    if budget.linear(head, with_sum):
        assert saved(shape, head, with_sum, enough, wanted) == tokens
        assert saved(shape, head, with_sum, enough - 1, wanted) < tokens
    else:
        assert tokens - 128 < saved(shape, head, with_sum, 2 * enough + 2**30, wanted) <= tokens


@given(SHAPES, st.booleans())
def test_on_hopper_all_is_saved_from_its_own_bytes_on(shape, of_e):
    """Nothing lies beside it if the scaled e has the place of de, but e's rows where they have no place there."""
    tokens, wanted = gathered(shape[0]), Wanted(of_e, True, False)
    enough = exponentials(tokens, shape[2]) + 2 * tokens * shape[1] * ((tokens != shape[0]) + (not of_e))
    assert saved(shape, Head(), False, enough, wanted, on_hopper=True) == tokens
    assert saved(shape, Head(), False, enough - 1, wanted, on_hopper=True) < tokens


@pytest.mark.parametrize(("softcap", "tokens"), [(1.9, 0), (2.0, 128), (36.0, 128), (36.1, 0), (1e4, 0)])
def test_under_a_softcap_whose_exponentials_lose_the_logit_nothing_is_saved(softcap, tokens):
    assert saved((128, 16, 4096), Head(softcap=softcap), False, 2**40) == tokens


@given(SHAPES, HEADS, st.booleans(), st.sampled_from([jnp.float16, jnp.float32]))
def test_other_types_save_nothing(shape, head, with_sum, dtype):
    assert saved(shape, head, with_sum, 2**60, dtype=dtype) == 0


@given(st.lists(st.integers(-3, 5), min_size=24, max_size=24))
def test_kept_tokens_come_first_and_go_back(targets):
    targets = np.array(targets, np.int32)
    live = targets >= 0
    for x in (np.arange(1, 25, dtype=np.float32), np.arange(1, 49, dtype=np.int32).reshape(-1, 2)):
        (count,), gathered, restored = moved(targets, x)
        assert count == live.sum()
        assert gathered.dtype == restored.dtype == x.dtype
        np.testing.assert_array_equal(gathered[:count], x[live])
        assert (np.asarray(gathered[count:]) == -7).all()
        np.testing.assert_array_equal(restored, np.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, 0))


@jax.jit
def moved(targets, x):
    """The number of kept tokens; x gathered; and put back, something else where no kept token is."""
    kept = Kept.of(targets, targets.size)
    gathered = kept.gathered(x, -7)
    beyond = jnp.arange(24) >= kept.count
    return kept.count, gathered, kept.restored(jnp.where(beyond.reshape(-1, *[1] * (x.ndim - 1)), 99, gathered))
