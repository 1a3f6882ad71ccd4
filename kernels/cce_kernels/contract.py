"""What every framework's linear_cross_entropy checks of its arguments. Pure Python: imports no framework.

Each message names the argument, prints the value or shape that it got and says what is allowed.
"""

import operator
import sys
from collections.abc import Sequence
from numbers import Real

REDUCTIONS = ("mean", "sum", "none")
IMPLS = ("auto", "cce", "chunked", "reference")
KERNEL_TYPES = ("bfloat16", "float16", "float32")
MEMORY_BUDGET = 300 * 2**20  # bytes; the default

Shape = tuple[int, ...]


def choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if type(value) is str and value in allowed:
        return
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


LARGEST = sys.float_info.max


def number(name: str, value: object, *, low: float = -LARGEST, high: float = LARGEST, above: bool = False) -> float:
    """value as a finite float in [low, high], or above low itself if `above`."""
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}")
    x = float(value)
    if not low <= x <= high or (above and x == low):  # NaN is in no interval
        bounds = f"in [{low:g}, {high:g}]" if high < LARGEST else "positive" if above else "a number"
        raise ValueError(f"{name}={value!r} must be finite and {bounds}")
    return x


def memory_budget(value: object) -> int:
    """memory_budget as an int; ValueError if negative."""
    value = integer("memory_budget", value)
    if value < 0:
        raise ValueError(f"memory_budget must be a number of bytes, at least 0, got {value}")
    return value


def softcap(value: object) -> float | None:
    try:
        return None if value is None else number("softcap", value, low=0.0, above=True)
    except ValueError as error:
        raise ValueError(f"{error}, or None for no softcap") from None


def integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def shapes(
    e: Shape, c: Shape, targets: Shape, *, vocab_axis: int, shift: int, bias: Shape | None, class_weight: Shape | None,
    token_weight: Shape | None,
) -> None:  # fmt: skip
    """Raise unless the arrays fit together."""
    layout = "(V, D)" if vocab_axis == 0 else "(D, V)"
    if len(c) != 2 or 0 in c:
        raise ValueError(f"c must have shape {layout} with V, D >= 1 for vocab_axis={vocab_axis}, got c {c}")
    vocabulary, width = c[vocab_axis], c[1 - vocab_axis]
    if not e or e[-1] != width:
        raise ValueError(f"e must have shape (..., D) with D = {width} as c's {layout}, got e {e} and c {c}")
    if targets != e[:-1]:
        raise ValueError(
            f"targets must have the shape of e without its last axis, {e[:-1]}, got targets {targets} and e {e}"
        )
    for name, shape in (("bias", bias), ("class_weight", class_weight)):
        if shape is not None and shape != (vocabulary,):
            raise ValueError(f"{name} must have shape (V,) = ({vocabulary},), got {name} {shape} and c {c}")
    if token_weight is not None and token_weight != targets:
        raise ValueError(
            f"token_weight must have the shape of targets, got token_weight {token_weight} and targets {targets}"
        )
    last = targets[-1] if targets else 0
    if shift and not 0 < shift < last:
        raise ValueError(f"shift={shift} must be in [0, T) with T = {last}, the last axis of targets {targets}")


def bad_target(position: Sequence[int], value: int, vocabulary: int, ignore_index: int) -> ValueError:
    at = ", ".join(map(str, position))
    return ValueError(f"targets[{at}] = {value} is outside [0, {vocabulary}) and is not ignore_index={ignore_index}")
