"""A call of either package on NumPy arrays, for tests of what every implementation does."""

from functools import partial
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
    """The sum of the losses times a factor, and its gradients of e, c and, where it is given, the bias.

    of: the cotangents of lse, which is returned then, and is all that is differentiated.
    """
    options = {"impl": impl, "precision": "highest", "return_lse": of is not None, **options}
    leaves = [e, c, *([options.pop("bias")] if "bias" in options else [])]

    def objective(call, options, targets, of, e, c, bias=None):
        found = call(e, c, targets, bias=bias, **options)
        return factor * found.sum() if of is None else (found[1] * of).sum()

    if package == "jax":
        run = partial(objective, cce_jax.linear_cross_entropy, options, targets, of)
        found = jax.value_and_grad(run, tuple(range(len(leaves))))(*map(jnp.asarray, leaves))
        return jax.tree.map(np.asarray, found)
    leaves = [tensor(x).requires_grad_() for x in leaves]
    of = None if of is None else tensor(of)
    value = objective(cce_torch.linear_cross_entropy, _tensors(options), torch.tensor(targets), of, *leaves)
    return array(value), tuple(map(array, torch.autograd.grad(value, leaves)))


def _tensors(options: dict[str, Any]) -> dict[str, Any]:
    return {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
