"""cce_torch: every option, implementation, layout and type against float64.

cce and chunked are one path through this package, JAX's own arithmetic and the name of an implementation for it, and
test_loss.py has every case with both. So chunked, which compiles in a third of the time, has every case here too, and
cce those that differ in which tensors cross over, and in their types and layouts.
"""

from functools import partial

import numpy as np
import pytest
import torch

from cce_torch import linear_cross_entropy
from tests import test_loss
from tests.call_torch import run, tensor
from tests.cases import CASES, Case, inputs
from tests.truth import truth

IMPLS = ("cce", "chunked", "reference", "torch_compile")
FAST = IMPLS[1:]
CROSSING = ("plain", "shift by 4 with weights", "everything")


def case_of(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def check(case: Case, dtype: str, impl: str, device: str = "cpu", **more) -> None:
    test_loss.check(case, dtype, impl, run=partial(run, device=device), **more)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """torch_compile's elementwise functions as they are: compiling them is test_torch_compiled.py's business."""
    from cce_torch import blocks

    monkeypatch.setattr(blocks, "fused", lambda function, *arguments: function(*arguments))


@pytest.mark.parametrize(
    ("case", "impl"),
    [(case, impl) for case in CASES for impl in FAST] + [(case_of(name), "cce") for name in CROSSING],
    ids=str,
)
def test_float32(case, impl):
    check(case, "float32", impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_classifier_with_the_vocabulary_last(name, impl):
    check(case_of(name), "bfloat16", impl, vocab_axis=1)


@pytest.mark.parametrize("impl", ["cce", "chunked", "torch_compile"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["none", "everything"])
def test_sixteen_bit(name, dtype, impl):
    check(case_of(name), dtype, impl)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("name", "dtype", "impl"),
    [
        *((name, "bfloat16", "cce") for name in ("bias, scale and softcap", "none", "shift by 4 with weights")),
        *(("everything", dtype, "cce") for dtype in ("bfloat16", "float16", "float32")),
        *(("everything", "bfloat16", impl) for impl in ("chunked", "torch_compile")),
    ],
)
def test_on_a_gpu(name, dtype, impl, axis):
    check(case_of(name), dtype, impl, device="cuda", vocab_axis=axis)


@pytest.mark.parametrize("impl", ["reference", "torch_compile"])
def test_float64(impl):
    given = inputs(case_of("everything"))
    loss, lse, gradients = truth(given, case_of("everything").options)
    wide = type(given)(*(np.float64(x) if x.dtype == np.float32 else x for x in (given.e, given.c, given.targets)),
                       {k: np.float64(v) for k, v in given.optional.items()}, np.float64(given.of_loss),
                       np.float64(given.of_lse))  # fmt: skip
    actual = run(wide, case_of("everything").options, impl)
    for x, y in zip((actual[0], actual[1], *actual[2].values()), (loss, lse, *gradients.values()), strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("impl", IMPLS)
def test_targets_of_every_integer_type(impl, dtype):
    given = inputs(Case("ints", (9,), 8, 70, ignored=0.0))
    e, c, t = (tensor(x) for x in (given.e, given.c, given.targets))
    t[3] = 5
    want = linear_cross_entropy(e, c, t.long(), impl=impl, ignore_index=5)
    assert torch.equal(linear_cross_entropy(e, c, t.to(dtype), impl=impl, ignore_index=5), want)
    want = linear_cross_entropy(e, c, t.long(), impl=impl)
    for beyond in (2**40, -(2**40), 300):  # which a narrower type does not hold
        assert torch.equal(linear_cross_entropy(e, c, t.to(dtype), impl=impl, ignore_index=beyond), want)


@pytest.mark.parametrize(
    ("bad", "impl"),
    [(bad, impl) for bad in (70, -1, 2**31, 2**32 + 3, -(2**40), 2**62) for impl in FAST] + [(2**32 + 3, "cce")],
)
def test_target_out_of_range_is_nan_and_so_is_every_gradient_it_reaches(impl, bad):
    given = inputs(Case("edge", (24,), 16, 70, ignored=0.0))
    e, c, t = (tensor(x) for x in (given.e, given.c, given.targets))
    e.requires_grad_(), c.requires_grad_()
    t = t.long()
    t[4] = bad
    losses = linear_cross_entropy(e, c, t, impl=impl, reduction="none")
    assert losses.isnan().nonzero().tolist() == [[4]]
    de, dc = torch.autograd.grad(linear_cross_entropy(e, c, t, impl=impl), (e, c))
    assert de[4].isnan().all()
    assert dc.isnan().all()
    assert linear_cross_entropy(e, c, t, impl=impl, ignore_index=bad).isfinite(), "unless it is the one to ignore"


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_of_an_ignored_token_gets_out(impl):
    given = inputs(Case("edge", (24,), 16, 70, arrays=("bias", "token_weight")))
    ignored = given.targets == -100

    def gradients(e, weight, bias):
        tensors = [tensor(x).requires_grad_() for x in (e, given.c, bias)]
        loss = linear_cross_entropy(tensors[0], tensors[1], tensor(given.targets), tensors[2], impl=impl,
                                    token_weight=tensor(weight), label_smoothing=0.1, z_loss=0.1)  # fmt: skip
        return [loss, *torch.autograd.grad(loss, tensors)]

    bias = given.optional["bias"].copy()
    bias[3] = 200.0  # whose exponential is infinite in float32
    dirty, weight = given.e.copy(), given.optional["token_weight"].copy()
    dirty[ignored], weight[ignored] = np.nan, np.nan
    for x, y in zip(gradients(dirty, weight, bias), gradients(given.e, given.optional["token_weight"], bias),
                    strict=True):  # fmt: skip
        assert torch.equal(x, y)
        assert x.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "reduction", "impl"),
    [(tokens, reduction, impl) for tokens in (0, 5) for reduction in ("mean", "sum", "none") for impl in FAST]
    + [(0, "mean", "cce"), (5, "mean", "cce")],
)
def test_no_tokens_or_all_ignored(tokens, reduction, impl):
    e, c, b = torch.randn(tokens, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True), torch.randn(40)
    t = torch.full((tokens,), -100)
    loss, lse = linear_cross_entropy(e, c, t, b, impl=impl, reduction=reduction, return_lse=True, label_smoothing=0.1)
    assert loss.shape == (t.shape if reduction == "none" else ())
    assert not loss.any()
    assert not lse.any()
    for gradient in torch.autograd.grad(loss.sum() + lse.sum(), (e, c)):
        assert not gradient.any()


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("make", [float, lambda x: torch.tensor(x), lambda x: torch.tensor([int(x)])])
def test_num_items_is_a_number_or_a_tensor(make, impl):
    given = inputs(Case("edge", (24,), 16, 70))
    e, c, t = (tensor(x) for x in (given.e, given.c, given.targets))
    total = linear_cross_entropy(e, c, t, impl=impl, reduction="sum")
    torch.testing.assert_close(linear_cross_entropy(e, c, t, impl=impl, num_items=make(12.0)), total / 12)
    assert linear_cross_entropy(e, c, t, impl=impl, num_items=make(0.0)) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("impl", IMPLS)
def test_sequences_too_short_for_a_shift_of_one_have_no_loss(impl, length, reduction):
    e, c = torch.ones(4, length, 8, requires_grad=True), torch.ones(40, 8, requires_grad=True)
    targets, weight = torch.full((4, length), 3), torch.ones(4, length)
    loss, lse = linear_cross_entropy(e, c, targets, impl=impl, reduction=reduction, shift=True, return_lse=True,
                                     token_weight=weight, label_smoothing=0.1)  # fmt: skip
    assert loss.shape == ((4, 0) if reduction == "none" else ())
    assert lse.shape == (4, 0)
    assert not loss.any()
    for x, gradient in zip((e, c), torch.autograd.grad(loss.sum() + lse.sum(), (e, c)), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_budget_all_is_that_of_more_than_enough_bytes(impl):
    given = inputs(Case("all", (24,), 16, 70), "bfloat16")
    e, c, t = (tensor(x) for x in (given.e, given.c, given.targets))
    e.requires_grad_(), c.requires_grad_()
    found = [linear_cross_entropy(e, c, t, impl=impl, memory_budget=budget) for budget in ("all", 2e12)]
    (de, dc), (de_of_bytes, dc_of_bytes) = (torch.autograd.grad(x, (e, c)) for x in found)
    assert torch.equal(found[0], found[1])
    assert torch.equal(de, de_of_bytes)
    assert torch.equal(dc, dc_of_bytes)


@pytest.fixture
def float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}]
)
@pytest.mark.parametrize("impl", IMPLS)
def test_the_default_dtype_changes_nothing(impl, options, float64_by_default):
    given = inputs(Case("edge", (24,), 16, 70, arrays=("class_weight",)), "bfloat16")
    e, c, t, weight = (tensor(x) for x in (given.e, given.c, given.targets, given.optional["class_weight"]))
    e.requires_grad_(), c.requires_grad_()
    for more in ({}, {"class_weight": weight}):
        loss, lse = linear_cross_entropy(e, c, t, impl=impl, return_lse=True, **options, **more)
        assert loss.dtype == lse.dtype == torch.float32
        gradients = torch.autograd.grad(loss.sum() + lse.sum(), (e, c))
        assert [g.dtype for g in gradients] == [e.dtype, c.dtype]


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 3.0}])
@pytest.mark.parametrize("impl", ["torch_compile", "reference"])
def test_vmap_and_its_gradients_are_those_of_a_loop(impl, options):
    given = inputs(Case("batch", (3, 10), 8, 70, arrays=("bias",)))
    e, c, t, bias = (tensor(x) for x in (given.e, given.c, given.targets, given.optional["bias"]))
    arrays = (e, c, t, bias)

    def loss(e, c, t, bias):
        return linear_cross_entropy(e, c, t, bias, impl=impl, **options)

    def looped(function):
        return [torch.stack(x) for x in zip(*(function(e[i], c, t[i], bias) for i in range(3)), strict=True)]

    axes = (0, None, 0, None)
    grad = torch.func.grad(loss, (0, 1, 3))
    torch.testing.assert_close(torch.func.vmap(loss, axes)(*arrays), looped(lambda *a: (loss(*a),))[0])
    torch.testing.assert_close(list(torch.func.vmap(grad, axes)(*arrays)), looped(grad))
    total = torch.func.grad(lambda *a: torch.func.vmap(loss, axes)(*a).sum(), (0, 1, 3))(*arrays)
    want = looped(grad)
    torch.testing.assert_close(total, (want[0], want[1].sum(0), want[2].sum(0)))


@pytest.mark.parametrize("impl", ["torch_compile", "reference"])
def test_several_cotangents_at_once(impl):
    given = inputs(Case("edge", (6,), 8, 70))
    e, c, t = (tensor(x) for x in (given.e, given.c, given.targets))
    e.requires_grad_(), c.requires_grad_()
    losses = linear_cross_entropy(e, c, t, impl=impl, reduction="none")
    found = torch.autograd.grad(losses, (e, c), torch.eye(6), is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(torch.eye(6)):
        torch.testing.assert_close(
            [x[i] for x in found], list(torch.autograd.grad(losses, (e, c), one, retain_graph=True))
        )


@pytest.mark.parametrize(
    "function", [lambda f, e: torch.func.jvp(f, (e,), (e,)), lambda f, e: torch.func.hessian(f)(e)]
)
def test_forward_mode_names_the_reference(function):
    given = inputs(Case("edge", (6,), 8, 70))
    e, c, t = (tensor(x) for x in (given.e, given.c, given.targets))
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        function(lambda e: linear_cross_entropy(e, c, t, impl="torch_compile"), e)
    assert function(lambda e: linear_cross_entropy(e, c, t, impl="reference"), e) is not None
