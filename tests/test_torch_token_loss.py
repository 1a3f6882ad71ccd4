"""cce_torch.linear_token_loss against full logits in float64, the built-in loss, and cce_jax's."""

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from cce_kernels.plan import choose
from cce_torch import linear_token_loss
from cce_torch.on_jax import bridge
from tests.call_torch import array, small_blocks
from tests.test_torch_vocab_in_forward import in_chunks
from tests.tolerance import assert_close

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IGNORED = -100
FORMED = ["torch_chunk_statistics", "torch_chunk_gradients"]


def smooth(numbers, old, advantage, beta):
    """No kink, at which a rounding would change the gradient."""
    gain = torch.exp(0.3 * (numbers.log_probs - old)) * advantage
    bonus = 0 if numbers.entropy is None else 0.1 * numbers.entropy
    return -gain - bonus + beta * numbers.lse**2


def nll(numbers):
    return -numbers.log_probs


def made(
    tokens=(3, 9), width=16, vocabulary=61, dtype="float32", *, seed=0, ignored=0.3, wide=False, **options
) -> tuple:
    """What is differentiated, and the rest of a call of `smooth`."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    of_c = torch.float32 if wide else TYPES[dtype]
    c = (normal(vocabulary, width) * 3 / width**0.5).to(of_c)
    leaves = {"e": normal(*tokens, width).to(TYPES[dtype]), "c": c.T.contiguous() if options.get("vocab_axis") else c}
    if options.pop("bias", False):
        leaves["bias"] = normal(vocabulary).to(of_c)
    targets = torch.tensor(rng.integers(0, vocabulary, tokens))
    targets[torch.tensor(rng.uniform(size=tokens)) < ignored] = IGNORED
    if options.get("temperature") == "each":
        options["temperature"] = torch.tensor(rng.uniform(0.3, 2.5, tokens), dtype=torch.float32)
    after = *tokens[:-1], tokens[-1] - options.get("shift", 0)
    arguments = normal(*after) - 3, normal(*after[:-1], 1), 0.01
    return leaves, {"targets": targets, "arguments": arguments, **options}


def truth(leaves: dict, call: dict, fn: Any = smooth) -> tuple:
    """The loss and the numbers from full logits."""
    call = {"shift": 0, "temperature": 1.0, "softcap": None, "logit_scale": 1.0, "reduction": "mean", **call}
    targets, shift, softcap = call["targets"], call["shift"], call["softcap"]
    temperature = torch.as_tensor(call["temperature"], device=targets.device).double().expand(targets.shape)
    e, c = leaves["e"], leaves["c"].T if call.get("vocab_axis") else leaves["c"]
    if shift:
        e, targets, temperature = e[..., :-shift, :], targets[..., shift:], temperature[..., :-shift]
    kept = targets != IGNORED
    z = call["logit_scale"] * (torch.where(kept[..., None], e, 0) @ c.T + leaves.get("bias", 0))
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature[..., None]
    lse = torch.logsumexp(z, -1)
    log_probs = z.gather(-1, targets.clamp(0)[..., None])[..., 0] - lse
    entropy = lse - (torch.softmax(z, -1) * z).sum(-1) if call.get("entropy") else None
    found = [None if x is None else torch.where(kept, x, 0) for x in (log_probs, lse, entropy)]
    numbers = mock.Mock(log_probs=found[0], lse=found[1], entropy=found[2])
    value = torch.where(kept, fn(numbers, *call["arguments"]), 0)
    if call["reduction"] != "none":
        items = call.get("num_items") or max(int(kept.sum()), 1)
        value = value.sum() / (items if call["reduction"] == "mean" else 1)
    return value, found


def ours(leaves: dict, call: dict, fn: Any = smooth, **more: Any) -> tuple:
    options = {"precision": "highest", **call, **more}
    targets, arguments = options.pop("targets"), options.pop("arguments")
    return linear_token_loss(
        leaves["e"], leaves["c"], targets, fn, *arguments, bias=leaves.get("bias"), return_numbers=True, **options
    )


def results(function: Any, leaves: dict, call: dict, **more: Any) -> dict[str, Any]:
    """The loss, the numbers, and the gradients of weights · loss; with `frozen`, of the others alone."""
    frozen = more.pop("frozen", ())
    own = {k: x.detach().requires_grad_(k not in frozen) for k, x in leaves.items()}
    value, (log_probs, lse, entropy) = function(own, call, **more)
    weights = torch.linspace(-2, 3, max(value.numel(), 1), dtype=value.dtype, device=value.device)
    weights = weights[: value.numel()].reshape(value.shape)
    wanted = [k for k in own if k not in frozen]
    gradients = torch.autograd.grad((weights * value).sum(), [own[k] for k in wanted])
    found = {"loss": value, "log_probs": log_probs, "lse": lse, "entropy": entropy}
    found = {k: x.detach() for k, x in found.items() if x is not None}
    for k, x in zip(wanted, gradients, strict=True):
        assert x.dtype == leaves[k].dtype, k
        found[k] = x.to(leaves["e"].dtype)  # of few tokens dz is rounded to it even where c is float32
    return {k: array(x) for k, x in found.items()}


def on_device(x: Any, device: str) -> Any:
    return tree_map(lambda y: y.to(device) if isinstance(y, torch.Tensor) else y, x)


def check(leaves: dict, call: dict, impl: str, fn: Any = smooth, **more: Any) -> None:
    with small_blocks():
        found = results(ours, leaves, call, impl=impl, fn=fn, **more)
        rounded = results(ours, leaves, call, impl="reference", fn=fn)
    dtype = leaves["e"].dtype  # in which a wide c is multiplied
    exact = results(truth, {k: x.to(dtype).double() for k, x in leaves.items()}, call, fn=fn)
    for name, x in found.items():
        if name in ("loss", "log_probs", "entropy"):  # sums and differences of numbers of this size
            size = max(1.0, np.abs(exact["lse"]).max(initial=0), np.abs(exact["loss"]).max(initial=0))
            assert np.abs(x - exact[name]).max(initial=0) <= 2.0**-18 * size * 4, name
        else:
            assert_close(x, exact[name], rounded[name], name)


@st.composite
def calls(draw) -> dict[str, Any]:
    """The arguments of `made`."""
    dtype = draw(st.sampled_from(list(TYPES)))
    options: dict[str, Any] = {
        "tokens": draw(st.sampled_from([(5,), (3, 9), (2, 3, 4)])),
        "dtype": dtype,
        "seed": draw(st.integers(0, 99)),
        "ignored": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "entropy": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, 4.0])),
        "logit_scale": draw(st.sampled_from([1.0, 1.3])),
        "vocab_axis": draw(st.integers(0, 1)),
        "shift": draw(st.integers(0, 2)),
        "temperature": draw(st.sampled_from([1.0, 0.7, "each"])),
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "bias": draw(st.booleans()),
        "wide": dtype != "float32" and draw(st.booleans()),
    }
    if options["reduction"] == "mean" and draw(st.booleans()):
        options["num_items"] = 7.5
    return options


@settings(max_examples=10)
@given(
    calls(),
    st.sampled_from(["chunked", "torch_compile"]),
    st.sampled_from([None, 4, 8]),
    st.sampled_from(["", "e", "c"]),
)
@example(dict(entropy=True, temperature="each", bias=True, softcap=4.0, shift=1, vocab_axis=1), "chunked", 8, "")
@example(dict(entropy=True, dtype="bfloat16", wide=True, temperature=0.7), "chunked", 8, "")
@example(dict(entropy=True, dtype="float16", bias=True), "chunked", 8, "e")
@example(dict(entropy=True, dtype="bfloat16", temperature="each", tokens=(40,)), "cce", 16, "")
def test_loss_numbers_and_gradients(x, impl, size, frozen):
    with in_chunks(size) if size else contextlib.nullcontext([]) as ran:
        check(*made(**x), impl, frozen=(frozen,) if frozen else ())
    if size and impl != "torch_compile":
        assert (FORMED[1] in ran) == (x.get("reduction") != "none"), ran


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
    assert max(sizes) <= 32 * 512 < 100 * 300, max(sizes)
    value.detach_()
    for reduction, grad in (("none", True), ("mean", False)):  # no one factor, no gradient: all tokens at once
        lengths.clear()
        with in_chunks(32) as ran, torch.set_grad_enabled(grad):
            ours(own, call, fn, reduction=reduction)
        assert ran == ["torch_loss"]
        assert lengths == [{(100,)}]


def test_the_plan_says_whether_gradients_are_formed_in_the_forward_pass():
    leaves, call = made((2, 300), vocabulary=200, entropy=True)
    own = {k: x.requires_grad_() for k, x in leaves.items()}
    found = []
    for forms in (True, False):
        with in_chunks(None) as ran, mock.patch.object(choose, "_may_form_in_forward", return_value=forms):
            found.append(torch.autograd.grad(ours(own, call)[0], list(own.values())))
            assert (FORMED[1] in ran) == forms, ran
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def policy_loss(leaves: dict, call: dict, **options: Any) -> Any:
    """(e, c) -> the loss."""
    options = {"impl": "chunked", **options}
    return lambda e, c: ours({**leaves, "e": e, "c": c}, call, **options)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_through_autograd_gives_the_same_bits(dtype):
    leaves, call = made((40,), dtype=dtype, entropy=True)
    own = [leaves[k].requires_grad_() for k in ("e", "c")]
    loss = policy_loss(leaves, call)

    def same(found, want):
        assert all(map(torch.equal, found, want))

    with in_chunks(16) as ran:
        want, doubled = (torch.autograd.grad(k * loss(*own), own) for k in (1, 2))
        value = loss(*own)
        same(torch.autograd.grad(value, own, retain_graph=True), want)
        same(torch.autograd.grad(value, own[1], retain_graph=True), want[1:])
        same(torch.autograd.grad(2 * value, own, retain_graph=True), doubled)
        batched = torch.autograd.grad(value, own, torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True)
        for x, y, z in zip(batched, want, doubled, strict=True):
            torch.testing.assert_close(x, torch.stack([y, z]))
        same(torch.autograd.grad(value, own), want)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(value, own)
        for reentrant in (False, True):
            ran.clear()
            value = checkpoint(loss, *own, use_reentrant=reentrant)
            assert ran == ["torch_loss" if reentrant else "torch_shard_statistics"]
            for x in own:
                x.grad = None
            value.backward()
            same([x.grad for x in own], want)
        with torch.autograd.graph.save_on_cpu():
            value = loss(*own)
        same(torch.autograd.grad(value, own), want)
        created = torch.autograd.grad(loss(*own), own, create_graph=True)
        same([x.detach() for x in created], want)
        for x in own:  # by each of them: none is dropped
            with pytest.raises(NotImplementedError, match="first derivatives"):
                torch.autograd.grad(created[0].sum(), x, retain_graph=True)
        de, _ = torch.autograd.grad(torch.inf * loss(*own), own)
        assert (de == 0).all(1).equal(call["targets"] == IGNORED)
    assert want[0].any()


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_of_an_ignored_token_gets_out(impl, reduction):
    leaves, call = made((3, 9), entropy=True, reduction=reduction)
    ignored = call["targets"] == IGNORED
    old, *others = call["arguments"]
    bad = {**leaves, "e": torch.where(ignored[..., None], torch.nan, leaves["e"])}
    bad_call = {**call, "arguments": (torch.where(ignored, torch.nan, old), *others)}

    def fn(numbers, old, advantage, beta):  # not finite where the numbers are 0, and neither is its derivative
        return smooth(numbers, old, advantage, beta) + 0.1 * torch.log(-numbers.log_probs)

    with small_blocks(), in_chunks(8):
        found, clean = (results(ours, *x, fn=fn, impl=impl) for x in ((bad, bad_call), (leaves, call)))
    for name, x in found.items():
        assert np.isfinite(x).all(), name
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
    assert not found["e"][ignored.numpy()].any()


E, C, T = torch.ones(2, 3, 4), torch.ones(9, 4), torch.zeros(2, 3, dtype=torch.int64)
LEAF, MASK = torch.ones((), requires_grad=True), torch.ones(6, dtype=torch.bool)


def times(numbers, x):
    return numbers.log_probs * x


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be a function of numbers and arguments, got int"),
        ({"fn": lambda n: 1.0}, TypeError, r"fn must return a torch\.Tensor.*returned float"),
        ({"fn": lambda n: n.lse[MASK]}, ValueError, r"fn fails for 2 tokens: The shape of the mask \[6\].*as an"),
        ({"fn": times, "arguments": [torch.ones(2)]}, ValueError, r"argument 0 of fn \(2,\) must broadcast.*\(2, 3\)"),
        ({"fn": times, "arguments": [torch.ones(2, 3)], "shift": 1}, ValueError, r"of fn \(2, 3\) must .*\(2, 2\)"),
        ({"fn": times, "arguments": [LEAF]}, TypeError, "argument 0 of fn requires a gradient.*linear_log_probs"),
        ({"fn": times, "arguments": [[1.0]]}, TypeError, r"argument 0 of fn must be a torch\.Tensor, got list"),
        ({"fn": times, "arguments": [jnp.ones(3)]}, TypeError, r"is a jax\.Array: cce_jax\.linear_token_loss"),
        ({"targets": T[:, :2]}, ValueError, r"targets.*\(2, 3\).*\(2, 2\)"),
        ({"targets": None}, TypeError, r"targets must be a torch\.Tensor, got NoneType"),
        ({"entropy": "detached"}, ValueError, r"entropy='detached' must be one of False, True"),
        ({"return_numbers": 1}, ValueError, "return_numbers=1 must be one of False, True"),
        ({"temperature": 0.0}, ValueError, r"temperature=0\.0 must be finite and positive"),
        ({"temperature": jnp.ones(())}, TypeError, r"temperature is a jax\.Array: cce_jax\.linear_token_loss"),
        ({"reduction": "max"}, ValueError, "reduction='max' must be one of 'mean', 'sum', 'none'"),
        ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items divides the loss with reduction='mean' only"),
        ({"num_items": torch.ones(2)}, ValueError, r"num_items must be a number or a tensor of one element.*\(2,\)"),
        ({"c": C.T}, ValueError, r"did you mean vocab_axis=1\?"),
        ({"targets": T + 9, "check_targets": True}, ValueError, r"targets\[0, 0\] = 9 is outside \[0, 9\)"),
        ({"vocab_parallel": 3}, TypeError, r"vocab_parallel must be a cce_torch\.VocabParallel, got int"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else None,
)
def test_bad_input(changed, error, message):
    options = {"e": E, "c": C, "targets": T, "fn": nll, **changed}
    given_ = [options.pop(k) for k in ("e", "c", "targets", "fn")]
    with pytest.raises(error, match=message):
        linear_token_loss(*given_, *options.pop("arguments", ()), **options)


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
def test_kernels_on_a_gpu_and_a_host_that_does_not_wait(softcap):
    leaves, call = made(
        (4, 500), 256, 4096, "bfloat16", entropy=softcap is None, temperature=0.7, softcap=softcap, shift=1
    )
    there, on = on_device((leaves, call), "cuda")
    with in_chunks(512) as ran:
        first = results(ours, there, on, impl="cce")
        assert FORMED[1] in ran
        own = {k: x.requires_grad_() for k, x in there.items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(ours(own, on, impl="cce")[0], list(own.values()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        again = results(ours, there, on, impl="cce")
    rounded = results(ours, leaves, call, impl="reference")
    exact = results(truth, {k: x.double() for k, x in leaves.items()}, call)
    for name, x in first.items():
        np.testing.assert_array_equal(x, again[name], err_msg=name)
        if name in leaves:
            assert_close(x, exact[name], rounded[name], name)
        else:
            np.testing.assert_allclose(x, exact[name], rtol=1e-4, atol=1e-4, err_msg=name)


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
        want = results(ours, leaves, call, impl=impl)
        for calls in range(3):
            graphs = counters["stats"]["unique_graphs"]
            found = results(ours, leaves, call, impl=impl, fn=compiled)
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
