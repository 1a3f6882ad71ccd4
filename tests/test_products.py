"""The gradient's two matmuls for a number of tokens that only the device knows, against NumPy's of those tokens."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy
from cce_kernels.device import INTERPRETER
from cce_kernels.engines.engine import Multiplying, Problem
from cce_kernels.engines.triton import TRITON, tiles
from cce_kernels.engines.triton.products import products
from cce_kernels.engines.triton.tiles import INTERPRETED
from cce_kernels.engines.xla import Xla
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Wanted, WantedNumbers
from cce_kernels.plan import plan_of
from cce_kernels.request import Request
from cce_kernels.windows import Window, Windows
from tests.cases import DTYPES
from tests.tolerance import error

TOKENS, WIDTH, COLUMNS, VOCABULARY = 53, 40, 72, 120  # the interpreter's tiles are of 16 and 32
START = 31


@cache
def program(axis: int, with_unit: bool, splits: int):
    """de, de added to what was there, and dc, as the products leave them, of arrays, the count and the unit."""
    head, wanted = Head(vocab_axis=axis, precision="highest"), Wanted(True, True, False)

    @jax.jit
    def all_of(e, c, dz, de, dc, count, unit):
        request = Request(*e.shape, VOCABULARY, str(e.dtype), head, False, wanted, 0)
        step = Multiplying(TRITON, INTERPRETED, INTERPRETED, Windows.whole(VOCABULARY), splits)
        problem = Problem(request, INTERPRETER, Inputs(e, c, None, None))  # type: ignore[arg-type]
        run = products(step, problem, unit if with_unit else None, count.reshape(1))
        window = Window(*[jnp.int32(START)] * 3)
        return run.add_de(None, dz, window), run.add_de(de, dz, window), run.put_dc(dc, dz, window)

    return all_of


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 48, TOKENS])
@pytest.mark.parametrize(
    ("axis", "dtype", "unit", "splits"),
    [(0, "float32", None, 1), (1, "float32", None, 1), (1, "bfloat16", None, 5), (0, "float16", 2.0**-9, 3)],
)
def test_products_of_the_first_tokens(axis, dtype, unit, splits, count):
    """splits: parts of de, of which none is empty with 72 columns in steps of 16."""
    rng, kind = np.random.default_rng(count), DTYPES[dtype]
    e, c, dz = (rng.standard_normal(s).astype(kind) for s in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (TOKENS, COLUMNS)))
    dz[count:], e[count:] = np.nan, 0  # what lies there is arbitrary in dz, and e was gathered with zeros
    before = rng.standard_normal((splits * TOKENS, WIDTH)).astype(np.float32)
    dc = rng.standard_normal((VOCABULARY, WIDTH)).astype(kind)
    given = e, c.T if axis else c, dz, before, dc.T if axis else dc, np.int32(count), np.float32(unit or 1)
    first, more, put = program(axis, unit is not None, splits)(*given)
    put, own = np.float64(put.T if axis else put), slice(START, START + COLUMNS)
    left, right = np.float64(dz[:count]), np.float64(e[:count])
    de, dc_g = left @ np.float64(c[own]), (unit or 1) * left.T @ right
    eps = float(np.finfo(np.float32).eps)
    assert first.dtype == more.dtype == np.float32
    for found, begun in ((first, 0 * before), (more, before)):
        parts = np.float64(found - begun).reshape(splits, TOKENS, WIDTH)[:, :count]
        assert error(parts.sum(0), de) < 32 * eps
        assert count == 0 or all(part.any() for part in parts)
    assert error(put[own], dc_g) <= error(dc_g.astype(kind), dc_g) + 16 * eps, "rounded once, after it was multiplied"
    others = np.delete(np.arange(VOCABULARY), np.r_[own])
    np.testing.assert_array_equal(put[others], np.float64(dc)[others])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # float16 is never saved
def test_few_tokens_have_partial_sums_of_de(dtype, smoothing, monkeypatch):
    """As many as fill the GPU: the gradients are those of one sum, from saved exponentials and from logits again."""
    rng, plans = np.random.default_rng(0), []
    e, c = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((6, 24), (200, 24)))
    targets, weight = rng.integers(0, 200, 6), rng.uniform(size=6)

    def gradients(splits: int) -> list:
        def loss(e, c):
            options = {"reduction": "none", "label_smoothing": smoothing, "memory_budget": "all"}
            return jnp.sum(weight * linear_cross_entropy(e, c, targets, impl="cce", **options))

        plan_of.cache_clear()
        jax.clear_caches()
        monkeypatch.setattr(tiles, "splits_of", lambda *_: splits)
        monkeypatch.setattr(Xla, "pads", lambda *_: True)  # as it does on a GPU where V is odd
        found = [np.float64(x) for x in jax.jit(jax.grad(loss, (0, 1)))(e, c)]
        numbers = WantedNumbers(sum=smoothing > 0)
        request = Request(6, 24, 200, dtype, Head(), False, Wanted(True, True, False), 2**60, numbers=numbers)
        plans.append(plan_of(request, INTERPRETER, "cce"))
        return found

    one, several = gradients(1), gradients(3)
    plan_of.cache_clear()
    assert [plan.way for plan in plans] == 2 * ["saved" if dtype == "bfloat16" else "recomputed"]
    assert [plan.gradients.products.splits for plan in plans] == [1, 3]
    for x, y in zip(one, several, strict=True):
        assert np.linalg.norm(x - y) <= 2**-9 * np.linalg.norm(y)
