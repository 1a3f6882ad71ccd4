"""Linear cross-entropy without the logits, for JAX. See `linear_cross_entropy`."""

from cce_jax.api import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
