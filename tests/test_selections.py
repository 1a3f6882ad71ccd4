"""The largest logits of each token and their ids, against a sort of whole rows; drawn calls (tests/search) ask both."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cce_jax import core
from cce_jax.plans import Core
from cce_kernels import selections
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs
from cce_kernels.selections import Asked, Selections
from tests.test_structure import arrays, equations


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


CORE = Core(Head(), "chunked", 0, None)


def test_there_are_no_gradients():
    rng = np.random.default_rng(0)
    e, c = (jnp.asarray(rng.standard_normal(shape), "float32") for shape in ((37, 16), (203, 16)))
    inputs = Inputs(e, c, None, jnp.zeros(37, jnp.int32))

    def total(e: jax.Array) -> jax.Array:
        found = core.numbers_of(inputs._replace(e=e), CORE, Asked(3, True))[1]
        return jnp.sum(found.top_logits) + jnp.sum(found.mean_logit)  # type: ignore[arg-type]

    assert not jax.grad(total)(e).any()


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

    def run(inputs: Inputs) -> Selections:
        return core.numbers_of(inputs, replace(CORE, memory_budget=memory_budget), Asked(k, True))[1]

    jaxpr = jax.make_jaxpr(run)(inputs).jaxpr
    assert max(size for _, size in arrays(jaxpr) if size != V * D) * 8 <= memory_budget * 1.01 < 8 * N * V
    sorted_ = [x.outvars[0].aval.shape[1] for x in equations(jaxpr) if x.primitive.name == "sort"]
    assert (k == 1) == (not sorted_)
    assert max(sorted_, default=0) < V / 10
