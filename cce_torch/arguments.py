"""Checks of the arguments of the public functions, and the form in which these pass their arguments on."""

import sys
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch.autograd import is_forward_mode, untraced
from cce_torch.call import Call
from cce_torch.on_jax import tensors
from cce_torch.options import Impl
from cce_torch.processes import vocab_parallel as parallel
from cce_torch.processes.vocab_parallel import VocabParallel

F = TypeVar("F", bound=Callable)
IMPLS = (*contract.IMPLS, "torch_compile")
OF_TORCH = ("torch_compile", "reference")  # which run without JAX
PRECISIONS = ("highest", "high", "medium")
LEAST = -(2**63)  # of int64
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
REQUIRED, WEIGHTS = ("e", "c", "targets"), ("class_weight", "token_weight")


def traced(function: F) -> F:
    """A public function, which torch.compile traces; with a break in the graph around it where it must not.

    In a graph torch.func and forward mode see no derivative rule of a Function, nor that a tensor requires a gradient:
    the gradient would be 0. And torch.compile of PyTorch 2.8 cannot trace named tuples.
    """
    if torch.__version__ < (2, 9):  # type: ignore[operator]
        return torch.compiler.disable(function)  # type: ignore[return-value]

    @wraps(function)
    def call(*given: Any, **options: Any) -> Any:
        if torch._C._are_functorch_transforms_active() or is_forward_mode():
            return untraced(function, *given, **options)
        return function(*given, **options)

    return call  # type: ignore[return-value]


class Options(NamedTuple):
    """The options that are no tensors, as the public functions take them; of a function that lacks one its default."""

    reduction: Any = "mean"
    impl: Any = "auto"
    vocab_axis: Any = 0
    precision: Any = None
    logit_scale: Any = None
    softcap: Any = None
    label_smoothing: Any = 0.0
    z_loss: Any = 0.0
    ignore_index: Any = -100
    memory_budget: Any = None
    gradient_tolerance: Any = 0.0
    shift: Any = 0


def checked(options: Options) -> Options:
    """The options as numbers, or an error that names one. Looks only once at values that it has seen."""
    cacheable = not torch.compiler.is_compiling() and CACHEABLE.issuperset(map(type, options))
    return (_checked_once if cacheable else _checked)(*options)


def _checked(*options: Any) -> Options:
    x = Options(*options)
    contract.choice("reduction", x.reduction, contract.REDUCTIONS)
    contract.choice("impl", x.impl, IMPLS)
    contract.choice("vocab_axis", x.vocab_axis, (0, 1))
    contract.choice("precision", x.precision, (None, *PRECISIONS))
    return x._replace(
        logit_scale=1.0 if x.logit_scale is None else contract.number("logit_scale", x.logit_scale),
        softcap=contract.softcap(x.softcap),
        label_smoothing=contract.number("label_smoothing", x.label_smoothing, low=0.0, high=1.0),
        z_loss=contract.number("z_loss", x.z_loss),
        ignore_index=contract.integer("ignore_index", x.ignore_index),
        memory_budget=contract.memory_budget(x.memory_budget),
        gradient_tolerance=contract.gradient_tolerance(x.gradient_tolerance),
        shift=contract.integer("shift", x.shift),
    )


CACHEABLE = {str, int, bool, float, type(None)}  # types of options that a cache can hold
_checked_once = lru_cache(maxsize=256, typed=True)(_checked)


class Prepared(NamedTuple):
    """The arguments of a call, checked and in the form in which all impls take them."""

    e: Tensor  # (..., D), under autocast in its type
    c: Tensor  # (V, D)
    bias: Tensor | None
    targets: Tensor  # (...) int64
    vocabulary: int  # of all processes
    shift: int
    ignore_index: int
    impl: Any  # not "auto" unless the plan decides
    shard: VocabParallel | None
    called: str  # the public function
    num_items: Tensor | None  # ()
    alone: bool  # whether the operators of ops.py compute: with JAX, in one process
    options: Options

    def call(self, reduction: str, **more: Any) -> Call:
        """The record of the call. more: its fields that are no options of all functions."""
        (options, shift), ignored = (self.options, self.shift), self.ignore_index
        return Call(
            options.softcap,
            options.memory_budget,
            options.gradient_tolerance,
            ignore_index=ignored if self.alone else -1,  # else `columns` of losses.py has found the ignored tokens
            shift=shift if self.alone else 0,
            reduction=reduction,
            precision=options.precision,
            impl=self.impl,
            wide_dc=self.c.dtype != self.e.dtype,
            of_shard=self.shard is not None,
            **more,
        )

    def unshifted(self, x: Tensor) -> Tensor:
        """A number of each token, (N,), in the shape of targets after the shift."""
        if not self.shift and self.targets.dim() == 1:
            return x
        x = x.reshape(self.targets.shape)
        return x[..., : -self.shift] if self.shift else x


def prepared(
    called: str,
    given: dict[str, Any],
    options: Options,
    num_items: Any = None,
    check_targets: bool = False,
    shard: VocabParallel | None = None,
) -> Prepared:
    """The arguments for a call, or an error that names one.

    called: the public function. given: all tensors by name. options: `checked`. num_items: a number or a tensor of one
    element.
    """
    contract.num_items(num_items, options.reduction)
    contract.choice("check_targets", check_targets, (False, True))
    e, c, targets, bias = given["e"], given["c"], given["targets"], given["bias"]
    complete = all([x is not None for x in (e, c, targets)])
    usual = complete and num_items is None and tensors.are_usual(*given.values())
    if not usual:
        check_tensors(given, num_items, called)
    if torch.is_autocast_enabled(e.device.type):
        e, c, bias = _autocast(e, c, bias)
        given = given | {"e": e, "c": c, "bias": bias}
    described = tuple([(name, None if x is None else (x.shape, x.dtype)) for name, x in given.items()])
    (_fit_once if usual and shard is None else fit)(options, num_items, shard, described)
    shift, ignore_index = options.shift, options.ignore_index
    if shift and not targets.shape[-1]:
        shift = 0  # there are no tokens to shift; the results are empty anyway
    if options.vocab_axis == 1:
        c = c.T
    vocabulary = c.shape[0] if shard is None else shard.vocabulary
    targets, ignore_index = int64(targets, ignore_index)  # in a narrower type a large one would wrap
    if check_targets:
        tensors.check_targets(targets, vocabulary, ignore_index, shift, given["targets"])
    impl = resolved(options.impl, e)
    if impl not in OF_TORCH and torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"torch.jit.trace cannot record the JAX programs of impl={impl!r}: give impl='torch_compile'"
        )
    items = None if num_items is None else scalar(num_items, e)
    alone = impl not in OF_TORCH and shard is None
    return Prepared(e, c, bias, targets, vocabulary, shift, ignore_index, impl, shard, called, items, alone, options)


def shard_of(vocab_parallel: VocabParallel | None, options: Any) -> VocabParallel | None:
    if options is not None and vocab_parallel is not None:
        raise ValueError("vocab_parallel and vocab_parallel_options are the same: give one of them")
    if options is not None:
        return parallel.of(options)
    if vocab_parallel is not None and not isinstance(vocab_parallel, VocabParallel):
        raise TypeError(f"vocab_parallel must be a cce_torch.VocabParallel, got {type(vocab_parallel).__name__}")
    if vocab_parallel is not None and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "vocab_parallel does not work with torch.func and torch.vmap: write torch.autograd.grad(loss, ...) or "
            "loss.backward()"
        )
    return vocab_parallel


def check_tensors(given: dict[str, Tensor | None], num_items: Any, function: str) -> None:
    """Raises an error for a tensor that no impl takes. As for `prepared`."""
    present: dict[str, Any] = {name: x for name, x in given.items() if x is not None or name in REQUIRED}
    for name, x in present.items():
        check_tensor(name, x, function)
    if num_items is not None:
        (check_tensor if isinstance(num_items, Tensor) else check_number)("num_items", num_items, function)
        shape = () if isinstance(num_items, (int, float)) else tuple(getattr(num_items, "shape", ()))
        if torch.Size(shape).numel() != 1:
            raise ValueError(f"num_items must be a number or a tensor of one element, got shape {shape}")
    if len({x.device for x in present.values()}) > 1:
        found = ", ".join(f"{name} {x.device}" for name, x in present.items())
        raise ValueError(f"all tensors must be on one device, got {found}")


def check_tensor(name: str, x: Any, function: str) -> None:
    """Raise unless x is a plain, dense tensor in memory. All tensors of the user are checked here.

    name: of the argument. function: the public one's name.
    """
    if not isinstance(x, Tensor):
        check_other(name, x, function)
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor: pass torch.nested.to_padded_tensor({name}, ...) or {name}.values()"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} is a sparse tensor of layout {x.layout}: pass {name}.to_dense()")
    tensors.check({name: x})


def check_number(name: str, x: Any, function: str) -> None:
    """Raise if x is an array of JAX, where a number or a tensor is asked for."""
    # Of a number sys.modules is not looked at: a graph of torch.compile would depend on what it holds.
    jax = None if isinstance(x, (int, float)) else sys.modules.get("jax")  # a module not imported has no arrays
    if jax is not None and isinstance(x, getattr(jax, "Array", ())):
        raise TypeError(f"{name} is a jax.Array: cce_jax.{function} takes those; or write torch.from_dlpack({name})")


def check_other(name: str, x: Any, function: str) -> NoReturn:
    """Raise the error for x, which is no tensor."""
    check_number(name, x, function)
    remedy, numpy = "", sys.modules.get("numpy")
    if numpy is not None and isinstance(x, numpy.ndarray):
        remedy = f": write torch.from_numpy({name})"
    elif isinstance(x, torch.nn.Module) and isinstance(getattr(x, "weight", None), Tensor):
        remedy = ": pass its weight" + (", and its bias as bias" if getattr(x, "bias", None) is not None else "")
    elif isinstance(x, (list, tuple)):
        of_tensors = len(x) > 0 and all(isinstance(part, Tensor) for part in x)
        remedy = f": write torch.{'stack' if of_tensors else 'tensor'}({name})"
    raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{remedy}")


def inverse_temperature(temperature: Any, x: Prepared, function: str) -> Tensor | None:
    """1 / temperature of each token, (N,) at least float32; None for the number 1. NaN where it is not positive.

    A temperature below contract.COLDEST is raised to it, as a number is.
    """
    if type(temperature) is float and constant(temperature == 1):  # nearly always
        return None
    tokens, dtype = x.targets.shape, torch.promote_types(x.e.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature, function)
    number = contract.temperature(temperature, tuple(tokens), type_name(x.e))
    if number is not None:
        return None if constant(number == 1) else x.e.new_ones(tokens.numel(), dtype=dtype) * (1 / number)
    if not isinstance(temperature, Tensor):
        check_other("temperature", temperature, function)
    check_constant("temperature", temperature)
    if temperature.numel() != 1:
        check_device("temperature", temperature, x.e)
    temperature = temperature.to(x.e.device, dtype)
    inverse = torch.where(temperature > 0, 1 / temperature.clamp(min=contract.COLDEST), torch.nan)
    return inverse.expand(tokens).reshape(-1)


def check_constant(name: str, x: Tensor) -> None:
    if x.requires_grad:
        raise TypeError(f"{name} gets no gradient, but requires one: pass {name}.detach()")


def check_device(name: str, x: Tensor, e: Tensor) -> None:
    if x.device != e.device:
        raise ValueError(f"all tensors must be on one device, got e {e.device}, {name} {x.device}")


def refuse_dtensors(given: dict[str, Any], function: str, remedy: str = "") -> None:
    if tensors.has_dtensor(given):
        name = next(name for name, x in given.items() if type(x).__name__ == "DTensor")
        raise TypeError(
            f"{name} is a DTensor, and {function} takes plain tensors: pass to_local() of each tensor{remedy}"
        )


def weight_of_tokens(token_weight: Any, x: Prepared, function: str) -> Tensor:
    """token_weight, (N,) at least float32; ones for None."""
    dtype, tokens = torch.promote_types(x.e.dtype, torch.float32), tuple(x.targets.shape)
    if token_weight is None:
        return x.e.new_ones(x.targets.numel(), dtype=dtype)
    check_tensor("token_weight", token_weight, function)
    check_constant("token_weight", token_weight)
    if token_weight.is_complex():
        raise TypeError(f"token_weight must be real, got token_weight {type_name(token_weight)}")
    contract.weight_of_tokens(tuple(token_weight.shape), (*tokens, x.e.shape[-1]))
    check_device("token_weight", token_weight, x.e)
    return token_weight.reshape(-1).to(dtype)


def fit(options: Options, num_items: Any, shard: VocabParallel | None, described: tuple[tuple[str, Any], ...]) -> None:
    """Raise unless the tensors fit together. described: the name of each, with its shape and its type."""
    types = {name: x[1] for name, x in described if x is not None}
    shapes: dict[str, Any] = {name: None if x is None else tuple(x[0]) for name, x in described}
    _check_types(types, shapes)
    for name, x in (("logit_scale", options.logit_scale), ("z_loss", options.z_loss), ("num_items", num_items)):
        if x is not None and not isinstance(x, Tensor):  # a tensor is not looked at: that could wait for a GPU
            contract.finite(name, x, _name(types["e"]))
    if shard is not None:
        shapes = parallel.of_whole(shapes, options.vocab_axis, shard)
    contract.shapes(**shapes, vocab_axis=options.vocab_axis, shift=options.shift)


_fit_once = lru_cache(maxsize=1024)(fit)  # looks only once at shapes and types that it has seen


def _check_types(types: dict[str, torch.dtype], shapes: dict[str, Any]) -> None:
    if types["targets"] not in INTEGERS:
        raise contract.not_integers("targets", types["targets"], shapes["targets"], shapes["e"], "long()")
    for name in WEIGHTS:
        if name in types and types[name].is_complex:
            raise TypeError(f"{name} must be real, got {name} {_name(types[name])}")
    e, c, bias = types["e"], types["c"], types.get("bias")
    if e in FLOATING and c == e and (bias is None or bias == e):
        return
    for name, x in (("e", e), ("c", c), ("bias", bias)):
        if x is not None and x not in FLOATING:
            allowed = ", ".join((*contract.KERNEL_TYPES, "float64"))
            hint = ": give the hidden states, the classifier and the targets, not logits" if x in INTEGERS else ""
            raise TypeError(f"{name} must be one of {allowed}, got {name} {_name(x)}{hint}")
    contract.types(_name(e), _name(c), None if bias is None else _name(bias), "to")


def _autocast(e: Tensor, c: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """e, c and bias, cast as torch.nn.functional.linear casts them under autocast, which is enabled.

    A float32 c and bias beside an e of 16 bits are left as they are: the loss rounds them, but not their gradients.
    """

    def cast(x: Any) -> Any:
        return x if x is None or x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))

    e = cast(e)
    if e.itemsize == 2 and c.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32):
        return e, c, bias
    return e, cast(c), cast(bias)


_capability = cache(torch.cuda.get_device_capability)


def resolved(impl: Impl, e: Tensor) -> Impl:
    """impl, with "auto" decided by the device and type of e. Raises if the impl cannot run there."""
    if impl in OF_TORCH:
        return impl
    device, typed = e.device.type, e.dtype != torch.float64
    runs = device == "cpu" or (device == "cuda" and torch.version.cuda is not None)
    # torch.compile warns about functions that functools caches.
    capability = torch.cuda.get_device_capability if torch.compiler.is_compiling() else _capability
    kernels_run = device == "cpu" or (runs and capability(e.device.index)[0] >= 8)
    if impl == "auto":
        return "torch_compile" if not (typed and kernels_run) else "auto" if device == "cuda" else "chunked"
    if not typed:
        allowed = ", ".join(contract.KERNEL_TYPES)
        raise TypeError(f"impl={impl!r} takes {allowed}; e is float64, which 'reference' and 'torch_compile' take")
    if not (kernels_run if impl == "cce" else runs):
        raise NotImplementedError(
            f"impl={impl!r} does not run on {e.device}"
            + (": it needs compute capability 8.0 or more" if runs else "")
            + "; impl='torch_compile' does"
        )
    return impl


def constant(condition: bool) -> bool:
    """condition, which may be a symbol under torch.compile. The branch makes it a constant of the graph."""
    return True if condition else False  # noqa: SIM210


def shifted(x: Tensor, shift: int, fill: float) -> Tensor:
    """x[..., shift:] followed by `shift` times fill. So e keeps all its rows, and its last rows are ignored.

    torch.nn.functional.pad would round fill to float64, which does not hold every integer.
    """
    return torch.cat([x[..., shift:], x.new_full((*x.shape[:-1], shift), fill)], -1)


def int64(ids: Tensor, ignore_index: int = -1) -> tuple[Tensor, int]:
    """ids as int64, and the ignore_index that goes with them.

    An id that int64 does not hold becomes a number that is in no vocabulary, and is still ignored if it equals
    ignore_index. An ignore_index that the type of ids does not hold ignores nothing.
    """
    wide, unsigned = ids.long(), ids.dtype == torch.uint64
    if not unsigned and LEAST <= ignore_index < 2**63:
        return wide, ignore_index
    own = ignore_index - 2**64 * (unsigned and 2**63 <= ignore_index < 2**64)  # long() keeps the bits
    beyond = wide < 0 if unsigned else wide == LEAST
    if not LEAST <= own < 2**63:
        own = LEAST
    elif ignore_index >= 2**63:
        beyond &= wide != own
    return torch.where(beyond, 2**62 + (own == 2**62), wide), own


def flat(x: Any, last: int = 0) -> Any:
    """x with all but its `last` last axes made one axis. x itself, not a view, if it has that shape already."""
    return x if x is None or x.dim() == 1 + last else x.reshape(-1, *x.shape[x.dim() - last :])


def type_name(x: Tensor) -> str:
    return _name(x.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scalar(x: float | Tensor, e: Tensor) -> Tensor:
    """num_items as a scalar tensor on e's device, which gets no gradient. Waits for no GPU."""
    dtype = torch.promote_types(e.dtype, torch.float32)
    if not isinstance(x, Tensor):
        if torch.compiler.is_compiling():  # all factors share one compilation; in torch.full each number has one
            return torch.ones((), dtype=dtype, device=e.device) * x
        return torch.full((), float(x), dtype=dtype, device=e.device)
    x = x.detach()
    if e.is_cuda and not x.is_cuda:
        x = x.clone()  # a copy from pinned memory could read x after the caller has changed it; a clone is not pinned
    return x.to(e.device, dtype, non_blocking=e.is_cuda).reshape(())
