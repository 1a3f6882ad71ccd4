"""Mixed precision: e in 16 bits beside a float32 c and bias, whose gradients come in float32 from float32 sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import cce_jax
import cce_torch
from cce_jax import reference
from tests import call, call_torch
from tests.cases import DTYPES, Case, Inputs, inputs
from tests.tolerance import FLOOR, error, roundoff
from tests.truth import truth

PACKAGES = [("jax", "chunked"), ("jax", "cce"), ("jax", "reference"), ("torch", "chunked"), ("torch", "cce"),
            ("torch", "reference"), ("torch", "torch_compile")]  # fmt: skip
BIAS = Case("bias", leading=(40,), arrays=("bias",), options={"label_smoothing": 0.1})


def mixed(case: Case, dtype: str) -> tuple[Inputs, Inputs]:
    """The inputs of a call with float32 parameters, and what it computes with: those parameters rounded to dtype."""
    exact, rounded = inputs(case), inputs(case, dtype)
    return Inputs(rounded.e, exact.c, exact.targets, exact.optional, exact.of_loss, exact.of_lse), rounded


@pytest.mark.parametrize(
    ("package", "impl", "dtype", "options"),
    [
        (*package, dtype, {"vocab_axis": axis})
        for package in PACKAGES
        for dtype, axis in (("bfloat16", 0), ("float16", 1))
    ]
    + [("jax", "cce", "bfloat16", {"memory_budget": 0}), ("torch", "cce", "float16", {"memory_budget": 0})],
    ids=str,
)
def test_gradients_of_float32_parameters(package, impl, dtype, options):
    given, rounded = mixed(BIAS, dtype)
    run = call.run if package == "jax" else call_torch.run
    loss, _, gradients = run(given, {**BIAS.options, **options}, impl)
    want, _, wanted = truth(rounded, BIAS.options)
    assert error(loss, want) < FLOOR["float32"] * roundoff(np.float32)
    assert gradients["e"].dtype == DTYPES[dtype]
    for name in ("c", "bias"):
        assert gradients[name].dtype == np.float32
        # dz is rounded to 16 bits, a part of the sum that is independent of the others; the sum is not
        assert error(gradients[name], wanted[name]) < roundoff(DTYPES[dtype]) / 2, name
    assert error(gradients["e"], wanted["e"]) < roundoff(DTYPES[dtype])


@pytest.mark.parametrize(("package", "impl"), PACKAGES)
def test_a_sum_that_16_bits_do_not_hold(package, impl):
    """Two tokens, whose gradients of the target's row are 1 and 2⁻¹⁰: bfloat16 would keep the first alone."""
    e = np.array([[1.0], [2.0**-10]], DTYPES["bfloat16"])
    c = np.zeros((64, 1), np.float32)
    c[0, 0] = -1e4  # the target's probability is 0, so that dz is exactly −1
    targets = np.zeros(2, np.int32)
    if package == "jax":
        dc = jax.grad(lambda c: cce_jax.linear_cross_entropy(jnp.asarray(e), c, targets, reduction="sum", impl=impl))(c)
    else:
        leaf = torch.tensor(c, requires_grad=True)
        of_e, of_targets = call_torch.tensor(e), torch.zeros(2, dtype=torch.long)
        cce_torch.linear_cross_entropy(of_e, leaf, of_targets, reduction="sum", impl=impl).backward()
        dc = leaf.grad
        assert dc is not None
    p = np.exp(-1e4 * np.float64(e))[:, 0] / (63 + np.exp(-1e4 * np.float64(e)))[:, 0]
    assert float(dc[0, 0]) == pytest.approx(np.sum((p - 1) * np.float64(e)[:, 0]), rel=1e-6)


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_autocast_keeps_the_gradients_in_float32(impl):
    """A float32 e is cast as torch.nn.functional.linear casts it; the parameters' gradients are not rounded."""
    given, _ = mixed(BIAS, "bfloat16")
    _, _, wanted = call_torch.run(given, BIAS.options, impl)
    leaves = {k: torch.tensor(np.float32(v), requires_grad=True) for k, v in given.differentiable().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cce_torch.linear_cross_entropy(
            leaves["e"], leaves["c"], torch.tensor(given.targets).long(), leaves["bias"], impl=impl, **BIAS.options
        )
    (loss * float(given.of_loss)).backward()
    for name, x in leaves.items():
        assert x.grad is not None
        np.testing.assert_array_equal(x.grad.numpy(), np.float32(wanted[name]), name)


@pytest.mark.parametrize("impl", ["chunked", "reference", "torch_compile"])
def test_autocast_computes_with_rounded_parameters(impl):
    given, rounded = mixed(BIAS, "bfloat16")
    losses = []
    for one in (given, rounded):
        e, c, bias = (call_torch.tensor(x) for x in one.differentiable().values())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(cce_torch.linear_cross_entropy(e, c, torch.tensor(one.targets).long(), bias, impl=impl))
    assert torch.equal(*losses)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_under_torch_compile(fullgraph):
    given, _ = mixed(BIAS, "bfloat16")
    e, c, bias = (call_torch.tensor(x).requires_grad_() for x in given.differentiable().values())
    targets = torch.tensor(given.targets).long()
    compiled = torch.compile(cce_torch.linear_cross_entropy, backend="aot_eager", fullgraph=fullgraph)
    want = torch.autograd.grad(cce_torch.linear_cross_entropy(e, c, targets, bias), (e, c, bias))
    found = torch.autograd.grad(compiled(e, c, targets, bias), (e, c, bias))
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_a_frozen_classifier_has_no_gradient():
    given, _ = mixed(BIAS, "bfloat16")
    e, c = call_torch.tensor(given.e).requires_grad_(), torch.tensor(given.c)
    cce_torch.linear_cross_entropy(e, c, torch.tensor(given.targets).long()).backward()
    assert e.grad is not None
    assert c.grad is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_nearest_number_of_a_type(dtype):
    """Also of those below the least normal number, halves between two numbers, and numbers that are too large."""
    rng = np.random.default_rng(0)
    least = float(jnp.finfo(dtype).smallest_normal) if dtype == "float16" else 1.0
    x = np.float32(rng.standard_normal(4096) * 10.0 ** rng.uniform(-8, 8, 4096))
    x = np.concatenate([x, np.float32(least * np.arange(64) / 37), [1 + 2.0**-8, 1 + 2.0**-11, 0.0, np.inf, -np.inf]])
    found = jax.jit(lambda x: reference.nearest(x, dtype))(np.float32(x))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, np.float32(x).astype(DTYPES[dtype]).astype(np.float32))


@pytest.mark.parametrize(("package", "impl"), PACKAGES)
def test_a_bias_that_masks_columns(package, impl):
    """−inf is a number of every type: it takes a column out of the vocabulary."""
    given, rounded = mixed(Case("masked", leading=(40,), arrays=("bias",)), "bfloat16")
    for one in (given, rounded):
        one.targets[one.targets == 7] = 8
        one.optional["bias"][7] = -np.inf
    loss, _, gradients = (call.run if package == "jax" else call_torch.run)(given, {}, impl)
    rounded.optional["bias"][7] = -1e4
    want, _, wanted = truth(rounded, {})
    assert error(loss, want) < FLOOR["float32"] * roundoff(np.float32)
    assert error(gradients["c"], wanted["c"]) < roundoff(DTYPES["bfloat16"]) / 2
