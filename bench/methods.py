"""What is measured, by name. A method's `load` imports what it needs, so a package that is missing costs one row."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from bench import losses, peers
from bench.calls import Loss
from bench.losses import BUDGETS


class Method(NamedTuple):
    framework: Literal["jax", "torch"]
    load: Callable[[], Loss]  # gives the mean loss of (e, c, targets)


def _torch(load: Callable[..., Loss], *arguments: Any) -> Method:
    return Method("torch", partial(load, *arguments))


def _of(name: str) -> Loss:
    return getattr(import_module("bench.torch_losses"), name)


METHODS = {
    **{f"cce_jax {x}".strip(): Method("jax", partial(losses.ours, "cce_jax", x)) for x in BUDGETS},
    **{f"cce_torch {x}".strip(): _torch(losses.ours, "cce_torch", x) for x in BUDGETS},
    "cce_jax chunked": Method("jax", partial(losses.ours, impl="chunked")),
    "cce_torch torch_compile": Method("torch", partial(losses.ours, "cce_torch", impl="torch_compile")),
    "Liger": _torch(peers.liger),
    **{f"Liger {x}": _torch(peers.liger, x) for x in (4, 16, 64)},
    "Liger 16 float32": _torch(peers.liger, 16, True),
    **{f"Liger {x} CuTe": _torch(peers.liger, x, False, True) for x in (4, 16)},
    "Liger SM90": _torch(peers.liger_sm90),
    "quack": _torch(peers.quack),
    **{f"quack {x}": _torch(peers.quack, x) for x in (1024, 2048)},
    "torch.compile": _torch(lambda: _of("compiled")()),
    "gist": _torch(lambda: _of("in_chunks")()),
    "cut_cross_entropy": _torch(peers.cut_cross_entropy),
    "cut_cross_entropy exact": _torch(peers.cut_cross_entropy, True),
    "PyTorch eager": _torch(_of, "full_logits"),
    "F.linear_cross_entropy": _torch(peers.torch_linear_cross_entropy, False),
    "F.linear_cross_entropy chunked": _torch(peers.torch_linear_cross_entropy, True),
    "tokamax": Method("jax", peers.tokamax),
    "tokamax chunked": Method("jax", partial(peers.tokamax, "chunked_xla")),
    # XLA's full logits come last: the memory that JAX's pool has grown to is not PyTorch's any more.
    "full logits (XLA)": Method("jax", lambda: losses.full_logits),
}
# Every rival at every setting, and ours with as much memory; those that take longest to compile come last.
ALL = (
    *("cce_jax 300 MiB", "cce_jax", "cce_jax 1.2 GB", "cce_jax 2.4 GB", "cce_jax all", "cce_torch"),
    *("Liger", "Liger 4", "Liger 16", "Liger 64", "Liger 16 float32", "quack 1024", "quack 2048", "quack"),
    *("torch.compile", "PyTorch eager", "Liger 4 CuTe", "Liger 16 CuTe", "Liger SM90", "gist"),
    *("cut_cross_entropy", "cut_cross_entropy exact", "tokamax", "tokamax chunked"),
)
# The fastest of them.
CLOSEST = ("cce_jax 300 MiB", "cce_jax", "cce_jax 1.2 GB", "Liger", "Liger 4", "Liger 16", "quack 2048", "quack")
# One of each kind.
QUICK = (
    *("cce_jax", "cce_jax all", "cce_torch", "PyTorch eager", "full logits (XLA)", "torch.compile"),
    *("cut_cross_entropy", "Liger", "quack", "F.linear_cross_entropy", "gist", "tokamax"),
)
