"""Mixed precision: e in 16 bits beside a float32 c and bias, whose gradients come in float32 from float32 sums.

tests/search draws such calls too.
"""

import numpy as np
import pytest
import torch

import cce_torch
from tests import both, call_torch
from tests.cases import DTYPES, Case, inputs

BIAS = Case("bias", leading=(40,), arrays=("bias",), options={"label_smoothing": 0.1})


@pytest.fixture(autouse=True)
def small_blocks():
    with call_torch.small_blocks():
        yield


@both.every
def test_a_sum_that_16_bits_do_not_hold(package, impl):
    """Two tokens, whose gradients of the target's row are 1 and 2⁻¹⁰: bfloat16 would keep the first alone."""
    e = np.array([[1.0], [2.0**-10]], DTYPES["bfloat16"])
    c = np.zeros((64, 1), np.float32)
    c[0, 0] = -1e4  # the target's probability is 0, so that dz is exactly −1
    dc = both.gradients(package, impl, e, c, np.zeros(2, np.int32), reduction="sum")[1][1]
    p = np.exp(-1e4 * np.float64(e))[:, 0] / (63 + np.exp(-1e4 * np.float64(e)))[:, 0]
    assert dc.dtype == np.float32
    assert float(dc[0, 0]) == pytest.approx(np.sum((p - 1) * np.float64(e)[:, 0]), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["chunked", "torch_compile", "reference"])
def test_autocast_is_mixed_precision(impl, dtype):
    """e is cast as torch.nn.functional.linear casts it; c and bias are rounded, but not their gradients."""
    given = inputs(BIAS)
    targets = torch.tensor(given.targets)

    def run(*arrays, autocast=False):
        leaves = [x.detach().requires_grad_() for x in arrays]
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            loss = cce_torch.linear_cross_entropy(*leaves[:2], targets, leaves[2], impl=impl, label_smoothing=0.1)
        assert loss.dtype == torch.float32
        return loss.detach(), torch.autograd.grad(loss, leaves)

    e, c, bias = map(torch.tensor, given.differentiable().values())
    loss, found = run(e, c, bias, autocast=True)
    of_mixed, mixed = run(e.to(dtype), c, bias)
    assert torch.equal(loss, of_mixed)
    assert torch.equal(loss, run(e.to(dtype), c.to(dtype), bias.to(dtype))[0])
    for x, y in zip(found, mixed, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y.float())
