"""Linear cross-entropy without the logits, for PyTorch. See `linear_cross_entropy`."""

from cce_torch.api import LinearCrossEntropy, linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]
