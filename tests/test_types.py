"""The types that a type checker sees. `make lint` lets pyright check every assert_type here; the tests run them."""

import doctest
import inspect
import typing
from typing import assert_type

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

import cce_jax
import cce_jax.api as of_jax
import cce_torch
from cce_torch import options as of_torch

E, C, T = np.ones((2, 4), np.float32), np.ones((9, 4), np.float32), np.zeros(2, np.int32)
BOOLS: list[bool] = [False, True]


def test_what_jax_returns():
    f = cce_jax.linear_cross_entropy
    loss, lse = assert_type(f(E, C, T, return_lse=True), tuple[jax.Array, jax.Array])
    for x in (assert_type(f(E, C, T), jax.Array), assert_type(f(E, C, T, return_lse=False, z_loss=0.0), jax.Array)):
        np.testing.assert_array_equal(x, loss)
    assert lse.shape == (2,)
    for wanted in BOOLS:
        either = assert_type(f(E, C, T, return_lse=wanted), jax.Array | tuple[jax.Array, jax.Array])
        assert isinstance(either, tuple) is wanted


def test_what_torch_returns():
    e, c, t = torch.tensor(E), torch.tensor(C), torch.tensor(T)
    f = cce_torch.linear_cross_entropy
    loss, lse = assert_type(f(e, c, t, return_lse=True), tuple[Tensor, Tensor])
    plain = assert_type(f(e, c, t), Tensor), assert_type(f(e, c, t, None, -100, None, "mean", False, False), Tensor)
    assert all(torch.equal(x, loss) for x in plain)
    assert lse.shape == (2,)
    by_place = assert_type(f(e, c, t, None, -100, None, "mean", False, True), tuple[Tensor, Tensor])
    assert torch.equal(by_place[1], lse)
    for wanted in BOOLS:
        either = assert_type(f(e, c, t, return_lse=wanted), Tensor | tuple[Tensor, Tensor])
        assert isinstance(either, tuple) is wanted


def test_what_the_module_returns():
    e, c, t = torch.tensor(E), torch.tensor(C), torch.tensor(T)
    loss, lse = assert_type(cce_torch.LinearCrossEntropy(return_lse=True)(e, c, t), tuple[Tensor, Tensor])
    assert torch.equal(assert_type(cce_torch.LinearCrossEntropy(z_loss=0.0)(e, c, t), Tensor), loss)
    assert lse.shape == (2,)
    for wanted in BOOLS:
        either = assert_type(cce_torch.LinearCrossEntropy(return_lse=wanted)(e, c, t), Tensor | tuple[Tensor, Tensor])
        assert isinstance(either, tuple) is wanted


def test_what_the_head_returns():
    h, t = torch.tensor(E), torch.tensor(T)
    linear = torch.nn.Linear(4, 9)
    from_linear = cce_torch.LinearCrossEntropyHead.from_linear
    head, with_lse = from_linear(linear, return_lse=False), from_linear(linear, return_lse=True)
    assert assert_type(head(h), Tensor).shape == (2, 9)
    loss, lse = assert_type(with_lse(h, t), tuple[Tensor, Tensor])
    assert torch.equal(assert_type(head(h, t), Tensor), loss)
    assert lse.shape == (2,)
    fresh = cce_torch.LinearCrossEntropyHead(4, 9, bias=False, softcap=30.0)
    assert assert_type(fresh(h, targets=t), Tensor).shape == ()
    assert_type(cce_torch.LinearCrossEntropyHead(4, 9, return_lse=True)(h, t), tuple[Tensor, Tensor])


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (cce_jax.linear_cross_entropy, of_jax.Options, ["return_lse"]),
        (cce_torch.linear_cross_entropy, of_torch.OptionsOfTokens, []),
    ],
)
def test_the_overloads_know_all_keyword_arguments(function, options, others):
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in others}
    assert keywords.keys() == options.__annotations__.keys()
    annotated = {name: kind for name, kind in keywords.items() if kind is not inspect.Parameter.empty}
    assert annotated == {name: typing.get_type_hints(options)[name] for name in annotated}


PUBLIC = [cce_jax.linear_cross_entropy, cce_torch.linear_cross_entropy, cce_torch.linear_log_probs]


@pytest.mark.parametrize("function", PUBLIC)
def test_the_example_of_help_runs(function):
    (example,) = doctest.DocTestFinder(recurse=False).find(function, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
