"""linear_log_probs and linear_token_loss of cce_jax against float64 full logits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_jax import linear_cross_entropy, linear_log_probs, linear_token_loss

IMPLS = "auto", "cce", "chunked", "reference"


class Full:
    """The same numbers from float64 logits, (B, T, V), by numpy's rules in JAX's float64."""

    def __init__(self, targets, *, bias=None, softcap=None, logit_scale=1.0, temperature=1.0, shift=0, vocab_axis=0):
        self.targets, self.bias, self.softcap, self.logit_scale = targets, bias, softcap, logit_scale
        self.temperature, self.shift, self.vocab_axis = np.asarray(temperature, np.float64), shift, vocab_axis

    def __call__(self, e, c, bias=None):
        z = self.logit_scale * (e @ (c if self.vocab_axis else c.T) + (0 if bias is None else bias))
        z = z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap)
        z = z / (self.temperature[..., None] if self.temperature.ndim else self.temperature)
        z, targets = z[:, : z.shape[1] - self.shift], self.targets[:, self.shift :]
        lse, kept = jax.nn.logsumexp(z, axis=-1), targets != -100
        target = jnp.take_along_axis(z, np.maximum(targets, 0)[..., None], -1)[..., 0]
        mean = jnp.sum(jnp.exp(z - lse[..., None]) * z, axis=-1)
        return [jnp.where(kept, x, 0) for x in (target - lse, lse, lse - mean)]


def drawn(seed: int, dtype: Any, vocab_axis: int, ignored: float):
    rng = np.random.default_rng(seed)
    vocabulary, width = int(rng.integers(3, 200)), int(rng.integers(1, 40))
    tokens = int(rng.integers(1, 4)), int(rng.integers(2, 9))
    e = jnp.asarray(rng.normal(size=(*tokens, width)) * rng.choice([0.1, 1, 3]), dtype)
    c = jnp.asarray(rng.normal(size=(width, vocabulary) if vocab_axis else (vocabulary, width)), dtype)
    targets = np.where(rng.uniform(size=tokens) < ignored, -100, rng.integers(vocabulary, size=tokens))
    return rng, e, c, jnp.asarray(rng.normal(size=vocabulary), dtype), targets


def with_gradients(numbers, weights, arrays):
    """The numbers, and the gradients of their sum with weights, in one program: they need every cotangent."""

    def total(*arrays):
        found = numbers(*arrays)
        return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True)), found

    gradients, found = jax.jit(jax.grad(total, tuple(range(len(arrays))), has_aux=True))(*arrays)
    return found, gradients


ERRORS = {"float32": 3e-5, "bfloat16": 2e-2, "float16": 4e-3}  # relative to the largest number


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(IMPLS),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([0, 1]),
    st.sampled_from([None, 5.0]),
    st.sampled_from(["one", "number", "tokens", "sequences"]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_numbers_and_gradients(seed, impl, dtype, vocab_axis, softcap, cooled, shift, with_bias, ignored):
    rng, e, c, bias, targets = drawn(seed, dtype, vocab_axis, ignored)
    shift = min(shift, e.shape[1] - 1)
    shapes = {"tokens": e.shape[:2], "sequences": (e.shape[0], 1)}
    temperature: Any = {"one": 1.0, "number": 0.7}.get(cooled) or jnp.asarray(
        rng.uniform(0.3, 3, shapes[cooled]), "float32"
    )
    options = {
        "softcap": softcap,
        "logit_scale": 1.3,
        "temperature": temperature,
        "shift": shift,
        "vocab_axis": vocab_axis,
    }
    given = [e, c, bias][: 2 + with_bias]
    of = rng.normal(size=(3, e.shape[0], e.shape[1] - shift))
    with jax.enable_x64(True):
        want, wanted = with_gradients(Full(targets, **options), of, [jnp.asarray(x, "float64") for x in given])
        want, wanted = jax.tree.map(np.float64, (want, wanted))

    def numbers(e, c, bias=None):
        return linear_log_probs(e, c, targets, bias, entropy=True, impl=impl, **options)[:3]

    found, gradients = with_gradients(numbers, of, given)
    largest = max(1, *(np.abs(x).max(initial=0) for x in want))
    for x, y in zip(found, want, strict=True):
        assert x is not None
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest)
    for x, y in zip(gradients, wanted, strict=True):
        assert x.dtype == e.dtype
        np.testing.assert_allclose(np.float64(x), y, rtol=0, atol=ERRORS[dtype] * max(1, np.abs(y).max()))


@settings(max_examples=5, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(IMPLS),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([0, 1]),
    st.integers(1, 9),
    st.integers(0, 1),
)
def test_given_ids(seed, impl, dtype, vocab_axis, number, shift):
    rng, e, c, bias, targets = drawn(seed, dtype, vocab_axis, 0.3)
    vocabulary = c.shape[vocab_axis]
    ids = rng.integers(min(vocabulary, 5) if seed % 2 else vocabulary, size=(*targets.shape, number))  # some repeat
    ids = np.where(rng.uniform(size=ids.shape) < 0.2, -100, ids)
    options: dict[str, Any] = {"softcap": 5.0, "temperature": 0.7, "vocab_axis": vocab_axis}
    kept = (targets[:, shift:] != -100)[..., None]
    at = ids[:, : ids.shape[1] - shift]
    weight = rng.normal(size=at.shape)

    def here(e, c, bias):
        found = linear_log_probs(e, c, targets, bias, ids=ids, shift=shift, impl=impl, **options).id_log_probs
        assert found is not None
        return jnp.sum(jnp.where(at >= 0, weight * found, 0)), found

    def full(e, c, bias):
        z = 5 * jnp.tanh((e @ (c if vocab_axis else c.T) + bias) / 5) / 0.7
        found = jnp.take_along_axis(jax.nn.log_softmax(z), np.maximum(ids, 0), -1)[:, : at.shape[1]]
        found = jnp.where(kept, jnp.where(at < 0, -jnp.inf, found), 0)
        return jnp.sum(jnp.where(at >= 0, weight * found, 0)), found

    (_, found), gradients = jax.jit(jax.value_and_grad(here, (0, 1, 2), has_aux=True))(e, c, bias)
    with jax.enable_x64(True):
        wide = (jnp.asarray(x, "float64") for x in (e, c, bias))
        (_, want), wanted = jax.jit(jax.value_and_grad(full, (0, 1, 2), has_aux=True))(*wide)
        want, wanted = jax.tree.map(np.float64, (want, wanted))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)
    for x, y in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(np.float64(x), y, rtol=0, atol=ERRORS[dtype] * max(1, np.abs(y).max()))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_likeliest_ids_and_the_mean_of_the_logits(impl):
    e, c, targets = inputs()
    targets[0, 1] = -100
    c = c.at[7].set(c[3])  # equal logits
    z = np.float64(e) @ np.float64(c).T / 0.7
    options: dict[str, Any] = {"temperature": 0.7, "impl": impl, "shift": 1}
    found = linear_log_probs(e, c, targets, predicted=True, top_k=67, mean_logit=True, **options)
    kept, order = (targets != -100)[:, 1:], np.argsort(-np.float32(z), axis=-1, kind="stable")[:, :4]
    assert found.top_ids is not None
    assert found.predicted is not None
    assert found.top_ids.shape == (2, 4, 67)
    np.testing.assert_array_equal(found.predicted, found.top_ids[..., 0])
    log_probs = np.asarray(jax.nn.log_softmax(z))[:, :4]
    at = np.take_along_axis(log_probs, np.asarray(found.top_ids), -1)
    np.testing.assert_allclose(at[kept], np.take_along_axis(log_probs, order, -1)[kept], atol=1e-4)
    np.testing.assert_allclose(found.top_log_probs[kept], at[kept], atol=1e-4)
    np.testing.assert_allclose(found.mean_logit[kept], z[:, :4][kept].mean(-1), atol=1e-4)
    assert not np.asarray(found.top_log_probs)[~kept].any()
    for row in np.asarray(found.top_ids)[kept]:
        assert sorted(row) == list(range(67))
        assert list(row).index(3) < list(row).index(7)
    few = linear_log_probs(e, c, targets, predicted=True, **options)
    np.testing.assert_array_equal(few.predicted, found.predicted)
    assert few.top_ids is None
    of = jax.grad(lambda e: jnp.sum(linear_log_probs(e, c, targets, top_k=3, **options).top_log_probs))(e)
    assert not of.any()


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


def test_without_targets_every_token_counts():
    e, c, _ = inputs()
    found = linear_log_probs(e, c, entropy=True)
    p = jax.nn.softmax(e @ c.T, axis=-1)
    assert found.log_probs is None
    np.testing.assert_allclose(found.lse, jax.nn.logsumexp(e @ c.T, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.entropy, -jnp.sum(p * jnp.log(p), axis=-1), atol=1e-4)


def test_a_detached_entropy_costs_the_backward_pass_nothing():
    e, c, targets = inputs()

    def program(entropy):
        def loss(e, c):
            found = linear_log_probs(e, c, targets, entropy=entropy)
            return jnp.sum(found.log_probs), found

        return jax.grad(loss, (0, 1), has_aux=True)

    plain, detached, whole = (program(x) for x in (False, "detached", True))
    np.testing.assert_array_equal(detached(e, c)[1].entropy, whole(e, c)[1].entropy)
    for x, y in zip(detached(e, c)[0], plain(e, c)[0], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    of_entropy = jax.grad(lambda e: jnp.sum(linear_log_probs(e, c, targets, entropy="detached").entropy))(e)
    assert not of_entropy.any()


def test_ignored_tokens_give_nothing_whatever_they_hold():
    e, c, targets = inputs()
    targets[0, 2] = -100
    e = e.at[0, 2].set(jnp.nan)

    def loss(e, c):
        found = linear_log_probs(e, c, targets, entropy=True, temperature=0.5)
        assert found.entropy is not None
        assert found.log_probs is not None
        return jnp.sum(found.log_probs * found.entropy * found.lse), found

    (de, dc), found = jax.grad(loss, (0, 1), has_aux=True)(e, c)
    assert [float(x[0, 2]) for x in found[:3]] == [0, 0, 0]
    assert np.isfinite(dc).all()
    assert not de[0, 2].any()


def test_a_target_out_of_range_is_nan_in_its_own_log_probability_alone():
    e, c, targets = inputs()
    targets[1, 1] = 67
    found = linear_log_probs(e, c, targets, entropy=True)
    assert np.argwhere(np.isnan(found.log_probs)).tolist() == [[1, 1]]
    assert np.isfinite(found.entropy).all()
    assert np.isfinite(found.lse).all()


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


def policy(numbers, old, advantage):
    ratio = jnp.exp(numbers.log_probs - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -gain - 0.1 * numbers.entropy + 1e-3 * numbers.lse**2


@settings(max_examples=5, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(IMPLS),
    st.sampled_from(["mean", "sum", "none", "items"]),
    st.sampled_from([0, 1]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([1.0, 0.7, "tokens"]),
)
def test_a_loss_of_the_users_own_is_that_of_the_numbers(seed, impl, reduction, shift, ignored, temperature):
    rng, e, c, bias, targets = drawn(seed, "float32", 0, ignored)
    if temperature == "tokens":
        temperature = jnp.asarray(rng.uniform(0.5, 2, e.shape[:2]), "float32")
    options: dict[str, Any] = {"shift": shift, "temperature": temperature, "impl": impl, "softcap": 4.0}
    shape = targets.shape[0], targets.shape[1] - shift
    old, advantage = (
        jnp.asarray(rng.normal(size=shape) - 4, "float32"),
        jnp.asarray(rng.normal(size=(shape[0], 1)), "float32"),
    )
    items = {"reduction": "mean", "num_items": 3.5} if reduction == "items" else {"reduction": reduction}
    weight = rng.normal(size=shape if reduction == "none" else ())
    kept = targets[:, shift:] != -100

    def here(e, c, bias):
        loss, numbers = linear_token_loss(
            e, c, targets, policy, old, advantage, bias=bias, entropy=True, return_numbers=True, **items, **options
        )
        return jnp.sum(weight * loss), numbers

    def of_numbers(e, c, bias):
        numbers = linear_log_probs(e, c, targets, bias, entropy=True, **options)
        loss = jnp.where(kept, policy(numbers, old, advantage), 0)
        count = 3.5 if reduction == "items" else max(kept.sum(), 1)
        loss = loss if reduction == "none" else jnp.sum(loss) / (1 if reduction == "sum" else count)
        return jnp.sum(weight * loss), numbers

    (found, numbers), gradients = jax.jit(jax.value_and_grad(here, (0, 1, 2), has_aux=True))(e, c, bias)
    (want, all_numbers), wanted = jax.jit(jax.value_and_grad(of_numbers, (0, 1, 2), has_aux=True))(e, c, bias)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    for x, y in zip(jax.tree.leaves((numbers, gradients)), jax.tree.leaves((all_numbers, wanted)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * max(1, np.abs(y).max(initial=0)))


def test_the_loss_by_itself_is_cross_entropy():
    e, c, targets = inputs()
    targets[0, 0] = -100

    def loss(numbers):
        return -numbers.log_probs

    found, want = (
        jax.value_and_grad(f, (0, 1))(e, c)
        for f in (lambda e, c: linear_token_loss(e, c, targets, loss), lambda e, c: linear_cross_entropy(e, c, targets))
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


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
