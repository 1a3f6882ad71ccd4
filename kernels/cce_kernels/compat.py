"""What the kernels use of JAX that differs between its versions, and JAX's version. Both are read at the import.

cce_jax and cce_torch/on_jax have a file of this name, for the private parts of JAX that they use. No other file imports
a private part of JAX or reads its version (tests/test_house.py).
"""

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import jax

VERSION = jax.__version__  # for messages
NEWEST = 0, 12  # the newest JAX that was tested: pyproject.toml asks for no newer one
_is_untested = jax.__version_info__[:2] > NEWEST

_IS_0_10 = jax.__version_info__ < (0, 11)
_DEPRECATION = "ignore", re.compile("The Pallas Triton backend is deprecated", re.I), DeprecationWarning, None, 0

# Whether the kernels for Hopper run. In JAX 0.10 they lower, but were never run on a GPU.
MOSAIC = not _IS_0_10

# The index of mosaic_gpu.load for a whole reference, which JAX 0.10 wants to be given.
NO_INDEX: tuple[Any, ...] = ((),) if _IS_0_10 else ()


def warn_if_untested() -> None:
    """Warns once in a process where JAX is newer than the newest one that was tested."""
    global _is_untested
    if _is_untested:
        _is_untested = False
        major, minor = NEWEST
        message = (
            f"cce-jax was tested with JAX up to {major}.{minor}, and this is JAX {VERSION}: should a call fail or be "
            f"slow, update cce-jax, or install 'jax<{major}.{minor + 1}'"
        )
        warnings.warn(message, stacklevel=2)


def ignore_deprecation_of_triton() -> None:
    """Has Python ignore what JAX says at each lowering of a Triton kernel since 0.11: a user can do nothing about it.

    To be called before each lowering: by then the filters may be others, as they are in each test of pytest.
    """
    if warnings.filters[:1] != [_DEPRECATION]:
        warnings.filterwarnings("ignore", _DEPRECATION[1].pattern, DeprecationWarning)


def run_on_mesh(body: Callable, mesh: Any, **options: Any) -> None:
    """Runs the body of a kernel. Public: pl.kernel, but in JAX 0.10 this copies arrays that are only read."""
    from jax.experimental import pallas as pl

    if _IS_0_10:
        pl.core_map(mesh, **options)(body)
    else:
        pl.kernel(body, mesh=mesh, **options)()  # type: ignore[reportCallIssue]


@cache
def has_triton() -> bool:
    """Whether JAX has Pallas' Triton, which all kernels need, also in the interpreter. Nothing public tells.

    Without jaxlib.mlir._mlir_libs._triton_ext the import fails. jaxlib's wheels for Windows lack it.
    """
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:
        return False
    return True
