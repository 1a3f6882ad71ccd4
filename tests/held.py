"""What a call holds on an H200, by XLA's own count, on a machine without a GPU: XLA compiles for one that is not there.

It needs JAX 0.11 and JAX's plugin for CUDA 13 (the wheels jax-cuda13-plugin and jax-cuda13-pjrt); no driver and no CUDA
libraries. XLA then measures no kernels, so its choice of matmul kernels may differ from that on a GPU, and with it a
workspace of at most 32 MiB.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple
from unittest import mock

import jax

MIB = 2**20
KIND = "NVIDIA H200"
TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  dnn_version: "9.10.0" driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{KIND}"
"""  # XLA's GpuTargetConfig, as a text proto


class Held(NamedTuple):
    """A compiled program: bytes beyond its arguments and results, and its instructions in XLA's final form."""

    bytes: int
    hlo: str

    @property
    def mib(self) -> float:
        return self.bytes / MIB


@lru_cache(None)
def available() -> str:
    """Why nothing can be compiled here; empty where it can."""
    if jax.__version_info__ < (0, 11):
        return f"JAX {jax.__version__} cannot compile for a GPU that is not there; 0.11 can"
    if jax.default_backend() == "gpu":
        return "there is a GPU: tests/test_gpu_budget.py asks it"
    try:
        _device()
    except ImportError as error:
        return f"JAX's plugin for CUDA 13 is not installed: {error}"
    except (NotImplementedError, RuntimeError) as error:
        return f"JAX's plugin for CUDA 13 does not start: {error}"
    return ""


def held(function: Callable, *arguments: Any, as_h200: bool = True, donated: int = 0) -> Held:
    """The function, compiled for these shapes (ShapeDtypeStruct, or any tree of them) on an H200.

    as_h200: whether cce_kernels and cce_jax are told of an H200, as they would be there. donated: of how many arguments
    the results take the memory.
    """
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

    there = SingleDeviceSharding(_device())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), arguments)
    gpu = AbstractMesh((), (), abstract_device=AbstractDevice(KIND, None, platform="gpu"))
    with use_abstract_mesh(gpu), _optimizing(), _h200() if as_h200 else contextlib.nullcontext():
        jitted = jax.jit(function, donate_argnums=range(donated), keep_unused=donated > 0)
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert hlo is not None
    return Held(memory.temp_size_in_bytes, hlo)


@lru_cache(None)
def _device():
    """The H200 that is not there. ImportError, NotImplementedError or RuntimeError where it cannot be described."""
    from jax._src import xla_bridge
    from jax.experimental import topologies

    jax.default_backend()  # finds the plugins
    if "cuda" not in xla_bridge._topology_factories:  # the plugin looked for a driver, found none, and gave up
        with mock.patch.dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
            importlib.import_module("jax_plugins.xla_cuda13").initialize()
    topology = {"topology_name": "1x1x1", "topology": "1x1x1", "target_config": TARGET}
    return topologies.get_topology_desc(platform="cuda", **topology).devices[0]


@contextlib.contextmanager
def _h200() -> Iterator[None]:
    """Everything that asks for the GPU at hand is told of an H200."""
    from cce_jax import prepare
    from cce_kernels.device import H200

    with mock.patch.object(prepare, "local_gpu", return_value=H200):
        yield


@contextlib.contextmanager
def _optimizing() -> Iterator[None]:
    """tests/conftest.py has XLA optimise little, which would change what a program holds."""
    from jax._src import compiler

    before = compiler._DISABLE_MOST_OPTIMIZATIONS.value
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def twins(hlo: str) -> dict[str, list[str]]:
    """The fusions that get one array as two operands, and these operands.

    optimization_barrier gives an array another name. XLA may let such a fusion write a result over the array because
    one operand is read element by element, even if the other is gathered from.
    """
    found = {}
    for computation in re.split(r"\n(?=\S)", hlo):
        made = {
            name: (kind, re.findall(r"%([^\s,)]+)", operands), more)
            for name, kind, operands, more in re.findall(
                r"%(\S+) = .*? (tuple|get-tuple-element|bitcast|fusion)\((.*?)\)(.*)", computation
            )
        }

        def source(name: str, made=made) -> str:
            kind, operands, more = made.get(name, ("", [], ""))
            if kind == "bitcast":
                return source(operands[0])
            if kind == "get-tuple-element" and made.get(operands[0], ("",))[0] == "tuple":
                return source(made[operands[0]][1][int(more.split("index=")[1].split(",")[0])])
            return name

        for name, (kind, operands, _) in made.items():
            sources = [source(x) for x in operands]
            same = [x for x, of in zip(operands, sources, strict=True) if sources.count(of) > 1]
            if kind == "fusion" and same:
                found[name] = same
    return found
