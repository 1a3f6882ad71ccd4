"""The GPU that a call is planned for."""

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Gpu:
    """What a plan wants to know of a GPU; interpreted: Pallas' interpreters stand in for it, on a CPU."""

    compute_capability: str
    multiprocessors: int
    interpreted: bool = False

    @property
    def supported(self) -> bool:
        """Whether the kernels run on it: NVIDIA, compute capability 8.0 or more."""
        major = self.compute_capability.partition(".")[0]
        return self.interpreted or (major.isdigit() and int(major) >= 8)


H200 = Gpu("9.0", 132)  # what CUDA programs are planned for where there is no GPU
INTERPRETER = Gpu("", 132, interpreted=True)


def gpu_of(device: Any) -> Gpu:
    """What JAX says of a jax.Device that is a GPU."""
    return Gpu(str(getattr(device, "compute_capability", "0")), int(getattr(device, "core_count", 0) or 132))


def cuda_gpu() -> Gpu | None:
    """The first CUDA GPU of this process, also where another platform is JAX's default; None if there is none."""
    try:
        return gpu_of(jax.local_devices(backend="cuda")[0])
    except RuntimeError:
        return None


def local_gpu() -> Gpu | None:
    """The first GPU of this process if GPUs are JAX's default, or None; starts JAX's backend if nothing has yet."""
    if jax.default_backend() != "gpu":
        return None
    return gpu_of(jax.local_devices(backend="gpu")[0])
