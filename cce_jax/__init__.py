"""Linear cross-entropy without the logits, for JAX. See `linear_cross_entropy` and `linear_log_probs`."""

from cce_jax.api import linear_cross_entropy
from cce_jax.divergence import linear_divergence
from cce_jax.explain import explain
from cce_jax.log_probs import LogProbs, linear_log_probs
from cce_jax.token_loss import linear_token_loss
from cce_kernels.version import installed

__all__ = ["LogProbs", "explain", "linear_cross_entropy", "linear_divergence", "linear_log_probs", "linear_token_loss"]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        return installed()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
