"""How PyTorch's operators are made. torch.compile does not trace them; torch.vmap runs them one example at a time.

An operator is a function whose parameters have types. A parameter that is a record (a NamedTuple) becomes an argument
for each of its fields; the options of a call become the arguments of `encoded`. So the function, its fake and its
callers name what they take, and no order of arguments is written down. A result that is a record is returned by the
operator as its fields, and a tensor without elements stands for None.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cce_torch.autograd import untraced
from cce_torch.call import ENCODED, Call, DivergenceCall, Scheduled, decoded, encoded
from cce_torch.on_jax import tensors

TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", Scheduled: "Tensor", float: "float", Sequence[bool]: "bool[]"}

IS_BATCHED = torch._C._functorch.is_legacy_batchedtensor  # type: ignore[attr-defined]  # as autograd.is_batched

_library = torch.library.Library("cce_torch", "FRAGMENT")
_tags = [torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe]


def of_jax(name: str, fake: Callable) -> Callable[[Callable], Any]:
    """Makes an operator of a function that runs JAX's programs. fake: the same for tensors without memory.

    The operator checks its tensors: torch.compile traced the public function, or it was not used. Where nothing
    observes operators, the function itself is called, as the dispatcher takes 50 µs. Its arguments by keyword, which
    repeat what it finds without them, reach it only then.
    """

    def make(run: Callable) -> Any:
        types, result = _types(run), get_type_hints(run)["return"]
        names = [name for name, _ in _arguments(types)]
        read, read_fake, read_result = _reading(run, types), _reading(fake, types, True), _reader(result)

        def checked(*arguments: Any) -> Any:
            tensors.check({k: x for k, x in zip(names, arguments, strict=True) if isinstance(x, Tensor)})
            return _as_tensors(untraced(read, *arguments))

        _library.define(f"{name}({_schema(types)}) -> {_returned(result)}", tags=_tags)
        for key in ("CPU", "CUDA"):
            _library.impl(name, checked, key)
        torch.library.register_fake(
            f"cce_torch::{name}", lambda *arguments: _as_tensors(read_fake(*arguments)), lib=_library
        )
        operator = getattr(torch.ops.cce_torch, name).default
        torch.library.register_vmap(f"cce_torch::{name}", one_by_one(operator), lib=_library)

        tensors_of = _tensors_of(tuple(types.values()))

        def call(*arguments: Any, **known: Any) -> Any:
            if is_plain(tensors_of(arguments)):
                return run(*arguments, **known)
            found = operator(*flat(*arguments))
            return found if result is Tensor else read_result(iter(found))

        call.function = run  # type: ignore[attr-defined]
        return call

    return make


def of_torch(name: str, fake: Callable) -> Callable[[Callable], Any]:
    """Makes an operator of a function in PyTorch alone. The function runs without autograd, which it does itself.

    Autocast is off too: it would change the types.
    """

    def make(run: Callable) -> Any:
        types, result = _types(run), get_type_hints(run)["return"]
        read, read_fake, read_result = _reading(run, types), _reading(fake, types, True), _reader(result)

        def plainly(*arguments: Any) -> Any:
            with torch.no_grad(), torch.autocast(arguments[0].device.type, enabled=False):
                return _as_tensors(read(*arguments))

        schema = f"({_schema(types)}) -> {_returned(result)}"
        operator = torch.library.custom_op(f"cce_torch::{name}", plainly, mutates_args=(), schema=schema)
        operator.register_fake(lambda *arguments: _as_tensors(read_fake(*arguments)))
        operator.register_vmap(one_by_one(operator))

        def call(*arguments: Any) -> Any:
            return read_result(iter(operator(*flat(*arguments))))

        call.function = run  # type: ignore[attr-defined]
        return call

    return make


@cache
def _types(of: Callable) -> dict[str, Any]:
    """Of the parameters of a function, but those by keyword only; or of the fields of a record."""
    found = get_type_hints(of)
    return found if isinstance(of, type) else {name: found[name] for name in _parameters(of)}


def _parameters(of: Callable) -> tuple[str, ...]:
    code = of.__code__
    return code.co_varnames[: code.co_argcount]


def _arguments(types: dict[str, Any]) -> list[tuple[str, str]]:
    """The names and types of an operator's arguments."""
    found: list[tuple[str, str]] = []
    for name, kind in types.items():
        if kind in ENCODED:
            found += ENCODED[kind].items()
        elif kind in TYPES:
            found.append((name, TYPES[kind]))
        else:
            found += _arguments(_types(kind))
    return found


def _schema(types: dict[str, Any]) -> str:
    return ", ".join(f"{kind} {name}" for name, kind in _arguments(types))


def _returned(result: Any) -> str:
    return "Tensor" if result is Tensor else f"({', '.join(['Tensor'] * len(_arguments(_types(result))))})"


def _reading(function: Callable, types: dict[str, Any], without_memory: bool = False) -> Callable:
    """The function, for the arguments of the operator."""
    readers = [_reader(kind, without_memory) for kind in types.values()]

    def reads(*arguments: Any) -> Any:
        values = iter(arguments)
        return function(*[read(values) for read in readers])

    return reads


def _reader(kind: Any, without_memory: bool = False) -> Callable[[Iterator[Any]], Any]:
    """Makes a parameter or a result of this type, from the next values of the operator."""
    if kind in ENCODED:
        count = len(ENCODED[kind])
        return lambda values: decoded(kind, *islice(values, count))
    if kind is Scheduled and not without_memory:
        return lambda values: Scheduled(*next(values).tolist())
    if kind in TYPES:
        return next
    readers = [_reader(of, without_memory) for of in _types(kind).values()]
    return lambda values: kind(*[read(values) for read in readers])


def _as_tensors(result: Any) -> Any:
    """What the operator returns."""
    if isinstance(result, Tensor):
        return result
    found = flat(*result)  # of the fake, a list too
    some = next(x for x in found if x is not None)  # nobody asks for nothing
    return tuple(some.new_empty(0) if x is None else x for x in found)


def flat(*arguments: Any) -> list[Any]:
    """The arguments of an operator, from those of its function."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, (Call, DivergenceCall)):
            found += encoded(x)
        elif isinstance(x, Scheduled):
            found.append(torch.tensor(x, dtype=torch.float64, device="cpu"))
        elif isinstance(x, tuple):  # a record; an operator gets a list of flags
            found += flat(*x)
        else:
            found.append(x)
    return found


def as_factors(numbers: Sequence[float]) -> Tensor:
    """The numbers as float64 on the CPU. Under torch.compile, which makes constants of numbers, all values share one
    compilation.
    """
    if torch.compiler.is_compiling():
        return torch.stack([torch.ones((), dtype=torch.float64, device="cpu") * x for x in numbers])
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def is_plain(given: Sequence[Tensor | None]) -> bool:
    """Whether nothing observes operators on these tensors."""
    return (
        not torch.compiler.is_compiling()
        and tensors.ORDINARY.issuperset(map(type, given))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]
        and True not in [IS_BATCHED(x) for x in given if x is not None]
    )


def _tensors_of(kinds: Sequence[Any]) -> Callable[[Any], Sequence[Tensor | None]]:
    """Finds the tensors among values of these types. Made once: it runs at each call."""
    if all(kind in (Tensor, Tensor | None) for kind in kinds):
        return lambda values: values
    finders = []
    for k, kind in enumerate(kinds):
        if kind in (Tensor, Tensor | None):
            finders.append((k, lambda x: (x,)))
        elif kind not in TYPES and kind not in ENCODED:  # a record
            finders.append((k, _tensors_of(tuple(_types(kind).values()))))
    return lambda values: [x for k, find in finders for x in find(values[k])]


def one_by_one(operator: Callable) -> Callable:
    """The rule of torch.vmap that runs an operator for one example after another."""

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        each = [
            operator(*(x.select(k, i) if isinstance(k, int) else x for x, k in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tree_map(lambda *x: torch.stack(x), *each), tree_map(lambda _: 0, each[0])

    return rule
