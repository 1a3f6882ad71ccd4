"""cce_torch.functional.linear_cross_entropy against PyTorch's own function, and what it refuses."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_torch.functional import linear_cross_entropy


def of_logits(input, linear_weight, target, *, linear_bias=None, ignore_index=None, **options):
    ignore_index = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ignore_index=ignore_index, **options)


THEIRS = [of_logits, *([F.linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else [])]


def tensors(seed: int, tokens: int | None, width: int, classes: int, ignore_index: int | None):
    rng = np.random.default_rng(seed)
    rows = () if tokens is None else (tokens,)
    drawn = [rng.standard_normal(shape) for shape in ((*rows, width), (classes, width), (classes,))]
    target = rng.integers(classes, size=rows)
    if ignore_index is not None and rows:
        target = np.where(rng.random(rows) < 0.3, ignore_index, target)
        target[0] = (ignore_index + 1) % classes  # one token counts: PyTorch's mean of none is NaN
    weight = rng.random(classes) + 0.1
    return [torch.tensor(x, requires_grad=True) for x in drawn], torch.tensor(target), torch.tensor(weight)


def outcome(loss, leaves, target, cotangent, options: dict[str, Any]):
    input, linear_weight, linear_bias = leaves
    if options.get("linear_bias", ...) is None:
        options, leaves = {k: v for k, v in options.items() if k != "linear_bias"}, leaves[:2]
    else:
        options = options | {"linear_bias": linear_bias}
    found = loss(input, linear_weight, target, **options)
    return found, *torch.autograd.grad((found * cotangent[: found.numel()].reshape(found.shape)).sum(), leaves)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.none() | st.integers(1, 9),
    width=st.integers(1, 7),
    classes=st.integers(2, 11),
    bias=st.booleans(),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignore_index=st.sampled_from([None, -100, 1]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_value_and_gradients_are_pytorchs(
    seed, tokens, width, classes, bias, weighted, reduction, ignore_index, label_smoothing
):
    leaves, target, weight = tensors(seed, tokens, width, classes, ignore_index)
    if tokens is None and ignore_index is not None and int(target) == ignore_index:
        target = (target + 1) % classes
    options = dict(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
    options |= {} if bias else {"linear_bias": None}
    options |= {"weight": weight} if weighted else {}
    cotangent = torch.randn(max(tokens or 1, 1), dtype=torch.float64)
    ours = outcome(linear_cross_entropy, leaves, target, cotangent, options)
    for loss in THEIRS:
        theirs = outcome(loss, leaves, target, cotangent, options)
        assert len(ours) == len(theirs)
        for x, y in zip(ours, theirs, strict=True):
            assert x.shape == y.shape
            assert x.dtype == y.dtype == torch.float64
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_the_signature_is_pytorchs():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this PyTorch has no linear_cross_entropy")
    ours, theirs = (inspect.signature(f).parameters for f in (linear_cross_entropy, F.linear_cross_entropy))
    assert [(x.name, x.kind, x.default) for x in ours.values()] == [
        (x.name, x.kind, x.default) for x in theirs.values()
    ]


def test_the_options_of_pytorch_change_nothing():
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this PyTorch has no LinearCrossEntropyOptions")
    leaves, target, _ = tensors(0, 8, 4, 7, -100)
    options = torch.nn.LinearCrossEntropyOptions()
    input, linear_weight, _ = leaves
    ours = linear_cross_entropy(input, linear_weight, target, options=options)
    torch.testing.assert_close(ours, F.linear_cross_entropy(input, linear_weight, target, options=options))


def test_sixteen_bits_give_a_loss_in_float32():
    leaves, target, _ = tensors(0, 8, 4, 7, -100)
    input, linear_weight = (x.detach().bfloat16() for x in leaves[:2])
    loss = linear_cross_entropy(input, linear_weight, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss.double(), of_logits(input.double(), linear_weight.double(), target), rtol=1e-5, atol=0
    )


def test_the_mean_of_no_token_is_0():
    leaves, target, _ = tensors(0, 3, 4, 7, -100)
    assert linear_cross_entropy(leaves[0], leaves[1], torch.full_like(target, -100)) == 0


E, C, T = torch.zeros(6, 4), torch.zeros(9, 4), torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        ((E, C, torch.zeros(6, 9)), {}, NotImplementedError, r"target .* got \(6, 9\): probabilities"),
        ((E[0], C, torch.zeros(9)), {}, NotImplementedError, r"target .* got \(9,\): probabilities"),
        ((E, C.reshape(3, 3, 4), T), {}, NotImplementedError, r"linear_weight must be \(V, D\), got \(3, 3, 4\)"),
        ((E.reshape(2, 3, 4), C, T.reshape(2, 3)), {}, NotImplementedError, r"input must be .* got \(2, 3, 4\)"),
        ((E[0, 0], C, T), {}, ValueError, r"input must be .* got \(\)"),
        ((E, C[0], T), {}, ValueError, r"linear_weight \(V, D\), got \(6, 4\) and \(4,\)"),
        ((E, C[:, :3], T), {}, ValueError, r"got \(6, 4\) and \(9, 3\)"),
        ((E, C, T[:5]), {}, ValueError, r"target must be \(6,\), .* got \(5,\)"),
        ((E, C, T[:, None]), {}, ValueError, r"target must be \(6,\), .* got \(6, 1\)"),
        ((E, C, T.float()), {}, TypeError, "target must be integers, got float32"),
        ((E, C, [0] * 6), {}, TypeError, "target must be a torch.Tensor, got list"),
        ((E, C.half(), T), {}, TypeError, r"^linear_weight must be of input's type, .*: write linear_weight\.to"),
        ((E.int(), C, T), {}, TypeError, "^input must be one of .*, got input int32"),
        ((E, C, T), {"linear_bias": torch.zeros(8)}, ValueError, r"linear_bias must be \(V,\) = \(9,\), got \(8,\)"),
        ((E, C, T), {"weight": torch.zeros(9, 1)}, ValueError, r"weight must be \(V,\) = \(9,\), got \(9, 1\)"),
        ((E, C, T), {"options": {"impl": "chunked"}}, TypeError, "options must be .*got dict"),
        ((E, C, T), {"reduction": "batchmean"}, ValueError, "reduction='batchmean'"),
        ((E, C, T), {"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5"),
    ],
)
def test_what_is_refused_names_the_argument(arguments, options, error, said):
    with pytest.raises(error, match=said):
        linear_cross_entropy(*arguments, **options)
