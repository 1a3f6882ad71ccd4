"""Several devices. The tests of tests/devices run in processes of their own, on 8 devices that XLA makes of the CPU."""

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax import prepare
from cce_kernels.device import Gpu
from cce_kernels.plan import choose
from tests.devices.meshes import MODES, Layout, gradient_of
from tests.lowering import for_hopper, kernels, mesh_of_gpus

ROOT = Path(__file__).parents[1]
GROUPS = {"options": ("layouts", "errors", "options", "log_probs"), "in_forward": ("in_forward",)}


@pytest.mark.parametrize("group", GROUPS)
def test_on_eight_devices(group):
    """Two processes alone, as one needs seconds to start."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    files = [f"tests/devices/{name}.py" for name in GROUPS[group]]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout), run.stdout
    assert "skipped" not in run.stdout


def test_two_processes():
    """Each has four of the eight devices, and they talk by gloo."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join((".", "kernels")),
    }
    command = [sys.executable, "-m", "tests.devices.processes", address, "2"]
    both = [
        subprocess.Popen(
            [*command, str(k)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for k in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for process, text in zip(both, said, strict=True):
        assert process.returncode == 0, text[-4000:]
        assert text.strip().endswith("right")


TWO_AXES = {"data": 2, "tensor": 2}
TOKENS, BOTH, WIDTH = (
    Layout("tokens", TWO_AXES, P("data"), P()),
    Layout("both", TWO_AXES, P("data"), P("tensor")),
    Layout("both, c's width over data", TWO_AXES, P("data"), P("tensor", "data")),
)
LOWERED = list(zip((TOKENS, BOTH, WIDTH, BOTH, WIDTH), MODES, strict=True))


def lowered(layout: Layout, mode: str, memory_budget, find):
    """find(function, shapes, mesh), for the loss and its gradients over four GPUs that are not there."""
    mesh = mesh_of_gpus(AxisType.Explicit if mode == "explicit" else AxisType.Auto, **layout.mesh)
    specs = layout.specs()

    def shape(name: str, *sizes: int, dtype=jnp.bfloat16):
        sharding = NamedSharding(mesh, specs[name]) if mode == "explicit" else None
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    leaves = {"e": shape("e", 4, 512, 128), "c": shape("c", 2048, 128)}
    others = {"targets": shape("targets", 4, 512, dtype=jnp.int32)}
    run = gradient_of(layout, mode, impl="cce", memory_budget=memory_budget, precision=None)
    return find(run, leaves, others, mesh=mesh)


@pytest.mark.parametrize("memory_budget", [0, "all"])
@pytest.mark.parametrize(("layout", "mode"), LOWERED, ids=str)
def test_the_triton_kernels_lower(layout, mode, memory_budget, monkeypatch):
    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("8.9", 132))
    found = {kernel.name for kernel in lowered(layout, mode, memory_budget, kernels)}
    assert {"target", "statistics", "rescue", *(("targets",) if memory_budget else ("dz",))} <= found


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the hopper engine needs JAX 0.11")
@pytest.mark.parametrize("memory_budget", [0, 16 * 2**20])  # logits are computed again; in the forward pass
@pytest.mark.parametrize(("layout", "mode"), LOWERED, ids=str)
def test_the_hopper_kernels_lower(layout, mode, memory_budget, monkeypatch):
    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("9.0", 132))
    found = set(lowered(layout, mode, memory_budget, for_hopper))
    assert {"statistics", "de", *(("dc_sum",) if memory_budget else ("dz", "dc"))} <= found


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the hopper engine needs JAX 0.11")
@pytest.mark.parametrize(("layout", "mode"), LOWERED, ids=str)
def test_the_hopper_kernels_form_gradients_in_the_forward_pass(layout, mode, monkeypatch):
    """In chunks of 256 tokens: one body of the loop, with the sums of a chunk, its de and its dc."""
    monkeypatch.setattr(prepare, "local_gpu", lambda: Gpu("9.0", 132))
    monkeypatch.setattr(choose, "_is_faster", lambda *_: True)
    choose.plan_of.cache_clear()
    found = Counter(lowered(layout, mode, 3 * 2**20, for_hopper))
    choose.plan_of.cache_clear()
    assert found == {"statistics": 1, "de": 1, "dc_sum": 1}
