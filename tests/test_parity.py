"""Agreement with the cross-entropies that people use: optax' and PyTorch's, where the contracts overlap."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F

from cce_jax import linear_cross_entropy
from tests.cases import IMPLS, Case, inputs
from tests.tolerance import error

CASE = Case("parity", leading=(29,), width=24, vocabulary=111, arrays=("class_weight",))


@pytest.mark.parametrize("impl", IMPLS)
def test_optax(impl):
    given = inputs(CASE)

    def theirs(e, c):
        kept = given.targets != -100
        logits = jnp.matmul(e, c.T, precision="highest")
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, np.where(kept, given.targets, 0))
        return jnp.sum(jnp.where(kept, nll, 0)) / kept.sum()

    def ours(e, c):
        return linear_cross_entropy(e, c, given.targets, impl=impl, precision="highest")

    want, actual = (jax.value_and_grad(f, (0, 1))(given.e, given.c) for f in (theirs, ours))
    np.testing.assert_allclose(actual[0], want[0], rtol=1e-6)
    for x, y in zip(actual[1], want[1], strict=True):
        assert error(x, y) < 2e-6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("impl", IMPLS)
def test_torch(impl, smoothing, weighted, reduction):
    given = inputs(CASE)
    weight = given.optional["class_weight"] if weighted else None
    their_weight = None if weight is None else torch.tensor(weight)
    e, c = (torch.tensor(x, requires_grad=True) for x in (given.e, given.c))
    want = F.cross_entropy(e @ c.T, torch.tensor(given.targets).long(), their_weight,
                           label_smoothing=smoothing, reduction=reduction)  # fmt: skip
    want.sum().backward()

    def ours(e, c):
        loss = linear_cross_entropy(e, c, given.targets, impl=impl, class_weight=weight, label_smoothing=smoothing,
                                    reduction=reduction, precision="highest")  # fmt: skip
        return jnp.sum(loss), loss

    (de, dc), loss = jax.grad(ours, (0, 1), has_aux=True)(given.e, given.c)
    assert error(loss, want.detach()) < 2e-6
    assert error(de, e.grad) < 2e-6
    assert error(dc, c.grad) < 2e-6
