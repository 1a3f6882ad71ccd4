"""impl="torch_compile": what it compiles, holds and computes. Its numbers: tests/search, test_edges.py.

Most tests run its elementwise functions as they are, which takes no seconds of compilation. Its windows are small, so
that every call has several, the last ragged.
"""

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cce_kernels import windows
from cce_torch import linear_cross_entropy
from cce_torch.call import Call, Operands
from cce_torch.in_torch import blocks, compiled, rule
from cce_torch.operators import flat
from tests import call, call_torch
from tests.cases import CASES, Case

EVERYTHING = next(case for case in CASES if case.name == "everything")
OPTIONS = {"softcap": 5.0, "logit_scale": 1.3, "label_smoothing": 0.2}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """64 columns a window: 203 are 64 + 64 + 64 + 11."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 0)
    monkeypatch.setattr(windows, "FEWEST_COLUMNS", 64)


@pytest.fixture
def plain(monkeypatch):
    """The elementwise functions, not compiled."""
    monkeypatch.setattr(compiled, "_compiled", lambda function, variant: function)


@pytest.fixture
def counted(monkeypatch):
    """What torch.compile counts from here on."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled._compiled.cache_clear()
    yield torch._dynamo.utils.counters["stats"]
    compiled._compiled.cache_clear()


def example(tokens=37, width=20, vocabulary=203, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, width), (vocabulary, width), (vocabulary,)
    e, c, bias = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::5] = -100
    return e, c, bias, targets


def loss(e, c, bias, targets, **more):
    return linear_cross_entropy(e, c, targets, bias, impl="torch_compile", **more)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inductor(device, counted):
    """Compiled for real: exact, without a warning, and once for all windows, numbers of tokens, scales and softcaps."""
    run = functools.partial(call_torch.run, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        call.check(EVERYTHING, "bfloat16", "torch_compile", run)
        assert counted["unique_graphs"] == 3  # the statistics, dz, its column sums
        options = {"softcap": 7.0, "logit_scale": 0.4, "label_smoothing": 1.0}
        other = Case("other", (53,), 12, 150, arrays=("bias", "class_weight"), options=options)
        call.check(other, "bfloat16", "torch_compile", run)
    assert counted["unique_graphs"] == 3


def test_every_variant_is_compiled(monkeypatch, counted):
    """torch.compile itself runs a function uncompiled after eight variants, and says so in a log alone."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    kinds = itertools.product((torch.float32, torch.float64), (None, 3.0), (0.0, 0.1), (5,))
    variants = *kinds, (torch.float32, None, 0.0, 1)
    with torch.no_grad():
        for done, (dtype, softcap, smoothing, tokens) in enumerate(variants):
            options = {"softcap": softcap, "label_smoothing": smoothing}
            loss(*example(tokens, 8, 100, dtype), **options)
            assert counted["unique_graphs"] == done + 1, f"{dtype}, {options}, {tokens} tokens run uncompiled"


@pytest.mark.parametrize("error", ["TorchDynamoException", "FailOnRecompileLimitHit"])
def test_where_torch_compile_fails_it_says_so_once_and_is_exact(error, monkeypatch):
    def fails(function, variant):
        def run(*_):
            raise getattr(torch._dynamo.exc, error)("no compiler here")

        return run

    monkeypatch.setattr(compiled, "_compiled", fails)
    monkeypatch.setattr(compiled, "_uncompilable", set())
    with pytest.warns(RuntimeWarning, match="no compiler here") as warned:
        call.check(EVERYTHING, "float32", "torch_compile", call_torch.run)
    assert len(warned) == 1


@pytest.fixture
def seen(plain, monkeypatch):
    """The two operators as the functions that they are: a dispatch mode does not look into an operator."""
    for name in ("run_statistics", "run_gradients"):
        monkeypatch.setattr(rule, name, getattr(rule, name).function)


class Record(TorchDispatchMode):
    """Every operation under it: its name, and the bytes and types of the new tensors that it returned."""

    def __init__(self):
        super().__init__()
        self.names, self.made = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        new = [] if func.is_view else torch.utils._pytree.tree_leaves(result)
        self.made |= {(x.nbytes, x.dtype) for x in new if isinstance(x, torch.Tensor)}
        return result


@pytest.mark.parametrize(("frozen", "matmuls"), [((), 4), ((0,), 3), ((1,), 3), ((0, 1), 2)])
def test_only_what_needs_a_gradient_is_computed(frozen, matmuls, seen):
    """A window multiplies once forward; backward once for its logits, and once for each of de and dc."""
    *leaves, targets = example()
    everything = torch.autograd.grad(loss(*leaves, targets), leaves)
    with Record() as record:
        own = [x.detach().requires_grad_(k not in frozen) for k, x in enumerate(leaves)]
        loss(*own, targets).backward()
    assert sum(name in ("aten::mm", "aten::addmm_", "aten::addmm") for name in record.names) == 4 * matmuls
    for k, x in enumerate(own):
        assert x.grad is None if k in frozen else torch.equal(x.grad, everything[k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_holds_one_bounded_block(dtype, seen, monkeypatch):
    """Nothing but the inputs' gradients is larger; a block of logits, of dz or of c's rows in float32 is nearly it."""
    tokens, bound = 64, 2**20
    monkeypatch.setattr(blocks, "BLOCK_BYTES", bound)
    *leaves, targets = example(tokens, 24, 20_000, dtype)
    with Record() as record:
        torch.autograd.grad(loss(*leaves, targets), leaves)
    dc = (leaves[1].nbytes, dtype)
    assert dc in record.made, "the record sees dc"
    assert bound / 2 < max(size for size, _ in record.made - {dc}) <= bound
    with Record() as record:
        linear_cross_entropy(leaves[0], leaves[1], targets, impl="reference")
    assert (4 * tokens * 20_000, torch.float32) in record.made, "the record sees logits"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_within_the_callers_own_torch_compile(backend, plain):
    """One graph without a break, the same bits, and nothing larger than the inputs saved between its passes."""
    *leaves, targets = example()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        value = torch.compile(loss, backend=backend, fullgraph=True)(*leaves, targets, **OPTIONS)
    gradients = torch.autograd.grad(value, leaves)
    expected = torch.autograd.grad(loss(*leaves, targets, **OPTIONS), leaves)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))
    assert 0 < max(saved) <= max(x.numel() for x in leaves)
    assert sum(saved) <= sum(x.numel() for x in leaves) + 203 + 20 * len(targets)


@pytest.mark.parametrize(
    ("wanted", "transposed"), [((True, True, True), True), ((False, True, False), False), ((True, False, True), True)]
)
def test_the_operators_are_what_they_say(wanted, transposed, plain):
    """Schemas, shapes, strides and tracing, by PyTorch's own checks."""
    e, c, bias, columns = (x.detach() for x in example(dtype=torch.bfloat16))
    c = c.T.contiguous().T if transposed else c
    of_tokens = columns.clamp(-1), torch.rand(203), 0.5 + torch.rand(37)
    operands = Operands(e, c, bias, *of_tokens, torch.randint(-1, 203, (37, 3), dtype=torch.int32))
    options = Call(softcap=5.0, memory_budget=2**28, smooths=True, with_mean=True, ids=3), 1.3
    torch.library.opcheck(torch.ops.cce_torch.statistics_in_torch.default, tuple(flat(operands, *options)))
    output = rule.run_statistics(operands, *options)
    cotangents = torch.tensor(np.random.default_rng(0).standard_normal((8, 37)), dtype=torch.float32)
    arguments = flat(cotangents, operands, output, *options, list(wanted))
    torch.library.opcheck(torch.ops.cce_torch.gradients_in_torch.default, tuple(arguments))
