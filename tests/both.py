"""A call of either package on NumPy arrays, for tests of what every implementation does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import cce_jax
import cce_torch
from tests.call_torch import array, tensor

# In torch "cce" and "chunked" are one path through the package, whose program JAX makes.
IMPLS = [("jax", "cce"), ("jax", "chunked"), ("jax", "reference")]
IMPLS += [("torch", "chunked"), ("torch", "reference"), ("torch", "torch_compile")]
every = pytest.mark.parametrize(("package", "impl"), IMPLS)


def losses(package: str, impl: str, e, c, targets, **options) -> Any:
    """What linear_cross_entropy returns, in NumPy."""
    options = {"impl": impl, "precision": "highest", **options}
    if package == "jax":
        return jax.tree.map(np.asarray, cce_jax.linear_cross_entropy(e, c, targets, **options))
    found = cce_torch.linear_cross_entropy(tensor(e), tensor(c), torch.tensor(targets), **_tensors(options))
    return array(found) if isinstance(found, torch.Tensor) else tuple(map(array, found))


def gradients(package: str, impl: str, e, c, targets, factor: float = 1.0, of=None, **options) -> tuple:
    """The sum of the losses times a factor, and its gradients of e and c.

    of: the cotangents of lse, which is returned then, and is all that is differentiated.
    """
    options = {"impl": impl, "precision": "highest", "return_lse": of is not None, **options}

    def objective(e, c, targets, call, options, of):
        found = call(e, c, targets, **options)
        return factor * found.sum() if of is None else (found[1] * of).sum()

    if package == "jax":
        run = lambda e, c: objective(e, c, targets, cce_jax.linear_cross_entropy, options, of)  # noqa: E731
        return jax.tree.map(np.asarray, jax.value_and_grad(run, (0, 1))(jnp.asarray(e), jnp.asarray(c)))
    leaves = [tensor(x).requires_grad_() for x in (e, c)]
    of = None if of is None else tensor(of)
    call = cce_torch.linear_cross_entropy
    value = objective(*leaves, torch.tensor(targets), call, _tensors(options), of)
    return array(value), tuple(map(array, torch.autograd.grad(value, leaves)))


def _tensors(options: dict[str, Any]) -> dict[str, Any]:
    return {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
