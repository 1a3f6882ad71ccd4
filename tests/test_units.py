"""The arithmetic around the kernels: windows, orders, splits, configurations."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_kernels.config import H200, SAFE, Gpu, TileConfig, tile_config
from cce_kernels.forward import SCRATCH_BYTES, vocabulary_splits
from cce_kernels.windows import FEWEST_COLUMNS, Groups, vocabulary_groups
from cce_kernels.tiles import grouped_order


@given(st.integers(1, 500), st.integers(1, 500))
def test_windows_own_every_column_once_and_overwrite_in_order(vocabulary, columns):
    groups = Groups(vocabulary, min(columns, vocabulary))
    owner = np.zeros(vocabulary, int)
    written = np.full(vocabulary, -1)
    for k, (start, owned) in enumerate(map(groups.window, range(groups.count))):
        assert 0 <= start <= owned
        assert start + groups.columns <= vocabulary
        owner[owned : start + groups.columns] += 1
        written[start : start + groups.columns] = k
    assert (owner == 1).all()
    # The last to write a column is the window that owns it, so no gradient is lost under an overlap.
    for k, (start, owned) in enumerate(map(groups.window, range(groups.count))):
        assert (written[owned : start + groups.columns] == k).all()


@given(st.integers(1, 300_000), st.integers(0, 2**30), st.integers(1, 2**17))
def test_groups_fit_their_budget(vocabulary, budget, column_bytes):
    groups = vocabulary_groups(vocabulary, budget, column_bytes)
    assert groups.columns * column_bytes <= budget or groups.columns <= FEWEST_COLUMNS
    assert 0 <= groups.overlap < groups.columns <= vocabulary


@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 17))
def test_grouped_order_visits_every_tile_once(row_blocks, column_blocks, row_group):
    programs = jnp.arange(row_blocks * column_blocks)
    rows, columns = grouped_order(programs, row_blocks, column_blocks, row_group)
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == programs.size
    assert int(rows.max()) < row_blocks
    assert int(columns.max()) < column_blocks


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
        assert tile_config(dtype, Gpu("99.0", 1)) is SAFE[itemsize]
        assert SAFE[itemsize].shared_memory(itemsize) <= 99 * 1024
