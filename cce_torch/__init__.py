"""Linear cross-entropy without the logits, for PyTorch. See `linear_cross_entropy`."""

from cce_kernels.version import installed
from cce_torch.api import LinearCrossEntropy, linear_cross_entropy
from cce_torch.head import LinearCrossEntropyHead
from cce_torch.vocab_parallel import VocabParallel

__all__ = ["LinearCrossEntropy", "LinearCrossEntropyHead", "VocabParallel", "linear_cross_entropy"]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        return installed()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
