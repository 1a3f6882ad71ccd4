"""Checks of the arguments of the public function that need JAX, and errors that say what to write instead."""

import sys
from functools import cache, lru_cache, partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cce_jax.losses import TokenNumbers
from cce_jax.plans import Impl
from cce_jax.sharding import Layout
from cce_kernels import contract
from cce_kernels.compat import has_triton
from cce_kernels.device import Gpu

INT32 = np.iinfo(np.int32)
MOST_IDS = 256  # of each token
ONLY_ARRAYS = "e", "c", "targets", "bias", "class_weight", "token_weight", "ids"  # the others may be numbers
ARRAYS = 7  # of the fields of prepare.Arrays are the user's
OPTIONAL = "bias", "class_weight", "token_weight", "ids", "num_items"  # may be None


def array(name: str, x: Any, function: str) -> Any:
    """x, or x.__jax_array__() if x has that method. TypeError unless it is an array of numbers, or allowed without.

    name: of the argument. function: of the user, for the error.
    """
    if x is None and name in OPTIONAL:
        return None
    what = "an array" if name in ONLY_ARRAYS else "a number or an array"
    if isinstance(x, Real) and name not in ONLY_ARRAYS and not (isinstance(x, bool) and name == "temperature"):
        return x
    torch = sys.modules.get("torch")  # if torch was not imported, x is no tensor
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        raise TypeError(f"{name} is a torch.Tensor: cce_torch.{function} takes those; cce_jax.{function} takes arrays")
    convert = getattr(x, "__jax_array__", None)  # None on JAX's tracers
    x = x if convert is None else convert()
    if hasattr(x, "todense"):
        raise TypeError(f"{name} is a sparse array, {type(x).__name__}: pass {name}.todense()")
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise TypeError(f"{name} must be {what}, got {type(x).__name__}{_instead(name, x)}")
    if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise TypeError(f"{name} must be {what} of numbers, got {name} {x.dtype} of shape {np.shape(x)}")
    return x


def known(**options: Any) -> None:
    """TypeError if an option is known only when a program runs: the program depends on it."""
    for name, value in options.items():
        if isinstance(value, Tracer):
            learned = ", or multiply e by a scale that is learned" if name == "logit_scale" else ""
            raise TypeError(
                f"{name} must be a Python number, got {value}, which JAX traces: give it as a static argument, such as "
                f"jax.jit(..., static_argnames={name!r}){learned}"
            )


def precision(precision: Any) -> None:
    """ValueError unless precision is one of JAX's. A DotAlgorithm is not checked: that depends on the types."""
    known = precision is None or isinstance(
        precision, jax.lax.Precision | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
    )
    of_both = precision if isinstance(precision, tuple) else (precision,)
    if not known and not (all(isinstance(x, str | jax.lax.Precision) for x in of_both) and _is_precision(precision)):
        names = ", ".join(repr(x.name.lower()) for x in jax.lax.Precision)
        raise ValueError(
            f"precision={precision!r} must be None, {names}, or another precision of jax.lax.dot_general, such as "
            "jax.lax.DotAlgorithmPreset.BF16_BF16_F32"
        )


@cache
def _is_precision(precision: Any) -> bool:
    x = jax.ShapeDtypeStruct((1,), np.float32)
    try:
        jax.eval_shape(partial(jax.lax.dot, precision=precision), x, x)
    except (TypeError, ValueError):
        return False
    return True


def _instead(name: str, x: Any) -> str:
    """What to write instead of an argument that is no array."""
    if isinstance(x, list | tuple):
        return f": write jnp.asarray({name})" if name.isidentifier() else ": write jnp.asarray(...) of it"
    for part, shape in (("weight", "(V, D)"), ("embedding", "(V, D)"), ("kernel", "(D, V)")):
        if hasattr(x, part) or (isinstance(x, dict) and part in x):
            return f": pass its {part}, with vocab_axis={int(shape == '(D, V)')} if its shape is {shape}"
    return ""


def arrays(given: Any, function: str) -> Any:
    """given, prepare.Arrays, with arrays for objects that stand for arrays. function: as for `array`."""
    found = {name: array(name, getattr(given, name), function) for name in given._fields[:ARRAYS]}
    return given._replace(**found)


def types(given: Any) -> None:
    """TypeError unless the arrays of api.Arrays have types that go together."""
    e, c, bias, targets = given[:4]
    arrays = dict(zip(given._fields[:6], given, strict=False))
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise contract.not_integers("targets", targets.dtype, targets.shape, e.shape, "astype(jnp.int32)")
    allowed = (*contract.KERNEL_TYPES, "float64")
    for name in ("e", "c", "bias"):
        if arrays[name] is not None and arrays[name].dtype.name not in allowed:
            raise TypeError(f"{name} must be one of {', '.join(allowed)}, got {name} {arrays[name].dtype}")
    contract.types(e.dtype.name, c.dtype.name, None if bias is None else bias.dtype.name, "astype")
    if e.dtype.name == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise TypeError(
            "e is float64, which JAX holds only with jax_enable_x64; enable it and use impl='chunked' or 'reference', "
            f"or cast to one of {', '.join(contract.KERNEL_TYPES)}"
        )
    for name in ("class_weight", "token_weight"):
        if arrays[name] is not None and jnp.issubdtype(arrays[name].dtype, jnp.complexfloating):
            raise TypeError(f"{name} must be real, got {name} {arrays[name].dtype}")


def shapes(given: Any, layout: Layout, vocab_axis: int, shift: int) -> None:
    """ValueError unless the shapes of api.Arrays fit."""
    users = zip(given._fields[:ARRAYS], given, strict=False)
    of: dict[str, Any] = {name: None if x is None else np.shape(x) for name, x in users}
    shape_of_c, parts = layout.whole_width(given.c, vocab_axis), layout.size(layout.split_sequences)
    weights = {name: of[name] for name in ("bias", "class_weight", "token_weight")}
    contract.shapes(of["e"], shape_of_c, of["targets"], vocab_axis=vocab_axis, shift=shift, parts=parts, **weights)
    if of["num_items"]:
        raise ValueError(f"num_items must be a number or a scalar array, got shape {of['num_items']}")


def num_items(value: Any, reduction: str, dtype: Any) -> Any:
    """num_items, a number as a float: JAX makes an int32 of an integer, which may be too small for it."""
    contract.num_items(value, reduction)
    if not isinstance(value, Real):
        return value
    contract.finite("num_items", float(value), dtype.name)
    return float(value)


def function(fn: Any, arguments: tuple, entropy: bool, dtype: Any) -> None:
    """TypeError or ValueError unless fn of linear_token_loss returns a loss for each of any number of tokens.

    It may close over nothing that JAX traces. dtype: of the numbers.
    """
    contract.function(fn)
    try:
        hash(fn)
    except TypeError:
        raise TypeError(
            f"fn must be hashable, as JAX compiles for each new fn, and {type(fn).__name__} is not: define a function, "
            "and give the arrays that it reads to linear_token_loss as arguments"
        ) from None
    types = tuple(jnp.dtype(getattr(a, "dtype", None) or jnp.result_type(a)).name for a in arguments)
    _check_function(fn, types, entropy, jnp.dtype(dtype).name)


@lru_cache(maxsize=256)  # an error is not kept
def _check_function(fn: Any, types: tuple[str, ...], entropy: bool, dtype: str) -> None:
    for tokens in contract.TRIED:
        x, *given = (jax.ShapeDtypeStruct((tokens,), of) for of in (dtype, *types))
        numbers: Any = TokenNumbers(x, x, x if entropy else None)  # type: ignore[arg-type]
        with contract.trial(tokens, entropy):
            traced, found = jax.make_jaxpr(fn, return_shape=True)(numbers, *given)
        if not hasattr(found, "shape"):
            raise contract.no_losses("an array", found, entropy)
        contract.losses_of_tokens(found.dtype.name, found.shape, tokens)
        for const in traced.consts:
            if isinstance(const, Tracer):
                raise TypeError(
                    f"fn closes over {const}, which JAX traces: give it to linear_token_loss as an argument"
                )


def temperature(temperature: Any, e: Any, function: str) -> Any:
    """As contract.temperature, with arrays. None where temperature is the number 1."""
    temperature = array("temperature", temperature, function)
    number = contract.temperature(temperature, np.shape(e)[:-1], e.dtype.name)
    return temperature if number is None else None if number == 1 else number


def weight(token_weight: Any, e: Any, function: str) -> Any:
    """token_weight of linear_divergence. TypeError unless it is a real array, ValueError unless it has e's tokens."""
    token_weight = array("token_weight", token_weight, function)
    if token_weight is None:
        return None
    if jnp.issubdtype(token_weight.dtype, jnp.complexfloating):
        raise TypeError(f"token_weight must be real, got token_weight {token_weight.dtype}")
    contract.weight_of_tokens(np.shape(token_weight), np.shape(e))
    return token_weight


def ids(ids: Any, e: Any, function: str) -> Any:
    """ids of linear_log_probs as int32. TypeError unless they are integers, ValueError unless their shape fits e."""
    ids, of_tokens = array("ids", ids, function), np.shape(e)[:-1]
    if ids is None:
        return None
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise contract.not_integers("ids", ids.dtype, ids.shape, (), "astype(jnp.int32)")
    if np.ndim(ids) < 1 or np.shape(ids)[:-1] != of_tokens or not 1 <= np.shape(ids)[-1] <= MOST_IDS:
        raise ValueError(
            f"ids {np.shape(ids)} must have the shape of e without its last axis, {of_tokens}, and a last axis K of 1 "
            f"to {MOST_IDS}"
        )
    return int32(ids, -1)[0]


def targets(targets, vocabulary: int, ignore_index: int, shift: int) -> None:
    if isinstance(targets, Tracer):
        raise ValueError(
            "check_targets=True reads the values of targets: call it outside jit and other transformations"
        )
    values = np.asarray(targets)
    bad = (values != ignore_index) & ((values < 0) | (values >= vocabulary))
    if shift:
        bad[..., :shift] = False  # no token predicts these targets
    if bad.any():
        position = np.argwhere(bad)[0]
        raise contract.bad_target(position.tolist(), int(values[tuple(position)]), vocabulary, ignore_index)


def int32(targets, ignore_index: int):
    """targets, or other ids, as int32, and the ignore_index that goes with them.

    A target that does not fit int32 must not wrap into the vocabulary: it is clipped to a number outside every
    vocabulary, and is still ignored if it equals ignore_index. An ignore_index that does not fit the type of targets
    ignores no token.
    """
    held = jnp.iinfo(targets.dtype)
    if held.max <= INT32.max and INT32.min <= ignore_index <= INT32.max:
        return targets.astype(np.int32), ignore_index
    numpy = jnp if isinstance(targets, jax.Array) else np
    ignored = held.min <= ignore_index <= held.max and targets == targets.dtype.type(ignore_index)
    fitting = numpy.clip(targets, max(held.min, INT32.min + 1), min(held.max, INT32.max)).astype(np.int32)
    return numpy.where(ignored, np.int32(INT32.min), fitting), INT32.min


def resolved(impl: Impl, dtype, gpu: Gpu | None) -> Impl:
    """impl, but "chunked" for "auto" if the kernels cannot run for this type or on this machine's GPU."""
    if impl not in ("auto", "cce"):
        return impl
    typed, runs = dtype.name in contract.KERNEL_TYPES, gpu is None or gpu.supported
    if impl == "auto":
        return "auto" if typed and runs else "chunked"
    if not typed:
        allowed = ", ".join(contract.KERNEL_TYPES)
        raise TypeError(f"impl='cce' takes {allowed}; e is {dtype}, which 'chunked' and 'reference' take")
    if not has_triton():
        raise NotImplementedError(
            "impl='cce' needs Triton, which this jaxlib lacks (jaxlib for Windows has none; in WSL2 use jaxlib for "
            "Linux): use impl='chunked', or leave impl out"
        )
    if gpu is not None and not gpu.supported:
        raise NotImplementedError(
            f"impl='cce' needs an NVIDIA GPU of compute capability 8.0 or more, this one is {gpu.compute_capability}; "
            "impl='chunked' runs on it"
        )
    return impl
