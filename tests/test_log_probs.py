"""What drawn calls (tests/search) of linear_log_probs and linear_token_loss of cce_jax do not ask."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy, linear_log_probs, linear_token_loss


def test_without_tokens():
    e, c, targets = inputs()
    asked: dict[str, Any] = {"entropy": True, "predicted": True, "top_k": 3, "mean_logit": True}
    found = linear_log_probs(e[:0], c, targets[:0], ids=np.zeros((0, 5, 2), int), **asked)
    assert [x.shape for x in found] == [(0, 5)] * 3 + [(0, 5, 2), (0, 5), (0, 5, 3), (0, 5, 3), (0, 5)]


def test_a_number_of_items_that_int32_does_not_hold():
    e, c, targets = inputs()
    found = linear_token_loss(e, c, targets, lambda numbers: -numbers.log_probs, num_items=2**40)
    np.testing.assert_allclose(
        np.float64(found) * 2**40, linear_cross_entropy(e, c, targets, reduction="sum"), rtol=1e-5
    )


def test_a_given_id_out_of_range_has_no_probability():
    e, c, targets = inputs()
    ids = np.stack([targets, np.full_like(targets, 67), np.full_like(targets, -7)], axis=-1)
    found = linear_log_probs(e, c, targets, ids=ids)
    np.testing.assert_allclose(found.id_log_probs[..., 0], found.log_probs, atol=1e-5)
    assert (found.id_log_probs[..., 1:] == -np.inf).all()


def inputs(tokens=(2, 5), width=16, vocabulary=67):
    rng = np.random.default_rng(0)
    e, c = (jnp.asarray(rng.normal(size=(*n, width)), "float32") for n in (tokens, (vocabulary,)))
    return e, c, rng.integers(vocabulary, size=tokens)


def test_new_temperatures_compile_nothing():
    e, c, targets = inputs()
    traced = []

    @jax.jit
    def program(temperature):
        traced.append(temperature)
        return linear_log_probs(e, c, targets, temperature=temperature, softcap=3.0).log_probs

    for x in (0.5, 2.0):
        z = 3 * jnp.tanh(e @ c.T / 3) / x
        want = jnp.take_along_axis(jax.nn.log_softmax(z), targets[..., None], -1)[..., 0]
        np.testing.assert_allclose(program(jnp.float32(x)), want, atol=1e-4)
    assert len(traced) == 1


def test_a_temperature_has_no_gradient():
    e, c, targets = inputs()
    of = jax.grad(lambda t: jnp.sum(linear_log_probs(e, c, targets, temperature=t, softcap=3.0).log_probs))
    assert of(jnp.float32(0.7)) == 0


@pytest.mark.parametrize(
    ("error", "given", "words"),
    [
        (ValueError, {"temperature": 0.0}, r"temperature=0\.0 must be finite and positive"),
        (ValueError, {"entropy": "yes"}, "entropy"),
        (TypeError, {"ids": np.zeros((2, 5, 3))}, "ids must be of an integer type, got ids float64"),
        (ValueError, {"ids": np.zeros((2, 5), int)}, r"ids \(2, 5\) must have the shape of e"),
        (ValueError, {"ids": np.zeros((2, 5, 300), int)}, r"ids \(2, 5, 300\) .* 1 to 256"),
        (ValueError, {"top_k": 68}, "top_k=68 must be from 0 to 67"),
        (ValueError, {"top_k": -1}, "top_k=-1 must be"),
        (ValueError, {"targets": None, "shift": 1}, "shift=1 needs targets"),
        (ValueError, {"targets": np.zeros((2, 4), int)}, "targets"),
        (TypeError, {"targets": np.zeros((2, 5))}, "targets must be of an integer type"),
    ],
)
def test_bad_arguments(error, given, words):
    e, c, targets = inputs()
    with pytest.raises(error, match=words):
        linear_log_probs(e, c, **{"targets": targets, **given})


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


@pytest.mark.parametrize(
    ("error", "arguments", "words"),
    [
        (TypeError, (3,), "fn must be a function"),
        (ValueError, (lambda n: n.log_probs.sum(),), r"fn must return a loss for each token"),
        (ValueError, (lambda n, x: n.log_probs * x, jnp.ones(3)), r"argument 0 of fn \(3,\) must broadcast"),
    ],
)
def test_bad_functions(error, arguments, words):
    e, c, targets = inputs()
    with pytest.raises(error, match=words):
        linear_token_loss(e, c, targets, *arguments)
