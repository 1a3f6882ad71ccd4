"""What cce_torch uses of JAX that is not public. All is bound at the import: a call looks nothing up.

Where a public function does nearly the same, it is named, with what it lacks.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from jax._src import api, config, mesh, xla_bridge
from jax._src import compilation_cache as _of_process
from jax._src.interpreters import pxla
from jax._src.lib import _jax, jaxlib_extension_version  # type: ignore[attr-defined]
from jax.core import ShapedArray as ShapedArray  # type: ignore[attr-defined]  # jax.core comes without a promise

# Whether JAX has started. Public: jax.devices, which starts it.
backends_are_initialized = xla_bridge.backends_are_initialized

# Makes arrays of numpy's, from their type, a sharding and its devices. Public: jax.device_put, which takes 30 µs more.
batched_device_put = pxla.batched_device_put

# An array on the memory that a DLPack capsule describes: (capsule, device, stream, copy), and from this jaxlib on the
# number of the platform. Public: jax.dlpack.from_dlpack, which keeps the exporter alive and takes 60 µs.
from_capsule = _jax.dlpack_managed_tensor_to_buffer
NAMES_PLATFORM = jaxlib_extension_version >= 467

# A DLPack capsule of an array, which `stream` waits for. Public: jax.Array.__dlpack__, which has checks in Python.
to_capsule = _jax.buffer_to_dlpack_managed_tensor

# JAX's settings by thread, and their defaults. Public: a context manager for each, such as jax.enable_x64. But that of
# debug_nans leaves the thread without its check, and all of them at each call would take longer than a comparison.
_meshes: Any = config if hasattr(config, "device_context") else mesh  # JAX 0.10 has them in config, 0.11 in mesh
post_hook: Any = api._post_hook_state  # the function that checks results under jax_debug_nans
DEFAULTS: dict[Any, Any] = {
    config.numpy_dtype_promotion: config.numpy_dtype_promotion("standard").new_val,
    config.numpy_rank_promotion: "allow",
    config.disable_jit: False,
    config.debug_nans: False,
    config.debug_infs: False,
    post_hook: None,
    config.enable_x64: False,
    config.default_matmul_precision: None,
    _meshes.abstract_mesh_context_manager: _meshes.abstract_mesh_context_manager.get_global(),  # jax.set_mesh sets
    _meshes.device_context: _meshes.device_context.get_global(),  # both for the thread alone
}

# More of them, whose default is None. Public: jax.transfer_guard, which sets all three, but tells none.
GUARDS = (
    config.transfer_guard_host_to_device,
    config.transfer_guard_device_to_device,
    config.transfer_guard_device_to_host,
)

# The persistent compilation cache. Public: jax.config.jax_compilation_cache_dir, which sets one for the whole process,
# for good: JAX opens it once.
_shortest = config.persistent_cache_min_compile_time_secs


class _Cache(threading.local):
    cache: Any = None


_of_thread = _Cache()


@cache
def _ask_the_thread() -> None:
    """Has JAX ask for the thread's own cache, and for the cache of the process where the thread has none."""
    of_process = _of_process._get_cache

    def of_thread(backend: Any) -> Any:
        return of_process(backend) if _of_thread.cache is None else _of_thread.cache

    _of_process._get_cache = of_thread


@contextmanager
def compilation_cache(cache: Any, shortest: float) -> Iterator[None]:
    """JAX's persistent compilation cache for this thread. cache: has get(key) -> bytes or None, and put(key, bytes).

    shortest: what takes fewer seconds to compile is not put there.
    """
    _ask_the_thread()
    before, _of_thread.cache = _shortest.swap_local(shortest), cache
    try:
        yield
    finally:
        _of_thread.cache = None
        _shortest.set_local(before)
