"""The model of examples/lm in PyTorch, with each loss."""

from functools import partial

import torch
from torch import Tensor

from bench import peers
from bench.calls import Loss
from bench.torch_losses import full_logits
from bench.training.jobs import ALL, CUT, LIGER_SETTINGS, OURS, REFERENCE, ROUNDED, TOLERANT
from cce_torch import LinearCrossEntropy, linear_cross_entropy
from examples.lm.settings import Settings
from examples.lm.torch_model import FullLogitsModel, LanguageModel


class SaveAll(LanguageModel):
    """Ours, which saves all exponentials."""

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        super().__init__(settings, vocabulary)
        self.head.loss = LinearCrossEntropy(shift=1, memory_budget="all")


def _with(mean_loss: Loss, in_16_bits: bool) -> type[LanguageModel]:
    """The model with a loss(e, c, targets). in_16_bits: c is given in e's type, else as the float32 parameter."""

    class Model(LanguageModel):
        def loss(self, hidden: Tensor, tokens: Tensor, num_items: float | None) -> Tensor:
            weight = self.head.weight.to(hidden.dtype) if in_16_bits else self.head.weight
            return mean_loss(hidden[:, :-1].flatten(0, 1), weight, tokens[:, 1:].flatten())

    return Model


def model_type(name: str) -> type[LanguageModel]:
    """Raises ImportError for another package that is not installed, or has no kernels here."""
    others = {CUT: peers.cut_cross_entropy, **{x: partial(peers.liger, of) for x, of in LIGER_SETTINGS.items()}}
    if name in others:
        if not torch.cuda.is_available():
            raise ImportError("it needs a GPU")
        return _with(others[name](), in_16_bits=name == CUT)  # Liger knows autocast, and then sums dc in float32
    if name in TOLERANT:
        return _with(partial(linear_cross_entropy, gradient_tolerance=TOLERANT[name]), in_16_bits=True)
    if name == ROUNDED:
        return _with(full_logits, in_16_bits=True)
    return {OURS: LanguageModel, ALL: SaveAll, REFERENCE: FullLogitsModel}[name]
