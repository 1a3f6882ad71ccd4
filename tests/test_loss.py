"""Every option, implementation, layout and type against float64."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.call import run
from tests.cases import CASES, DTYPES, IMPLS, Case, inputs
from tests.tolerance import assert_close, assert_reference
from tests.truth import truth


def check(case: Case, dtype: str, impl: str, seed: int = 0, run: Callable = run, **more) -> None:
    given = inputs(case, dtype, seed)
    loss, lse, gradients = truth(given, case.options)
    reference = run(given, case.options, "reference")
    for what, number, exact in zip(("loss", "lse"), reference, (loss, lse), strict=False):
        assert_reference(number, exact, f"the reference's {what}")
    for name, gradient in reference[2].items():
        assert_reference(gradient, gradients[name], f"the reference's gradient of {name}")
    actual = run(given, case.options, impl, **more)
    assert_close(actual[0], loss, reference[0], "loss")
    assert_close(actual[1], lse, reference[1], "lse")
    assert actual[0].dtype == np.float32
    assert set(actual[2]) == set(gradients)
    for name, gradient in actual[2].items():
        assert gradient.dtype == given.differentiable()[name].dtype
        assert_close(gradient, gradients[name], reference[2][name], f"gradient of {name}")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case, impl):
    check(case, "float32", impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["plain", "smoothing and class weights", "everything"])
def test_classifier_with_the_vocabulary_last(name, impl):
    check(next(c for c in CASES if c.name == name), "float32", impl, vocab_axis=1)


@pytest.mark.parametrize("impl", ["cce", "chunked"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "float32"])
@pytest.mark.parametrize("name", ["plain", "bias", "scale", "smoothing and class weights", "everything"])
def test_sixteen_bit(name, dtype, impl):
    check(next(c for c in CASES if c.name == name), dtype, impl)


@pytest.mark.parametrize("impl", ["cce", "chunked"])
@pytest.mark.parametrize("shape", [(16, 16, 32), (17, 15, 33), (15, 17, 31), (1, 40, 100), (50, 1, 97), (40, 8, 2)])
def test_ragged_tiles(shape, impl):
    tokens, width, vocabulary = shape
    check(Case("ragged", (tokens,), width, vocabulary, arrays=("bias",)), "float32", impl, seed=sum(shape))


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_chunked_in_several_groups(vocab_axis):
    """Of 1024 columns, the fewest, of which the last one overlaps its neighbour."""
    options = {"label_smoothing": 0.3, "reduction": "none", "return_lse": True}
    case = Case("groups", (9,), 8, 2500, arrays=("bias", "class_weight"), options=options)
    check(case, "float32", "chunked", memory_budget=0, vocab_axis=vocab_axis)
