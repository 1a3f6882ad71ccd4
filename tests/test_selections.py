"""The largest logits of each token, their ids and the mean of its logits, against float64 and a sort of whole rows."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cce_jax import core
from cce_kernels import selections
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs
from cce_kernels.selections import Asked, Selections
from tests.test_given_ids import Drawn, calls, made
from tests.test_given_ids import held as numbers_held
from tests.test_given_ids import ours as ours_and_gradients
from tests.test_structure import arrays, equations
from tests.tolerance import roundoff


def ours(x: Drawn, asked: Asked, memory_budget: int = 0) -> Selections:
    inputs = jax.tree.map(jnp.asarray, x.inputs)
    found = jax.jit(lambda inputs: core.statistics(inputs, x.core("chunked", memory_budget), None, asked)[1])(inputs)
    return jax.tree.map(np.asarray, found)


def logits(x: Drawn) -> np.ndarray:
    """Those of float64, (N, V)."""
    e, c, bias, _, _, scale, inverse, _ = (None if y is None else np.float64(y) for y in x.inputs)
    y = e @ (c.T if x.head.vocab_axis == 0 else c) + (0 if bias is None else bias)
    y = y if scale is None else y * scale
    y = y if x.head.softcap is None else x.head.softcap * np.tanh(y / x.head.softcap)
    return y if inverse is None else y * inverse[:, None]


def held(x: Drawn, found: Selections, asked: Asked) -> None:
    """Rounding may exchange logits that are nearly equal: each id's own logit is what its place asks for."""
    z, kept = logits(x), np.asarray(x.inputs.targets) >= 0
    allowed = 32 * roundoff("float32") * max(1.0, np.abs(z[kept]).max(initial=0))
    if asked.top_k:
        exact = -np.sort(-z, axis=1)[:, : asked.top_k]
        assert found.top_logits.shape == found.top_ids.shape == exact.shape
        assert found.top_ids.dtype == np.int32
        of_ids = np.take_along_axis(z, found.top_ids, axis=1)
        assert np.abs(found.top_logits - exact)[kept].max(initial=0) <= allowed
        assert np.abs(of_ids - exact)[kept].max(initial=0) <= allowed
        assert all(len(set(row)) == asked.top_k for row in found.top_ids[kept])
        assert not found.top_ids[~kept].any()
        assert not found.top_logits[~kept].any()
    if asked.mean_logit:
        assert np.abs(found.mean_logit - z.mean(1))[kept].max(initial=0) <= allowed
        assert not found.mean_logit[~kept].any()


@settings(max_examples=15)
@given(calls(), st.integers(0, 300), st.booleans(), st.sampled_from([0, 2**16, 2**40]))
@example(made(60, vocabulary=300, bias=True, head=Head(5.0, 1, "highest")), 64, True, 0)
@example(made(20, vocabulary=7), 7, True, 2**40)
def test_selections(x, k, mean_logit, memory_budget):
    vocabulary = x.head.vocabulary(x.inputs.c)
    asked = Asked(min(k, vocabulary), mean_logit)
    held(x, ours(x, asked, memory_budget), asked)


@settings(max_examples=10)
@given(calls(), st.integers(1, 9), st.booleans(), st.sampled_from([0, 2**40]), st.sampled_from([13, 512]))
@example(made(60, vocabulary=300, bias=True, head=Head(5.0, 1, "highest")), 64, True, 0, 512)
def test_numbers_beside_selections(x, k, mean_logit, memory_budget, most):
    """And their gradients. most: the tokens of a chunk."""
    x = x.with_(weights=None)._replace(of=x.of._replace(sum=None))
    asked = Asked(min(k, x.head.vocabulary(x.inputs.c)), mean_logit)
    with mock.patch.object(selections, "MOST", most):
        numbers_held(x, ours_and_gradients(x, x.core("chunked", memory_budget), asked))


def by_sorting(z: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-z, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(z, ids, axis=1), ids


COLUMNS = st.integers(1, 3000) | st.integers(10_000, 60_000)


@settings(max_examples=25)
@given(st.integers(1, 9), COLUMNS, st.integers(1, 256), st.integers(1, 50), st.integers(0, 99))
@example(4, 2048, 64, 1, 0)
@example(4, 2049, 256, 2, 0)
@example(40, 3000, 2, 10**6, 0)  # the largest logits are in k blocks
@example(3, 20_000, 64, 50, 0)  # blocks are cut into smaller ones
def test_ties_keep_the_lowest_ids(rows, columns, k, values, seed):
    """Logits of few values, −inf among them."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, values, (rows, columns)).astype(np.float32)
    z[rng.uniform(size=z.shape) < rng.choice([0, 0.5, 0.99])] = -np.inf
    k = min(k, columns)
    found, ids = jax.jit(selections.largest, static_argnums=1)(z, k)
    exact, exact_ids = by_sorting(z, k)
    np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(ids, exact_ids)


@pytest.mark.parametrize("k", [1, 3, 40])
def test_a_nan_counts_as_minus_infinity(k):
    rng = np.random.default_rng(0)
    z = rng.standard_normal((5, 900)).astype(np.float32)
    z[rng.uniform(size=z.shape) < 0.3] = np.nan
    z[2] = np.nan
    found, ids = selections.largest(jnp.asarray(z), k)
    exact, exact_ids = by_sorting(np.where(np.isnan(z), -np.inf, z), k)
    np.testing.assert_array_equal(found, exact)
    np.testing.assert_array_equal(ids, exact_ids)
    np.testing.assert_array_equal(ids[2], np.arange(k))


def test_a_bad_row_that_is_ignored_changes_nothing():
    x = made(ignored=0.0)
    targets, e = np.array(x.inputs.targets), np.array(x.inputs.e)
    targets[0], e[0] = -1, np.nan
    asked = Asked(3, True)
    held(x.with_(targets=targets), ours(x.with_(targets=targets, e=e), asked), asked)


def test_there_are_no_gradients():
    x = made()
    inputs = jax.tree.map(jnp.asarray, x.inputs)

    def total(e: jax.Array) -> jax.Array:
        found = core.statistics(inputs._replace(e=e), x.core("chunked", 0), None, Asked(3, True))[1]
        return jnp.sum(found.top_logits) + jnp.sum(found.mean_logit)  # type: ignore[arg-type]

    assert not jax.grad(total)(inputs.e).any()


N, D, V = 4096, 24, 99_968


@pytest.mark.parametrize("k", [1, 64, 256])
@pytest.mark.parametrize("memory_budget", [2**24, 2**28])
def test_no_array_of_the_size_of_the_logits(k, memory_budget):
    """Nor a sort of whole rows."""
    inputs: Any = Inputs(
        jax.ShapeDtypeStruct((N, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((V, D), jnp.bfloat16),
        None,
        jax.ShapeDtypeStruct((N,), jnp.int32),
    )
    static = made().core("chunked", memory_budget)

    def run(inputs: Inputs) -> Selections:
        return core.statistics(inputs, static, None, Asked(k, True))[1]

    jaxpr = jax.make_jaxpr(run)(inputs).jaxpr
    assert max(size for _, size in arrays(jaxpr) if size != V * D) * 8 <= memory_budget * 1.01 < 8 * N * V
    sorted_ = [x.outvars[0].aval.shape[1] for x in equations(jaxpr) if x.primitive.name == "sort"]
    assert (k == 1) == (not sorted_)
    assert max(sorted_, default=0) < V / 10
