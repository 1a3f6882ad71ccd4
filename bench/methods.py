"""What is measured, by name. A method's `load` imports what it needs, so a package that is missing costs one row."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from bench import peers
from bench.losses_jax import SIZES, full_float32_logits, full_logits, ours


class Method(NamedTuple):
    framework: Literal["jax", "torch"]
    load: Callable[[], Callable[..., Any]]  # gives the mean loss of (e, c, targets)


def _jax(loss: Callable) -> Method:
    return Method("jax", lambda: loss)


def _torch(module: str, function: str, *arguments: Any) -> Method:
    """A function of one of this folder's modules that import PyTorch."""
    return Method("torch", lambda: getattr(import_module(f"bench.{module}"), function)(*arguments))


def _peer(load: Callable, *arguments: Any) -> Method:
    return Method("torch", partial(load, *arguments))


BUDGETS = ("", *SIZES, "2NV", "all")  # bench.losses_jax.budget
OURS = {
    **{f"cce_torch {name}".strip(): _torch("losses_torch", "ours", "auto", name) for name in BUDGETS},
    **{f"cce_jax {name}".strip(): _jax(ours(memory=name)) for name in BUDGETS},
}
METHODS = {
    **OURS,
    "cce_torch torch_compile": _torch("losses_torch", "ours", "torch_compile"),
    "cce_jax chunked": _jax(ours("chunked")),
    "Liger": _peer(peers.liger),
    **{f"Liger {x}": _peer(peers.liger, x) for x in (4, 16, 64)},
    "Liger 16 float32": _peer(peers.liger, 16, True),
    **{f"Liger {x} CuTe": _peer(peers.liger, x, False, True) for x in (4, 16)},
    "Liger SM90": _peer(peers.liger_sm90),
    "quack": _peer(peers.quack),
    **{f"quack {x}": _peer(peers.quack, x) for x in (1024, 2048)},
    "torch.compile": _torch("losses_torch", "compiled"),
    "gist": _torch("gist", "compiled"),
    "cut_cross_entropy": _peer(peers.cut_cross_entropy),
    "cut_cross_entropy exact": _peer(peers.cut_cross_entropy, "exact"),
    "cut_cross_entropy torch_compile": _peer(peers.cut_cross_entropy, "torch_compile"),
    "PyTorch eager": Method("torch", lambda: import_module("bench.losses_torch").full_logits),
    "F.linear_cross_entropy": _peer(peers.torch_linear_cross_entropy, False),
    "F.linear_cross_entropy chunked": _peer(peers.torch_linear_cross_entropy, True),
    "tokamax": Method("jax", peers.tokamax),
    "tokamax chunked": Method("jax", partial(peers.tokamax, "chunked_xla")),
    # XLA's full logits come last: the memory that JAX's pool has grown to is not PyTorch's any more.
    "full logits (XLA)": _jax(full_logits),
    "full float32 logits (XLA)": _jax(full_float32_logits),
}
# Every rival at every setting, beside ours with as much memory; those that take longest to compile come last.
ALL = (
    *("cce_jax 300 MiB", "cce_jax", "cce_jax 1.2 GB", "cce_jax 2.4 GB", "cce_jax all", "cce_torch"),
    *("Liger", "Liger 4", "Liger 16", "Liger 64", "Liger 16 float32", "quack 1024", "quack 2048", "quack"),
    *("torch.compile", "Liger 4 CuTe", "Liger 16 CuTe", "Liger SM90", "gist"),
    *("cut_cross_entropy", "cut_cross_entropy exact", "tokamax", "tokamax chunked"),
)
# The fastest of them.
CLOSEST = ("cce_jax 300 MiB", "cce_jax", "cce_jax 1.2 GB", "Liger", "Liger 4", "Liger 16", "quack 2048", "quack")
# One of each kind.
QUICK = (
    *("cce_jax", "cce_jax all", "cce_torch", "cce_torch all", "PyTorch eager", "full logits (XLA)"),
    *("full float32 logits (XLA)", "torch.compile", "cut_cross_entropy exact", "Liger", "quack"),
    *("F.linear_cross_entropy", "gist", "cut_cross_entropy", "tokamax"),
)
SWEPT = ("cce_torch", "cce_jax", "cce_jax all", "cut_cross_entropy", "Liger", "torch.compile")
