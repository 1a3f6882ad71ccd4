import os
import platform

import hypothesis
import jax
import pytest

from cce_kernels.engines import hopper
from cce_kernels.plan import choose
from tests import programs
from tests.collector import keep_what_is_there
from tests.search.processes import gpus

hypothesis.settings.register_profile("all", deadline=None, derandomize=True)
hypothesis.settings.load_profile("all")

# XLA's newer emitters for the CPU take twice as long to compile the interpreted kernels. Under the older, without fused
# multiply-adds, the same arithmetic has the same bits in two programs. A program in one piece compiles in less time
# than in the 32 that XLA makes of it. Read when the first backend starts; processes that tests start have them too.
flags = "--xla_cpu_parallel_codegen_split_count=1"
if platform.machine() == "x86_64":
    flags += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_max_isa=AVX"
os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

# In Mosaic's GPU interpreter the threads of a kernel wait for each other in the thread pool of XLA's CPU client, which
# has one thread a core: with fewer threads than the kernel's it waits forever. The first backend that starts takes the
# number from either variable.
os.environ["NPROC"] = os.environ["PJRT_NPROC"] = str(max(32, os.cpu_count() or 1))

# A worker of pytest-xdist has one core: PyTorch's other threads would take turns with it. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests that start processes, each of which imports and compiles.
LONG = ("test_devices.py", "distributed.py", "test_torch_vocab_in_forward.py", "test_example.py", "of_several_devices")

# The workers of pytest-xdist share a GPU: none may reserve most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_configure(config):
    """Spreads the workers of pytest-xdist over all GPUs, each of which a worker takes for the only one.

    Without a GPU, all processes share a folder of compiled programs. pytest keeps it with its own cache for later runs,
    and `pytest --cache-clear` empties it.
    """
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    found = gpus()
    if worker and found:
        os.environ["CUDA_VISIBLE_DEVICES"] = found[int(worker.removeprefix("gw")) % len(found)]
    cache = getattr(config, "cache", None)
    if not found and cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        named = programs.environment(programs.emptied(cache.mkdir("programs")))
        os.environ |= named  # for workers, and for the processes that tests start
        for name, value in named.items():
            jax.config.update(name.lower(), value if name.endswith("DIR") else float(value))


def pytest_collection_modifyitems(config, items):
    """Tests marked gpu need one; on a machine without, they are skipped by name, not silently absent.

    There XLA compiles without its costly optimisations: most of what the tests wait for is LLVM. Tests that take most
    of a minute come first, so that no core waits for the last of them.
    """
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))
    if jax.default_backend() == "gpu":
        return
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # for the processes that tests start
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    keep_what_is_there()


@pytest.fixture(scope="module")
def hopper_kernels_in_every_jax():
    """Plans use the kernels for Hopper also where the installed JAX is not one with which they were measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "MOSAIC", True)
        choose.plan_of.cache_clear()
        yield
    choose.plan_of.cache_clear()
