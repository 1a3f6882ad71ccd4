"""cce_torch.linear_log_probs against full logits in float64: numbers, gradients, and what a call does not do."""

import contextlib
import re
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import cce_torch
from cce_torch import chosen, linear_log_probs, ops
from cce_torch.on_jax import programs
from cce_torch.processes import shard_programs
from tests.call_torch import array, small_blocks
from tests.test_torch_distributed import in_processes
from tests.tolerance import assert_close, assert_reference, roundoff

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IMPLS = ("auto", "chunked", "cce", "torch_compile")
IGNORED = -100


class Drawn(NamedTuple):
    """The tensors of a call, its options, and the cotangents of log_probs, lse and entropy, (3, ...)."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    of: torch.Tensor


def made(
    tokens=(3, 7),
    width=16,
    vocabulary=83,
    dtype="float32",
    *,
    bias=False,
    temperature="none",
    targets=True,
    size=1.0,
    ignored=0.3,
    seed=0,
    **options,
) -> Drawn:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.tensor(rng.standard_normal(shape), dtype=torch.float32)

    c = (normal(vocabulary, width) * 3 / width**0.5).to(TYPES[dtype])
    found: dict[str, Any] = {
        "e": (size * normal(*tokens, width)).to(TYPES[dtype]),
        "c": c.T.contiguous() if options.get("vocab_axis") else c,
        "bias": normal(vocabulary).to(TYPES[dtype]) if bias else None,
        "targets": None,
    }
    if targets:
        ids = torch.tensor(rng.integers(0, vocabulary, tokens))
        ids[torch.tensor(rng.uniform(size=tokens)) < ignored] = IGNORED
        found["targets"] = ids
    else:
        options.pop("shift", None)
    each = torch.tensor(rng.uniform(0.3, 2.5, tokens), dtype=torch.float32)
    options |= {"number": {"temperature": 0.7}, "each": {"temperature": each}}.get(temperature, {})
    shift = int(options.get("shift", 0))
    return Drawn(found, options, normal(3, *(*tokens[:-1], tokens[-1] - shift)))


def on_device(x: Drawn, device: str) -> Drawn:
    return tree_map(lambda y: y.to(device) if isinstance(y, torch.Tensor) else y, x)


def truth(x: Drawn) -> dict[str, np.ndarray]:
    """The numbers, and the gradients of Σ of · numbers."""
    leaves = {k: y.double().requires_grad_() for k, y in x.tensors.items() if y is not None and k != "targets"}
    targets, options, shift = x.tensors["targets"], x.options, int(x.options.get("shift", 0))
    temperature = torch.as_tensor(options.get("temperature", 1.0), device=x.of.device).double()
    e, c = leaves["e"], leaves["c"].T if options.get("vocab_axis") else leaves["c"]
    kept = torch.ones(e.shape[:-1], dtype=torch.bool) if targets is None else targets != IGNORED
    temperature = temperature.expand(e.shape[:-1])
    if shift:
        kept, e, temperature = kept[..., shift:], e[..., :-shift, :], temperature[..., :-shift]
        targets = targets[..., shift:]
    z = options.get("logit_scale", 1.0) * (torch.where(kept[..., None], e, 0) @ c.T + leaves.get("bias", 0))
    softcap = options.get("softcap")
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / torch.where(kept, temperature, 1)[..., None]
    lse, mean = torch.logsumexp(z, -1), (torch.softmax(z, -1) * z).sum(-1)
    numbers = {"lse": lse, "entropy": lse - mean}
    numbers["entropy"] = numbers["entropy"].detach() if options.get("entropy") == "detached" else numbers["entropy"]
    if targets is not None:
        numbers["log_probs"] = z.gather(-1, targets.clamp(0)[..., None])[..., 0] - lse
    numbers = {k: torch.where(kept, y, 0) for k, y in numbers.items()}
    return results(numbers, leaves, x)


def ours(x: Drawn, impl: str, **more) -> dict[str, np.ndarray]:
    leaves = {k: y.clone().requires_grad_() for k, y in x.tensors.items() if y is not None and k != "targets"}
    bias = leaves.get("bias")
    options = {"precision": "highest", "impl": impl, **x.options, **more}
    found = linear_log_probs(leaves["e"], leaves["c"], x.tensors["targets"], bias, **options)
    assert (found.log_probs is None) == (x.tensors["targets"] is None)
    assert (found.entropy is None) == (not x.options.get("entropy"))
    return results({k: y for k, y in found._asdict().items() if y is not None}, leaves, x)


def results(numbers: dict[str, Any], leaves: dict[str, torch.Tensor], x: Drawn) -> dict[str, np.ndarray]:
    asked = [
        k for k in ("log_probs", "lse", "entropy") if k in numbers and (k != "entropy" or x.options.get("entropy"))
    ]
    weights = dict(zip(("log_probs", "lse", "entropy"), x.of, strict=True))
    objective = sum((weights[k].to(numbers[k].dtype) * numbers[k]).sum() for k in asked if numbers[k].requires_grad)
    gradients = torch.autograd.grad(objective, list(leaves.values()))  # type: ignore[arg-type]
    found = {k: numbers[k].detach() for k in asked} | dict(zip(leaves, gradients, strict=True))
    return {k: array(y) for k, y in found.items()}


def served(x: Drawn, impl: str) -> bool:
    """Whether the impl has the call: the kernels have no mean and no temperatures yet."""
    return impl != "cce" or not (x.options.get("entropy") or "temperature" in x.options)


def check(x: Drawn, impl: str, **more) -> None:
    with small_blocks():
        exact, reference, found = truth(x), ours(x, "reference"), ours(x, impl, **more)
    assert set(found) == set(reference) == set(exact)
    largest = max(1.0, *(np.abs(exact[k]).max(initial=0) for k in ("lse", "log_probs") if k in exact))
    for name, value in found.items():
        assert value.shape == exact[name].shape
        if name in ("entropy", "log_probs"):  # differences of numbers of this size
            assert value.dtype == np.float32
            assert np.abs(value - exact[name]).max(initial=0) <= 16 * roundoff("float32") * 2 * largest, name
        else:
            assert_reference(reference[name], exact[name], name)
            assert_close(value, exact[name], reference[name], name)


@st.composite
def calls(draw) -> Drawn:
    shape = draw(st.sampled_from([(5,), (3, 7), (2, 3, 4), (1, 1)]))
    options = {
        "entropy": draw(st.sampled_from([False, True, "detached"])),
        "softcap": draw(st.sampled_from([None, 4.0])),
        "logit_scale": draw(st.sampled_from([None, 1.3])) or 1.0,
        "vocab_axis": draw(st.integers(0, 1)),
        "shift": draw(st.integers(0, min(2, shape[-1] - 1))),
    }
    return made(
        shape,
        vocabulary=draw(st.sampled_from([1, 30, 203])),
        dtype=draw(st.sampled_from(list(TYPES))),
        bias=draw(st.booleans()),
        temperature=draw(st.sampled_from(["none", "number", "each"])),
        targets=draw(st.booleans()),
        size=draw(st.sampled_from([0.1, 1.0, 4.0])),
        ignored=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 99)),
        **options,
    )


@settings(max_examples=12)
@given(calls(), st.sampled_from(IMPLS), st.sampled_from([None, "all"]))
@example(made(entropy=True, temperature="each", bias=True, softcap=4.0, shift=1, vocab_axis=1), "chunked", None)
@example(made(entropy="detached", temperature="number", dtype="bfloat16"), "chunked", "all")
@example(made(entropy=True, temperature="each", dtype="float16", bias=True), "torch_compile", None)
@example(made(targets=False, entropy=True), "auto", None)
def test_numbers_and_gradients(x, impl, memory_budget):
    impl = impl if served(x, impl) else "chunked"
    check(x, impl, memory_budget=memory_budget)


@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_nothing_of_an_ignored_token_gets_out(impl):
    x = made(entropy=True, temperature="each", ignored=0.5)
    ignored = x.tensors["targets"] == IGNORED
    hidden = x.tensors["e"].clone(), x.options["temperature"].clone()
    for y in hidden:
        y[ignored] = torch.nan
    bad = x._replace(tensors=x.tensors | {"e": hidden[0]}, options=x.options | {"temperature": hidden[1]})
    with small_blocks():
        found, clean = ours(bad, impl), ours(x, impl)
    for name in found:
        assert np.isfinite(found[name]).all(), name
        np.testing.assert_array_equal(found[name], clean[name], err_msg=name)
    assert not any(found[name][ignored.numpy()].any() for name in ("log_probs", "lse", "entropy", "e"))


@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_a_target_out_of_range_is_nan_and_reaches_no_other_row(impl):
    x = made(entropy=True, ignored=0.0)
    targets = x.tensors["targets"].clone()
    targets[1, 2] = 83
    with small_blocks():
        found = ours(x._replace(tensors=x.tensors | {"targets": targets}), impl)
    bad = np.zeros((3, 7), bool)
    bad[1, 2] = True
    assert (np.isnan(found["log_probs"]) == bad).all()
    assert (np.isnan(found["e"]).any(-1) == bad).all()
    assert np.isfinite(found["entropy"]).all()


@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_a_detached_entropy_has_no_gradient_and_its_backward_pass_no_mean(impl, monkeypatch):
    run, seen = programs._gradients_program, []
    monkeypatch.setattr(programs, "_gradients_program", lambda k, *x: (seen.append(k.call.with_mean), run(k, *x))[1])
    x = made(dtype="bfloat16")
    with small_blocks():
        plain = ours(x, impl)
        for entropy in ("detached", True):
            asked = x._replace(options=x.options | {"entropy": entropy})
            leaves = {k: y.clone().requires_grad_() for k, y in x.tensors.items() if k in ("e", "c")}
            found = linear_log_probs(*leaves.values(), x.tensors["targets"], impl=impl, **asked.options)
            assert found.entropy.requires_grad == (entropy is True)
            if entropy == "detached":
                of = ours(asked, impl)
                assert all(np.array_equal(of[name], plain[name]) for name in plain)
            torch.autograd.grad((found.log_probs + (found.entropy if entropy is True else 0)).sum(), leaves.values())
    if impl == "chunked":
        assert seen == [False, False, False, True]


@pytest.mark.parametrize(("impl", "frozen"), [("cce", None), ("chunked", "c")])
def test_what_is_saved_with_a_detached_entropy(impl, frozen, monkeypatch):
    """As without one: exponentials, or m where the gradient of e alone is wanted. Also where a profiler looks on."""
    left, run = [], programs.gradients
    monkeypatch.setattr(
        programs, "gradients", lambda k, given, saved, *x: (left.append(saved.left), run(k, given, saved, *x))[1]
    )
    x, found = made((200,), dtype="bfloat16", vocabulary=256, width=64), []
    for entropy, profiled in ((False, False), ("detached", False), ("detached", True)):
        own = {k: x.tensors[k].clone().requires_grad_(k != frozen) for k in ("e", "c")}
        numbers = linear_log_probs(**own, targets=x.tensors["targets"], entropy=entropy, impl=impl, memory_budget="all")
        with torch.autograd.profiler.profile() if profiled else contextlib.nullcontext():
            found.append(torch.autograd.grad(numbers.log_probs.sum(), [y for y in own.values() if y.requires_grad]))
    assert [len(y) for y in left] == [1, 1, 1]
    for gradients in found[1:]:
        for y, z in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(y, z)


def test_without_gradients_there_is_no_graph():
    x = made(entropy=True)
    found = linear_log_probs(**x.tensors, impl="chunked", entropy=True)
    with torch.no_grad():
        leaves = {k: y if y is None or k == "targets" else y.clone().requires_grad_() for k, y in x.tensors.items()}
        assert not any(
            y.requires_grad for y in linear_log_probs(**leaves, impl="chunked", entropy=True) if y is not None
        )
    assert not any(y.requires_grad for y in found if y is not None)


def test_new_temperatures_compile_nothing_and_1_is_none(monkeypatch):
    x, made_programs = made(entropy=True), []
    jitted = programs.jitted
    monkeypatch.setattr(programs, "jitted", lambda *y: (made_programs.append(y[0].__name__), jitted(*y))[1])

    def run(temperature):
        e = x.tensors["e"].clone().requires_grad_()
        found = linear_log_probs(e, x.tensors["c"], x.tensors["targets"], temperature=temperature, impl="chunked")
        return found.log_probs.detach(), torch.autograd.grad(found.log_probs.sum(), e)[0]

    programs._loss_program.cache_clear()
    programs._gradients_program.cache_clear()
    plain = run(1.0)
    assert len(made_programs) == 2
    assert all(map(torch.equal, plain, run(1)))
    assert len(made_programs) == 2
    for temperature in (0.5, 0.7, torch.tensor(0.9), torch.rand(7) + 0.5, torch.rand(3, 1) + 0.5):
        run(temperature)
        assert len(made_programs) == 4
    torch.testing.assert_close(run(torch.ones(3, 7)), plain)


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_torch_compile_makes_one_graph_for_all_temperatures(impl):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    x = made(entropy=True, shift=1)

    def run(e, c, targets, temperature):
        found = linear_log_probs(e, c, targets, entropy=True, shift=1, temperature=temperature, impl=impl)
        return found, (found.log_probs + 0.1 * found.entropy).sum()

    compiled, graphs = torch.compile(run, fullgraph=True, backend="aot_eager"), []
    with small_blocks():
        for k in range(5):
            results = []
            for call in (compiled, run):
                leaves = [x.tensors[name].clone().requires_grad_() for name in ("e", "c")]
                found, total = call(*leaves, x.tensors["targets"], 0.5 + 0.1 * k)
                results.append([found.log_probs, found.entropy, *torch.autograd.grad(total, leaves)])
            for y, z in zip(*results, strict=True):
                torch.testing.assert_close(y, z)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1] <= 2  # torch.compile takes a number for a constant until it changes


def test_compiled_without_targets():
    torch._dynamo.reset()
    x = made(targets=False)

    def run(e):
        return linear_log_probs(e, x.tensors["c"], entropy=True, impl="chunked").entropy

    leaves = [x.tensors["e"].clone().requires_grad_() for _ in range(2)]
    calls = torch.compile(run, fullgraph=True, backend="aot_eager"), run
    found = [torch.autograd.grad(call(e).sum(), e)[0] for call, e in zip(calls, leaves, strict=True)]
    torch.testing.assert_close(*found)


def test_opcheck():
    x = made(ignored=0.3)
    e, c, targets = (x.tensors[k] for k in ("e", "c", "targets"))
    call = cce_torch.call.Call(reduction="none", impl="chunked", with_mean=True, with_temperature=True)
    inverse = torch.rand(21) + 0.5
    given = e.flatten(0, 1), c, None, targets.flatten(), None, None, None, inverse, torch.tensor([0.0, 0.0, 1.0]), 1
    torch.library.opcheck(torch.ops.cce_torch.loss.default, (*given, [], False, *call.encoded()))
    _, statistics, _ = torch.ops.cce_torch.loss.default(*given, [], False, *call.encoded())
    wanted = [True, True, False, False]
    arguments = None, torch.rand_like(statistics), *given, statistics, *[None] * ops.LEFT, [], wanted, False
    torch.library.opcheck(torch.ops.cce_torch.gradients.default, (*arguments, *call.encoded()))


def test_transforms_of_functions():
    x = made(entropy=True)
    e, c, targets = (x.tensors[k] for k in ("e", "c", "targets"))

    def total(e, c, targets):
        found = linear_log_probs(e, c, targets, entropy=True, temperature=0.7, impl="chunked")
        return (found.log_probs + found.entropy).sum()

    leaves = [y.clone().requires_grad_() for y in (e, c)]
    expected = torch.autograd.grad(total(*leaves, targets), leaves)
    torch.testing.assert_close(torch.func.grad(total, (0, 1))(e, c, targets), expected)
    each = torch.func.vmap(torch.func.grad(total), (0, None, 0))(e, c, targets)
    torch.testing.assert_close(each, expected[0])


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_no_tokens(shape, impl):
    e, c = torch.ones(*shape, 4, requires_grad=True), torch.ones(9, 4, requires_grad=True)
    found = linear_log_probs(e, c, torch.zeros(shape, dtype=torch.int64), entropy=True, temperature=0.5, impl=impl)
    assert all(y.shape == shape for y in found if y is not None)
    de, dc = torch.autograd.grad((found.log_probs + found.entropy).sum(), [e, c])
    assert de.shape == e.shape
    assert not dc.any()


@pytest.mark.parametrize("impl", ["torch_compile", "reference"])
def test_float64(impl):
    x = made(entropy=True, temperature="each", bias=True)
    x = x._replace(tensors={k: y if k == "targets" else y.double() for k, y in x.tensors.items()})
    with small_blocks():
        exact, found = truth(x), ours(x, impl)
    for name in exact:
        np.testing.assert_allclose(found[name], exact[name], rtol=1e-6, atol=1e-7, err_msg=name)  # 1/T is of float32


E, C, T = torch.ones(2, 3, 4), torch.ones(9, 4), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"targets": T[:, :2]}, ValueError, r"targets.*\(2, 3\).*\(2, 2\)"),
        ({"targets": T.float()}, TypeError, r"targets.*integer.*float32"),
        ({"e": None}, TypeError, r"e must be a.*NoneType"),
        ({"e": None, "targets": None}, TypeError, r"e must be a.*NoneType"),
        ({"c": jnp.ones((9, 4))}, TypeError, r"c is a jax\.Array: cce_jax\.linear_log_probs takes those"),
        ({"c": C.T}, ValueError, r"did you mean vocab_axis=1\?"),
        ({"bias": torch.ones(4)}, ValueError, r"bias.*\(9,\).*\(4,\)"),
        ({"temperature": 0.0}, ValueError, r"temperature=0\.0 must be finite and positive"),
        ({"temperature": jnp.ones(())}, TypeError, r"temperature is a jax\.Array: cce_jax\.linear_log_probs"),
        ({"temperature": torch.ones(3, requires_grad=True)}, TypeError, r"temperature gets no gradient.*detach"),
        ({"entropy": "yes"}, ValueError, r"entropy='yes' must be one of False, True, 'detached'"),
        ({"entropy": 1}, ValueError, r"entropy=1 must be one of False, True, 'detached'"),
        ({"ids": T}, ValueError, r"ids must have shape \(\.\.\., K\).*\(2, 3\) .*got ids \(2, 3\)"),
        ({"ids": T[:1, :, None]}, ValueError, r"ids must have shape .*got ids \(1, 3, 1\)"),
        ({"ids": torch.zeros(2, 3, 257).long()}, ValueError, r"K <= 256, got ids \(2, 3, 257\)"),
        ({"ids": E}, TypeError, r"ids must be of an integer type, got ids float32: write ids\.long\(\)"),
        ({"ids": T.tolist()}, TypeError, r"ids must be a torch\.Tensor, got list: write torch\.tensor\(ids\)"),
        ({"top_k": 10}, ValueError, r"top_k=10 must be in \[0, 9\], for V = 9"),
        ({"top_k": -1}, ValueError, r"top_k=-1 must be in \[0, 9\]"),
        ({"top_k": 1.5}, TypeError, r"top_k must be an integer, got float"),
        ({"predicted": 1}, ValueError, r"predicted=1 must be one of False, True"),
        ({"mean_logit": None}, ValueError, r"mean_logit=None must be one of False, True"),
        ({"softcap": -1.0}, ValueError, r"softcap=-1\.0.*positive"),
        ({"logit_scale": 1e39}, ValueError, r"logit_scale=1e\+39 must be finite in float32"),
        ({"shift": 3}, ValueError, r"shift=3.*\[0, T\).*T = 3"),
        ({"targets": None, "shift": 1}, ValueError, r"shift=1 moves targets, and there are none"),
        ({"impl": "triton"}, ValueError, r"impl='triton'.*'auto'"),
        ({"memory_budget": -1}, ValueError, r"memory_budget=-1 .*at least 0"),
        ({"vocab_parallel": 3}, TypeError, r"vocab_parallel must be a cce_torch\.VocabParallel, got int"),
        ({"targets": T + 9, "check_targets": True}, ValueError, r"targets\[0, 0\] = 9 is outside \[0, 9\)"),
    ],
    ids=lambda x: re.sub(r"\s+", " ", str(x))[:40],
)
def test_bad_input(changed, error, message):
    with pytest.raises(error, match=message):
        linear_log_probs(**{"e": E, "c": C, "targets": T, **changed})


def every_number(x: Drawn, found: Any, leaves: dict[str, torch.Tensor]) -> tuple[dict[str, Any], tuple]:
    """The numbers, and the gradients of a sum with weights of id_log_probs that are finite, and of log_probs."""
    finite = torch.where(found.id_log_probs.isfinite(), found.id_log_probs, 0)
    weights = torch.linspace(-1, 1, finite.numel(), dtype=finite.dtype, device=finite.device).reshape(finite.shape)
    objective = (finite * weights).sum() + (x.of[0].to(finite.dtype) * found.log_probs).sum()
    return found._asdict(), torch.autograd.grad(objective, list(leaves.values()))


def full_logits(x: Drawn, ids: torch.Tensor, k: int, leaves: dict[str, torch.Tensor]) -> cce_torch.LogProbs:
    """What linear_log_probs returns, from the logits of leaves, which are float64."""
    options, targets = x.options, x.tensors["targets"]
    shift, kept = int(options.get("shift", 0)), targets != IGNORED
    e, c = leaves["e"], leaves["c"].T if options.get("vocab_axis") else leaves["c"]
    e, ids = (y[:, :-shift] if shift else y for y in (e, ids))
    kept, targets = kept[:, shift:], targets[:, shift:]
    z = e @ c.T + leaves.get("bias", 0)
    z = z if options.get("softcap") is None else options["softcap"] * torch.tanh(z / options["softcap"])
    temperature = torch.as_tensor(options.get("temperature", 1.0), device=e.device).double()
    temperature = temperature.expand(x.tensors["targets"].shape)
    z = z / (temperature[:, :-shift] if shift else temperature)[..., None]
    log_p, lse = torch.log_softmax(z, -1), torch.logsumexp(z, -1)
    named = (ids >= 0) & (ids < c.shape[0])
    of_ids = torch.where(named, log_p.gather(-1, torch.where(named, ids, 0)), -torch.inf)
    top, top_ids = torch.sort(log_p.detach(), dim=-1, descending=True, stable=True)
    found = {
        "log_probs": log_p.gather(-1, targets.clamp(0)[..., None])[..., 0],
        "lse": lse,
        "id_log_probs": of_ids,
        "predicted": top_ids[..., 0],
        "top_ids": top_ids[..., :k],
        "top_log_probs": top[..., :k],
        "mean_logit": z.mean(-1),
    }
    masks = {name: kept.reshape(*kept.shape, *[1] * (y.dim() - kept.dim())) for name, y in found.items()}
    return cce_torch.LogProbs(**{name: torch.where(masks[name], y, 0) for name, y in found.items()})


def check_chosen(x: Drawn, impl: str, k: int, count: int, **more) -> None:
    """All numbers of chosen columns, and their gradients, against float64."""
    own = more.pop("own", slice(None))
    vocabulary = x.tensors["c"].shape[1 if x.options.get("vocab_axis") else 0]
    rng = np.random.default_rng(count)
    targets = x.tensors["targets"]
    ids = torch.tensor(rng.integers(-1, vocabulary + 1, (*targets.shape, count)), device=targets.device)
    ids[..., -1] = ids[..., 0]
    given = {name: y for name, y in x.tensors.items() if y is not None and name != "targets"}
    exact_leaves = {name: y.double().requires_grad_() for name, y in given.items()}
    exact, want = every_number(x, full_logits(x, ids, k, exact_leaves), exact_leaves)
    leaves = {n: (y[own] if n in ("c", "bias") else y).clone().requires_grad_() for n, y in given.items()}
    asked = {"ids": ids, "predicted": True, "top_k": k, "mean_logit": True, "impl": impl, **x.options, **more}
    with small_blocks():
        found = linear_log_probs(leaves["e"], leaves["c"], x.tensors["targets"], leaves.get("bias"), **asked)
        numbers, gradients = every_number(x, found, leaves)
    for name in ("log_probs", "id_log_probs", "top_log_probs", "mean_logit"):
        torch.testing.assert_close(numbers[name].double(), exact[name], rtol=1e-5, atol=1e-4, msg=name)
    assert numbers["predicted"].dtype == numbers["top_ids"].dtype == torch.int64
    for name in ("predicted", "top_ids"):  # logits that differ by a rounding may change places
        assert (numbers[name] == exact[name]).float().mean() > 0.98, name
    assert not numbers["top_log_probs"].requires_grad
    for name, y, z in zip(leaves, gradients, want, strict=True):
        z = z[own] if name in ("c", "bias") else z
        allowed = 4 * roundoff(str(y.dtype)[6:]) + 32 * roundoff("float32")  # the two parts are rounded and added
        assert (y.double() - z).norm() <= allowed * max(float(z.norm()), 1e-30), name


@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
@pytest.mark.parametrize(
    ("dtype", "room"), [("bfloat16", 0), ("float32", 20_000), ("bfloat16", 20_000), ("float16", 2**28)]
)
def test_chosen_columns(impl, dtype, room, monkeypatch):
    """room: in chunks of one token and one column; of a few; in one."""
    monkeypatch.setattr(chosen, "ROOM", room)
    options = {"softcap": 4.0, "vocab_axis": 1, "shift": 1} if room else {}
    check_chosen(made(dtype=dtype, bias=room > 0, temperature="each", **options), impl, 5, 6)


def drawn(seed: int, tokens: int = 1000, width: int = 512, vocabulary: int = 20_000, device: str = "cuda") -> tuple:
    """The arguments of check_chosen, and its budget: a call of at most these sizes."""
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    x = made(
        (2, int(rng.integers(3, tokens // 2))),
        width // pick(1, 2, 4) - pick(0, 0, 1),
        int(rng.integers(vocabulary // 20, vocabulary)),
        ("bfloat16", "float16", "float32", "bfloat16")[seed % 4],
        bias=pick(False, True),
        temperature=pick("none", "number", "each"),
        seed=seed,
        softcap=pick(None, 4.0),
        vocab_axis=pick(0, 1),
        shift=pick(0, 0, 1),
    )
    of_ids = pick(1, 7, 256)
    return (on_device(x, device), pick("auto", "chunked", "torch_compile"), pick(1, 40), of_ids), pick(0, 2**22, None)


def test_the_smallest_budget_does_not_mean_one_token_and_one_column_at_a_time():
    """Which would be 40,000 products of matrices here."""
    product, operands = chosen.blocks.product, (torch.randn(20, 16), torch.randn(2000, 16))
    with mock.patch.object(chosen.blocks, "product", mock.Mock(side_effect=product)) as products:
        chosen.largest_logits._init_fn(*operands, None, None, 3, 1.0, None, 0)
    assert 1 <= products.call_count <= 4


@pytest.mark.parametrize("seed", range(12))
def test_drawn_chosen_columns(seed):
    arguments, memory_budget = drawn(seed, 60, 64, 2000, "cpu")
    check_chosen(*arguments, memory_budget=memory_budget)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_chosen_columns_on_a_gpu(seed):
    arguments, memory_budget = drawn(seed)
    check_chosen(*arguments, memory_budget=memory_budget)


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_of_equal_logits_the_lowest_ids_come_first(vocabulary, k, dtype, seed):
    k, rng = min(k, vocabulary), np.random.default_rng(seed)
    z = torch.tensor(rng.integers(-2, 3, (7, vocabulary)) * rng.choice([0.0, -0.0, 1.0, np.inf], (1, vocabulary)))
    z = torch.where(z.isnan(), 0, z).to(dtype)
    values, ids = torch.sort(z, dim=1, descending=True, stable=True)
    found = chosen._merged(*chosen._largest(z, k), k)
    assert torch.equal(found[1], ids[:, :k])
    assert torch.equal(found[0], values[:, :k])


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_equal_rows_of_the_classifier(impl, monkeypatch):
    """Over groups of the vocabulary too."""
    monkeypatch.setattr(chosen, "MOST_COLUMNS", 3)
    found = linear_log_probs(E, C, T, predicted=True, top_k=5, impl=impl)
    assert (found.predicted == 0).all()
    assert (found.top_ids == torch.arange(5)).all()


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_ids_of_ignored_tokens_and_negative_ids_get_no_gradient(impl):
    x = made(ignored=0.5)
    e = x.tensors["e"].clone()
    ignored = x.tensors["targets"] == IGNORED
    e[ignored] = torch.nan
    ids = torch.zeros(3, 7, 2, dtype=torch.int64)
    ids[..., 1] = -1
    leaves = [y.clone().requires_grad_() for y in (e, x.tensors["c"])]
    found = linear_log_probs(*leaves, x.tensors["targets"], ids=ids, top_k=2, impl=impl)
    assert not found.id_log_probs[ignored].any()
    assert not found.top_log_probs[ignored].any()
    assert (found.id_log_probs[~ignored][:, 1] == -torch.inf).all()
    de, dc = torch.autograd.grad(torch.logsumexp(found.id_log_probs, -1).sum(), leaves)
    assert not de[ignored].any()
    assert de[~ignored].any()
    assert dc.isfinite().all()


def test_chosen_columns_compiled():
    torch._dynamo.reset()
    x, ids = made(), torch.arange(42).reshape(3, 7, 2)

    def run(e, c):
        found = linear_log_probs(e, c, x.tensors["targets"], ids=ids, top_k=3, predicted=True, impl="chunked")
        return found.id_log_probs.sum(), found.top_ids, found.predicted

    results = []
    for call in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        leaves = [x.tensors[name].clone().requires_grad_() for name in ("e", "c")]
        total, *others = call(*leaves)
        results.append([*others, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(*results)


def test_second_derivatives_of_ids_are_an_error():
    leaves = [E.clone().requires_grad_(), C.clone().requires_grad_()]
    found = linear_log_probs(*leaves, T, ids=T[..., None], impl="chunked").id_log_probs
    de, _ = torch.autograd.grad((found**2).sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives"):
        torch.autograd.grad(de.sum(), leaves)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (True, False, True)])
def test_the_operators_of_ids_are_what_they_say(wanted):
    x = made(bias=True, dtype="bfloat16")
    e, ids = x.tensors["e"].flatten(0, 1), torch.randint(-1, 83, (21, 4))
    given, inverse = (e, x.tensors["c"], x.tensors["bias"]), torch.rand(21) + 0.5
    torch.library.opcheck(chosen.id_logits, (*given, ids, inverse, 1.3, 5.0, 2**28))
    dz = torch.where(ids >= 0, torch.rand(21, 4), 0)
    torch.library.opcheck(chosen.id_gradients, (dz, *given, ids, 2**28, *wanted, False))
    torch.library.opcheck(chosen.largest_logits, (*given, inverse, 3, 1.3, 5.0, 2**28))


def test_no_tokens_and_no_ids():
    found = linear_log_probs(E[:0], C, T[:0], ids=T[:0, :, None], top_k=2, mean_logit=True, impl="chunked")
    assert found.id_log_probs.shape == (0, 3, 1)
    assert found.top_ids.shape == (0, 3, 2)
    assert linear_log_probs(E, C, ids=torch.zeros(2, 3, 0, dtype=torch.int64)).id_log_probs.shape == (2, 3, 0)


def test_no_tensor_has_the_size_of_the_logits(monkeypatch):
    class Largest(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            new = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.largest = max(self.largest, *(x.nbytes for x in new if not func.is_view), 0)
            return result

    operands = torch.randn(2000, 8), torch.randn(3000, 8), None, None
    monkeypatch.setattr(chosen, "LEAST_ROOM", 0)
    with Largest() as seen:
        chosen.largest_logits._init_fn(*operands, 4, 1.0, None, 2**20)
        ids = torch.randint(0, 3000, (2000, 8))
        chosen.id_logits._init_fn(*operands[:3], ids, None, 1.0, None, 2**20)
        chosen.id_gradients._init_fn(torch.randn(2000, 8), *operands[:3], ids, 2**20, True, True, False, False)
    assert 0 < seen.largest < 2**20 < 4 * 2000 * 3000


STOPS = (30, 30, 83)  # the rows of c that each process ends with: the second holds none


def check_split(**options) -> None:
    """Each process of a vocabulary split has the numbers and gradients of one process."""
    rank = dist.get_rank()
    start, stop = (0, *STOPS)[rank], STOPS[rank]
    shard = cce_torch.VocabParallel(None, start, stop, largest=53)
    for entropy, dtype, softcap in ((True, "float32", 4.0), ("detached", "bfloat16", None), (True, "bfloat16", None)):
        x = made(entropy=entropy, temperature="each", bias=True, dtype=dtype, softcap=softcap, ignored=0.3)
        own = {"c": x.tensors["c"][start:stop].clone(), "bias": x.tensors["bias"][start:stop].clone()}
        for impl in ("chunked", "torch_compile", "reference"):
            exact, reference = truth(x), ours(x, "reference")
            found = ours(x._replace(tensors=x.tensors | own), impl, vocab_parallel=shard, **options)
            for name, value in found.items():
                rows = slice(start, stop) if name in own else slice(None)
                if name in ("log_probs", "entropy"):
                    assert np.abs(value - exact[name]).max() <= 32 * roundoff("float32") * 10, (impl, name)
                elif value.size:
                    assert_close(value, exact[name][rows], reference[name][rows], f"{impl}: {name}")
    x = made(dtype="bfloat16")
    own = {"c": x.tensors["c"][start:stop].clone()}
    x, of = x._replace(tensors=x.tensors | own), []
    for entropy in (False, "detached"):  # both save exponentials
        with mock.patch.object(shard_programs, "gradients", wraps=shard_programs.gradients) as run:
            asked = x._replace(options={"entropy": entropy})
            of.append(ours(asked, "cce", vocab_parallel=shard, memory_budget="all", **options))
        assert start == stop or run.call_args.args[3].saved is not None
    for name, value in of[0].items():
        np.testing.assert_allclose(value.astype(float), of[1][name].astype(float), rtol=2**-7, atol=1e-6, err_msg=name)
    for dtype in ("float32", "bfloat16"):
        x = made(temperature="each", bias=True, dtype=dtype, softcap=4.0, shift=1)
        check_chosen(x, "chunked", 40, 6, own=slice(start, stop), vocab_parallel=shard)


def test_a_vocabulary_that_processes_split():
    in_processes(3, check_split)
