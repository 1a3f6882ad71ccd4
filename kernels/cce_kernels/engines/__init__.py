"""The engines. Each has a folder with its kernels, its tiles and the calls that it serves. plan/choose.py chooses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from cce_kernels.device import Gpu
from cce_kernels.engines.engine import Engine
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.xla import XLA
from cce_kernels.request import Request
from cce_kernels.tokens import gathered_rows

Impl = Literal["auto", "cce", "chunked"]
KERNELS = (HOPPER, TRITON)  # Pallas, fastest first


def engines(itemsize: int, impl: Impl) -> Sequence[Engine]:
    """The engines that may compute a call, fastest first (bench/engines.py). itemsize: of e, in bytes."""
    if impl == "chunked":
        return (XLA,)
    if impl == "cce":
        return KERNELS
    return (XLA,) if itemsize > 2 else (*KERNELS, XLA)  # with float32 Triton takes 1.4 to 2.1 times as long as XLA


def needs_reference(itemsize: int, impl: Impl) -> bool:
    """Whether shards of the vocabulary must know the targets' logits before their sums, whatever the shards' sizes."""
    return not all(engine.finds_target for engine in engines(itemsize, impl))


def refusals(request: Request, gpu: Gpu | None, impl: Impl) -> dict[Engine, str]:
    """The engines of impl, and why each does not serve a call: its kept tokens may be gathered into a few more rows."""
    request = replace(request, tokens=gathered_rows(request.tokens))
    return {engine: engine.refuses(request, gpu) for engine in engines(request.itemsize, impl)}
