"""Calls of cce_jax on the NumPy inputs of a case."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cce_jax import linear_cross_entropy
from tests.cases import Inputs


def run(given: Inputs, options: dict[str, Any], impl: str, **more) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """loss, lse and the gradients of Σ of_loss·loss (+ Σ of_lse·lse if lse is returned), as tests.truth.truth."""
    options = {"precision": "highest", **options, **more}
    returned = options.pop("return_lse", False)
    arrays = {k: jnp.asarray(v) for k, v in given.optional.items()}
    leaves = {k: jnp.asarray(v) for k, v in given.differentiable().items()}
    if options.get("vocab_axis"):
        leaves["c"] = leaves["c"].T

    @jax.jit
    def objective(leaves):
        optional = {k: leaves.get(k, v) for k, v in arrays.items()}
        loss, lse = linear_cross_entropy(leaves["e"], leaves["c"], given.targets, impl=impl, return_lse=True,
                                         **optional, **options)  # fmt: skip
        scalar = jnp.sum(loss * given.of_loss)
        return scalar + (jnp.sum(lse * given.of_lse) if returned else 0), (loss, lse)

    gradients, (loss, lse) = jax.grad(objective, has_aux=True)(leaves)
    if options.get("vocab_axis"):
        gradients["c"] = gradients["c"].T
    return loss, lse, {k: np.asarray(v) for k, v in gradients.items()}
