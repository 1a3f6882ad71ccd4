"""Several processes of PyTorch that talk by gloo, or each with a GPU by nccl; and what they find, put together.

A process needs seconds to start. So each test starts its processes once, and they make many checks; and they are
forks of a process that has imported all modules and computed nothing.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cce_torch import VocabParallel
from tests.call_torch import array, run_uncompiled
from tests.collector import keep_what_is_there
from tests.tolerance import assert_close, bound, error

needed = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
TIMEOUT = timedelta(seconds=120)


def in_processes(count: int, *checks: Callable[[], None], gpus: bool = False) -> None:
    """Calls the checks in so many processes of one group. An error in one of them ends all and is raised here.

    gpus: each process sees one GPU, and talks about its tensors by nccl.
    """
    if gpus and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    modules = "tests.test_torch_distributed", "cce_torch.on_jax.bridge", "torch._dynamo", "torch.distributed.fsdp"
    multiprocessing.set_forkserver_preload(list(modules))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, f"{folder}/store", checks, gpus)
        torch.multiprocessing.start_processes(_process, arguments, nprocs=count, start_method="forkserver")


def _process(rank: int, count: int, file: str, checks: tuple[Callable[[], None], ...], gpus: bool) -> None:
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # CUDA has not started in this process
    else:
        keep_what_is_there()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    run_uncompiled()  # compiling takes most of a minute
    back_end = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(back_end, init_method=f"file://{file}", rank=rank, world_size=count, timeout=TIMEOUT)
    for check in checks:
        check()
        dist.barrier()
    dist.destroy_process_group()  # not after an error: with nccl it would wait for the other processes


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """x of every process."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def gathered_objects(x: Any) -> list[Any]:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


def shard_of(stops: tuple[int, ...], **options: Any) -> VocabParallel:
    """Each process holds the rows from the stop of the one before it to its own."""
    rank = dist.get_rank()
    return VocabParallel(None, (0, *stops)[rank], stops[rank], **options)


def rows_of(shard: VocabParallel) -> slice:
    return slice(shard.start, shard.stop)


def whole_gradients(module: Any) -> dict[str, torch.Tensor]:
    """Of plain parameters, and of those of DDP and both kinds of FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            named = {k.replace("_fsdp_wrapped_module.", ""): p for k, p in module.named_parameters()}
            return {k: p.grad.clone() for k, p in named.items() if p.requires_grad}
    grads = {k.removeprefix("module."): p.grad for k, p in module.named_parameters() if p.grad is not None}
    return {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in grads.items()}


def assert_as_one_process(what: str, loss: Any, wrapped: Any, exact: dict, reference: dict, low: bool = False) -> None:
    """The mean of the losses, and all gradients. low: in 16 bits, as the reference, and of the gradients alone."""
    found = whole_gradients(wrapped)
    found |= {} if low else {"loss": torch.stack(gathered(loss.detach())).mean()}
    assert found.keys() == exact.keys() - ({"loss"} if low else set()), f"{what}: {sorted(found)}, not {sorted(exact)}"
    for name, x in found.items():
        if low:
            assert error(array(x.float()), exact[name]) <= bound(reference[name], exact[name]), f"{what}: {name}"
        else:
            assert_close(array(x), exact[name], reference[name], f"{what}: {name}")


def fsdp1(module: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    return FullyShardedDataParallel(module, **options)


class Collectives(TorchDispatchMode):
    """The collectives that run, with the shape and the type of what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name = function._schema.name.split("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            self.seen.append(f"{name.removesuffix('_')} {tuple(args[0].shape)} {str(args[0].dtype)[6:]}")
        return function(*args, **(kwargs or {}))
