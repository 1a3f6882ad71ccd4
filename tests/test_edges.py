"""Integers of any size, removed classes, the ranges of types, mixed precision, and who looks on.

In every implementation of both packages. Random calls (tests/search), and those of test_calls.py, have the rest:
ignored tokens that hold NaN, extreme logits, targets out of range, float64, and that the same call has the same bits.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import cce_jax
import cce_torch
from cce_jax import linear_cross_entropy
from cce_torch import in_forward
from tests import both, call, call_torch
from tests.cases import DTYPES, Case, inputs
from tests.search.torch_transformations import Nothing
from tests.tolerance import assert_rounded, error
from tests.truth import truth
from tests.wrapped import Wrapped

CASE = Case("edge", leading=(24,), width=16, vocabulary=70, arrays=("bias", "class_weight", "token_weight"))
GIVEN = inputs(CASE)
BIAS = GIVEN.optional["bias"]
RUN = {"jax": call.run, "torch": call_torch.run}


@pytest.fixture(autouse=True)
def small_blocks(request):
    """Under autocast as on a CPU, whose matmuls are not narrow."""
    with call_torch.small_blocks(narrow="autocast" not in request.node.name):
        yield


def test_num_items_is_any_number_that_float32_holds():
    total = linear_cross_entropy(GIVEN.e, GIVEN.c, GIVEN.targets, reduction="sum")
    for number in (3_000_000_000, np.int64(3_000_000_000), 10**30, 3e9, np.float64(3e9)):
        for run in (linear_cross_entropy, jax.jit(linear_cross_entropy, static_argnames="num_items")):
            mean = run(GIVEN.e, GIVEN.c, GIVEN.targets, num_items=number)
            np.testing.assert_allclose(mean, np.float64(total) / float(number), rtol=1e-6)


@settings(max_examples=12)
@given(
    st.sampled_from([np.uint8, np.int32, np.uint32, np.int64, np.uint64]),
    st.sampled_from([-(2**31), 2**31 - 1, 2**32 + 3, -(2**40), 2**63, 10**30]),
)
@example(np.uint64, 2**63)
@example(np.int64, 2**63)
def test_any_integer_is_an_ignore_index(dtype, ignore_index):
    """Where the targets' type holds it, it is what it ignores, and no value near it; elsewhere it ignores nothing."""
    targets = np.where(GIVEN.targets < 0, 3, GIVEN.targets).astype(dtype)
    held = np.iinfo(dtype).min <= ignore_index <= np.iinfo(dtype).max
    targets[5] = ignore_index if held else np.iinfo(dtype).min or np.iinfo(dtype).max
    targets[6] = np.iinfo(dtype).max if ignore_index != np.iinfo(dtype).max else ignore_index - 1
    options = dict(ignore_index=ignore_index, reduction="none")
    with jax.enable_x64(True):
        array = jnp.asarray(targets)
    e, c, own = (torch.from_numpy(np.array(x)) for x in (GIVEN.e, GIVEN.c, targets))
    in_torch = partial(cce_torch.linear_cross_entropy, e, c, own, **options)
    in_jax = [(x64, partial(linear_cross_entropy, GIVEN.e, GIVEN.c, t)) for t, x64 in ((targets, False), (array, True))]
    for x64, of in (*in_jax, *((False, partial(in_torch, impl=impl)) for impl in ("chunked", "reference"))):
        with jax.enable_x64(x64):
            run = partial(of, **options)
            loss = np.asarray(run())
            assert (loss[5] == 0) if held else np.isnan(loss[5])
            assert np.isnan(loss[6]), "out of range and not ignored"
            assert np.isfinite(np.delete(loss, [5, 6])).all()
            np.testing.assert_array_equal(np.isnan(np.asarray(run(shift=2))), np.isnan(loss)[2:])
            bad = 6 if held else 5
            with pytest.raises(ValueError, match=rf"targets\[{bad}\] = {targets[bad]} "):
                run(check_targets=True)


@both.every
@pytest.mark.parametrize("ignore_index", [2**53 + 1, -(2**62) - 1])
def test_the_last_tokens_are_ignored_after_a_shift(package, impl, ignore_index):
    """Whatever float64 holds of ignore_index."""
    targets = np.where(GIVEN.targets < 0, 3, GIVEN.targets).astype(np.int64)
    run = partial(both.gradients, package, impl, GIVEN.e, GIVEN.c, targets, shift=2)
    jax.tree.map(np.testing.assert_array_equal, run(ignore_index=ignore_index), run())


@both.every
def test_a_class_of_weight_0_whose_logit_is_minus_infinity_counts_as_0(package, impl):
    """−inf is a number of every type: of a float32 bias beside a 16-bit e too."""
    removed = np.arange(70) < 66
    targets = np.where(GIVEN.targets >= 0, 66 + GIVEN.targets % 4, -100).astype(np.int32)
    e, weight = GIVEN.e.astype(DTYPES["bfloat16"]), np.where(removed, 0.0, 1.5).astype(np.float32)
    run = partial(both.gradients, package, impl, e, GIVEN.c, targets, class_weight=weight, label_smoothing=0.1)
    found = [run(bias=np.where(removed, low, BIAS).astype(np.float32)) for low in (-np.inf, -1e4)]
    assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(found[0]))
    jax.tree.map(np.testing.assert_array_equal, *found)


NARROW = pytest.mark.parametrize(
    ("package", "impl"), [("jax", "cce"), ("jax", "chunked"), ("torch", "chunked"), ("torch", "torch_compile")]
)


@NARROW
def test_float16_keeps_what_is_far_smaller_than_the_largest_cotangent(package, impl):
    """Flat softmaxes over many classes, of tokens that count 2⁻¹⁰ of another one: their dz are 2⁻²¹ of the largest.

    lse alone has a cotangent, so no target's element hides the small ones. The token that counts has an embedding of 0:
    dc has nothing of it, and its own row of de is left out.
    """
    flat = inputs(Case("flat", (24,), 16, 2001, ignored=0.0), "float16")
    others = np.arange(24) > 0
    e, c = (flat.e / 64 * others[:, None]).astype(np.float16), (1 + flat.c / 64).astype(np.float16)
    of = (np.where(others, 2.0**-10, 1.0) * 2.0**14).astype(np.float32)
    z = np.float64(e) @ np.float64(c).T
    dz = of[:, None] * np.exp(z - np.logaddexp.reduce(z, axis=1)[:, None])
    run = partial(both.gradients, package, e=e, c=c, targets=flat.targets, of=of)
    reference, actual = run("reference")[1], run(impl)[1]
    for k, (exact, rows) in enumerate(((dz @ np.float64(c), others), (dz.T @ np.float64(e), ...))):
        assert_rounded(actual[k][rows], exact[rows], reference[k][rows], f"gradient of {'ec'[k]}", roundings=2)


@NARROW
def test_float16_has_room_for_class_weights(package, impl):
    """Gradients that float16 holds, of a dz that is 10⁴ times its largest cotangent."""
    options = {"label_smoothing": 1.0, "reduction": "none", "return_lse": True}
    made = inputs(Case("class weights", (24,), 16, 300, ("class_weight",), options=options), "float16")
    weight = made.optional["class_weight"] * 1e4
    of_lse = -made.of_loss * weight.mean(dtype=np.float32)  # else it has a cotangent as large as the mean weight
    made = replace(made, optional={"class_weight": weight}, of_lse=of_lse)
    exact = truth(made, options)[2]
    reference, actual = (RUN[package](made, options, x)[2] for x in ("reference", impl))
    for name, gradient in actual.items():
        assert_rounded(gradient, exact[name], reference[name], f"gradient of {name}", roundings=2)


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


SURROUNDINGS = {
    "the default device meta": lambda: torch.device("meta"),
    "the default dtype float64": lambda: default_dtype(torch.float64),
    "the default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "a dispatch mode": Nothing,
    "a profiler": torch.profiler.profile,
    "a dispatch mode, and the default device meta": lambda: _both(Nothing(), torch.device("meta")),
}


@contextmanager
def _both(first, second):
    with first, second:
        yield


def policy(numbers, advantage):
    return -numbers.log_probs * advantage - 0.1 * numbers.entropy


def calls_in_torch(impl: str):
    """Each function with nearly all that it has, (e, c, bias) -> its results."""
    weights = (call_torch.tensor(GIVEN.optional[k]) for k in ("class_weight", "token_weight"))
    weights = dict(zip(("class_weight", "token_weight"), weights, strict=True))
    targets, ids = torch.tensor(GIVEN.targets), torch.arange(24)[:, None]
    tokens, student = {"impl": impl, "targets": targets}, {"impl": impl, "temperature": 0.7}
    selected = {"predicted": True, "top_k": 2, "mean_logit": True}
    losses, numbers = cce_torch.linear_cross_entropy, cce_torch.linear_log_probs
    yield partial(losses, **tokens, reduction="none", return_lse=True, token_weight=weights["token_weight"])
    yield partial(losses, **tokens, label_smoothing=0.1, z_loss=0.1, softcap=3.0, logit_scale=1.5, **weights)
    yield partial(losses, **tokens, num_items=7, shift=1)
    yield partial(numbers, **tokens, entropy=True, ids=ids, temperature=0.7, **selected)
    yield partial(numbers, impl=impl, entropy="detached")
    for reduction in ("none", "sum"):
        yield lambda e, c, bias, r=reduction: cce_torch.linear_token_loss(
            e, c, targets, policy, 0.3, bias=bias, entropy=True, reduction=r, impl=impl, return_numbers=True
        )
        yield lambda e, c, bias, r=reduction: cce_torch.linear_divergence(
            *(e, c, e.detach().flip(0), c.detach()), bias=bias, **student, divergence="jsd", beta=0.3, reduction=r
        )
    yield lambda e, c, bias: cce_torch.linear_divergence(e, c, 2 * e.detach(), c.detach(), bias=bias, impl=impl)


@pytest.mark.parametrize("impl", ["chunked", "reference", "torch_compile"])
def test_pytorchs_defaults_and_who_looks_on_change_no_bit(impl):
    """Every tensor is made with the type and device of the call's. A dispatch mode sees no chunks of in_forward.py.

    What the kernels ("cce") compute comes through the tensors and operators of "chunked".
    """
    leaves = [call_torch.tensor(x).requires_grad_() for x in (GIVEN.e, GIVEN.c, BIAS)]

    def bits(run) -> list[torch.Tensor]:
        found = [x for x in tree_leaves(run(*leaves[:2], bias=leaves[2])) if x is not None]
        total = sum(x.double().sum() for x in found if x.requires_grad)
        return [*found, *torch.autograd.grad(total, leaves)]

    for k, run in enumerate(calls_in_torch(impl)):
        with mock.patch.object(in_forward, "_planned", return_value=None):
            without_chunks = bits(run)
        want = bits(run)
        for name, surrounding in SURROUNDINGS.items():
            with surrounding():
                found = bits(run)
            for x, y in zip(found, without_chunks if "mode" in name else want, strict=True):
                assert x.dtype == y.dtype, (k, name)
                assert x.equal(y), (k, name)


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_anything_with_jax_array_is_an_array(impl):
    made = inputs(Case("wrapped", (24,), 16, 70, arrays=("bias", "class_weight", "token_weight")))
    arrays = {"e": made.e, "c": made.c, "targets": made.targets, "num_items": np.float32(12), **made.optional}
    arrays = {k: jnp.asarray(v) for k, v in arrays.items()}
    want = linear_cross_entropy(**arrays, impl=impl)
    wrapped = {k: Wrapped(x) for k, x in arrays.items()}
    assert linear_cross_entropy(**wrapped, impl=impl) == want
    np.testing.assert_allclose(jax.jit(lambda a: linear_cross_entropy(**a, impl=impl))(wrapped), want, rtol=1e-6)

    def loss(leaves):
        return linear_cross_entropy(**{**arrays, **leaves}, impl=impl)

    leaves = {k: arrays[k] for k in ("e", "c", "bias")}
    want_of = jax.grad(loss)(leaves)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        for name, gradient in transform(loss)({k: wrapped[k] for k in leaves}).items():
            assert error(gradient.value, want_of[name]) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_nearest_number_of_a_type(dtype):
    """Also of those below the least normal number, halves between two numbers, and numbers that are too large."""
    from cce_jax import reference

    rng = np.random.default_rng(0)
    least = float(jnp.finfo(dtype).smallest_normal) if dtype == "float16" else 1.0
    x = np.float32(rng.standard_normal(4096) * 10.0 ** rng.uniform(-8, 8, 4096))
    x = np.concatenate([x, np.float32(least * np.arange(64) / 37), [1 + 2.0**-8, 1 + 2.0**-11, 0.0, np.inf, -np.inf]])
    found = jax.jit(lambda x: reference.nearest(x, dtype))(np.float32(x))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, np.float32(x).astype(DTYPES[dtype]).astype(np.float32))


@both.every
def test_a_sum_that_16_bits_do_not_hold(package, impl):
    """Two tokens, whose gradients of the target's row are 1 and 2⁻¹⁰: bfloat16 would keep the first alone."""
    e = np.array([[1.0], [2.0**-10]], DTYPES["bfloat16"])
    c = np.zeros((64, 1), np.float32)
    c[0, 0] = -1e4  # the target's probability is 0, so that dz is exactly −1
    dc = both.gradients(package, impl, e, c, np.zeros(2, np.int32), reduction="sum")[1][1]
    p = np.exp(-1e4 * np.float64(e))[:, 0] / (63 + np.exp(-1e4 * np.float64(e)))[:, 0]
    assert dc.dtype == np.float32
    assert float(dc[0, 0]) == pytest.approx(np.sum((p - 1) * np.float64(e)[:, 0]), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_autocast_is_mixed_precision(impl, dtype):
    """e is cast as torch.nn.functional.linear casts it; c and bias are rounded, but not their gradients."""
    targets = torch.tensor(GIVEN.targets)

    def run(*arrays, autocast=False):
        leaves = [x.detach().requires_grad_() for x in arrays]
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            loss = cce_torch.linear_cross_entropy(*leaves[:2], targets, leaves[2], impl=impl, label_smoothing=0.1)
        assert loss.dtype == torch.float32
        return loss.detach(), torch.autograd.grad(loss, leaves)

    e, c, bias = (torch.tensor(GIVEN.differentiable()[name]) for name in ("e", "c", "bias"))
    loss, found = run(e, c, bias, autocast=True)
    of_mixed, mixed = run(e.to(dtype), c, bias)
    assert torch.equal(loss, of_mixed)
    assert torch.equal(loss, run(e.to(dtype), c.to(dtype), bias.to(dtype))[0])
    for x, y in zip(found, mixed, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y.float())


@pytest.mark.parametrize(
    ("what", "impl"),
    [("a target out of range", "cce"), ("logits that overflow", "cce"), ("logits that overflow", "chunked")],
)
def test_debug_nans_finds_a_nan_that_the_input_deserves(what, impl):
    """In the interpreted kernels too, which JAX cannot run by themselves while it looks for the NaN."""
    e, c = jnp.tile(jnp.asarray(GIVEN.e), (13, 1)), jnp.asarray(GIVEN.c)
    targets = np.tile(GIVEN.targets, 13)
    if what == "a target out of range":
        targets[200] = len(c)
    else:
        e = e.at[np.flatnonzero(targets >= 0)[:8]].set(3e38)
    gradient = jax.value_and_grad(lambda e: linear_cross_entropy(e, c, targets, impl=impl))
    for run in (gradient, jax.jit(gradient)):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            run(e)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs", "linear_token_loss"])
def test_debug_nans_finds_none_in_ignored_tokens(name):
    e = jnp.where(GIVEN.targets[:, None] < 0, jnp.nan, GIVEN.e)
    more = (lambda n: n.lse**2,) if name == "linear_token_loss" else ()

    def total(c):
        return jax.tree.leaves(getattr(cce_jax, name)(e, c, GIVEN.targets, *more))[0].sum()

    with jax.debug_nans(True):
        assert np.isfinite(jax.grad(total)(jnp.asarray(GIVEN.c))).all()
