"""What describes a training, in both frameworks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    width: int = 256  # of the hidden states; attention heads have 64 channels each
    layers: int = 4
    context: int = 256  # tokens in a sequence
    vocabulary: int = 16384  # of the tokenizer, at most
    batch: int = 16  # sequences in an optimizer step, on all devices together
    accumulation: int = 1  # into how many parts a batch is split, which are computed one after the other
    steps: int = 1000
    learning_rate: float = 1e-3  # the highest: it rises during a tenth of the steps, then falls along a cosine
    weight_decay: float = 0.1
    dtype: str = "float32"  # of matmuls and of the loss's inputs: or "bfloat16". Parameters are always float32
    loss: str = "cce"  # or "full": the cross-entropy of all logits
    seed: int = 0  # of the first weights and of the order of the text

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
