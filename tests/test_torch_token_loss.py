"""What drawn and named calls (tests/search, test_calls.py) of cce_torch.linear_token_loss do not ask."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

from cce_torch import linear_token_loss
from cce_torch.on_jax import bridge
from tests.call_torch import array, in_chunks, small_blocks

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IGNORED = -100
FORMED = ["torch_chunk_statistics", "torch_chunk_gradients"]


def smooth(numbers, old, advantage, beta):
    """No kink, at which a rounding would change the gradient."""
    gain = torch.exp(0.3 * (numbers.log_probs - old)) * advantage
    bonus = 0 if numbers.entropy is None else 0.1 * numbers.entropy
    return -gain - bonus + beta * numbers.lse**2


def made(tokens=(3, 9), width=16, vocabulary=61, dtype="float32", *, ignored=0.3, **options) -> tuple:
    """What is differentiated, and the rest of a call of `smooth`."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    c = normal(vocabulary, width) * 3 / width**0.5
    leaves = {"e": normal(*tokens, width).to(TYPES[dtype]), "c": c.to(TYPES[dtype])}
    targets = torch.tensor(rng.integers(0, vocabulary, tokens))
    targets[torch.tensor(rng.uniform(size=tokens)) < ignored] = IGNORED
    after = *tokens[:-1], tokens[-1] - options.get("shift", 0)
    arguments = normal(*after) - 3, normal(*after[:-1], 1), 0.01
    return leaves, {"targets": targets, "arguments": arguments, **options}


def ours(leaves: dict, call: dict, fn: Any = smooth, **more: Any) -> tuple:
    options = {"precision": "highest", **call, **more}
    targets, arguments = options.pop("targets"), options.pop("arguments")
    return linear_token_loss(leaves["e"], leaves["c"], targets, fn, *arguments, return_numbers=True, **options)


def results(leaves: dict, call: dict, **more: Any) -> dict[str, Any]:
    """The loss, the numbers, and the gradients of weights · loss."""
    own = {k: x.detach().requires_grad_() for k, x in leaves.items()}
    value, numbers = ours(own, call, **more)
    weights = torch.linspace(-2, 3, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
    found = {"loss": value, **numbers._asdict()}
    found |= dict(zip(own, torch.autograd.grad((weights * value).sum(), list(own.values())), strict=True))
    return {k: array(x) for k, x in found.items() if x is not None}


def on_device(x: Any, device: str) -> Any:
    return tree_map(lambda y: y.to(device) if isinstance(y, torch.Tensor) else y, x)


def test_fn_is_called_in_chunks_and_the_backward_pass_computes_no_logits(monkeypatch):
    """With an entropy bonus too. No array has an element for each logit."""
    leaves, call = made((4, 25), vocabulary=300, dtype="bfloat16", entropy=True, ignored=0.0)
    own = {k: x.requires_grad_() for k, x in leaves.items()}
    sizes, lengths, run = [], [], bridge.run

    def measured(program, inputs, outputs, *more):
        sizes.extend(x.numel() for x in (*inputs, *outputs) if isinstance(x, torch.Tensor) and x.numel() != 300 * 16)
        return run(program, inputs, outputs, *more)

    def fn(numbers, *arguments):
        lengths.append({x.shape for x in (*numbers, *arguments)})
        return smooth(numbers, *arguments)

    monkeypatch.setattr(bridge, "run", measured)
    with in_chunks(32) as ran:
        value, numbers = ours(own, call, fn)
        assert ran == 4 * FORMED
        assert lengths == [{(2,)}, {(3,)}] + 3 * [{(32,)}] + [{(4,)}]  # a function is tried once, for few tokens
        assert not any(x.requires_grad for x in numbers)
        ran.clear()
        torch.autograd.grad(value, list(own.values()))
        assert ran == ["torch_chunk_finish"]
        of_e, _ = torch.autograd.grad(torch.inf * ours(own, call, fn)[0], list(own.values()))
        assert not of_e.isfinite().all(-1).any()
    assert max(sizes) <= 32 * 512 < 100 * 300, max(sizes)
    value.detach_()
    for reduction, grad in (("none", True), ("mean", False)):  # no one factor, no gradient: all tokens at once
        lengths.clear()
        with in_chunks(32) as ran, torch.set_grad_enabled(grad):
            ours(own, call, fn, reduction=reduction)
        assert ran == ["torch_loss"]
        assert lengths == [{(100,)}]


@pytest.mark.parametrize(("impl", "reduction"), [("chunked", "mean"), ("torch_compile", "none")])
def test_nothing_of_an_ignored_token_gets_out(impl, reduction):
    leaves, call = made((3, 9), entropy=True, reduction=reduction)
    ignored = call["targets"] == IGNORED
    old, *others = call["arguments"]
    bad = {**leaves, "e": torch.where(ignored[..., None], torch.nan, leaves["e"])}
    bad_call = {**call, "arguments": (torch.where(ignored, torch.nan, old), *others)}

    def fn(numbers, old, advantage, beta):  # not finite where the numbers are 0, and neither is its derivative
        return smooth(numbers, old, advantage, beta) + 0.1 * torch.log(-numbers.log_probs)

    with small_blocks(), in_chunks(8):
        found, clean = (results(*x, fn=fn, impl=impl) for x in ((bad, bad_call), (leaves, call)))
    for name, x in found.items():
        assert np.isfinite(x).all(), name
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
    assert not found["e"][ignored.numpy()].any()


E, C, T = torch.ones(2, 3, 4), torch.ones(9, 4), torch.zeros(2, 3, dtype=torch.int64)
LEAF = torch.ones((), requires_grad=True)


def times(numbers, x):
    return numbers.log_probs * x


@pytest.mark.parametrize("impl", ["chunked", "reference"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("argument", [torch.ones(2, 3), torch.ones(3)], ids=["as it is", "broadcast"])
def test_fn_must_not_change_an_argument_in_place(argument, reduction, impl):
    """Whether the caller's tensor changes depends on the way that runs: on some, fn gets a copy."""

    def fn(numbers, pure, x):
        return numbers.log_probs * x.mul_(2)

    run = partial(linear_token_loss, E.clone().requires_grad_(), C, T, reduction=reduction, impl=impl)
    with pytest.raises(ValueError, match="fn must be pure, and it changed argument 1 in place"):
        run(fn, torch.ones(()), argument.clone())
    with torch.inference_mode():
        assert run(times, argument.clone()).isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("leaf", [LEAF, torch.nn.Linear(1, 1)], ids=["tensor", "module"])
def test_a_tensor_that_fn_closes_over_must_need_no_gradient(leaf, reduction):
    e = E.clone().requires_grad_()

    def fn(numbers):
        by = leaf.exp() if isinstance(leaf, torch.Tensor) else leaf(numbers.lse[:, None])[:, 0]
        return numbers.log_probs * by

    call = partial(linear_token_loss, targets=T, fn=fn, impl="chunked", reduction=reduction)
    for given_ in ((e, C), (E, C)):  # a frozen model too
        with (
            in_chunks(4),
            pytest.raises(TypeError, match=r"fn closes over a tensor of shape .* that requires a gradient"),
        ):
            call(*given_)
    with torch.no_grad():
        assert call(e, C).isfinite().all()
    if isinstance(leaf, torch.Tensor):
        assert linear_token_loss(e, C, T, lambda n: n.log_probs * leaf.detach()).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_on_a_gpu_the_host_does_not_wait(softcap):
    options = {"entropy": softcap is None, "temperature": 0.7, "softcap": softcap, "shift": 1}
    leaves, call = on_device(made((4, 500), 256, 4096, "bfloat16", **options), "cuda")
    with in_chunks(512) as ran:
        results(leaves, call, impl="cce")  # compiles
        assert FORMED[1] in ran
        own = {k: x.requires_grad_() for k, x in leaves.items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(ours(own, call, impl="cce")[0], list(own.values()))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("device", "impl", "backend"),
    [("cpu", "chunked", "aot_eager"), pytest.param("cuda", "cce", "inductor", marks=pytest.mark.gpu)],
)
def test_a_compiled_function(device, impl, backend):
    """Chunks of two sizes, and the third call compiles nothing."""
    leaves, call = on_device(made((2, 550), 256, 4096, "bfloat16", entropy=True, temperature=0.7, shift=1), device)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(smooth, backend=backend)
    with in_chunks(512) as ran:
        want = results(leaves, call, impl=impl)
        for calls in range(3):
            graphs = counters["stats"]["unique_graphs"]
            found = results(leaves, call, impl=impl, fn=compiled)
            assert (counters["stats"]["unique_graphs"] > graphs) == (calls == 0)
    assert FORMED[1] in ran
    assert not counters["graph_break"]
    for name, x in want.items():
        eps = 2.0**-7 if name in leaves else 2.0**-20
        np.testing.assert_allclose(found[name], x, rtol=eps, atol=eps * np.abs(x).max(), err_msg=name)


@pytest.mark.parametrize(
    "options", [{"reduction": "none"}, {"impl": "reference"}, {}], ids=["none", "reference", "auto"]
)
def test_a_loss_that_depends_on_no_number_has_gradients_of_zero(options):
    e, c = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    loss = linear_token_loss(e, c, torch.tensor([1, IGNORED, 2]), lambda x: torch.ones_like(x.lse), **options)
    loss.sum().backward()
    assert not e.grad.any()
    assert not c.grad.any()


def test_a_function_may_use_torch_func():
    """Where nobody has set hooks on saved tensors, none are set around it: torch.func.grad refuses them."""
    slope = lambda numbers, *_: torch.vmap(torch.func.grad(lambda x: x**3))(numbers.log_probs)  # noqa: E731
    plain = lambda numbers, *_: 3 * numbers.log_probs**2  # noqa: E731
    leaves, call = made((27,))
    found, want = (results(leaves, {**call, "reduction": "sum"}, fn=fn) for fn in (slope, plain))
    assert found.keys() == want.keys()
    for name, x in found.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-5)
