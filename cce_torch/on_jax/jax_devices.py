"""JAX's devices for those of PyTorch: starts JAX, and refuses or warns where it would not run well beside PyTorch."""

import os
import threading
import warnings
from functools import cache

import jax
import numpy as np
import torch

from cce_torch.on_jax import settings
from cce_torch.on_jax.compat import backends_are_initialized

HELD_SHARE = 0.5  # of the GPU's memory: if JAX holds more, it has reserved memory before it needed it

_starting = threading.Lock()
_is_child = False  # whether this process was forked from one that had started JAX


def jax_device(device: torch.device):
    """JAX's device for the torch device. Starts JAX."""
    return cpu()[0] if device.type == "cpu" else gpu(device.index)


@cache
def cpu():
    """JAX's device for torch's cpu, and the sharding of arrays on it."""
    start()
    device = jax.local_devices(backend="cpu")[0]
    return device, jax.sharding.SingleDeviceSharding(device)


@cache
def gpu(index: int):
    """JAX's device for torch's cuda:index."""
    with torch.cuda.device(index), settings.defaults():  # starting JAX may change the current device
        return _gpu(index)


def _gpu(index: int):
    start()
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise RuntimeError(
            "the tensors are on a CUDA device, which JAX cannot use here: install JAX's CUDA plugin, with "
            "pip install 'jax[cuda13]' or 'jax[cuda12]', or use impl='torch_compile', which needs no JAX "
            f"({error})"
        ) from None
    found = [d for d in devices if d.local_hardware_id == index]
    if not found:
        raise RuntimeError(
            f"the tensors are on cuda:{index}, but JAX was told to use {devices} alone, by jax_cuda_visible_devices"
        )
    if len(devices) > 1 and "LOCAL_RANK" in os.environ:
        warnings.warn(
            f"this rank sees {len(devices)} GPUs, and JAX opens a context on each: show each rank its "
            "own, with CUDA_VISIBLE_DEVICES=$LOCAL_RANK set before PyTorch is imported, and use cuda:0 in it",
            stacklevel=2,
        )
    _warn_if_reserved(found[0])
    return found[0]


def check_can_run(device: torch.device) -> None:
    """Raises an error where JAX would wait for ever or end the process. It calls nothing of JAX."""
    if _is_child:
        # The child has copies of JAX's locks and queues, but not the threads that serve them.
        raise RuntimeError(
            "this process was forked from one in which JAX had started, so JAX cannot run here: start processes by "
            "spawn (torch.multiprocessing.set_start_method('spawn'), DataLoader(multiprocessing_context='spawn')), or "
            "use impl='torch_compile', which needs no JAX"
        )
    if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
        raise RuntimeError(
            "linear_cross_entropy cannot be captured in a CUDA graph with impl='cce' and 'chunked', because JAX runs "
            "them: call it outside of torch.cuda.graph, or use impl='torch_compile'. Code that is compiled by "
            "torch.compile(mode='reduce-overhead') calls it between its CUDA graphs, not in one"
        )


def _after_fork() -> None:
    global _is_child
    _is_child = backends_are_initialized()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def start() -> None:
    """Before JAX's backends start, tells them not to reserve the GPU's memory, which torch needs.

    It does not set jax_cuda_visible_devices, which would spare other ranks a context on their GPU: with a GPU that is
    not the first, JAX 0.11.2 fails at its first operation.
    """
    with _starting:
        if backends_are_initialized():
            return
        if not jax.config.jax_pjrt_client_create_options and "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ:  # type: ignore[attr-defined]
            jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})


def _warn_if_reserved(device) -> None:
    jax.device_put(np.int32(0), device)  # JAX reserves memory at its first allocation
    stats = device.memory_stats() or {}
    held, limit = stats.get("pool_bytes", 0), stats.get("bytes_limit", 0)
    if limit and held > HELD_SHARE * limit:
        warnings.warn(
            f"JAX had started before cce_torch was first called and holds {held / 2**30:.1f} GiB of {device}, which "
            "PyTorch cannot use. Set XLA_PYTHON_CLIENT_PREALLOCATE=false, or call cce_torch before other JAX code.",
            stacklevel=2,
        )


def out_of_memory(device: torch.device, error: Exception) -> str:
    free, total = torch.cuda.mem_get_info(device)
    held = (gpu(device.index).memory_stats() or {}).get("pool_bytes", 0)
    held, reserved = held / 2**20, torch.cuda.memory_reserved(device) / 2**20
    return (
        f"linear_cross_entropy found no memory for its scratch on {device}, even after freeing PyTorch's cache: "
        f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB are free, PyTorch holds {reserved:.0f} "
        f"MiB, JAX {held:.0f} MiB. {str(error).splitlines()[0]}"
    )
