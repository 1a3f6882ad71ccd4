"""How far a method's result is from the float64 truth, and whether rounding explains that."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import truth as float64
from bench.data import LARGEST_LOGIT


class Expected(NamedTuple):
    truth: float64.Truth
    rounding: dict[str, float]  # the least error that de and dc of their type can have


def expected(e: jax.Array, c: jax.Array, targets: jax.Array) -> Expected:
    truth = float64.mean_loss(e, c, targets)
    return Expected(truth, {x: float64.rounding_error(getattr(truth, x), e.dtype) for x in ("de", "dc")})


def bound(dtype) -> float:
    """The relative error of loss and gradients beyond which a row is marked.

    Rounding a logit z to a type of unit roundoff u changes exp(z), and so a probability and its share of the gradient,
    by z·u relative to itself; full logits in the model's type do that, and no method needs to do worse. Twice, for dz
    is rounded too and the products are accumulated. A matmul of float32 may be one of TF32, of 11 bits.
    """
    unit_roundoff = max(float(jnp.finfo(dtype).eps), 2.0**-10) / 2
    return 2 * LARGEST_LOGIT * unit_roundoff


def of_result(framework: str, result: Any, given: Expected, dtype) -> dict[str, Any]:
    """The columns of a row about correctness. Raises ValueError where the result is not one: its shapes, or NaN."""
    loss, gradients = result
    truth = given.truth
    for name, found in zip(("de", "dc"), gradients, strict=True):
        want = getattr(truth, name).shape
        if tuple(found.shape) != want:
            raise ValueError(f"{name} has shape {tuple(found.shape)}, not {want}")
    if framework == "torch":
        from bench.calls import arrays

        gradients = arrays(*gradients)
    errors = {"loss_error": abs(float(loss) - truth.loss) / truth.loss}
    errors |= {
        f"{x}_error": float64.relative_error(found, getattr(truth, x))
        for x, found in zip(("de", "dc"), gradients, strict=True)
    }
    if not np.isfinite(list(errors.values())).all():
        raise ValueError(f"the result is not finite: {errors}")
    largest = max(errors.values())
    return errors | {f"rounding_{x}": r for x, r in given.rounding.items()} | {"marked": largest > bound(dtype)}
