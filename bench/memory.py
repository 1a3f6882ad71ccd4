"""Peak device memory of a call beyond what was there before it, results included, in both frameworks' pools."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from bench.calls import Call

MIB = 2**20
PIECE = 1024 * MIB  # bytes: the filler comes in pieces, for which the pool need not have one free region


@contextmanager
def _filled(device) -> Iterator[None]:
    """JAX's pool filled up to the highest it has been, so that any allocation raises its peak.

    The peak is that of the process, which cannot be reset: without this a call would hide below what the float64 truth
    or XLA's choice of matmul algorithms once took.
    """
    stats = device.memory_stats()
    spare = stats["peak_bytes_in_use"] - stats["bytes_in_use"]
    sizes = [PIECE] * (spare // PIECE) + [spare % PIECE]
    filler = [jax.block_until_ready(jnp.empty(size, jnp.uint8)) for size in sizes if size]
    yield
    del filler


def of_jax(call: Call) -> float | None:
    """MiB that JAX's pool rises by in a call; None where JAX does not tell, as on a CPU."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return None
    count = device.memory_stats()["num_allocs"]
    call()
    if device.memory_stats()["num_allocs"] == count:
        return 0.0  # a call of PyTorch's alone
    with _filled(device):
        before = device.memory_stats()["bytes_in_use"]
        _ = call()
        return (device.memory_stats()["peak_bytes_in_use"] - before) / MIB


def of_torch(call: Call) -> float | None:
    """MiB that PyTorch's pool rises by in a call; None on a CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    call.wait(None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _ = call()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def peak(call: Call) -> float | None:
    """MiB. XLA says what a compiled program takes; of calls from PyTorch the frameworks' pools have to tell."""
    if call.scratch is not None and call.output is not None:
        return (call.scratch + call.output) / MIB
    in_torch, in_jax = of_torch(call), of_jax(call)
    return None if in_torch is None or in_jax is None else in_torch + in_jax


def release() -> None:
    """Give back what a method leaves behind, so that one framework's pool does not starve the other's."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # what torch.compile has compiled
    empty()


def empty() -> None:
    """Give back the memory that PyTorch's pool holds and does not use."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
