"""What `explain` says is what runs."""

import logging
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cce_jax
import cce_torch
from cce_jax import prepare
from cce_kernels import device
from cce_kernels.compat import VERSION
from cce_kernels.device import H200, Gpu
from cce_kernels.engines import hopper
from cce_kernels.plan import plan_of
from cce_torch import arguments
from cce_torch.on_jax import bridge, jax_devices, kinds

S = jax.ShapeDtypeStruct
E, C = S((2048, 128), jnp.bfloat16), S((32000, 128), jnp.bfloat16)


@pytest.fixture
def on_h200(monkeypatch):
    for module in (prepare, sys.modules["cce_jax.explain"]):
        monkeypatch.setattr(module, "local_gpu", lambda: H200)
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


def test_each_way_to_the_gradients(on_h200, monkeypatch):
    monkeypatch.setattr(hopper, "MOSAIC", True)
    ways = {
        "in the forward pass": {"memory_budget": 2**26},
        "from exponentials that the forward pass saves": {"memory_budget": "all"},
        "from logits that the backward pass computes again": {"reduction": "none", "memory_budget": 0},
    }
    for way, options in ways.items():
        found = cce_jax.explain(E, C, **options)
        assert found.gradients == way
        assert found.engine == "hopper"
        assert (found.chunks is not None) == (way == "in the forward pass")
        assert found.held > 0
        assert str(found).count("\n") >= 2
        assert found.time > 0.9
    head = S((8192, 4096), jnp.bfloat16), S((128256, 4096), jnp.bfloat16)
    exact, tolerant = (cce_jax.explain(*head, memory_budget="all", gradient_tolerance=x) for x in (0.0, 2**-7))
    assert exact.gradients == "from exponentials that the forward pass saves"
    assert tolerant.gradients == "in the forward pass", "which alone can leave out blocks"
    evaluation = cce_jax.explain(E, C, gradients_of=())
    assert (evaluation.gradients, evaluation.chunks, evaluation.time) == (None, None, None)


def test_what_is_said_is_a_sentence_that_is_true(on_h200, monkeypatch):
    """A time is no 1313.71; a tolerance that does nothing is said to do nothing."""
    monkeypatch.setattr(hopper, "MOSAIC", True)
    small = cce_jax.explain(E, C, memory_budget=0)
    assert small.time > 10
    assert "more than 10 times the matrix products alone, which take little of this call's time" in str(small)
    evaluation = str(cce_jax.explain(E, C, gradients_of=()))
    assert evaluation.endswith("gradients: none, as in evaluation; no time is predicted for it")
    assert "gradient_tolerance" not in evaluation + str(small)
    one = cce_jax.explain(S((64, 32), jnp.float32), S((500, 32), jnp.float32), impl="chunked")
    assert ", 1 chunk of 64 tokens\n" in str(one)

    head = S((8192, 4096), jnp.bfloat16), S((128256, 4096), jnp.bfloat16)
    tolerant = cce_jax.explain(*head, gradient_tolerance=2**-7)
    assert tolerant.leaves_out
    assert "gradient_tolerance: blocks are left out of the products" in str(tolerant)
    for options in ({"reduction": "none"}, {"bias": S((128256,), jnp.bfloat16)}, {"impl": "chunked"}):
        exact = cce_jax.explain(*head, gradient_tolerance=2**-7, **options)
        assert exact.leaves_out is False
        assert "gradient_tolerance: does nothing here" in str(exact)


def test_a_faster_engine_says_why_it_refuses(on_h200, monkeypatch):
    monkeypatch.setattr(hopper, "MOSAIC", False)
    assert "needs JAX 0.11, and so Python 3.12" in cce_jax.explain(E, C).refused["hopper"]
    monkeypatch.setattr(hopper, "MOSAIC", True)
    plan_of.cache_clear()
    reasons = {
        "bias": cce_jax.explain(E, C, bias=S((32000,), jnp.bfloat16)),
        "label smoothing": cce_jax.explain(E, C, label_smoothing=0.1, reduction="none", memory_budget=0),
        "vocabulary V, 32003, must be a multiple of 8": cce_jax.explain(E, S((32003, 128), jnp.bfloat16)),
        "256 tokens or more": cce_jax.explain(S((8, 128), jnp.bfloat16), C),
    }
    for reason, found in reasons.items():
        assert found.engine == "triton"
        assert reason in found.refused["hopper"]
        assert reason in str(found)


def on_gpu(monkeypatch, gpu: Gpu):
    """Both packages' explain of E and C as on this GPU: cce_torch's gets fake tensors."""
    for module in (prepare, sys.modules["cce_jax.explain"]):
        monkeypatch.setattr(module, "local_gpu", lambda: gpu)
    major, _, minor = gpu.compute_capability.partition(".")
    on = SimpleNamespace(compute_capability=gpu.compute_capability, core_count=gpu.multiprocessors)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(arguments, "_capability", lambda _: (int(major), int(minor)))
    monkeypatch.setattr(jax_devices, "check_can_run", lambda _: None)
    for module in (jax_devices, bridge):
        monkeypatch.setattr(module, "jax_device", lambda _: on)
    monkeypatch.setattr(kinds, "_kinds", {})
    plan_of.cache_clear()

    def in_torch(**options):
        with FakeTensorMode():
            e, c = (torch.empty(x.shape, dtype=torch.bfloat16, device="cuda") for x in (E, C))
            return cce_torch.explain(e, c, **options)

    return partial(cce_jax.explain, E, C), in_torch


def test_without_pallas_triton_all_kernels_say_that_they_need_it(on_h200, monkeypatch):
    """Those for Hopper too: a plan takes the launches that they lack from the engine triton."""
    name = "jax.experimental.pallas.triton"
    monkeypatch.setattr(device, "has_triton", lambda: False)
    monkeypatch.setattr(hopper, "MOSAIC", True)
    for explain in on_gpu(monkeypatch, H200):
        found = explain()
        assert (found.engine, list(found.refused)) == ("xla", ["hopper", "triton"])
        assert str(found).count(f"it needs Pallas' Triton ({name}), which this JAX, {VERSION}, lacks\n") == 2
    with pytest.raises(ValueError, match=r"; triton: it needs Pallas' Triton .*\); impl='chunked' computes it"):
        cce_torch.linear_cross_entropy(torch.zeros(5, 4), torch.zeros(7, 4), torch.zeros(5).long(), impl="cce")


def test_a_gpu_that_is_too_old_is_named(on_h200, monkeypatch):
    in_jax, in_torch = on_gpu(monkeypatch, Gpu("7.5", 40))
    found = in_jax()
    assert found.engine == "xla"
    assert "  not hopper: it needs a GPU of compute capability 9.0 (H100, H200)\n" in str(found)
    assert found.refused["triton"] == "it needs an NVIDIA GPU of compute capability 8.0 or more, and this GPU's is 7.5"
    with pytest.raises(ValueError, match=r"runs PyTorch's own operators.* cuda:0: it needs compute capability 8\.0"):
        in_torch()


def test_a_device_that_is_no_gpu_is_refused_too():
    for found in (cce_jax.explain(E, C), cce_torch.explain(*(torch.zeros(x.shape).bfloat16() for x in (E, C)))):
        assert found.engine == "xla"
        assert found.refused["triton"] == "it needs an NVIDIA GPU of compute capability 8.0 or more"
    assert not cce_jax.explain(E, C, impl="chunked").refused


def test_it_tells_of_the_program_that_runs():
    """In JAX on this machine, in float32: where gradients are formed before, the backward pass has no matmul."""
    e, c, targets = jnp.ones((1024, 16)), jnp.ones((4000, 16)), jnp.zeros(1024, jnp.int32)
    seen = set()
    for budget in (2**21, 2**24, 2**30):
        found = cce_jax.explain(e, c, memory_budget=budget)
        loss = partial(cce_jax.linear_cross_entropy, targets=targets, memory_budget=budget)
        value, pull = jax.vjp(loss, e, c)
        assert ("dot_general" in str(jax.make_jaxpr(pull)(value))) == (found.gradients != "in the forward pass")
        seen.add(found.gradients)
    assert len(seen) > 1


def test_both_packages_say_the_same():
    e, c = torch.zeros(2048, 128), torch.zeros(32000, 128)
    given = {"memory_budget": 2**24}, {"reduction": "none"}, {"gradients_of": ("e",)}, {"gradient_tolerance": 2**-7}
    for options in ({}, *given):
        shapes = S((2048, 128), jnp.float32), S((32000, 128), jnp.float32)
        assert cce_torch.explain(e, c, **options) == cce_jax.explain(*shapes, **options)


def test_one_line_of_logging(caplog):
    e, c = torch.randn(37, 20, requires_grad=True), torch.randn(91, 20)
    with caplog.at_level(logging.INFO, "cce_kernels"):
        for _ in range(2):
            cce_torch.linear_cross_entropy(e, c, torch.zeros(37).long()).backward()
    lines = [x.getMessage() for x in caplog.records if x.name == "cce_kernels"]
    assert len([x for x in lines if x.startswith("37×20×91 float32: engine: xla; gradients: ")]) == 1


def test_what_is_no_option_is_an_error():
    with pytest.raises(ValueError, match="gradients_of"):
        cce_jax.explain(E, C, gradients_of=("d",))
    for explain, arrays in ((cce_jax.explain, (E, C)), (cce_torch.explain, (torch.zeros(2, 2), torch.zeros(3, 2)))):
        with pytest.raises(ValueError, match="gradient_tolerance"):
            explain(*arrays, gradient_tolerance=1.0)
    with pytest.raises(ValueError, match="impl"):
        cce_jax.explain(E, C, impl="reference")
    with pytest.raises(ValueError, match="impl"):
        cce_torch.explain(torch.zeros(2, 2), torch.zeros(3, 2), impl="reference")
    with pytest.raises(ValueError, match=r"runs PyTorch's own operators.*e is float64"):
        cce_torch.explain(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((E, S((128, 32000), jnp.bfloat16)), {}, r"e must have shape .*vocab_axis=1\?"),
        ((E, C), {"bias": S((3,), jnp.bfloat16)}, r"bias must have shape \(V,\)"),
        ((S((2048, 128), jnp.int32), C), {}, "e must be one of .*int32"),
        (([[1.0]], C), {}, "e must be an? .*, got list"),
        ((E, C), {"precision": "low"}, "precision='low'"),
        ((E, C), {"precision": ("high", ["x"])}, "precision="),
    ],
)
def test_what_the_call_raises_is_raised(given, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        cce_jax.explain(*given, **options)

    def tensor(x):
        return torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="meta") if hasattr(x, "shape") else x

    options = {name: tensor(x) for name, x in options.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        cce_torch.explain(*map(tensor, given), **options)
