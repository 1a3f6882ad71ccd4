"""cce_torch with gradients that the forward pass forms: every way through autograd, held to float64."""

import gc
import weakref
from functools import lru_cache, partial

import jax
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from cce_jax import passes
from cce_kernels.numbers import Cotangents, Wanted
from cce_torch import LinearCrossEntropy, LinearCrossEntropyHead, linear_cross_entropy, ops
from cce_torch.call import TENSORS, Call
from cce_torch.on_jax import bridge, kinds, programs
from tests import truth
from tests.call_torch import array
from tests.test_in_forward import in_forward as on  # noqa: F401  # for all tests of this file
from tests.test_torch import CALL_OF, SCHEDULED
from tests.tolerance import assert_rounded

DTYPES = torch.float32, torch.bfloat16, torch.float16
ONCE = ["torch_begin", "torch_finish"]  # the programs of a step
AGAIN = ["torch_loss", "torch_gradients"]
TOLERANCE = 2.0**-7
LEFT = TENSORS + 2  # where the saved tensors of the loss begin that the forward pass left


@pytest.fixture(autouse=True, scope="module")
def decided_again(on):  # noqa: F811
    programs.handover_of.cache_clear()
    yield
    programs.handover_of.cache_clear()
    ops._traced.clear()


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The names of the programs that ran."""
    names, real = [], bridge.run

    def recorded(program, *arguments, **options):
        names.append(program.__wrapped__.__name__)
        return real(program, *arguments, **options)

    monkeypatch.setattr(bridge, "run", recorded)
    return names


def example(tokens=600, width=40, vocabulary=300, dtype=torch.bfloat16, seed=0, ignored=0.2, wide=False, axis=0):
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    c = torch.randn(vocabulary, width, generator=generator).to(torch.float32 if wide else dtype)
    c = (c.T.contiguous().T if axis else c).requires_grad_()
    t = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return e, c, torch.where(torch.rand(tokens, generator=generator) < ignored, -100, t)


def loss(e, c, t, **options):
    return linear_cross_entropy(e, c, t, **{"impl": "chunked", "precision": "highest", **options})


def gradients(value, *leaves, **more):
    return torch.autograd.grad(value, leaves, **more)


def assert_same(actual, expected) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def budget_of(chunk, tokens, width, vocabulary) -> int:
    """Bytes that hold chunks of so many times 256 tokens, and not of one time more."""
    return chunk * 256 * 13 * (vocabulary + width) + 100 * (tokens + 256) + 4 * (tokens + 256) * width + 8000


def held_to_float64(found, want, rounded, what, roundings=3):
    """See tests/tolerance.py. Besides the result dz is rounded, and de before its factor. What is 0 in truth is 0."""
    found, want, rounded = (array(x) for x in (found, want, rounded))
    if not np.any(want):
        assert not np.any(found), what
    else:
        assert_rounded(found, want, rounded, what, roundings=roundings)


@settings(max_examples=14, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    tokens=st.integers(257, 1500),
    width=st.integers(16, 70),
    vocabulary=st.integers(100, 500),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    axis=st.integers(0, 1),
    chunk=st.integers(0, 2),
    padded=st.booleans(),
    ignored=st.sampled_from([0.0, 0.4, 0.95, 1.0]),
    reduction=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 99),
    factor=st.sampled_from([1.0, 0.3, -7.0, 0.0, 2.0**16]),
)
def test_any_call(tokens, width, vocabulary, dtype, axis, chunk, padded, ignored, reduction, seed, factor, data):
    wide, chosen = dtype != torch.float32 and data.draw(st.booleans()), partial(data.draw, st.booleans())
    if dtype == torch.float16:
        factor = min(factor, 1.0)  # which float16 holds
    e, c, t = example(tokens, width, vocabulary, dtype, seed, ignored, wide, axis)
    draw = torch.Generator().manual_seed(seed + 1)
    leaves = {"e": e, "c": c}
    if chosen():
        leaves["bias"] = torch.randn(vocabulary, generator=draw).to(c.dtype).requires_grad_()
    if chosen():
        leaves["token_weight"] = torch.rand(tokens, generator=draw).requires_grad_()
    options = {
        "reduction": reduction,
        "shift": tokens // 7 if chosen() else 0,
        "softcap": 9.0 if chosen() else None,
        "logit_scale": 0.7 if chosen() else None,
        "label_smoothing": 0.1 * chosen(),
        "z_loss": 1e-3 * chosen(),
    }
    if chosen():
        options["class_weight"] = torch.rand(vocabulary, generator=draw) + 0.5
    if reduction == "mean" and chosen():
        options["num_items"] = 37.0
    frozen = data.draw(st.sampled_from([set(), {"e"}, {"c"}, {"e", "bias"}, {"c", "bias"}]))
    more: dict = {"memory_budget": budget_of(chunk, tokens, width, vocabulary)} if chunk else {}
    more["gradient_tolerance"] = TOLERANCE * chosen()  # on a CPU nothing is left out

    def call(function, dtype=None, **more):
        own = {k: x.detach() if dtype is None else x.detach().to(dtype) for k, x in leaves.items()}
        own = {k: x if k in frozen else x.requires_grad_() for k, x in own.items()}
        given = {k: x.to(dtype) if dtype and isinstance(x, torch.Tensor) else x for k, x in options.items()}
        wanted = [k for k in own if k not in frozen]
        value = function(**own, targets=t, **given, **more)
        value = value[0] if isinstance(value, tuple) else value
        return value.detach(), dict(zip(wanted, gradients(factor * value, *(own[k] for k in wanted)), strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "EXACT", 0 if padded else 4)
        patch.setattr(kinds, "_kinds", {})
        names = []
        real = bridge.run
        patch.setattr(bridge, "run", lambda f, *more: names.append(f.__wrapped__.__name__) or real(f, *more))
        found, of_found = call(linear_cross_entropy, impl="chunked", precision="highest", **more)
    assert names == ONCE
    rounded, of_rounded = call(linear_cross_entropy, impl="reference")
    want, of_want = call(truth.losses, torch.float64)
    assert_rounded(array(found), array(want), array(rounded), "loss", roundings=2)
    for name, x in of_found.items():
        assert x.dtype == leaves[name].dtype
        assert x.stride() == leaves[name].stride()
        held_to_float64(x, of_want[name], of_rounded[name], f"gradient of {name}")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("dtype", "wide"), [*((x, False) for x in DTYPES), (torch.bfloat16, True)])
@pytest.mark.parametrize(
    "wanted", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_the_shapes_of_what_is_formed(dtype, wide, axis, wanted):
    e, c, _ = example(500, 300, 203, dtype, axis=axis)
    call = Call(gradient_tolerance=TOLERANCE * axis, precision="highest", impl="chunked", wide_dc=wide)
    kind = kinds.kind_of_tensors(e, c, call)
    wanted = Wanted(*map(bool, wanted))

    def begin(inputs):
        return passes.begin(inputs, (), lambda numbers, _: Cotangents.of(numbers), kind.static, wanted)[1]

    expected = jax.tree.flatten(jax.eval_shape(begin, kind.shapes(500, with_bias=True)))
    found = jax.tree.flatten(programs.handover_of(kind, 500, True, wanted).shapes)
    assert found[1] == expected[1]
    assert [(x.shape, x.dtype) for x in found[0]] == [(x.shape, x.dtype) for x in expected[0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
def test_backward_again_over_a_kept_graph(dtype, axis, ran):
    e, c, t = example(dtype=dtype, axis=axis)
    expected, twice = gradients(loss(e, c, t), e, c), gradients(2 * loss(e, c, t), e, c)
    ran.clear()
    value = loss(e, c, t)
    assert_same(gradients(value, e, c, retain_graph=True), expected)
    assert_same(gradients(value, e, retain_graph=True), expected[:1])
    assert_same(gradients(value, c, retain_graph=True), expected[1:])
    assert_same(gradients(2 * value, e, c, retain_graph=True), twice)
    assert_same(gradients(value, e, c), expected)
    assert ran == ["torch_begin"] + 5 * ["torch_finish"]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(value, e, c)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_take_the_memory_of_what_was_formed(dtype, kept):
    e, c, t = example(dtype=dtype)
    value = loss(e, c, t)
    formed = [x.data_ptr() for x in value.grad_fn.saved_tensors[LEFT : LEFT + 2]]
    found = gradients(value, e, c, retain_graph=kept)
    assert [x.data_ptr() in formed for x in found] == 2 * [not kept]
    assert len({x.data_ptr() for x in found}) == 2
    for x in found:
        x *= 2  # no view that autograd forbids to change


def test_results_that_are_grads_may_be_changed_in_place(monkeypatch):
    monkeypatch.setattr(kinds, "EXACT", 0)
    monkeypatch.setattr(kinds, "_kinds", {})
    e, c, t = example(tokens=530)
    expected = gradients(loss(e, c, t), e, c)
    for k in (1, 2):
        loss(e, c, t).backward()
        assert_same([e.grad, c.grad], [k * x for x in expected])
    for x, y in zip((e, c), expected, strict=True):
        x.grad *= 3
        assert torch.equal(x.grad, 6 * y)


def test_a_loss_used_twice_and_two_pending_losses():
    e, c, t = example(dtype=torch.float32)
    first, second = gradients(loss(e, c, t), e, c), gradients(loss(e, c, t.flip(0)), e, c)
    one, other = loss(e, c, t), loss(e, c, t.flip(0))
    found = gradients(one + 2 * other + 3 * one, e, c)
    for x, y, z in zip(found, first, second, strict=True):
        torch.testing.assert_close(x, 4 * y + 2 * z)


@pytest.mark.parametrize("done", [False, True])
def test_what_was_formed_is_freed(done):
    """With the graph, or by the backward pass, even if the loss is kept for a log."""
    e, c, t = example()
    value = loss(e, c, t)
    formed = [weakref.ref(x) for x in value.grad_fn.saved_tensors[LEFT:]]
    assert len(formed) >= 5
    if done:
        gradients(value, e, c)
    else:
        del value
    gc.collect()
    assert all(x() is None for x in formed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_factor_reaches_kept_tokens_alone(dtype):
    e, c, t = example(dtype=dtype)
    de, dc = gradients(loss(e, c, t) * torch.inf, e, c)
    assert not de[t == -100].any()
    assert not de[t != -100].isfinite().any(1).all()
    assert not dc.isfinite().any(1).all()
    assert not torch.stack(gradients(loss(e, torch.zeros_like(c), t) * 0.0, e)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_is_differentiated_too(dtype, ran):
    e, c, t = example(dtype=dtype)

    def both(function, e, c, **more):
        value, lse = function(e, c, t, **more)
        return value - 0.99 * lse.sum() / (t != -100).sum()  # their parts nearly cancel

    chunked = partial(linear_cross_entropy, impl="chunked", precision="highest", return_lse=True)
    found = gradients(both(chunked, e, c), e, c)
    assert ran == ["torch_begin", "torch_gradients"]
    ran.clear()
    rounded = gradients(both(partial(chunked, impl="reference"), e, c), e, c)
    leaves = [x.detach().double().requires_grad_() for x in (e, c)]
    want = gradients(both(truth.losses, *leaves), *leaves)
    for x, y, z in zip(found, want, rounded, strict=True):
        held_to_float64(x, y, z, "gradient")
    value, lse = chunked(e, c, t)
    assert_same(gradients(value, e, c, retain_graph=True), gradients(loss(e, c, t), e, c))
    assert ran == ONCE + ONCE
    ran.clear()
    (x,), (y,) = gradients(chunked(e, c, t)[1].sum(), e), gradients(lse.sum(), e)
    assert torch.equal(x, y)
    assert ran == ["torch_begin", "torch_gradients", "torch_gradients"]


def test_token_weights_where_lse_is_differentiated_too():
    (e, c, t), weight = example(dtype=torch.float32), torch.rand(600, requires_grad=True)

    def of_both(leaves, impl):
        value, lse = linear_cross_entropy(e, c, t, token_weight=weight, impl=impl, precision="highest", return_lse=True)
        return gradients(value - 0.99 * lse.mean(), *leaves)

    for leaves in ((weight,), (e, c, weight)):
        for x, y in zip(of_both(leaves, "chunked"), of_both(leaves, "reference"), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * float(y.abs().max()))


def test_only_what_is_wanted_is_formed(ran):
    e, c, t = example()
    b = torch.zeros(300, dtype=e.dtype, requires_grad=True)

    def formed(*leaves):
        return [x.shape for x in loss(*leaves[:2], t, bias=leaves[2]).grad_fn.saved_tensors[LEFT:]]

    found = formed(e, c, b)
    assert [*found[:2], found[3]] == [e.shape, c.shape, b.shape]
    assert formed(e, c.detach(), b.detach()) == [e.shape]
    assert formed(e.detach(), c, None)[0] == c.shape
    assert formed(e.detach(), c.detach(), b) == [b.shape]
    ran.clear()
    weight = torch.rand(600, requires_grad=True)
    gradients(loss(e.detach(), c.detach(), t, token_weight=weight), weight)
    with torch.no_grad():
        loss(e, c, t)
    with torch.inference_mode():
        loss(e, c, t)
    assert ran == ["torch_loss", "torch_gradients", "torch_loss", "torch_loss"]


def test_what_a_hook_keeps_stays_as_it_is():
    e, c, t = example()
    expected = gradients(loss(e, c, t), e, c)
    kept, copies = [], []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or copies.append(x.clone()) or x, lambda x: x
    ):
        value = loss(e, c, t)
    assert_same(gradients(value, e, c), expected)
    assert_same(kept, copies)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_loss_forms_its_gradients_once(reentrant, ran):
    """One matmul, then three, where computing the logits again in the backward pass would take one, one and three."""
    e, c, t = example()
    for retained in (False, True):
        e.grad = c.grad = None
        value = checkpoint(lambda e: loss(e * 2, c, t), e, use_reentrant=reentrant)
        assert ran == ["torch_loss"]
        value.backward(retain_graph=retained)
        assert ran == ["torch_loss", *ONCE]
        assert_same([e.grad, c.grad], gradients(loss(e * 2, c, t), e, c))
        if retained and not reentrant:
            value.backward()
            assert_same([e.grad, c.grad], [2 * x for x in gradients(loss(e * 2, c, t), e, c)])
        ran.clear()


def test_selective_checkpointing():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    e, c, t = example()
    expected = gradients(loss(e * 2, c, t), e, c)
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        contexts = partial(create_selective_checkpoint_contexts, lambda *_, policy=policy, **__: policy)
        value = checkpoint(lambda e: loss(e * 2, c, t), e, use_reentrant=False, context_fn=contexts)
        assert_same(gradients(value, e, c), expected)


def test_programs_that_were_not_called_of_late_are_freed(monkeypatch):
    for name in ("_begin_program", "_finish_program", "handover_of"):
        monkeypatch.setattr(programs, name, lru_cache(maxsize=2)(getattr(programs, name).__wrapped__))
    e, c, t = example(dtype=torch.float32)
    client = jax.devices("cpu")[0].client

    def call(number):
        loss(e, c, t, logit_scale=1.5 + number, precision=None).backward()
        gc.collect()
        return len(client.live_executables()), len(kinds._kinds)

    call(0)
    before = call(1)
    assert [call(2 + k) for k in range(4)] == [before] * 4


@pytest.mark.parametrize("setting", ["jax_numpy_dtype_promotion", "jax_enable_x64", "jax_debug_nans"])
def test_the_users_jax_settings_change_nothing(setting):
    e, c, t = example(dtype=torch.bfloat16, seed=3)
    expected = gradients(loss(e, c, t, logit_scale=0.9), e, c)
    programs.handover_of.cache_clear()
    programs._begin_program.cache_clear()
    programs._finish_program.cache_clear()
    before = getattr(jax.config, setting)
    jax.config.update(setting, {"jax_numpy_dtype_promotion": "strict"}.get(setting, True))
    try:
        assert_same(gradients(loss(e, c, t, logit_scale=0.9), e, c), expected)
    finally:
        jax.config.update(setting, before)


def test_a_weight_that_was_freed_is_named():
    e, c, t = example()
    value = loss(e, c, t)
    c.detach().untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=r"^c of shape .* has no memory"):
        gradients(value, e, c)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code(backend, ran):
    """With static shapes, and a budget that holds de and dc besides a chunk."""
    torch._dynamo.reset()
    step = torch.compile(lambda e, c, t, **more: 3 * loss(e * 2, c, t, **more), fullgraph=True, backend=backend)
    for tokens, expected in ((600, ONCE), (610, AGAIN), (620, AGAIN)):
        e, c, t = example(tokens)
        found = gradients(step(e, c, t), e, c)
        assert ran == expected
        for x, y in zip(found, gradients(3 * loss(e * 2, c, t), e, c), strict=True):
            assert torch.linalg.norm(x - y) <= 2**-7 * torch.linalg.norm(y)
        ran.clear()


@pytest.mark.parametrize("more", [{"memory_budget": 100000}, {"return_lse": True}, {"reduction": "none"}])
def test_compiled_code_that_computes_the_logits_again(more, ran):
    torch._dynamo.reset()
    e, c, t = example()

    def step(e, c, t):
        found = loss(e, c, t, **more)
        return (found[0] if isinstance(found, tuple) else found).sum()

    expected = gradients(step(e, c, t), e, c)
    ran.clear()
    found = gradients(torch.compile(step, fullgraph=True, backend="aot_eager")(e, c, t), e, c)
    assert ran == AGAIN
    for x, y in zip(found, expected, strict=True):
        assert torch.linalg.norm(x - y) <= 2**-7 * torch.linalg.norm(y)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_opcheck(axis, wide):
    e, c, t = (x.detach() for x in example(wide=wide, axis=axis))
    rounded, weight, scheduled = c.to(e.dtype), torch.rand(600), torch.tensor(SCHEDULED)
    call = CALL_OF._replace(wide_dc=wide, gradient_tolerance=TOLERANCE * axis).encoded()
    saving_for, wanted = [True, True, False], [True, True, False, True]
    assert rounded.stride() == c.stride()
    given = None, t, None, weight, None, None, None, scheduled, 1
    torch.library.opcheck(torch.ops.cce_torch.loss.default, (e, rounded, *given, saving_for, False, *call))
    _, statistics, left = torch.ops.cce_torch.loss.default(e, rounded, *given, saving_for, False, *call)
    assert [x.dtype for x in left[:2]] == [e.dtype, torch.float32 if wide else torch.int16]
    left = *left, *[None] * (ops.LEFT - len(left))
    arguments = torch.ones(()), None, e, c, *given, statistics, *left, saving_for, wanted, False, *call
    torch.library.opcheck(torch.ops.cce_torch.gradients.default, arguments)
    de, dc, _, dweight = torch.ops.cce_torch.gradients.default(*arguments)
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in (e, c, weight)]
    assert_same(
        [de, dc, dweight], gradients(loss(*leaves[:2], t, token_weight=leaves[2], memory_budget=2**28), *leaves)
    )


def blocks(value):
    """Which blocks are multiplied, of what a loss left for its backward pass."""
    return [x for x in value.grad_fn.saved_tensors[LEFT:] if x.dtype == torch.bool]


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1), (torch.float16, 0), (torch.float32, 0)])
def test_a_tolerance_leaves_which_blocks_are_multiplied(dtype, count, ran):
    """In bfloat16 alone. On a CPU all are, and the bits are those of the exact gradients."""
    e, c, t = example(dtype=dtype)
    bias = torch.zeros(300, dtype=dtype, requires_grad=True)  # with it a call leaves as much as any
    exact, value = (loss(e, c, t, bias=bias, gradient_tolerance=x) for x in (0.0, TOLERANCE))
    assert blocks(exact) == blocks(loss(e, c, t)) == []
    assert len(blocks(value)) == count
    assert all(x.all() for x in blocks(value))
    assert len(value.grad_fn.saved_tensors[LEFT:]) <= ops.LEFT
    assert_same(gradients(value, e, c, bias), gradients(exact, e, c, bias))
    assert ran[:3] == ["torch_begin"] * 3


@pytest.mark.parametrize("impl", ["chunked", "cce", "torch_compile", "reference"])
def test_every_impl_takes_a_tolerance(impl, ran):
    """The kernels that run on a CPU leave out nothing either."""
    e, c, t = example(70, 20, 90)
    exact, found = (loss(e, c, t, impl=impl, gradient_tolerance=x) for x in (0.0, TOLERANCE))
    if impl in ("chunked", "cce"):
        assert len(blocks(found)) == 1
    else:
        assert not ran
    assert torch.equal(exact, found)
    assert_same(gradients(found, e, c), gradients(exact, e, c))


def test_every_way_through_autograd_takes_a_tolerance():
    e, c, t = example()
    exact = gradients(loss(e, c, t), e, c)
    call = partial(loss, gradient_tolerance=TOLERANCE)
    value = call(e, c, t)
    assert_same(gradients(value, e, c, retain_graph=True), exact)
    assert_same(gradients(value, e, c), exact)
    assert_same([x.detach() for x in gradients(call(e, c, t), e, c, create_graph=True)], exact)
    with torch.autograd.graph.save_on_cpu():
        value = call(e, c, t)
    assert_same(gradients(value, e, c), exact)
    assert_same(gradients(checkpoint(call, e, c, t, use_reentrant=False), e, c), exact)
    found = torch.func.grad(call, (0, 1))(e.detach(), c.detach(), t)
    assert_same(found, torch.func.grad(loss, (0, 1))(e.detach(), c.detach(), t))
    options = {"impl": "chunked", "precision": "highest", "gradient_tolerance": TOLERANCE}
    assert_same(gradients(LinearCrossEntropy(**options)(e, c, t), e, c), exact)
    head = LinearCrossEntropyHead(40, 300, bias=False, dtype=torch.bfloat16, **options)
    head.weight = torch.nn.Parameter(c.detach())
    assert_same(gradients(head(e, t), e, head.weight), exact)


def test_each_tolerance_is_a_constant_of_compiled_code(ran):
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    step = torch.compile(lambda e, c, t, x: loss(e * 2, c, t, gradient_tolerance=x), fullgraph=True, backend=counted)
    e, c, t = example()
    exact = gradients(loss(e * 2, c, t), e, c)
    seen = []
    for tolerance in (0.0, TOLERANCE, TOLERANCE / 2, 0.0, TOLERANCE):
        ran.clear()
        for x, y in zip(gradients(step(e, c, t, tolerance), e, c), exact, strict=True):
            assert torch.linalg.norm(x - y) <= 2**-7 * torch.linalg.norm(y)
        assert ran == ONCE
        seen.append(len(graphs))
    assert seen[0] < seen[1] < seen[2] == seen[4], "nothing is compiled again for a tolerance that came before"
