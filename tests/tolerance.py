"""How close is close: one bound for every comparison, derived from what rounding alone must cost.

Let err(x) = ‖x − truth‖ / ‖truth‖ with truth in float64. A result passes if

    err(result) ≤ K · err(reference in the same dtype) + FLOOR · eps(dtype)

The reference keeps full float32 logits and rounds once, each gradient to its type. The kernels also round dz to the
input type before its two matmuls: a second rounding of the same size, √2 in the error, and up to 2 where both fall on a
small sum such as a single row; K = 2. Errors of a reference can vanish by luck, for a loss of one token, say, hence the
floor: the unit roundoff of the result's type, four times, for the handful of operations after the last long sum.
In float32 the sums themselves are rounded, in another order than the reference's: √n·eps of their n ≤ 256 terms.

That floor is wider than the error of a whole gradient. Where a result has hundreds of elements, so that no error
vanishes by luck, a test counts its roundings instead, and the floor is float32's for every type:

    err(result) ≤ roundings · err(reference in the same dtype) + FLOOR · eps(float32)

The reference's is one; r of the same size that are independent make √r of it, and r if all fall together. The kernels
round dz and the result: 2. From saved exponentials (cce_kernels/exponentials.py) there is one rounding more, of P,
relative, as dz's is: 3. Where all are saved dz is not formed and not rounded, but r·e is, before dc: 3 at the most,
again.

Both bounds trust the reference, and what is wrong in it and in the kernels alike, such as the sign of the bias, which
they add in one function, would widen them. So the reference has a bound of its own, `assert_reference`: a rounding to
its type, and of float32 √n for the sums of n ≤ 256 terms and |z| ≤ 48 for an exponential of a rounded logit.
"""

import ml_dtypes
import numpy as np

K = 2.0
RELIABLE = 64.0  # 16 + 48
FLOOR = {"float32": 16.0, "bfloat16": 1.0, "float16": 1.0, "float64": 64.0}


def error(actual, truth) -> float:
    """‖actual − truth‖ / ‖truth‖, or ‖actual‖ where the truth is zero; NaN never passes a bound."""
    actual, truth = np.asarray(actual, np.float64), np.asarray(truth, np.float64)
    assert actual.shape == truth.shape, f"{actual.shape=} is not {truth.shape=}"
    size = np.linalg.norm(truth.ravel())
    return float(np.linalg.norm((actual - truth).ravel()) / (size if size > 0 else 1.0))


def roundoff(dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def bound(reference, truth) -> float:
    """The error that a result of the reference's type may have."""
    reference = np.asarray(reference)
    return K * error(reference, truth) + FLOOR[reference.dtype.name] * roundoff(reference.dtype)


def assert_reference(reference, truth, what: str) -> None:
    """Assert that the reference is off by its own roundings alone."""
    reference = np.asarray(reference)
    allowed = roundoff(reference.dtype) + RELIABLE * roundoff(np.float32)
    assert error(reference, truth) <= allowed, f"{what}: error {error(reference, truth):.3g} exceeds {allowed:.3g}"


def assert_close(actual, truth, reference, what: str) -> None:
    """Assert the bound above; reference is the full-logits result in the same dtype as actual."""
    actual = np.asarray(actual)
    assert actual.dtype == np.asarray(reference).dtype, f"{what}: {actual.dtype} is not {np.asarray(reference).dtype}"
    allowed = bound(reference, truth)
    assert error(actual, truth) <= allowed, f"{what}: error {error(actual, truth):.3g} exceeds {allowed:.3g}"


def assert_rounded(actual, truth, reference, what: str, *, roundings: int) -> None:
    """Assert the bound that counts roundings."""
    actual, reference = np.asarray(actual), np.asarray(reference)
    assert actual.dtype == reference.dtype, f"{what}: {actual.dtype} is not {reference.dtype}"
    allowed = roundings * error(reference, truth) + FLOOR["float32"] * roundoff(np.float32)
    assert error(actual, truth) <= allowed, f"{what}: error {error(actual, truth):.3g} exceeds {allowed:.3g}"
