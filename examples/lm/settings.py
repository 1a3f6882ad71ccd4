"""What describes a training, in both frameworks."""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, help: str) -> Any:
    """A field, with what the command line says of it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    width: int = _option(256, "of the hidden states; an attention head has 64 channels")
    layers: int = _option(4, "of attention and perceptron")
    context: int = _option(256, "tokens in a sequence")
    vocabulary: int = _option(16384, "tokens that the tokenizer knows, at most")
    batch: int = _option(16, "sequences in an optimizer step, on all devices together")
    accumulation: int = _option(1, "parts of a batch that are computed one after the other, to save memory")
    steps: int = _option(1000, "of the optimizer")
    learning_rate: float = _option(1e-3, "the highest: it rises for a tenth of the steps, then falls along a cosine")
    weight_decay: float = _option(0.1, "of AdamW")
    dtype: str = _option("float32", "of matmuls and of the loss's inputs; parameters are float32 in any case")
    loss: str = _option("cce", "linear cross-entropy, or for comparison that of all logits")
    seed: int = _option(0, "of the first weights and of the order of the text")

    def __post_init__(self) -> None:
        if self.width % 64:
            raise ValueError(f"the width must be a multiple of 64, the channels of an attention head, not {self.width}")
        if self.batch % self.accumulation:
            raise ValueError(f"a batch of {self.batch} sequences cannot be split into {self.accumulation} equal parts")

    @property
    def warmup(self) -> int:
        return self.steps // 10 + 1

    @property
    def targets(self) -> int:
        """The number of tokens in a batch that are predicted: all but the first of each sequence."""
        return self.batch * (self.context - 1)
