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

from cce_torch.on_jax.compat import DEFAULTS, GUARDS

_STATES = (*DEFAULTS, *GUARDS)
_VALUES = [*DEFAULTS.values(), None, None, None]


def are_default() -> bool:
    """Whether all settings already have their defaults. Takes a microsecond."""
    return [state.value for state in _STATES] == _VALUES


@contextmanager
def defaults() -> Iterator[None]:
    """JAX's default settings, in this thread."""
    with ExitStack() as stack:
        for state, value in DEFAULTS.items():
            stack.callback(state.set_local, state.swap_local(value))
        for guard in GUARDS:
            stack.enter_context(guard("allow"))  # not set_local alone: this also tells the runtime
        yield
