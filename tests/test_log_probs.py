"""What drawn calls (tests/search) of linear_log_probs and linear_token_loss of cce_jax do not ask."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_log_probs, linear_token_loss


def test_float16_has_room_for_the_cotangents_of_repeated_ids():
    """256 times the same id: their cotangents add to one element of dz, while those of lse cancel."""
    e, c, targets = inputs()

    def gradients(impl: str, dtype: str):
        def logits(e, c):
            found = linear_log_probs(e, c, targets, ids=np.repeat(targets[..., None], 256, -1), impl=impl)
            return jnp.sum(found.id_log_probs) + 256 * jnp.sum(found.lse)

        return jax.grad(logits, (0, 1))(e.astype(dtype), c.astype(dtype))

    for x, y in zip(gradients("chunked", "float16"), gradients("reference", "float32"), strict=True):
        assert np.linalg.norm(np.float64(x) - y) <= 2.0**-9 * np.linalg.norm(y)


def inputs(tokens=(2, 5), width=16, vocabulary=67):
    rng = np.random.default_rng(0)
    e, c = (jnp.asarray(rng.normal(size=(*n, width)), "float32") for n in (tokens, (vocabulary,)))
    return e, c, rng.integers(vocabulary, size=tokens)


COLD = 1e-2, 1e-3, 1e-6, 1e-10, 1e-36, 1e-40  # float32 holds the last one in few digits, XLA takes it for 0


def cold(temperature: float) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """e, c and targets, some of which are the likeliest or the second one; and the numbers of float64."""
    rng = np.random.default_rng(0)
    e, c = (rng.standard_normal(shape).astype(np.float32) / scale for shape, scale in (((24, 32), 1), ((300, 32), 6)))
    order = np.argsort(e @ c.T, axis=1)
    targets = np.where(np.arange(24) < 8, order[:, -1], np.where(np.arange(24) < 16, order[:, -2], order[:, 0]))
    temperature = max(temperature, 2.0**-100)
    z = np.float64(e) @ np.float64(c).T / temperature
    log_p = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
    dz = (np.exp(log_p) - (np.arange(300) == targets[:, None])) / temperature
    found = {"log_probs": log_p[np.arange(24), targets], "entropy": -np.sum(np.exp(log_p) * log_p, axis=1)}
    return (e, c, targets), found | {"ids": log_p[:, :3], "e": dz @ c, "c": dz.T @ e}


def held_cold(found: dict[str, Any], want: dict[str, np.ndarray]) -> None:
    for name, y in want.items():
        x = np.asarray(found[name], np.float64)
        assert np.linalg.norm(x - y) <= 1e-5 * max(np.linalg.norm(y), 1), name
    assert np.max(found["log_probs"]) <= 0
    assert np.max(found["ids"]) <= 0
    assert np.min(found["entropy"]) >= 0


@pytest.mark.parametrize("impl", ["cce", "chunked", "reference"])
@pytest.mark.parametrize("temperature", COLD[::2] + COLD[-1:])
@pytest.mark.parametrize("scales", [False, True])
def test_small_temperatures_keep_the_digits(impl, temperature, scales):
    """The logits are large, their differences are not: a reference is subtracted from logits that are rounded alike."""
    (e, c, targets), want = cold(temperature)
    options = {"temperature": np.full(24, temperature, np.float32)}
    options = {"logit_scale": 1 / max(temperature, 2.0**-100)} if scales else options

    def loss(e, c):
        ids = np.tile(np.arange(3), (24, 1))
        found = linear_log_probs(e, c, targets, ids=ids, entropy=True, impl=impl, **options)
        return -jnp.sum(found.log_probs), found

    (of_e, of_c), found = jax.grad(loss, (0, 1), has_aux=True)(e, c)
    numbers = {"log_probs": found.log_probs, "entropy": found.entropy, "ids": found.id_log_probs}
    held_cold(numbers | {"e": of_e, "c": of_c}, want)


def test_a_temperature_has_no_gradient():
    e, c, targets = inputs()
    of = jax.grad(lambda t: jnp.sum(linear_log_probs(e, c, targets, temperature=t, softcap=3.0).log_probs))
    assert of(jnp.float32(0.7)) == 0


def test_where_the_loss_of_an_ignored_token_is_not_finite():
    e, c, targets = inputs()
    targets[0, 0] = -100
    loss = partial(linear_token_loss, e, c, targets, lambda numbers: -1 / numbers.log_probs)
    assert np.isfinite(loss())
    of = jax.grad(lambda e: linear_token_loss(e, c, targets, lambda numbers: -1 / numbers.log_probs))(e)
    assert np.isfinite(of).all()
    assert not of[0, 0].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_argument_that_needs_a_gradient_is_an_error(reduction):
    e, c, targets = inputs()

    def loss(beta):
        return jnp.sum(linear_token_loss(e, c, targets, lambda n, b: b * n.log_probs, beta, reduction=reduction))

    with pytest.raises(TypeError, match="an argument of fn needs a gradient"):
        jax.grad(loss)(0.5)
    with pytest.raises(TypeError, match="fn closes over"):
        jax.grad(lambda b: linear_token_loss(e, c, targets, lambda n: b * n.log_probs))(0.5)
    assert np.isfinite(jax.jit(loss)(0.5))
