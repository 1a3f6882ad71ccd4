"""The processes that torchrun started."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .mesh import axes


def gpu_of(rank: int, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a process, from what it was for all processes of this machine; None if it was not set."""
    if visible is None:
        return str(rank)
    # One GPU is the process' own already, and "" means none.
    return visible.split(",")[rank] if "," in visible else visible


def start(mesh: str | None) -> DeviceMesh | None:
    """The mesh of the processes, by default all along one axis "data"; None in a process without others.

    To be called before anything uses a GPU: afterwards each process sees its own GPU alone.
    """
    if "LOCAL_RANK" not in os.environ:
        return None
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(int(os.environ["LOCAL_RANK"]), os.environ.get("CUDA_VISIBLE_DEVICES"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.init()  # init_device_mesh would start CUDA on the GPU of the number LOCAL_RANK, which is hidden
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    sizes = axes(mesh or f"data={dist.get_world_size()}")
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
