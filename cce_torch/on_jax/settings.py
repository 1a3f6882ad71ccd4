"""JAX's default settings for the programs that torch runs, whatever settings the user has made.

JAX reads most of its settings while it traces a program and again when it runs the program. With some settings our
programs would fail: "strict" promotion, `jax_transfer_guard`, and `jax_debug_nans`, which finds the NaN of a buffer
that is not written yet. With others they would be compiled for other devices (`jax.set_mesh`) or not at all
(`jax_disable_jit`).

Each setting has a value for the process, and one for each thread that takes precedence. `defaults` sets the values of
its thread and then restores them. JAX's own context managers would serve for most settings, but the one for
`debug_nans` leaves the thread without its check.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jax._src import api, config, mesh

_meshes: Any = config if hasattr(config, "device_context") else mesh  # JAX 0.10 has them in config, 0.11 in mesh
_post_hook: Any = api._post_hook_state  # the function that checks results under jax_debug_nans
_GUARDS = (
    config.transfer_guard_host_to_device,
    config.transfer_guard_device_to_device,
    config.transfer_guard_device_to_host,
)
_DEFAULTS: dict[Any, Any] = {
    config.numpy_dtype_promotion: config.numpy_dtype_promotion("standard").new_val,
    config.numpy_rank_promotion: "allow",
    config.disable_jit: False,
    config.debug_nans: False,
    config.debug_infs: False,
    _post_hook: None,
    config.enable_x64: False,
    config.default_matmul_precision: None,
    _meshes.abstract_mesh_context_manager: _meshes.abstract_mesh_context_manager.get_global(),  # jax.set_mesh sets
    _meshes.device_context: _meshes.device_context.get_global(),  # both for the thread alone
}
_STATES = (*_DEFAULTS, *_GUARDS)
_VALUES = [*_DEFAULTS.values(), None, None, None]


def are_default() -> bool:
    """Whether all settings already have their defaults. Takes a microsecond."""
    return [state.value for state in _STATES] == _VALUES


@contextmanager
def defaults() -> Iterator[None]:
    """JAX's default settings, in this thread."""
    with ExitStack() as stack:
        for state, value in _DEFAULTS.items():
            stack.callback(state.set_local, state.swap_local(value))
        for guard in _GUARDS:
            stack.enter_context(guard("allow"))  # not set_local alone: this also tells the runtime
        yield
