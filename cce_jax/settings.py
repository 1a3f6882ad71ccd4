"""JAX's settings while this package traces its programs, whatever the user has set.

With jax_numpy_dtype_promotion="strict" or jax_numpy_rank_promotion="raise" JAX refuses what cce_kernels writes, such as
an integer plus a boolean. Under jax.disable_jit() JAX would run each operation of a pass by itself, and each tile of
the interpreted kernels. A setting counts when a function is traced. JAX traces the derivative rule later than the call,
so the rule needs these settings too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def defaults() -> Iterator[None]:
    """JAX's default settings, in this thread. Also a decorator."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.disable_jit(False):
        yield
