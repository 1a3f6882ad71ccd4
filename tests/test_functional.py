"""cce_torch.functional.linear_cross_entropy against PyTorch's own function, and what it refuses."""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cce_torch.functional import linear_cross_entropy
from tests.call_torch import small_blocks

OF_NEW_PYTORCHS = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has none")


def tensors(tokens: tuple[int, ...] = (8,), width: int = 4, classes: int = 7):
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal(shape) for shape in ((*tokens, width), (classes, width), (classes,))]
    return [torch.tensor(x, requires_grad=True) for x in drawn], torch.tensor(rng.integers(2, classes, size=tokens))


OPTIONS = [
    {},
    {"linear_bias": None, "weight": torch.linspace(0.1, 1.1, 7, dtype=torch.float64)},
    {"reduction": "none", "label_smoothing": 0.1, "ignore_index": 1},
    {"reduction": "sum", "label_smoothing": 1.0, "ignore_index": None},
]


@OF_NEW_PYTORCHS
@pytest.mark.parametrize("tokens", [(), (8,)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradients_are_pytorchs(options, tokens):
    """Beside full logits: tests/search."""
    leaves, target = tensors(tokens)
    leaves = leaves[:2] if "linear_bias" in options else leaves
    options = {"linear_bias": leaves[-1], **options}
    if tokens and options.get("ignore_index", -100) is not None:
        target[::3] = options.get("ignore_index", -100)
    found = []
    for loss in (linear_cross_entropy, F.linear_cross_entropy):
        with small_blocks():
            value = loss(*leaves[:2], target, **options)
            weights = torch.linspace(-1, 2, value.numel(), dtype=torch.float64).view(value.shape)
            found.append([value, *torch.autograd.grad((weights * value).sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@OF_NEW_PYTORCHS
def test_the_signature_is_pytorchs():
    ours, theirs = (inspect.signature(f).parameters for f in (linear_cross_entropy, F.linear_cross_entropy))
    *own, last = [(x.name, x.kind, x.default) for x in ours.values()]
    assert own == [(x.name, x.kind, x.default) for x in theirs.values()]
    assert last[0] == "accumulate_into", "the one argument that PyTorch has not"


@OF_NEW_PYTORCHS
def test_the_options_of_pytorch_change_nothing():
    (input, linear_weight, _), target = tensors()
    options = torch.nn.LinearCrossEntropyOptions()
    with small_blocks():
        ours = linear_cross_entropy(input, linear_weight, target, options=options)
    torch.testing.assert_close(ours, F.linear_cross_entropy(input, linear_weight, target, options=options))


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
