"""How PyTorch's operators are made. torch.compile does not trace them; torch.vmap runs them one example at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from cce_torch.call import SCHEMA

OPERANDS = "Tensor e, Tensor c, Tensor? bias, Tensor columns, Tensor? weights, Tensor? inverse_temperature, Tensor? ids"

_library = torch.library.Library("cce_torch", "FRAGMENT")
_tags = [torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe]


def define(name: str, takes: str, results: str, run: Callable, fake: Callable) -> None:
    """An operator of JAX's programs. takes: its arguments before those of the call (call.SCHEMA)."""
    _library.define(f"{name}({takes}, {SCHEMA}) -> {results}", tags=_tags)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"cce_torch::{name}", fake, lib=_library)


def operator(name: str, takes: str, results: str, fake: Callable) -> Callable[[Callable], Any]:
    """Makes an operator of a function in PyTorch alone. The function runs without autograd, which it does itself.

    Autocast is off too: it would change the types.
    """

    def make(run: Callable) -> Any:
        def plainly(*arguments: Any) -> Any:
            with torch.no_grad(), torch.autocast(arguments[0].device.type, enabled=False):
                return run(*arguments)

        schema = f"({takes}) -> {results}"
        found = torch.library.custom_op(f"cce_torch::{name}", plainly, mutates_args=(), schema=schema)
        found.register_fake(fake)
        found.register_vmap(one_by_one(found))
        return found

    return make


def one_by_one(operator: Callable) -> Callable:
    """The rule of torch.vmap that runs an operator for one example after another."""

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple:
        each = [
            operator(*(x.select(k, i) if isinstance(k, int) else x for x, k in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tree_map(lambda *x: torch.stack(x), *each), tree_map(lambda _: 0, each[0])

    return rule
