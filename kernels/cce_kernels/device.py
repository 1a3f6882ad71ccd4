"""The GPU that a call is planned for."""

from dataclasses import dataclass
from typing import Any

import jax

from cce_kernels.compat import VERSION, has_triton


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that a plan depends on. interpreted: Pallas' interpreters run the kernels on a CPU."""

    compute_capability: str
    multiprocessors: int
    interpreted: bool = False

    @property
    def supported(self) -> bool:
        """Whether the kernels run on this GPU: NVIDIA, compute capability 8.0 or more; and JAX has Triton."""
        return not self.lacks

    @property
    def lacks(self) -> str:
        """What a kernel needs and does not find on this GPU, in words for a user; "" if the kernels run."""
        if not has_triton():
            return f"it needs Pallas' Triton (jax.experimental.pallas.triton), which this JAX, {VERSION}, lacks"
        major = self.compute_capability.partition(".")[0]
        if self.interpreted or (major.isdigit() and int(major) >= 8):
            return ""
        return f"it needs an NVIDIA GPU of compute capability 8.0 or more, and this GPU's is {self.compute_capability}"


H200 = Gpu("9.0", 132)  # a CUDA program that is lowered on a machine without a GPU is planned for this one
INTERPRETER = Gpu("", 132, interpreted=True)


def gpu_of(device: Any) -> Gpu:
    """The Gpu that describes one of JAX's GPUs."""
    return Gpu(str(getattr(device, "compute_capability", "0")), int(getattr(device, "core_count", 0) or 132))


def cuda_gpu() -> Gpu | None:
    """The first CUDA GPU of this process, even if another platform is JAX's default; None if there is none."""
    try:
        return gpu_of(jax.local_devices(backend="cuda")[0])
    except RuntimeError:
        return None


def local_gpu() -> Gpu | None:
    """This process's first GPU; None if GPUs are not JAX's default. Starts JAX's backend if it has not started yet."""
    if jax.default_backend() != "gpu":
        return None
    return gpu_of(jax.local_devices(backend="gpu")[0])
