"""Linear cross-entropy without the logits, for JAX. See `linear_cross_entropy`."""

from cce_jax.api import linear_cross_entropy
from cce_jax.explain import explain
from cce_kernels.version import installed

__all__ = ["explain", "linear_cross_entropy"]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        return installed()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
