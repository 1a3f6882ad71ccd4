"""Calls of cce_jax on the NumPy inputs of a case, and a case held to float64."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cce_jax import linear_cross_entropy
from tests.cases import Case, Inputs, inputs
from tests.tolerance import assert_close, assert_reference


def run(given: Inputs, options: dict[str, Any], impl: str, **more) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """loss, lse and the gradients of Σ of_loss·loss (+ Σ of_lse·lse if lse is returned), as tests.truth.truth."""
    options = {"precision": "highest", **options, **more}
    returned = options.pop("return_lse", False)
    leaves, transposed = given.differentiable(), options.get("vocab_axis")
    if transposed:
        leaves["c"] = leaves["c"].T

    program = _program(impl, returned, tuple(sorted(options.items())))
    arrays = jax.device_put((leaves, given.optional))  # compiles nothing, as jnp.asarray does for each shape
    gradients, (loss, lse) = program(*arrays, given.targets, given.of_loss, given.of_lse)
    found = {k: np.asarray(v) for k, v in gradients.items()}
    if transposed:
        found["c"] = found["c"].T
    return loss, lse, found


@cache
def _program(impl: str, returned: bool, options: tuple):
    """One for each kind of call, so that the same with other numbers compiles nothing."""

    def objective(leaves, arrays, targets, of_loss, of_lse):
        optional = {k: leaves.get(k, v) for k, v in arrays.items()}
        more = optional | dict(options)
        loss, lse = linear_cross_entropy(leaves["e"], leaves["c"], targets, impl=impl, return_lse=True, **more)
        scalar = jnp.sum(loss * of_loss)
        return scalar + (jnp.sum(lse * of_lse) if returned else 0), (loss, lse)

    return jax.jit(jax.grad(objective, has_aux=True))


def check(case: Case, dtype: str, impl: str, run: Callable = run, **more) -> None:
    """The loss, lse and every gradient of a case within the bounds of tests/tolerance.py."""
    from tests.truth import truth  # by PyTorch, which some machines lack

    given = inputs(case, dtype)
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
