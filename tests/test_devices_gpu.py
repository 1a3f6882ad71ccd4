"""Several GPUs of one process: every layout by both engines of kernels. tests/test_devices.py has fake devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.cases import Case
from tests.devices.layouts import compare
from tests.devices.meshes import Layout, arrays, gradient_of, leaves_of, mesh_of, uneven

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs several GPUs"),
]
GPUS = jax.device_count() if jax.default_backend() == "gpu" else 2
LAYOUTS = [
    Layout("tokens", {"data": GPUS}, P("data"), P()),
    Layout("vocabulary", {"tensor": GPUS}, P(), P("tensor")),
    Layout("tokens and vocabulary", {"data": 2, "tensor": GPUS // 2}, P("data"), P("tensor")),
    Layout("c's vocabulary over data", {"data": GPUS}, P("data"), P("data")),
    Layout("width over data, vocabulary over tensor", {"data": GPUS // 2, "tensor": 2}, P("data"), P("tensor", "data")),
]
HOPPER = Case("hopper", leading=(8, 512), width=128, vocabulary=4096)
TRITON = Case(
    "triton", leading=(8, 512), width=128, vocabulary=4096, arrays=("bias", "token_weight"), options={"softcap": 30.0}
)


@pytest.mark.parametrize("memory_budget", [0, 2**23, "all"])
@pytest.mark.parametrize("mode", ["auto", "explicit", "checked"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", [HOPPER, TRITON], ids=str)
def test_on_several_gpus(case, layout, mode, memory_budget):
    if layout.allows(mode):
        compare(case, layout, mode, "cce", "bfloat16", memory_budget=memory_budget)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_bits_on_repetition(layout):
    mesh = mesh_of(layout, "auto")
    leaves, others = leaves_of(arrays(uneven(HOPPER, "bfloat16"), layout, mesh))
    with jax.set_mesh(mesh):
        run = jax.jit(gradient_of(layout, "auto", impl="cce", memory_budget=2**23))
        first, *again = (jax.device_get(run(leaves, others)) for _ in range(4))
    for other in again:
        jax.tree.map(np.testing.assert_array_equal, other, first)
