"""cce_torch.linear_token_loss against full logits in float64, the built-in loss, and cce_jax's."""

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import cce_jax
from cce_kernels.plan import choose
from cce_torch import VocabParallel, linear_cross_entropy, linear_token_loss
from cce_torch.on_jax import bridge
from tests.call_torch import array, small_blocks
from tests.test_torch_distributed import assert_same_everywhere, in_processes
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


@pytest.mark.parametrize(
    ("dtype", "softcap", "shift"), [("float32", 4.0, 0), ("bfloat16", None, 2), ("float16", None, 1)]
)
def test_the_loss_by_itself_is_cross_entropy(dtype, softcap, shift):
    leaves, call = made((3, 50), dtype=dtype)
    own = [x.requires_grad_() for x in leaves.values()]
    options = {"softcap": softcap, "shift": shift, "impl": "chunked"}
    with in_chunks(64):
        for reduction, items in (("mean", None), ("sum", None), ("mean", torch.tensor(11)), ("mean", 0)):
            options |= {"reduction": reduction, "num_items": items}
            value = linear_token_loss(*own, call["targets"], nll, **options)
            want = linear_cross_entropy(*own, call["targets"], **options)
            torch.testing.assert_close(value, want, rtol=1e-6, atol=0)
            for x, y in zip(*(torch.autograd.grad(z, own) for z in (value, want)), strict=True):
                eps = torch.finfo(x.dtype).eps
                torch.testing.assert_close(x, y, rtol=eps, atol=eps * float(y.abs().max()))


@pytest.mark.parametrize("shift", [0, 2])
def test_jax_has_the_same_loss(shift):
    leaves, call = made((3, 9), entropy=True, softcap=6.0, temperature="each", shift=shift, bias=True)
    options = {k: x for k, x in call.items() if k not in ("targets", "arguments")}
    arguments = [jnp.asarray(x) for x in call["arguments"]]
    options["temperature"] = jnp.asarray(options["temperature"])

    def of_jax(numbers, old, advantage, beta):
        return -jnp.exp(0.3 * (numbers.log_probs - old)) * advantage - 0.1 * numbers.entropy + beta * numbers.lse**2

    def there(e, c, bias):
        targets = jnp.asarray(call["targets"])
        return cce_jax.linear_token_loss(e, c, targets, of_jax, *arguments, bias=bias, return_numbers=True, **options)

    given_ = [jnp.asarray(x) for x in leaves.values()]
    (value, numbers), gradients = jax.value_and_grad(there, (0, 1, 2), has_aux=True)(*given_)
    found = results(ours, leaves, call)
    gradients = [-2 * x for x in gradients]  # the weight of a loss that is a scalar, in `results`
    want = {"loss": value, **numbers._asdict(), **dict(zip(leaves, gradients, strict=True))}
    assert list(found) == list(want)
    for name, x in found.items():
        np.testing.assert_allclose(x, want[name], atol=1e-5 * max(1, np.abs(want[name]).max()), err_msg=name)


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


def test_compiled_and_transformed():
    torch._dynamo.reset()
    leaves, call = made((3, 9), entropy=True, shift=1, temperature=0.7)
    loss, own = policy_loss(leaves, call), [leaves["e"].requires_grad_(), leaves["c"].requires_grad_()]
    want = torch.autograd.grad(loss(*own), own)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*own), own), want)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(*(x.detach() for x in own)), want)


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


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_a_target_out_of_range_is_nan_and_reaches_no_other_row(impl):
    leaves, call = made((20,), ignored=0.0)
    call["targets"][7] = 61
    with small_blocks(), in_chunks(8):
        found = results(ours, leaves, call, impl=impl)
    assert np.isnan(found["loss"])
    assert np.flatnonzero(np.isnan(found["log_probs"])).tolist() == [7]
    assert np.flatnonzero(np.isnan(found["e"]).any(-1)).tolist() == [7]


@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_no_tokens_and_all_ignored(impl):
    for shape, ignored in (((0,), 0.0), ((3, 0), 0.0), ((12,), 1.0)):
        with small_blocks(), in_chunks(8):
            found = results(ours, *made(shape, ignored=ignored, entropy=True), impl=impl)
        assert found["log_probs"].shape == shape
        assert not any(x.any() for x in found.values())


def test_a_loss_that_depends_on_no_number():
    leaves, call = made((20,))
    with in_chunks(8):
        value = ours({k: x.requires_grad_() for k, x in leaves.items()}, call, lambda n, *_: torch.ones_like(n.lse))[0]
        assert value == 1
        assert not any(x.any() for x in torch.autograd.grad(value, list(leaves.values())))


def test_autocast():
    leaves, call = made((40,), wide=True)
    own = {k: x.float().requires_grad_() for k, x in leaves.items()}
    cast = {"e": own["e"].bfloat16(), "c": own["c"]}
    with in_chunks(16) as ran:
        with torch.autocast("cpu", torch.bfloat16):
            value = ours(own, call)[0]
        found = torch.autograd.grad(value, list(own.values()))
        want = torch.autograd.grad(ours(cast, call)[0], list(own.values()))
    assert ran.count(FORMED[1]) == 6
    for x, y in zip(found, want, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-7 * float(y.abs().max()))


@pytest.mark.parametrize("impl", ["torch_compile", "reference"])
def test_float64(impl):
    leaves, call = made(entropy=True, bias=True)
    leaves = {k: x.double() for k, x in leaves.items()}
    with small_blocks():
        found, exact = results(ours, leaves, call, impl=impl), results(truth, leaves, call)
    for name, x in found.items():
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, exact[name], rtol=1e-9, atol=1e-9, err_msg=name)


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


def check_split() -> None:
    """Each process of a vocabulary split has the loss, the numbers and the gradients of one process."""
    stop = (30, 61)[dist.get_rank()]
    rows = slice((0, 30)[dist.get_rank()], stop)
    shard = VocabParallel(None, rows.start, stop)
    for seed, (dtype, options) in enumerate(
        [
            ("float32", {"entropy": True, "softcap": 4.0, "temperature": "each", "bias": True, "reduction": "sum"}),
            ("bfloat16", {"entropy": True, "temperature": 0.7, "num_items": 9.0}),
            ("bfloat16", {"shift": 1, "reduction": "none"}),
        ]
    ):
        leaves, call = made((3, 9), dtype=dtype, seed=seed, **options)
        own = {k: x if k == "e" else x[rows].clone() for k, x in leaves.items()}
        with in_chunks(8) as ran:
            found = results(ours, own, call, impl="chunked", vocab_parallel=shard)
        assert (FORMED[1] in ran) == (options.get("reduction") != "none"), ran
        rounded = results(ours, leaves, call, impl="reference")
        exact = results(truth, {k: x.double() for k, x in leaves.items()}, call)
        for name, x in found.items():
            part = rows if name in ("c", "bias") else slice(None)
            if name in ("c", "bias", "e", "lse"):
                assert_close(x, exact[name][part], rounded[name][part], name)
            else:
                np.testing.assert_allclose(x, exact[name], rtol=1e-4, atol=1e-4, err_msg=name)
            if name == "loss":
                assert_same_everywhere(torch.tensor(x), name)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_a_vocabulary_that_processes_split():
    in_processes(2, check_split)


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


def clipped(numbers, old, advantage, weight):
    """Of GRPO and PPO."""
    ratio = torch.exp(numbers.log_probs - old)
    return -weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def with_a_bonus(numbers, old, advantage, weight):
    return -weight * (numbers.log_probs * advantage + 0.1 * numbers.entropy)


def focal(numbers, old, advantage, weight):
    return -weight * (1 - torch.exp(numbers.log_probs)) ** 2 * numbers.log_probs


def drawn(seed: int, tokens: int = 2500, width: int = 512, vocabulary: int = 20_000, device: str = "cuda") -> tuple:
    """The arguments of `check` and those that it passes on: a call of at most these sizes. Some weights are 0."""
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    size, shift, fn = int(rng.integers(3, tokens)), pick(0, 0, 2), (clipped, with_a_bonus, focal)[seed % 3]
    options = {
        "dtype": pick("float32", "float16", "bfloat16", "bfloat16"),
        "entropy": fn is with_a_bonus or pick(False, True),
        "softcap": pick(None, 4.0),
        "logit_scale": pick(1.0, 1.3),
        "vocab_axis": pick(0, 1),
        "temperature": pick(1.0, 0.7, "each"),
        "reduction": pick("mean", "sum", "none"),
        "bias": pick(False, True),
    }
    options |= {"wide": options["dtype"] != "float32" and pick(False, True), "shift": shift, "seed": seed}
    shape = pick((size,), (2, 1 + size // 2))
    width, vocabulary = width // pick(1, 2, 4) - pick(0, 0, 1), int(rng.integers(vocabulary // 20, vocabulary))
    leaves, call = on_device(made(shape, width, vocabulary - pick(0, 1) * (vocabulary % 64), **options), device)
    exact = {k: x.double() for k, x in leaves.items()}
    log_probs = truth(exact, {**call, "arguments": ()}, nll)[1][0]

    def normal(*values):
        """Normal numbers of the shape of the results around some of these values."""
        found = rng.choice(values, log_probs.shape) + 0.02 * rng.standard_normal(log_probs.shape)
        return torch.tensor(found, dtype=torch.float32, device=device)

    old = log_probs.float() - normal(-0.5, -0.1, 0.1, 0.5)  # no ratio is near a bound of the clip
    weight = torch.tensor(rng.uniform(0, 2, log_probs.shape) * (rng.random(log_probs.shape) < 0.7)).to(old)
    call = {**call, "arguments": (old, normal(-1, 1, 2), weight)}
    return (leaves, call, pick("auto", "cce", "chunked")), {"fn": fn, "memory_budget": pick(0, 2**22, None, "all")}


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


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_drawn_calls_on_a_gpu(seed):
    arguments, more = drawn(seed)
    check(*arguments, **more)


@pytest.mark.parametrize(
    "options", [{"reduction": "none"}, {"impl": "reference"}, {}], ids=["none", "reference", "auto"]
)
def test_a_loss_that_depends_on_no_number_has_gradients_of_zero(options):
    e, c = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    loss = linear_token_loss(e, c, torch.tensor([1, IGNORED, 2]), lambda x: torch.ones_like(x.lse), **options)
    loss.sum().backward()
    assert not e.grad.any()
    assert not c.grad.any()
