"""The facts about a call that are known before it runs."""

from dataclasses import dataclass

from cce_kernels.head import Head
from cce_kernels.numbers import Wanted

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Call:
    """Everything that a plan depends on, except the GPU."""

    tokens: int
    width: int
    vocabulary: int
    dtype: str  # of e and c
    head: Head
    with_bias: bool
    with_sum: bool  # whether the weighted sum of the logits is asked for
    wanted: Wanted | None  # the gradients that will be asked for; None for evaluation
    memory_budget: int  # bytes
    wide_de: bool = False  # whether de is at least float32, for a sum over devices; else it has the type of e
    wide_dc: bool = False  # whether dc and dbias are at least float32, for float32 parameters; else of e's type
    one_factor: bool = False  # whether the forward pass knows the cotangents, up to one factor for all tokens
    may_chunk: bool = True  # whether the tokens may be taken in chunks: not if XLA may split them over devices

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def of_de(self) -> int:
        """Bytes of an element of de."""
        return self.wide if self.wide_de else self.itemsize

    @property
    def of_dc(self) -> int:
        """Bytes of an element of dc."""
        return self.wide if self.wide_dc else self.itemsize

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum: sums are at least float32."""
        return max(self.itemsize, 4)
