"""torch.compile, what cce_torch's own compiled functions hold and compute, and its operators."""

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cce_torch
from cce_kernels import windows
from cce_kernels.exponentials import saved_shape
from cce_torch import linear_cross_entropy, ops
from cce_torch.call import Call, Distillation, DivergenceCall, Given, OfResults, Operands, Saved, Scheduled
from cce_torch.in_torch import blocks, compiled, rule
from cce_torch.operators import flat
from tests import call, call_torch
from tests.call_torch import assert_near, small_blocks
from tests.cases import CASES, Case

EVERYTHING = next(case for case in CASES if case.name == "everything")


@pytest.fixture
def plain(monkeypatch):
    """impl="torch_compile", its functions as they are, in windows of 64 columns: 203 are 64 + 64 + 64 + 11."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 0)
    monkeypatch.setattr(windows, "FEWEST_COLUMNS", 64)
    monkeypatch.setattr(compiled, "_compiled", lambda function, variant: function)


@pytest.fixture
def counted():
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
    return linear_cross_entropy(e, c, targets, bias, **{"impl": "torch_compile", **more})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_compiled_is_exact(device, counted):
    """Without a warning, and once for all windows, numbers of tokens, scales and softcaps."""
    run = functools.partial(call_torch.run, device=device)
    options = {"softcap": 7.0, "logit_scale": 0.4, "label_smoothing": 1.0}
    other = Case("other", (53,), 12, 150, arrays=("bias", "class_weight"), options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for case in (EVERYTHING, other):
            call.check(case, "bfloat16", "torch_compile", run)
            assert counted["unique_graphs"] == 3  # the statistics, dz, its column sums


@pytest.mark.parametrize("impl", ["torch_compile", "chunked"])
def test_inside_what_the_user_compiles_with_inductor(impl, counted, plain):
    """One graph for any batch, and nothing larger than the inputs saved between its passes."""

    def step(e, c, bias, targets, weight):
        options = {"softcap": 5.0, "logit_scale": 1.3, "label_smoothing": 0.2, "shift": 1, "token_weight": weight}
        return loss(e * 2, c, bias, targets, impl=impl, **options)

    run = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (37, 31):
        e, c, bias, targets = example(tokens)
        c = c.detach().T.contiguous().T.requires_grad_()
        leaves, saved = (e, c, bias, torch.rand(tokens, requires_grad=True)), []
        given = e, c, bias, targets, leaves[3]
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.numel()) or x, lambda x: x):
            value = run(*given)
        found = torch.autograd.grad(value, leaves)
        assert_near([value, *found], [step(*given), *torch.autograd.grad(step(*given), leaves)])
        assert found[1].stride() == c.stride()
        assert 0 < max(saved) <= max(x.numel() for x in leaves)
        assert sum(saved) <= sum(x.numel() for x in leaves) + 203 + 20 * tokens
    assert counted["unique_graphs"] == 1


SMALL = example(24, 16, 70)
CHANGING: list[tuple[str, str, dict[str, list]]] = [
    *(
        ("linear_cross_entropy", impl, {"num_items": [3.25, 4.25, 5.25], "z_loss": [0.1, 0.2, 0.3], **more})
        for impl, more in (
            ("chunked", {"label_smoothing": [0.1, 0.2, 0.3], "logit_scale": [0.4, 0.5, 0.6]}),
            ("torch_compile", {"label_smoothing": [0.1, 0.2, 0.3]}),
        )
    ),
    ("linear_cross_entropy", "chunked", {"num_items": [3, 4, 5]}),
    *(
        ("linear_log_probs", impl, {"temperature": [0.5, 0.6, 0.7], "top_k": [1, 3, 3], "entropy": 3 * [True]})
        for impl in ("chunked", "torch_compile")
    ),
]


@pytest.mark.parametrize(("function", "impl", "values"), CHANGING)
def test_numbers_that_change_make_one_graph_more(function, impl, values, counted):
    """torch.compile takes a number for a constant until it changes; a number of ids is always one."""
    e, c, _, targets = SMALL

    def step(options):
        found = getattr(cce_torch, function)(2 * e, c, targets, impl=impl, **options)
        return [x for x in found if x is not None] if isinstance(found, tuple) else [found]

    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    with small_blocks():
        for each in zip(*values.values(), strict=True):
            results = []
            for call_ in (run, step):
                found = call_(dict(zip(values, each, strict=True)))
                total = sum(x.sum() for x in found if x.requires_grad)
                results.append([*found, *torch.autograd.grad(total, (e, c))])
            assert_near(*results)
    assert counted["unique_graphs"] <= 2


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


def test_jit_trace_names_what_it_can_record():
    e, c, _, t = (x.detach() for x in SMALL)

    def traced(impl):
        return torch.jit.trace(lambda e: linear_cross_entropy(e, c, t, impl=impl), (e,))

    for impl in ("auto", "cce", "chunked"):
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace cannot record.*impl='torch_compile'"):
            traced(impl)
    with small_blocks():
        for impl in ("torch_compile", "reference"):
            torch.testing.assert_close(traced(impl)(2 * e), linear_cross_entropy(2 * e, c, t, impl=impl))


@pytest.fixture
def seen(plain, monkeypatch):
    """The two operators as the functions that they are: a dispatch mode does not look into an operator."""
    for name in ("run_numbers", "run_gradients"):
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


# Operators, by PyTorch's own checks: schemas, shapes, strides and tracing.


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("transposed", [False, True])
def test_the_operators_in_torch_are_what_they_say(transposed):
    e, c, bias, columns = (x.detach() for x in example(dtype=torch.bfloat16))
    c = c.T.contiguous().T if transposed else c
    of_tokens = columns.clamp(-1), torch.rand(203), 0.5 + torch.rand(37)
    operands = Operands(e, c, bias, *of_tokens, torch.randint(-1, 203, (37, 3), dtype=torch.int32))
    options = Call(softcap=5.0, memory_budget=2**28, smooths=True, with_mean=True, ids=3), 1.3
    torch.library.opcheck(torch.ops.cce_torch.numbers_in_torch.default, tuple(flat(operands, *options)))
    output = rule.run_numbers(operands, *options).statistics
    cotangents = torch.tensor(np.random.default_rng(0).standard_normal((8, 37)), dtype=torch.float32)
    arguments = flat(cotangents, operands, output, *options, [transposed, True, not transposed])
    torch.library.opcheck(torch.ops.cce_torch.gradients_in_torch.default, tuple(arguments))
    for asked in ({"top_k": 3}, {"mean_logit": True}):
        arguments = flat(operands._replace(weights=None, ids=None), Call(5.0, 2**28, **asked), 1.3)
        torch.library.opcheck(torch.ops.cce_torch.numbers_in_torch.default, tuple(arguments))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("name", "impl"), [("divergence", "chunked"), ("divergence_in_torch", "torch_compile")])
def test_the_operators_of_divergences_are_what_they_say(name, impl):
    e, c, *_ = (x.detach() for x in example(40, 20, 232, torch.bfloat16))
    head, scheduled = (e, c, None), torch.tensor([0.3, 1.0, 1.2], dtype=torch.float64)
    given = Distillation(*head, *head, torch.rand(40), None, scheduled, torch.ones(()))
    for wanted, entropy in (([True, False, False], True), ([False, True, False], False)):
        how = DivergenceCall(5.0, None, 2**28, "jsd", None, impl, entropy)
        torch.library.opcheck(getattr(torch.ops.cce_torch, name).default, tuple(flat(given, how, wanted)))


# The options of a call, the type of e, whether c is a transposed (D, V), and what the forward pass leaves.
LEAVES: dict[str, tuple[dict, Any, bool, tuple[str, ...]]] = {
    "a shifted loss": ({"shift": 1, "reduction": "none"}, torch.float32, False, ()),
    "smoothed": ({"smooths": True, "reduction": "none"}, torch.float32, True, ()),
    "of tokens": ({"with_mean": True, "ids": 4, "reduction": "none"}, torch.float32, False, ()),
    "likeliest": ({"top_k": 3, "mean_logit": True, "reduction": "none"}, torch.float32, False, ()),
    "kernels": ({"impl": "cce", "memory_budget": 0}, torch.bfloat16, False, ()),
    "saved": ({"impl": "cce", "memory_budget": 2**40, "reduction": "none"}, torch.bfloat16, False, ("exponentials",)),
    "formed": ({"precision": "highest"}, torch.bfloat16, False, ("de", "dc", "steps")),
    "formed, wide": ({"wide_dc": True, "gradient_tolerance": 2**-7}, torch.bfloat16, True, ("de", "dc")),
}


@pytest.mark.parametrize("name", LEAVES)
def test_the_operators_of_jax_are_what_they_say(name, monkeypatch):
    """Of saved exponentials those of ignored tokens are arbitrary: no token is ignored."""
    options, dtype, transposed, kept = LEAVES[name]
    how = Call(**{"memory_budget": 2**28, "impl": "chunked", **options})
    forms, of_tokens = name.startswith("formed"), name == "of tokens"
    e, c, _, t = (x.detach() for x in example(600 if forms else 40, 20, 232, dtype))
    c, t = c.T.contiguous().T if transposed else c, t.clamp(0)
    ids = torch.randint(-1, 232, (40, 4), dtype=torch.int32) if of_tokens else None
    weight, inverse = torch.rand(len(t)), torch.rand(len(t)) + 0.5 if of_tokens else None
    how = how._replace(with_temperature=of_tokens)
    given, numbers = Given(e, c, None, t, None, weight, None, inverse, ids), Scheduled(0.1 * how.smooths)
    saving_for = [True, True, False] if kept else []
    with call_torch.formed_in_forward(forms):
        torch.library.opcheck(torch.ops.cce_torch.loss.default, tuple(flat(given, numbers, None, saving_for, how)))
        found = ops.loss_of(given, numbers, None, saving_for, how)
        left = {k: x for k, x in found.residuals._asdict().items() if x is not None and x.numel()}
        assert tuple(left) == kept
        if name == "saved":
            assert left["exponentials"].shape == saved_shape(40, 232)
        given = given._replace(c=c.float()) if how.wide_dc else given
        saved = Saved(found.statistics, found.residuals, saving_for)
        cotangents = OfResults(torch.rand(found.loss.shape), None if forms else torch.rand_like(found.statistics))
        every = itertools.product((True, False), (True, False), (False,), (True, False))
        for wanted in every if name == "a shifted loss" else [(True, True, False, True)]:
            arguments = cotangents, given, numbers, saved, list(wanted), how
            if wanted == (True, True, False, True):
                torch.library.opcheck(torch.ops.cce_torch.gradients.default, tuple(flat(*arguments)))
            real, fakes = ops.gradients_of(*arguments), ops._fake_gradients(*arguments)
            assert [x is not None for x in real] == [y is not None for y in fakes] == list(wanted)
            for x, y in zip(real, fakes, strict=True):
                if x is not None and y is not None:
                    assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


E, C, _, T = (x.detach() for x in example(8, 6, 9))
FUNCTIONS = {
    "linear_cross_entropy": lambda e, **more: linear_cross_entropy(e, C, T, **more),
    "linear_log_probs": lambda e, **more: cce_torch.linear_log_probs(e, C, T, **more).log_probs.sum(),
    "linear_token_loss": lambda e, **more: cce_torch.linear_token_loss(e, C, T, lambda n: n.lse**2, **more),
    "linear_divergence": lambda e, **more: cce_torch.linear_divergence(e, C, E.flip(0), C + 1, **more),
}


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_inside_a_graph_have_a_derivative_or_an_error(name, impl):
    """torch.compile sees no derivative rule inside torch.func and forward mode: the gradient was 0."""
    function = functools.partial(FUNCTIONS[name], impl=impl)
    want, compiled = torch.func.grad(function)(E), functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()
    for transformed in (torch.func.grad(function), torch.func.jacrev(function)):
        torch.testing.assert_close(compiled(transformed)(E), want)
    torch.testing.assert_close(compiled(torch.vmap(torch.func.grad(function)))(E[None])[0], want)
    with pytest.raises(NotImplementedError, match=f"^{name} has first derivatives"):
        compiled(lambda e: torch.func.jvp(function, (e,), (e,)))(E)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{name} has first"):
        compiled(function)(torch.autograd.forward_ad.make_dual(E, E))


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
def test_numbers_that_change_have_graphs_of_their_own(impl):
    ids = [torch.arange(8 * k).reshape(8, k) % 9 for k in (2, 3, 4)]
    of_ids = lambda e, k: cce_torch.linear_log_probs(e, C, ids=k, impl=impl).id_log_probs.sum()  # noqa: E731
    numbers = {"softcap": (3.0, 4.0, 5.0), "teacher_softcap": (3.0, 4.0), "memory_budget": (2**22, 2**23)}
    calls = [
        (lambda e, x, name=name: FUNCTIONS["linear_divergence"](e, impl=impl, **{name: x}), values)
        for name, values in numbers.items()
    ]
    for function, values in ((of_ids, ids), *calls):
        torch._dynamo.reset()
        run = torch.compile(function, backend="aot_eager", fullgraph=True)
        for value in values:
            e = E.clone().requires_grad_()
            found, want = (torch.autograd.grad(f(e, value), e)[0] for f in (run, function))
            torch.testing.assert_close(found, want)
