"""The checks that linear_cross_entropy makes of its arguments, the same in JAX and PyTorch. Imports no framework.

Each error message names the argument, prints the value or shape that it got, and says what is allowed.
"""

import operator
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from cce_kernels.default_budget import MEMORY_BUDGET

REDUCTIONS = ("mean", "sum", "none")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
IMPLS = ("auto", "cce", "chunked", "reference")
KERNEL_TYPES = ("bfloat16", "float16", "float32")
EVERYTHING = 2**62  # bytes; stands for memory_budget="all": an int64 argument of a PyTorch operator can hold it

Shape = tuple[int, ...]


def choice(name: str, value: object, allowed: Sequence[object]) -> None:
    for one in allowed:
        if value is one or (type(value) is type(one) and value == one):
            return
    exact = "; impl='cce' has exact gradients" if name == "impl" and str(value).startswith("cce_") else ""
    raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}{exact}")


_EXACT = "write gradient_tolerance, or nothing: the gradients are exact"
_ROUNDED_ONCE = "write nothing: the sum of a gradient errs by no more than one rounding"
ELSEWHERE = {
    **dict.fromkeys(("filter_eps", "filter_e_grad", "filter_c_grad"), _EXACT),
    **dict.fromkeys(("accum_e_fp32", "accum_c_fp32", "accum_dtype"), _ROUNDED_ONCE),
    "lse_square_scale": "write z_loss",
    "ce_weight": "write class_weight",
    "chunk_mem_const": "write memory_budget, in bytes",
}  # the options of cut_cross_entropy and Liger that have other names here


def unknown_options(function: str, options: Iterable[str], allowed: Iterable[str]) -> TypeError:
    """The error for options that a function or class does not have."""
    remedies = "".join(f"; for {name} {ELSEWHERE[name]}" for name in sorted(options) if name in ELSEWHERE)
    return TypeError(f"{function}: unknown options {sorted(options)}{remedies}; allowed: {', '.join(sorted(allowed))}")


LARGEST = sys.float_info.max
LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
COLDEST = 2.0**-100  # a temperature below it is raised to it: float32 does not hold the inverse of a smaller one
LEAST_BUDGET = 2**20  # bytes: a smaller memory_budget was surely meant in MiB
LARGEST_SOFTCAP = 2.0**100  # a softcap this large changes no logit: softcap · tanh(z / softcap) rounds to z


def number(name: str, value: object, *, low: float = -LARGEST, high: float = LARGEST, above: bool = False) -> float:
    """value as a finite float in [low, high], or in (low, high] if `above`."""
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        cast = f": write float({name})" if hasattr(value, "shape") else ""
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}{cast}")
    try:
        x = float(value)
    except OverflowError:  # an integer
        x = float("inf")
    if not low <= x <= high or (above and x == low):  # NaN is in no interval
        if high < LARGEST:
            bounds = f"in [{low:g}, {high:g}]"
        elif low > -LARGEST:
            bounds = "positive" if above else f"at least {low:g}"
        else:
            bounds = "a number"
        raise ValueError(f"{name}={value!r} must be finite and {bounds}")
    return x


def finite(name: str, value: float, dtype: str) -> None:
    """Raise unless value is finite in the type that computes, which is at least float32. dtype: of e."""
    if abs(value) > LARGEST_FLOAT32 and dtype != "float64":
        raise ValueError(
            f"{name}={value!r} must be finite in float32, in which a loss of {dtype} embeddings is computed"
        )


def memory_budget(value: object) -> int | None:
    """memory_budget in bytes; "all" becomes EVERYTHING. None stays None: the default depends on the tokens."""
    if value is None:
        return None
    if type(value) is str and value == "all":
        return EVERYTHING
    allowed = "must be a whole number of bytes, at least 0, such as 2e9, or 'all' to save everything"
    if type(value) is not int and (not isinstance(value, Real) or isinstance(value, bool)):
        raise TypeError(f"memory_budget={value!r} {allowed}; leave it out for {MEMORY_BUDGET // 2**20} MiB or more")
    size = value if type(value) is int else float(value)
    if not 0 <= size < float("inf") or size != int(size):  # NaN is in no interval
        raise ValueError(f"memory_budget={value!r} {allowed}")
    if 0 < size < LEAST_BUDGET:
        raise ValueError(f"memory_budget={value!r} is in bytes: for MiB write {value!r} * 2**20; 0 is the least plan")
    return min(int(size), EVERYTHING)


def num_items(value: object, reduction: str) -> None:
    """Raise unless "mean" can divide by num_items. Reads no array's value: that could make the host wait for a GPU."""
    if value is None:
        return
    if reduction != "mean":
        raise ValueError(
            f"num_items divides the loss with reduction='mean' only, got reduction={reduction!r}: leave num_items out, "
            "and divide the loss yourself"
        )
    if type(value) in (int, float) or isinstance(value, Real):
        number("num_items", value, low=0.0)
    elif not any(hasattr(value, name) for name in ("__float__", "__index__", "shape")):  # a nested tensor has no shape
        raise TypeError(f"num_items must be a number or a scalar array, got {type(value).__name__}")
    elif "complex" in str(getattr(value, "dtype", "")):
        raise TypeError(f"num_items must be real, got {str(value.dtype).removeprefix('torch.')}")  # type: ignore


def softcap(value: object) -> float | None:
    """softcap as a float; None where it changes no logit.

    A softcap too small for float32 to divide by is raised to 2⁻¹⁰⁰: with either one every logit is almost 0.
    """
    try:
        cap = None if value is None else number("softcap", value, low=0.0, above=True)
    except ValueError as error:
        raise ValueError(f"{error}, or None for no softcap") from None
    if cap is None or cap >= LARGEST_SOFTCAP:
        return None
    return max(cap, 1 / LARGEST_SOFTCAP)


def temperature(value: Any, tokens: Shape, dtype: str) -> float | None:
    """temperature as a float. None for an array: its type and shape are checked, and its values are not read.

    tokens: the shape of e without its last axis. dtype: of e.
    """
    if type(value) is float or (isinstance(value, Real) and not isinstance(value, bool)):
        x = number("temperature", value, low=0.0, above=True)
        finite("temperature", x, dtype)
        return max(x, COLDEST)
    if not hasattr(value, "shape"):
        raise TypeError(f"temperature must be a number or an array, got {type(value).__name__}")
    kind, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if not kind.startswith(("float", "bfloat", "int", "uint")):
        raise TypeError(f"temperature must be real, got temperature {kind}")
    if len(shape) > len(tokens) or any(n not in (1, m) for n, m in zip(shape[::-1], tokens[::-1], strict=False)):
        raise ValueError(
            f"temperature must be a number, or broadcast to the shape of e without its last axis, {tokens}, got "
            f"temperature {shape}"
        )
    return None


TRIED = 2, 3  # numbers of tokens for which fn of linear_token_loss is tried: no array that it closes over fits both


def of_token_loss(entropy: object) -> None:
    try:
        choice("entropy", entropy, (False, True))
    except ValueError as error:
        raise ValueError(f"{error}; for an entropy without a gradient detach numbers.entropy in fn") from None


def function(fn: object) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be a function of numbers and arguments, got {type(fn).__name__}")


AS_ARGUMENT = (
    "fn is called on some of the tokens at a time, in any order, so give an array with a number for each token to "
    "linear_token_loss as an argument: linear_token_loss(e, c, targets, fn, array)"
)


@contextmanager
def trial(tokens: int, entropy: bool) -> Iterator[None]:
    """What fn of linear_token_loss raises for this number of tokens becomes an error that says what may be wrong."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        if "NoneType" in str(error) and not entropy:
            raise TypeError(f"fn reads numbers.entropy, which is None: give entropy=True ({error})") from error
        if "traced array" in str(error) or not any(word in str(error) for word in ("broadcast", "size", "shape")):
            raise
        raise ValueError(f"fn fails for {tokens} tokens: {str(error).rstrip('.')}. {AS_ARGUMENT}") from error


def no_losses(array: str, found: object, entropy: bool) -> TypeError:
    """The error for an fn that returns no array. array: what it must return."""
    hint = ": numbers.entropy is None without entropy=True" if found is None and not entropy else ""
    return TypeError(f"fn must return {array}, the loss of each token; it returned {type(found).__name__}{hint}")


def losses_of_tokens(dtype: str, shape: Shape, tokens: int) -> None:
    """Raise unless what fn of linear_token_loss returned for so many tokens is a loss for each."""
    if shape != (tokens,):
        raise ValueError(
            f"fn must return a loss for each token, of the shape of log_probs, {(tokens,)}; it returned one of shape "
            f"{shape}. {AS_ARGUMENT}"
        )
    if not dtype.startswith(("float", "bfloat")):
        raise TypeError(f"fn must return real numbers of a floating type, got {dtype}, which has no gradient")


def gradient_tolerance(value: object) -> float:
    """With 1 all of a gradient could be left out."""
    tolerance = number("gradient_tolerance", value)
    if not 0 <= tolerance < 1:
        raise ValueError(f"gradient_tolerance={value!r} must be in [0, 1)")
    return tolerance


def integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def shapes(
    e: Shape, c: Shape, targets: Shape, *, vocab_axis: int, shift: int, parts: int = 1, **others: Shape | None
) -> None:
    """Raise unless the arrays fit together.

    parts: the number of devices over which each sequence is split. others: bias, class_weight and token_weight.
    """
    layout = "(V, D)" if vocab_axis == 0 else "(D, V)"
    if len(c) != 2 or 0 in c:
        raise ValueError(f"c must have shape {layout} with V, D >= 1 for vocab_axis={vocab_axis}, got c {c}")
    vocabulary, width = c[vocab_axis], c[1 - vocab_axis]
    if not e or e[-1] != width:
        transposed = ""
        if e and e[-1] == vocabulary:
            transposed = f": did you mean vocab_axis={1 - vocab_axis}? If e holds logits, give the hidden states"
        raise ValueError(
            f"e must have shape (..., D) with D = {width} as c's {layout} for vocab_axis={vocab_axis}, got e {e} and "
            f"c {c}{transposed}"
        )
    if targets != e[:-1]:
        raise ValueError(
            f"targets must have the shape of e without its last axis, {e[:-1]}, got targets {targets} and e {e}"
        )
    token_weight = others.pop("token_weight", None)
    for name, shape in others.items():
        if shape is not None and shape != (vocabulary,):
            raise ValueError(f"{name} must have shape (V,) = ({vocabulary},), got {name} {shape} and c {c}")
    if token_weight is not None and token_weight != targets:
        raise ValueError(
            f"token_weight must have the shape of targets, got token_weight {token_weight} and targets {targets}"
        )
    if not shift:
        return
    last = parts * targets[-1] if targets else 0
    nothing_left = shift == 1 and last <= 1 and targets != ()  # sequences of one token, and batches of no tokens
    if not nothing_left and not 0 < shift < last:
        raise ValueError(f"shift={shift} must be in [0, T) with T = {last}, the last axis of targets {targets}")


def types(e: str, c: str, bias: str | None, cast: str) -> None:
    """Raise unless c and bias have e's type, or both are float32 parameters beside a 16-bit e.

    cast: the framework's method that casts, "astype" or "to".
    """
    mixed = c == "float32" and e in ("bfloat16", "float16")
    if c != e and not mixed:
        raise TypeError(
            f"c must be of e's type, or float32 beside a 16-bit e, got c {c} and e {e}: write c.{cast}(e.dtype) or "
            f"e.{cast}(c.dtype)"
        )
    if bias is not None and bias != c:
        raise TypeError(f"bias must be of c's type, got bias {bias} and c {c}: write bias.{cast}(c.dtype)")


def not_integers(name: str, dtype: object, shape: Shape, e: Shape, cast: str) -> TypeError:
    """The error for targets or ids that are no integers. cast: the call that makes integers of them."""
    got = f"{name} must be of an integer type, got {name} {str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
    if len(shape) == len(e) and name == "targets":
        return TypeError(
            f"{got}: probabilities as targets are not supported; label_smoothing gives an even share of all classes, "
            "and linear_divergence takes a teacher's distribution"
        )
    return TypeError(f"{got}: write {name}.{cast}")


def bad_target(position: Sequence[int], value: int, vocabulary: int, ignore_index: int) -> ValueError:
    at = ", ".join(map(str, position))
    ignored = f": only targets that equal ignore_index are left out; did you mean ignore_index={value}?"
    return ValueError(
        f"targets[{at}] = {value} is outside [0, {vocabulary}) and is not ignore_index={ignore_index}"
        f"{ignored if value < 0 else ''}"
    )


def beta(value: object, divergence: str) -> float | None:
    """beta of linear_divergence; None where the divergence does not use it."""
    if divergence != "jsd":
        return None
    share = number("beta", value)
    if not 0 < share < 1:
        raise ValueError(
            f"beta={value!r} must be above 0 and below 1 for divergence='jsd': write divergence='forward_kl' for what "
            "others call beta=0, and divergence='reverse_kl' for beta=1"
        )
    return share


def weight_of_tokens(token_weight: Shape, e: Shape) -> None:
    if token_weight != e[:-1]:
        raise ValueError(
            f"token_weight must have the shape of e without its last axis, {e[:-1]}, got token_weight {token_weight} "
            f"and e {e}"
        )


TEACHERS = {name: f"teacher_{name}" for name in ("e", "c", "bias", "softcap", "logit_scale", "vocab_axis")}


@contextmanager
def named(names: dict[str, str] = TEACHERS) -> Iterator[None]:
    """Errors about these arguments become errors about what the called function names them, such as teacher_e."""
    try:
        yield
    except (TypeError, ValueError) as error:
        words = re.compile(rf"\b({'|'.join(names)})\b(?!/)")
        raise type(error)(words.sub(lambda found: names[found[1]], str(error))) from None


def pair(e: Shape, c: Shape, teacher_e: Shape, teacher_c: Shape, axes: tuple[int, int]) -> None:
    """Raise unless a student and a teacher have the same tokens and the same vocabulary. axes: their vocab_axis."""
    if teacher_e[:-1] != e[:-1]:
        raise ValueError(
            f"teacher_e must have the shape of e but for the last axis, (*{e[:-1]}, D'), got teacher_e {teacher_e} and "
            f"e {e}"
        )
    vocabulary, of_teacher = c[axes[0]], teacher_c[axes[1]]
    if vocabulary != of_teacher:
        raise ValueError(
            f"teacher_c must have the vocabulary of c, {vocabulary}, and has {of_teacher}: got teacher_c {teacher_c} "
            f"with teacher_vocab_axis={axes[1]} and c {c} with vocab_axis={axes[0]}; if the last entries of the larger "
            "one are padding, leave them out"
        )
