"""How PyTorch's operators are made. torch.compile does not trace them; torch.vmap runs them one example at a time.

An operator is a function whose parameters have types. A parameter that is a record (a NamedTuple) becomes an argument
for each of its fields; the options of a call become the arguments of `encoded`. So the function, its fake and its
callers name what they take, and no order of arguments is written down.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cce_torch.call import ENCODED, Call, Scheduled, decoded, encoded

TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Scheduled: "Tensor",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    Sequence[bool]: "bool[]",
}

_library = torch.library.Library("cce_torch", "FRAGMENT")
_tags = [torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe]


def of_jax(name: str, results: str, fake: Callable) -> Callable[[Callable], Any]:
    """Makes an operator of a function that runs JAX's programs. fake: the same for tensors without memory."""

    def make(run: Callable) -> Any:
        types = _types(run)
        _library.define(f"{name}({_schema(types)}) -> {results}", tags=_tags)
        for key in ("CPU", "CUDA"):
            _library.impl(name, _reading(run, types), key)
        torch.library.register_fake(f"cce_torch::{name}", _reading(fake, types), lib=_library)
        operator = getattr(torch.ops.cce_torch, name).default
        torch.library.register_vmap(f"cce_torch::{name}", one_by_one(operator), lib=_library)
        return _taking_records(operator, run)

    return make


def of_torch(name: str, results: str, fake: Callable) -> Callable[[Callable], Any]:
    """Makes an operator of a function in PyTorch alone. The function runs without autograd, which it does itself.

    Autocast is off too: it would change the types.
    """

    def make(run: Callable) -> Any:
        types = _types(run)
        read = _reading(run, types)

        def plainly(*arguments: Any) -> Any:
            with torch.no_grad(), torch.autocast(arguments[0].device.type, enabled=False):
                return read(*arguments)

        schema = f"({_schema(types)}) -> {results}"
        operator = torch.library.custom_op(f"cce_torch::{name}", plainly, mutates_args=(), schema=schema)
        operator.register_fake(_reading(fake, types))
        operator.register_vmap(one_by_one(operator))
        return _taking_records(operator, run)

    return make


@cache
def _types(of: Callable) -> dict[str, Any]:
    """Of the parameters of a function, or of the fields of a record."""
    return {name: kind for name, kind in get_type_hints(of).items() if name != "return"}


def _schema(types: dict[str, Any]) -> str:
    """The arguments of an operator."""
    found = []
    for name, kind in types.items():
        if kind is Call:
            found += [f"{of} {field}" for field, of in ENCODED.items()]
        else:
            found.append(f"{TYPES[kind]} {name}" if kind in TYPES else _schema(_types(kind)))
    return ", ".join(found)


def _reading(function: Callable, types: dict[str, Any]) -> Callable:
    """The function, for the arguments of the operator."""

    def read(kind: Any, values: Any) -> Any:
        if kind is Call:
            return decoded(*islice(values, len(ENCODED)))
        return next(values) if kind in TYPES else kind(*(read(of, values) for of in _types(kind).values()))

    def reads(*arguments: Any) -> Any:
        values = iter(arguments)
        return function(*[read(kind, values) for kind in types.values()])

    return reads


def _taking_records(operator: Callable, run: Callable) -> Any:
    def call(*arguments: Any) -> Any:
        return operator(*flat(*arguments))

    call.function = run  # type: ignore[attr-defined]
    return call


def flat(*arguments: Any) -> list[Any]:
    """The arguments of an operator, from those of its function."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, Call):
            found += encoded(x)
        elif isinstance(x, tuple):  # a record; an operator gets a list of flags
            found += flat(*x)
        else:
            found.append(x)
    return found


def one_by_one(operator: Callable) -> Callable:
    """The rule of torch.vmap that runs an operator for one example after another."""

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        each = [
            operator(*(x.select(k, i) if isinstance(k, int) else x for x, k in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tree_map(lambda *x: torch.stack(x), *each), tree_map(lambda _: 0, each[0])

    return rule
