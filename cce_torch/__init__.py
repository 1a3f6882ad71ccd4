"""Linear cross-entropy without the logits, for PyTorch. See `linear_cross_entropy`."""

from typing import TYPE_CHECKING, Any

from cce_kernels.version import installed

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    advice = "cce_torch needs PyTorch, which is not installed: pip install torch. The same for JAX alone is cce_jax"
    raise ModuleNotFoundError(advice, name="torch") from None

from cce_torch.api import LinearCrossEntropy, linear_cross_entropy
from cce_torch.divergence import linear_divergence
from cce_torch.explain import explain
from cce_torch.head import LinearCrossEntropyHead
from cce_torch.log_probs import LogProbs, linear_log_probs
from cce_torch.processes.vocab_parallel import VocabParallel
from cce_torch.token_function import TokenNumbers
from cce_torch.token_loss import linear_token_loss

if TYPE_CHECKING:
    from cce_torch.processes.parallel_style import VocabParallelStyle

__all__ = [
    "LinearCrossEntropy",
    "LinearCrossEntropyHead",
    "LogProbs",
    "TokenNumbers",
    "VocabParallel",
    "VocabParallelStyle",
    "explain",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_token_loss",
]

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return installed()
    if name == "VocabParallelStyle":  # imports DTensor, which takes a second
        from cce_torch.processes.parallel_style import VocabParallelStyle

        return VocabParallelStyle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
