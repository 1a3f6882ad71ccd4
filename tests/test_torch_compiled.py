"""cce_torch's two implementations in PyTorch alone, `reference` and `compiled`, against float64.

Most tests run compiled's elementwise functions as they are, which takes no seconds of compilation; the inductor tests
show that compiling them changes nothing. Its groups are made small, so that every test has several, the last ragged.
"""

import functools
import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cce_kernels import windows
from cce_torch import blocks, compiled, reference
from tests.cases import CASES, DTYPES, Case, inputs
from tests.tolerance import assert_close, assert_rounded, error
from tests.truth import losses

NAMES = ["plain", "none ignored", "one token", "one of everything", "tiles exactly", "bias", "softcap", "scale",
         "bias, scale and softcap", "smoothing and class weights", "everything"]  # fmt: skip
CASE = {case.name: case for case in CASES}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPLS = [reference.statistics, compiled.statistics]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """64 columns a group: 203 are 64 + 64 + 64 + 11."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 0)
    monkeypatch.setattr(windows, "FEWEST_COLUMNS", 64)
    monkeypatch.setattr(windows, "COLUMN_MULTIPLE", 16)


@pytest.fixture
def plain(monkeypatch):
    """The elementwise functions, not compiled."""
    monkeypatch.setattr(blocks, "_compiled", lambda function, variant: function)


@pytest.fixture
def narrow(monkeypatch):
    """Matmuls of 16-bit operands with a float32 result, as CUDA has them, on any device."""
    monkeypatch.setattr(blocks, "_multiplies", lambda *_: True)
    monkeypatch.setattr(blocks, "product", lambda left, right, out: left.to(out) @ right.to(out))


class Call:
    """The arguments of one call, its leaves, and random cotangents for every row."""

    def __init__(self, case: Case, dtype: str = "float32", device: str = "cpu", vocab_axis: int = 0, seed: int = 0):
        given = inputs(case, dtype, seed, ignore_index=-1)
        kind = getattr(torch, dtype)
        leaves = {"e": given.e.reshape(-1, case.width), "c": given.c, "bias": given.optional.get("bias")}
        self.leaves = {k: torch.tensor(np.float32(x), dtype=kind, device=device) for k, x in leaves.items()
                       if x is not None}  # fmt: skip
        if vocab_axis:
            self.leaves["c"] = self.leaves["c"].T.contiguous().T
        weights = given.optional.get("class_weight")
        self.columns = torch.tensor(given.targets.reshape(-1), device=device)
        self.weights = None if weights is None else torch.tensor(weights, device=device)
        self.head = {"scale": case.options.get("logit_scale", 1.0), "softcap": case.options.get("softcap"),
                     "with_sum": case.options.get("label_smoothing", 0) > 0}  # fmt: skip
        rows = np.random.default_rng(seed + 1).standard_normal((2 + self.head["with_sum"], self.columns.numel()))
        self.cotangents = torch.tensor(rows, dtype=torch.float32, device=device)

    def __call__(self, function, cotangents=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The rows, and the gradient of Σ cotangents·rows for each leaf."""
        leaves = {k: x.detach().requires_grad_() for k, x in self.leaves.items()}
        rows = self.rows(function, **leaves)
        found = torch.autograd.grad(rows, list(leaves.values()), self.cotangents if cotangents is None else cotangents)
        return rows.detach(), dict(zip(leaves, found, strict=True))

    def rows(self, function, e, c, bias=None):
        return function(e, c, bias, self.columns, self.weights, **self.head)

    def definition(self, kind: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The same by tests/truth.py, whose losses are lse - target and, smoothed, (Σ_v w_v·lse - sum) / V."""

        def function(e, c, bias, columns, weights, *, scale, softcap, with_sum):
            e, c, bias, weights = (None if x is None else x.cpu().to(kind) for x in (e, c, bias, weights))
            columns, vocabulary = columns.cpu().long(), c.shape[0]
            head = {"bias": bias, "softcap": softcap, "logit_scale": scale, "ignore_index": -1, "reduction": "none"}
            nll, lse = losses(e, c, columns, **head)
            rows = [lse, lse - nll]
            if with_sum:
                smooth, _ = losses(e, c, columns, class_weight=weights, label_smoothing=1.0, **head)
                rows.append((vocabulary if weights is None else weights.sum()) * lse - vocabulary * smooth)
            return torch.stack(rows)

        return self(function, self.cotangents.cpu().to(kind))


def array(x: torch.Tensor) -> np.ndarray:
    """x in NumPy, in its own type."""
    name = str(x.dtype).removeprefix("torch.")
    x = x.detach().cpu()
    return x.numpy() if name not in DTYPES or name == "float32" else x.float().numpy().astype(DTYPES[name])


def check(actual, truth, other) -> None:
    """The rows and every gradient within the bound of tests/tolerance.py; other: the reference in the same dtype."""
    for (what, x), t, r in zip(enumerate(actual[0]), truth[0], other[0], strict=True):
        assert_close(array(x), array(t), array(r), f"row {what}")
    assert set(actual[1]) == set(truth[1])
    for what, x in actual[1].items():
        assert_close(array(x), array(truth[1][what]), array(other[1][what]), f"gradient of {what}")


def float64(call: Call):
    """The truth: the definition in float64, of the same rounded inputs."""
    wide = Call.__new__(Call)
    wide.__dict__.update(call.__dict__, leaves={k: x.double() for k, x in call.leaves.items()})
    return wide.definition(torch.float64)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in NAMES), *(("everything", dtype) for dtype in ("bfloat16", "float16"))],
)
def test_the_reference_is_the_definition(name, dtype):
    call = Call(CASE[name], dtype)
    actual = call(reference.statistics)
    assert actual[0].dtype == torch.float32
    check(actual, float64(call), call.definition(torch.float32))


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [(name, "float32", "cpu") for name in NAMES]
    + [(name, dtype, "cpu") for dtype in ("bfloat16", "float16") for name in ("plain", "everything")]
    + [pytest.param(name, dtype, "cuda", marks=pytest.mark.gpu)
       for name, dtype in [("plain", "float32"), ("everything", "float16"), ("everything", "bfloat16")]],
)  # fmt: skip
def test_exact(name, dtype, device, plain):
    call = Call(CASE[name], dtype, device)
    check(call(compiled.statistics), float64(call), call(reference.statistics))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_exact_with_16_bit_operands(name, dtype, plain, narrow):
    call = Call(CASE[name], dtype)
    check(call(compiled.statistics), float64(call), call(reference.statistics))


@pytest.mark.parametrize("function", IMPLS)
def test_float64(function, plain):
    call = Call(CASE["everything"])
    call.leaves = {k: x.double() for k, x in call.leaves.items()}
    call.cotangents = call.cotangents.double()
    rows, gradients = call(function)
    true_rows, true_gradients = float64(call)
    assert rows.dtype == torch.float64
    for x, t in [(rows, true_rows), *((gradients[k], true_gradients[k]) for k in gradients)]:
        assert error(x.numpy(), t.numpy()) < 1e-13


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 127, 129, 203])
def test_ragged_vocabularies(vocabulary, plain):
    call = Call(Case("ragged", (7,), 9, vocabulary, arrays=("bias",)), seed=vocabulary)
    check(call(compiled.statistics), float64(call), call(reference.statistics))


@pytest.mark.parametrize("scale", [-300.0, 3e4])
def test_logits_whose_exponentials_overflow(scale, plain):
    call = Call(Case("extreme", arrays=("bias",), options={"logit_scale": scale}))
    actual = call(compiled.statistics)
    assert actual[0].abs().max() > 500
    check(actual, float64(call), call(reference.statistics))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_classifier_with_the_vocabulary_last(dtype, device, plain):
    call = Call(CASE["everything"], dtype, device, vocab_axis=1)
    actual = call(compiled.statistics)
    assert actual[1]["c"].stride() == (1, 203)
    check(actual, float64(call), call(reference.statistics))


@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device):
    """Compiled for real: exact, without a warning, and once for all groups, numbers of tokens, scales and softcaps."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks._compiled.cache_clear()
    counted = torch._dynamo.utils.counters["stats"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        call = Call(CASE["everything"], "bfloat16", device)
        check(call(compiled.statistics), float64(call), call(reference.statistics))
        graphs = counted["unique_graphs"]
        assert graphs == 3  # the statistics, dz, its column sums
        other = Case("other", (53,), 12, 150, arrays=("bias", "class_weight"),
                     options={"softcap": 7.0, "logit_scale": 0.4, "label_smoothing": 1.0})  # fmt: skip
        call = Call(other, "bfloat16", device)
        check(call(compiled.statistics), float64(call), call(reference.statistics))
    assert counted["unique_graphs"] == graphs


def test_every_variant_is_compiled(monkeypatch):
    """torch.compile itself runs a function uncompiled after eight variants, and says so in a log alone."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks._compiled.cache_clear()
    counted = torch._dynamo.utils.counters["stats"]
    kinds = itertools.product((torch.float32, torch.float64), (None, 3.0), (0.0, 0.1), (5,))
    variants = *kinds, (torch.float32, None, 0.0, 1)
    with torch.no_grad():
        for done, (dtype, softcap, smoothing, tokens) in enumerate(variants):
            options = {"softcap": softcap, "label_smoothing": smoothing}
            call = Call(Case("variant", (tokens,), 8, 100, options=options))
            call.rows(compiled.statistics, **{k: x.to(dtype) for k, x in call.leaves.items()})
            assert counted["unique_graphs"] == done + 1, f"{dtype}, {options}, {tokens} tokens run uncompiled"
    blocks._compiled.cache_clear()


@pytest.mark.parametrize("error", ["TorchDynamoException", "FailOnRecompileLimitHit"])
def test_where_torch_compile_fails_it_says_so_once_and_is_exact(error, monkeypatch):
    def fails(function, variant):
        def run(*_):
            raise getattr(torch._dynamo.exc, error)("no compiler here")

        return run

    monkeypatch.setattr(blocks, "_compiled", fails)
    monkeypatch.setattr(blocks, "_uncompilable", set())
    call = Call(CASE["everything"])
    with pytest.warns(RuntimeWarning, match="no compiler here") as warned:
        actual = call(compiled.statistics)
    assert len(warned) == 1
    check(actual, float64(call), call(reference.statistics))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("function", IMPLS)
def test_nothing_of_an_ignored_token_gets_out(function, poison, plain):
    call = Call(Case("ignored", arrays=("bias", "class_weight"), options={"label_smoothing": 1.0}))
    ignored = call.columns < 0
    assert ignored.any()
    call.leaves["bias"][5] = 200.0  # its exponential overflows where nothing is subtracted
    clean, clean_gradients = call(function)
    call.leaves["e"][ignored] = poison
    call.cotangents[:, ignored] = poison
    dirty, dirty_gradients = call(function)
    assert torch.equal(clean, dirty)
    assert dirty.isfinite().all()
    for name, gradient in dirty_gradients.items():
        assert gradient.isfinite().all()
        assert torch.equal(gradient, clean_gradients[name])
    assert not dirty_gradients["e"][ignored].any()


@pytest.mark.parametrize("removed", [slice(5, 7), slice(0, 64), slice(0, 130)])
@pytest.mark.parametrize("function", IMPLS)
def test_a_bias_of_minus_infinity_removes_a_class(function, removed, plain):
    """Also all classes of the first groups; and a weight of 0 with an infinite logit counts as 0."""
    call = Call(Case("removed", arrays=("bias", "class_weight"), options={"label_smoothing": 1.0}))
    call.columns[:] = call.columns.clamp(131)
    call.leaves["bias"][removed] = -torch.inf
    call.weights[removed] = 0
    rows, gradients = call(function)
    stay = torch.ones(203, dtype=torch.bool)
    stay[removed] = False
    less = Call.__new__(Call)
    less.__dict__.update(call.__dict__, columns=call.columns - int((~stay).sum()), weights=call.weights[stay],
                         leaves={k: x if k == "e" else x[stay] for k, x in call.leaves.items()})  # fmt: skip
    remaining = {k: x if k == "e" else x[stay] for k, x in gradients.items()}
    check((rows, remaining), float64(less), less(reference.statistics))
    assert not gradients["c"][removed].any()
    assert not gradients["bias"][removed].any()


@pytest.mark.parametrize("function", IMPLS)
def test_a_target_past_the_vocabulary_names_no_column(function, plain):
    call = Call(CASE["everything"])
    call.columns[3:6] = torch.tensor([203, 204, 2**31 - 1])
    rows, gradients = call(function)
    assert not rows[1, 3:6].any()
    assert rows[0, 3:6].all()
    call.cotangents[1, 3:6] = 1e9
    assert all(torch.equal(x, gradients[k]) for k, x in call(function)[1].items())


@pytest.mark.parametrize(("size", "cotangent", "scale"), [(0.0005, 1e4, 1.0), (100.0, 1e-5, 1e-4)])
def test_float16_neither_overflows_nor_underflows(size, cotangent, scale, plain, narrow):
    """Gradients that float16 holds, of dz that it does not: some 1e6, and some 1e-9.

    The reference holds dz in float16 too, and may overflow. The rounded truth stands in its place.
    """
    options = {"label_smoothing": 1.0, "logit_scale": scale}
    call = Call(Case("half", arrays=("class_weight",), options=options), "float16")
    call.cotangents *= cotangent
    call.weights *= 100
    call.leaves = {k: size * x for k, x in call.leaves.items()}
    rows, gradients = exact = float64(call)
    rounded = rows.float(), {k: x.to(call.leaves[k].dtype) for k, x in gradients.items()}
    assert all(x.isfinite().all() for x in rounded[1].values())
    check(call(compiled.statistics), exact, rounded)


def test_float16_keeps_what_is_far_smaller_than_the_largest_cotangent(plain, narrow):
    """As tests/test_edges.py has it: flat softmaxes of tokens that count 2⁻¹⁰ of another one, through lse alone."""
    call = Call(Case("flat", (24,), 16, 2001, ignored=0.0), "float16")
    others = torch.arange(24) > 0
    e, c = call.leaves["e"], call.leaves["c"]
    call.leaves = {"e": e / 64 * others[:, None], "c": 1 + c / 64}
    call.cotangents = torch.zeros(2, 24)
    call.cotangents[0] = torch.where(others, 2.0**-10, 1.0) * 2.0**14
    found, exact, other = (x[1] for x in (call(compiled.statistics), float64(call), call(reference.statistics)))
    for name, rows in (("e", others), ("c", ...)):
        actual, truth, rounded = (array(x[name][rows]) for x in (found, exact, other))
        assert_rounded(actual, truth, rounded, f"gradient of {name}", roundings=2)


def test_in_float16_a_token_of_cotangent_nan_reaches_no_other_row(plain, narrow):
    """The others' are 10⁴, which float16 does not hold where they are divided by a number for cotangents of 1."""
    call = Call(CASE["plain"], "float16")
    call.cotangents *= 1e4
    call.cotangents[:, 5], call.columns[5] = 0, 3
    clean = call(compiled.statistics)[1]["e"]
    call.cotangents[:, 5] = torch.nan
    found = call(compiled.statistics)[1]["e"]
    others = torch.arange(37) != 5
    assert clean.isfinite().all()
    assert torch.equal(found[others], clean[others])
    assert found[5].isnan().all()


def test_a_retained_graph_differentiates_twice(plain):
    call = Call(CASE["everything"])
    leaves = {k: x.requires_grad_() for k, x in call.leaves.items()}
    rows = call.rows(compiled.statistics, **leaves)
    first = torch.autograd.grad(rows, list(leaves.values()), call.cotangents, retain_graph=True)
    again = torch.autograd.grad(rows, list(leaves.values()), call.cotangents, retain_graph=True)
    other = torch.autograd.grad(rows, list(leaves.values()), -2 * call.cotangents)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert all(torch.equal(-2 * x, y) for x, y in zip(first, other, strict=True))


def test_cotangents_of_any_strides(plain):
    call = Call(CASE["everything"])
    for strided in (torch.ones(()).expand_as(call.cotangents), call.cotangents.T.contiguous().T,
                    torch.stack([call.cotangents, call.cotangents], 2)[..., 0]):  # fmt: skip
        assert not strided.is_contiguous()
        expected = call(compiled.statistics, strided.contiguous())[1]
        assert all(torch.equal(x, expected[k]) for k, x in call(compiled.statistics, strided)[1].items())


def test_expanded_and_sliced_embeddings(plain):
    call = Call(CASE["plain"])
    e = call.leaves["e"]
    for strided in (torch.cat([e, e], 1)[:, :20], e[0].expand_as(e), e.T.contiguous().T):
        call.leaves["e"] = strided.contiguous()
        expected, gradients = call(compiled.statistics)
        call.leaves["e"] = strided
        rows, actual = call(compiled.statistics)
        torch.testing.assert_close(rows, expected)
        torch.testing.assert_close(actual, gradients)


@pytest.fixture
def seen(plain, monkeypatch):
    """compiled's two operators as the functions that they are: a dispatch mode does not look into an operator."""
    for name in ("run_statistics", "run_gradients"):
        monkeypatch.setattr(compiled, name, getattr(compiled, name)._init_fn)


class Record(TorchDispatchMode):
    """Every operation under it: its name, and the bytes and types of the new tensors that it returned."""

    def __init__(self):
        super().__init__()
        self.names, self.made = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        self.made |= {(x.nbytes, x.dtype) for x in torch.utils._pytree.tree_leaves(result)
                      if isinstance(x, torch.Tensor) and not func.is_view}  # fmt: skip
        return result


@pytest.mark.parametrize(("frozen", "matmuls"), [((), 4), (("e",), 3), (("c",), 3), (("e", "c"), 2)])
def test_only_what_needs_a_gradient_is_computed(frozen, matmuls, seen):
    """A group multiplies once forward; backward once for its logits, and once for each of de and dc."""
    call = Call(CASE["bias"])
    everything = call(compiled.statistics)[1]
    with Record() as record:
        leaves = {k: x.clone().requires_grad_(k not in frozen) for k, x in call.leaves.items()}
        call.rows(compiled.statistics, **leaves).backward(call.cotangents)
    assert sum(name in ("aten::mm", "aten::addmm_", "aten::addmm") for name in record.names) == 4 * matmuls
    for name, x in leaves.items():
        assert x.grad is None if name in frozen else torch.equal(x.grad, everything[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_holds_one_bounded_block(dtype, seen, monkeypatch):
    """Nothing but the inputs' gradients is larger; a block of logits, of dz or of c's rows in float32 is nearly it."""
    tokens, width, vocabulary, bound = 64, 24, 20_000, 2**20
    monkeypatch.setattr(blocks, "BLOCK_BYTES", bound)
    call = Call(Case("large", (tokens,), width, vocabulary, arrays=("bias",)), dtype)
    with Record() as record:
        call(compiled.statistics)
    dc = (call.leaves["c"].nbytes, call.leaves["c"].dtype)
    assert dc in record.made, "the record sees dc"
    assert bound / 2 < max(size for size, _ in record.made - {dc}) <= bound
    with Record() as record:
        call(reference.statistics)
    assert (4 * tokens * vocabulary, torch.float32) in record.made, "the record sees logits"


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_within_the_callers_own_torch_compile(backend, plain):
    """One graph without a break, the same bits, and nothing larger than the inputs saved between its passes."""
    call = Call(CASE["everything"])

    def objective(e, c, bias):
        rows = call.rows(compiled.statistics, e, c, bias)
        return (rows * call.cotangents).sum()

    saved = []
    leaves = [x.requires_grad_() for x in call.leaves.values()]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        value = torch.compile(objective, backend=backend, fullgraph=True)(*leaves)
    gradients = torch.autograd.grad(value, leaves)
    expected = torch.autograd.grad(objective(*leaves), leaves)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))
    assert 0 < max(saved) <= max(x.numel() for x in leaves)
    assert sum(saved) <= sum(x.numel() for x in leaves) + 203 + 10 * call.columns.numel()


def test_second_derivatives_are_the_references():
    call = Call(CASE["everything"])
    leaves = {k: x.double().requires_grad_() for k, x in call.leaves.items()}
    values, few = list(leaves.values()), call.columns < 0
    few[:2] = True
    call.columns, values[0] = call.columns[few], values[0].detach()[few].requires_grad_()

    def small(*leaves):
        return call.rows(reference.statistics, *leaves)

    assert torch.autograd.gradgradcheck(small, values, fast_mode=True)


@pytest.mark.parametrize("of", ["e", "c", "bias", "cotangents"])
def test_second_derivatives_are_an_error_that_names_the_reference(of, plain):
    call = Call(CASE["everything"])
    leaves = {k: x.requires_grad_() for k, x in call.leaves.items()}
    rows = call.rows(compiled.statistics, **leaves)
    cotangents = call.cotangents.requires_grad_()
    gradients = torch.autograd.grad(rows, list(leaves.values()), cotangents, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='reference' has"):
        torch.autograd.grad(sum(g.sum() for g in gradients), {**leaves, "cotangents": cotangents}[of])


@pytest.mark.parametrize("function", IMPLS)
def test_func_grad(function, plain):
    call = Call(CASE["everything"])

    def objective(leaves):
        return (call.rows(function, **leaves) * call.cotangents).sum()

    gradients = torch.func.grad(objective)(call.leaves)
    expected = call(function)[1]
    assert all(torch.equal(x, expected[k]) for k, x in gradients.items())


def test_checkpointed(plain):
    call = Call(CASE["everything"])
    expected = call(compiled.statistics)[1]
    for reentrant in (False, True):
        leaves = {k: x.detach().requires_grad_() for k, x in call.leaves.items()}
        run = lambda e, c, bias: call.rows(compiled.statistics, e, c, bias)  # noqa: E731
        checkpoint(run, *leaves.values(), use_reentrant=reentrant).backward(call.cotangents)
        assert all(torch.equal(x.grad, expected[k]) for k, x in leaves.items())


@pytest.mark.parametrize("function", IMPLS)
def test_autocast_changes_nothing(function, plain):
    call = Call(CASE["everything"])
    leaves = {k: x.requires_grad_() for k, x in call.leaves.items()}
    rows = call.rows(function, **leaves)
    gradients = torch.autograd.grad(rows, list(leaves.values()), call.cotangents)
    with torch.autocast("cpu", torch.bfloat16):
        assert (leaves["e"] @ leaves["c"].T).dtype == torch.bfloat16
        inside = call.rows(function, **leaves)
    # PyTorch's own backward passes follow the autocast that they run in, so the reference's runs outside
    with torch.autocast("cpu", torch.bfloat16, enabled=function is compiled.statistics):
        inside_gradients = torch.autograd.grad(inside, list(leaves.values()), call.cotangents)
    assert torch.equal(rows, inside)
    assert all(torch.equal(x, y) for x, y in zip(gradients, inside_gradients, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_tokens(dtype, plain, narrow):
    call = Call(CASE["everything"], dtype)
    call.leaves["e"], call.columns, call.cotangents = call.leaves["e"][:0], call.columns[:0], call.cotangents[:, :0]
    for function in IMPLS:
        rows, gradients = call(function)
        assert rows.shape == (3, 0)
        assert all(x.shape == call.leaves[k].shape and not x.any() for k, x in gradients.items())


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (True, False, True)])
def test_the_operators_are_what_they_say(wanted, vocab_axis, plain):
    """Schemas, shapes, strides and tracing, by PyTorch's own checks."""
    call = Call(CASE["everything"], "bfloat16", vocab_axis=vocab_axis)
    e, c, bias = call.leaves.values()
    arguments = (e, c, bias, call.columns, call.weights, 1.3, 5.0, True, 2**28)
    torch.library.opcheck(compiled.run_statistics, arguments)
    output = compiled.run_statistics(*arguments)
    arguments = (call.cotangents, *arguments[:5], output, 1.3, 5.0, 2**28, *wanted)
    torch.library.opcheck(compiled.run_gradients, arguments)


def test_needs_no_jax_and_imports_no_compiler():
    code = """import sys, cce_torch.compiled, cce_torch.reference
bad = [m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib') or m == 'torch._inductor.compile_fx']
assert not bad, bad"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
