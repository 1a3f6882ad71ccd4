"""Numbers per token on a GPU, drawn, against float64: by the engine that the plan chooses for each call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_log_probs, linear_token_loss
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs
from tests.test_given_ids import Drawn, truth

pytestmark = pytest.mark.gpu
ERRORS = {"float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of a gradient, relative to its norm


@pytest.mark.parametrize("seed", range(16))
def test_drawn_calls(seed):
    draw = np.random.default_rng(seed)
    dtype = ("bfloat16", "float16", "float32", "bfloat16")[seed % 4]
    tokens, width = 8 * int(draw.integers(32, 120)), 64 * int(draw.integers(2, 9))
    vocabulary = 64 * int(draw.integers(20, 200)) + 3 * (seed % 5 == 4)
    axis, softcap = int(draw.integers(2)), draw.choice([None, 20.0])
    e, c = (draw.normal(size=(n, width)) for n in (tokens, vocabulary))
    e, c = (jnp.asarray(x, dtype) for x in (e, c * draw.choice([0.3, 1.0]) / width**0.25))
    bias = jnp.asarray(draw.normal(size=vocabulary), dtype) if seed % 4 == 3 else None
    targets, ids = (draw.integers(vocabulary, size=(tokens, *n)) for n in ((), (7,)))
    targets = np.where(draw.uniform(size=tokens) < 0.3, -100, targets)
    temperature = jnp.asarray(draw.uniform(0.5, 2, size=tokens), jnp.float32)
    weights = [draw.normal(size=x) for x in (tokens, tokens, tokens, (tokens, 7))]
    weights[3] *= seed % 2
    given: dict[str, Any] = {"temperature": temperature if seed % 3 else 0.7, "softcap": softcap}
    given |= {"ids": ids} if seed % 2 else {}
    given |= {"precision": "highest"} if dtype == "float32" else {}  # not TF32

    def here(e, c, bias):
        found = linear_log_probs(e, c.T if axis else c, targets, bias, entropy=True, vocab_axis=axis, **given)
        found = [found.log_probs, found.lse, found.entropy, found.id_log_probs]
        return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True) if x is not None), found

    argnums = (0, 1) if bias is None else (0, 1, 2)
    (_, found), gradients = jax.jit(jax.value_and_grad(here, argnums, has_aux=True))(e, c, bias)
    want, wanted = of_truth(
        e, c, bias, targets, ids, temperature if seed % 3 else np.full(tokens, 0.7), weights, softcap
    )
    for x, y in zip(found, want, strict=True):
        assert x is None or np.abs(np.float64(x) - y).max() < 3e-4
    for x, y in zip(gradients, wanted, strict=True):
        assert np.linalg.norm(np.float64(x) - y) < ERRORS[dtype] * np.linalg.norm(y)


def of_truth(e, c, bias, targets, ids, temperature, weights, softcap) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """log_probs, lse, entropy and id_log_probs in float64, and the gradients of their sum with the weights."""
    of_log_probs, of_lse, of_entropy, of_ids = weights
    of_all = of_lse + of_entropy - of_log_probs - of_ids.sum(axis=1)
    targets = np.where(targets < 0, -1, targets)
    inputs = Inputs(e, c, bias, targets, None, None, 1 / np.float64(temperature), ids)
    of = Cotangents(of_all, of_log_probs, None, -of_entropy, of_ids)  # type: ignore[arg-type]
    found, kept = truth(Drawn(inputs, of, Head(softcap))), targets >= 0
    lse, target, mean = (np.zeros(targets.size) for _ in range(3))
    lse[kept], target[kept], mean[kept] = found["lse"], found["target"], found["mean"]
    at_ids = np.where(kept[:, None], found["ids"] - lse[:, None], 0)
    return [target - lse, lse, lse - mean, at_ids], [found[name] for name in ("e", "c", "bias") if name in found]


@pytest.mark.parametrize("seed", range(8))
def test_drawn_likeliest_ids(seed):
    """By the kernel for Hopper, or by XLA: with a bias, in float32, or where V is no multiple of 32."""
    draw = np.random.default_rng(seed)
    dtype = ("bfloat16", "float16", "bfloat16", "float32")[seed % 4]
    tokens, width = int(draw.integers(40, 9000)), 64 * int(draw.integers(2, 9))
    vocabulary, axis = 64 * int(draw.integers(20, 900)) + 8 * (seed % 5 == 4), int(draw.integers(2))
    softcap, k = draw.choice([None, 20.0]), int(draw.choice([1, 5, 64, 256]))
    e, c = (draw.normal(size=(n, width)) for n in (tokens, vocabulary))
    e, c = (jnp.asarray(x, dtype) for x in (e, c * draw.choice([0.3, 1.0]) / width**0.25))
    bias = jnp.asarray(draw.normal(size=vocabulary), dtype) if seed == 6 else None
    targets = np.where(
        draw.uniform(size=tokens) < draw.choice([0.1, 0.9]), -100, draw.integers(vocabulary, size=tokens)
    )
    temperature = jnp.asarray(draw.uniform(0.5, 2, size=tokens), jnp.float32)
    asked: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "vocab_axis": axis, "top_k": k}
    asked |= {
        "entropy": bool(seed % 2),
        "mean_logit": bool(draw.integers(2)),
        "memory_budget": 2 ** draw.integers(22, 31),
    }
    found = linear_log_probs(e, c.T if axis else c, targets, bias, predicted=True, precision="highest", **asked)
    some = np.flatnonzero(targets >= 0)[:: 1 + tokens // 400]
    z = np.float64(e)[some] @ np.float64(c).T + (0 if bias is None else np.float64(bias))
    z = (z if softcap is None else softcap * np.tanh(z / softcap)) / np.float64(temperature)[some, None]
    peak = z.max(axis=1)
    lse = peak + np.log(np.exp(z - peak[:, None]).sum(axis=1))
    at = np.take_along_axis(z, np.asarray(found.top_ids)[some], axis=1)
    np.testing.assert_allclose(at, -np.sort(-z, axis=1)[:, :k], atol=3e-4)
    np.testing.assert_allclose(np.asarray(found.top_log_probs)[some], at - lse[:, None], atol=3e-4)
    np.testing.assert_allclose(np.asarray(found.lse)[some], lse, atol=3e-4)
    np.testing.assert_array_equal(found.predicted, np.asarray(found.top_ids)[:, 0])
    target = np.take_along_axis(z, targets[some, None], axis=1)[:, 0]
    np.testing.assert_allclose(np.asarray(found.log_probs)[some], target - lse, atol=3e-4)
    if found.entropy is not None:
        entropy = lse - (np.exp(z - lse[:, None]) * z).sum(axis=1)
        np.testing.assert_allclose(np.asarray(found.entropy)[some], entropy, atol=3e-4)
    if found.mean_logit is not None:
        np.testing.assert_allclose(np.asarray(found.mean_logit)[some], z.mean(axis=1), atol=3e-4)
    for x in (found.top_log_probs, found.lse, found.top_ids):
        assert not np.asarray(x)[targets < 0].any()


@pytest.mark.parametrize("entropy", [False, True])
def test_a_loss_of_the_users_own(entropy):
    draw = np.random.default_rng(0)
    e, c = (jnp.asarray(draw.normal(size=(n, 512)) / 5, "bfloat16") for n in (1024, 16384))
    targets, old = jnp.asarray(draw.integers(16384, size=1024)), jnp.asarray(draw.normal(size=1024) - 9, "float32")

    def fn(numbers, old):
        gain = jnp.minimum(jnp.exp(numbers.log_probs - old), 1.2)
        return -gain - (0.1 * numbers.entropy if entropy else 0)

    def here(e, c):
        return linear_token_loss(e, c, targets, fn, old, entropy=entropy)

    def of_numbers(e, c):
        return jnp.mean(fn(linear_log_probs(e, c, targets, entropy=entropy), old))

    found, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(e, c) for f in (here, of_numbers))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    for x, y in zip(found[1], want[1], strict=True):
        x, y = np.float64(x), np.float64(y)
        assert np.linalg.norm(x - y) < 2.0**-7 * np.linalg.norm(y)
