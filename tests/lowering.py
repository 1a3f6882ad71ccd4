"""The kernels' way to a GPU, on a machine without one: JAX's lowering to Triton, then Triton's own compiler."""

import contextlib
import glob
import os
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import jax
from jax._src.pallas.triton import lowering as pallas_triton

LIMITS = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}  # KiB of shared memory a program
GPUS = {"8.0": "NVIDIA A100", "9.0": "NVIDIA H100", "10.0": "NVIDIA B200"}


class Resources(NamedTuple):
    shared: int  # bytes
    registers: int
    stack: int  # bytes of spilled registers and local arrays


def _gpu_at_hand(device_kind: str = GPUS["9.0"]) -> contextlib.AbstractContextManager:
    """JAX 0.11 wants to be told which GPU it lowers for; 0.10 assumes compute capability 9.0."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(device_kind, None, platform="gpu")))


def triton_modules(function, *arguments: Any) -> list[str]:
    """The Triton module of each kernel that the function, lowered for CUDA, launches."""
    modules = []
    lower = pallas_triton.lower_jaxpr_to_triton_module

    def recorded(*args, **kwargs):
        result = lower(*args, **kwargs)
        modules.append(result.module.operation.get_asm(enable_debug_info=False))
        return result

    pallas_triton.lower_jaxpr_to_triton_module = recorded
    try:
        with _gpu_at_hand():
            jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    finally:
        pallas_triton.lower_jaxpr_to_triton_module = lower
    return modules


def compile_module(module: str, capability: str, warps: int, stages: int) -> Resources:
    """Compile a Triton module for a compute capability and read what the kernel takes."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    options = {"num_warps": warps, "num_stages": stages}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/kernel.ttir"
        with open(path, "w") as file:
            file.write(module)
        # triton.compile skips the first passes of a .ttir file; one of them turns a dot and an add into a dot.
        backend, context = CUDABackend(target), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        parsed = ir.parse_mlir_module(path, context)
        parsed.context = context
        first = backend.make_ttir(parsed, {}, backend.parse_options(options), target.arch)
        with open(path, "w") as file:
            file.write(str(first))
        kernel = triton.compile(path, target=target, options=options)
        with open(f"{folder}/kernel.cubin", "wb") as file:
            file.write(kernel.asm["cubin"])
        (tool,) = glob.glob(os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump"))
        usage = subprocess.run(
            [tool, "-res-usage", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        )
    (registers, stack) = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()  # type: ignore[union-attr]
    return Resources(kernel.metadata.shared, int(registers), int(stack))
