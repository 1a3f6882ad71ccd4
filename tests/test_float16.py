"""Gradients in float16, of token weights, divisors and loss scales of any size, held to float64, in both packages.

The mean of a loss divides by the sum of its weights. So weights of 10⁶ have moderate gradients, and so have weights of
10⁻⁶, but float16 holds neither times the one nor times the other before it is divided.
"""

from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cce_jax
import cce_torch
from cce_kernels.float16 import FLOAT16_LARGEST
from cce_kernels.gradients import fitted
from cce_kernels.numbers import Cotangents, Inputs, Numbers
from tests.nightly import draws
from tests.test_in_forward import in_forward as on  # noqa: F401  # for all tests of this file
from tests.test_torch_in_forward import budget_of
from tests.test_torch_in_forward import decided_again as again  # noqa: F401

TOKENS, WIDTH, VOCABULARY = 600, 32, 300
FUNCTIONS = "linear_cross_entropy", "linear_token_loss", "linear_divergence"
PACKAGES = [("jax", "chunked"), ("torch", "chunked"), ("torch", "torch_compile")]
BUDGETS = None, budget_of(1, TOKENS, WIDTH, VOCABULARY)  # one chunk, and more than one
LARGEST = 6e4  # float16 holds it
RNG = np.random.default_rng(0)
E, OF_TEACHER = (RNG.normal(size=(TOKENS, WIDTH)).astype(np.float16) for _ in range(2))
C = (RNG.normal(size=(VOCABULARY, WIDTH)) / 4).astype(np.float16)
BIAS = RNG.normal(size=VOCABULARY).astype(np.float16)
TARGETS = RNG.integers(0, VOCABULARY, TOKENS)


def weighted(numbers: Any, weight: Any) -> Any:
    return -weight * numbers.log_probs


def truth(function: str, weight: np.ndarray, items: float, scale: float) -> list[np.ndarray]:
    """The gradients of e, c and bias, from the full logits in float64."""
    e, c, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (E, C, BIAS))
    log_p = (e @ c.T + bias).log_softmax(-1)
    if function == "linear_divergence":
        log_q = (torch.tensor(OF_TEACHER).double() @ c.detach().T).log_softmax(-1)
        total = (log_q.exp() * (log_q - log_p)).sum(-1)
    else:
        total = -log_p[torch.arange(TOKENS), torch.tensor(TARGETS)]
    loss = scale * (torch.tensor(weight).double() * total).sum() / items
    return [x.numpy() for x in torch.autograd.grad(loss, (e, c, bias))]


@cache
def of_jax(function: str, impl: str, budget: int | None, reduction: str) -> Any:
    def loss(leaves: Any, weight: Any, items: Any, scale: Any) -> Any:
        (e, c, bias), run = leaves, getattr(cce_jax, function)
        options = {"bias": bias, "impl": impl, "memory_budget": budget, "reduction": reduction, "num_items": items}
        if function == "linear_token_loss":
            value = run(e, c, TARGETS, weighted, weight, **options)
        else:
            arrays = (OF_TEACHER, C) if function == "linear_divergence" else (TARGETS,)
            value = run(e, c, *arrays, token_weight=weight, **options)
        return scale * value

    return jax.jit(jax.grad(loss))


def gradients(
    package: str, impl: str, function: str, weight: Any, items: float | None, scale: float, budget: int | None = None
) -> list[np.ndarray]:
    """Those of scale · the sum of weight · loss over items. items: None for the sum, of linear_token_loss too."""
    weight, reduction = np.float32(weight), "sum" if items is None else "mean"
    if package == "jax":
        items = None if items is None else jnp.float32(items)
        found = of_jax(function, impl, budget, reduction)((E, C, BIAS), weight, items, jnp.float32(scale))
        return [np.asarray(x) for x in found]
    e, c, bias = (torch.tensor(x, requires_grad=True) for x in (E, C, BIAS))
    options: Any = {"bias": bias, "impl": impl, "memory_budget": budget, "reduction": reduction, "num_items": items}
    targets, weight, run = torch.tensor(TARGETS), torch.tensor(weight), getattr(cce_torch, function)
    if function == "linear_token_loss":
        value = run(e, c, targets, weighted, weight, **options)
    else:
        arrays = map(torch.tensor, (OF_TEACHER, C)) if function == "linear_divergence" else (targets,)
        value = run(e, c, *arrays, token_weight=weight, **options)
    return [x.numpy() for x in torch.autograd.grad(scale * value, (e, c, bias))]


def drawn(magnitude: float, spread: str, seed: int) -> np.ndarray:
    """Weights of about this size; "any": from 10⁻⁶ to 10⁶ in one call; "signed": some are negative, some are 0."""
    rng = np.random.default_rng(seed)
    if spread == "any":
        return 10.0 ** rng.uniform(-6, 6, TOKENS)
    weight = magnitude * rng.uniform(0.5, 2, TOKENS)
    return weight * rng.choice([-1, 0, 1], TOKENS) if spread == "signed" else weight


@settings(max_examples=draws(10, 100), deadline=None)
@given(
    st.sampled_from(PACKAGES),
    st.sampled_from(FUNCTIONS),
    st.floats(-6, 6).map(lambda x: 10.0**x),
    st.sampled_from(["near", "any", "signed"]),
    st.sampled_from([2.0**-4, 1.0, 2.0**10, 2.0**16]),
    st.sampled_from(BUDGETS),
    st.integers(0, 99),
)
@example(PACKAGES[0], FUNCTIONS[0], 1e6, "near", 1.0, None, 0)
@example(PACKAGES[0], FUNCTIONS[1], 1e-6, "near", 1.0, BUDGETS[1], 0)
@example(PACKAGES[0], FUNCTIONS[2], 1e6, "near", 2.0**16, None, 0)
@example(PACKAGES[1], FUNCTIONS[0], 1e-6, "near", 2.0**16, None, 0)
@example(PACKAGES[1], FUNCTIONS[1], 1e6, "near", 1.0, BUDGETS[1], 0)
@example(PACKAGES[1], FUNCTIONS[2], 1e-6, "near", 1.0, None, 0)
def test_weights_and_loss_scales_of_any_size(package, function, magnitude, spread, scale, budget, seed):
    """A row of de has at most three roundings: of dz, of de before its factor, and of the result.

    dz of some tokens is divided by one number: what is 2⁻³⁸ of the largest cotangent is 0.
    """
    weight = np.float32(drawn(magnitude, spread, seed))
    items = float(np.abs(weight).sum(dtype=np.float64))
    scale = min(scale, LARGEST / max(np.abs(x).max() for x in truth(function, weight, items, 1.0)))
    want = truth(function, weight, items, scale)
    found = gradients(*package, function, weight, items, scale, budget)
    lost = 2.0**-38 * scale * np.abs(weight).max() / items
    for name, x, y in zip(("e", "c", "bias"), found, want, strict=True):
        assert x.dtype == np.float16
        own = lost * np.linalg.norm({"e": C, "c": E, "bias": np.ones(TOKENS)}[name])
        rows, exact = (np.atleast_2d(z).reshape(-1, z.shape[-1]) for z in (np.float64(x), y))
        off, size = np.linalg.norm(rows - exact, axis=1), np.linalg.norm(exact, axis=1)
        assert (off <= 3 * (2.0**-11 * size + 2.0**-25 * np.sqrt(rows.shape[1])) + own).all(), name
        rounded = np.linalg.norm(np.float64(y.astype(np.float16)) - y)
        assert np.linalg.norm(off) <= 2 * rounded + own, name


@pytest.mark.parametrize(("package", "function"), [*product(PACKAGES, FUNCTIONS)])
def test_powers_of_two_that_cancel_change_no_bit(package, function):
    """In weights and divisor; and in the weights of a sum and in a loss scale. float16 holds only their products."""
    weight, run = np.random.default_rng(1).uniform(0.5, 2, TOKENS), partial(gradients, *package, function)
    ones, items = np.ones(TOKENS), weight.sum()
    want, of_sum = run(weight, items, 0.3), run(ones, None, 1.0)
    for factor in (2.0**-24, 2.0**24):
        found = *run(factor * weight, factor * items, 0.3), *run(factor * ones, None, 1 / factor)
        for x, y in zip(found, (*want, *of_sum), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-41, 1e-30, 1.0])
def test_cotangents_of_any_size_have_a_unit_that_no_gpu_takes_for_0(size):
    """Some GPU programs take numbers below the least normal one for 0: a unit of 1e-45 made gradients inf."""
    of = jnp.full(3, size, jnp.float32)
    inputs = Inputs(jnp.ones((3, 2), jnp.float16), jnp.ones((5, 2), jnp.float16), None, jnp.zeros(3, jnp.int32))
    divided, unit = fitted(Cotangents(of, -of, None), Numbers(of, of, of), inputs)
    assert unit is not None
    assert unit >= 100 * jnp.finfo(jnp.float32).tiny
    assert jnp.all(jnp.abs(divided.lse) <= FLOAT16_LARGEST)
