"""Calls of cce_jax on the NumPy inputs of a case."""

from functools import cache
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

    program = _program(impl, returned, tuple(sorted(options.items())))
    gradients, (loss, lse) = program(leaves, arrays, given.targets, given.of_loss, given.of_lse)
    if options.get("vocab_axis"):
        gradients["c"] = gradients["c"].T
    return loss, lse, {k: np.asarray(v) for k, v in gradients.items()}


@cache
def _program(impl: str, returned: bool, options: tuple):
    """One for each kind of call, so that the same with other numbers compiles nothing."""

    def objective(leaves, arrays, targets, of_loss, of_lse):
        optional = {k: leaves.get(k, v) for k, v in arrays.items()}
        loss, lse = linear_cross_entropy(leaves["e"], leaves["c"], targets, impl=impl, return_lse=True,
                                         **optional, **dict(options))  # fmt: skip
        scalar = jnp.sum(loss * of_loss)
        return scalar + (jnp.sum(lse * of_lse) if returned else 0), (loss, lse)

    return jax.jit(jax.grad(objective, has_aux=True))
