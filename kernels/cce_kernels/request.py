"""The facts about a call that are known before it runs."""

from dataclasses import dataclass

from cce_kernels.block_floats import block_of
from cce_kernels.head import Head
from cce_kernels.numbers import NO_OTHERS, Wanted, WantedNumbers

ITEMSIZE = {"bfloat16": 2, "float16": 2, "int16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Request:
    """Everything that a plan depends on, except the GPU."""

    tokens: int
    width: int
    vocabulary: int
    dtype: str  # of e and c
    head: Head
    with_bias: bool
    wanted: Wanted | None  # the gradients that will be asked for; None for evaluation
    memory_budget: int  # bytes
    wide_de: bool = False  # whether de is at least float32, for a sum over devices; else it has the type of e
    wide_dc: bool = False  # whether dc and dbias are at least float32, for float32 parameters; else of e's type
    one_factor: bool = False  # whether the forward pass knows the cotangents, up to one factor for all tokens
    gradient_tolerance: float = 0.0  # the share of dz that the products may leave out (cce_kernels/block_sparse.py)
    may_chunk: bool = True  # whether the tokens may be taken in chunks: not if XLA may split them over devices
    numbers: WantedNumbers = NO_OTHERS
    with_temperature: bool = False  # whether each token has a temperature
    ids: int = 0  # how many ids of each token have logits that are asked for
    teacher_width: int = 0  # the width of a teacher, whose logits a chunk holds too (divergence.py); 0: no teacher

    @property
    def wants(self) -> Wanted:
        """`wanted`, with none for evaluation."""
        return Wanted(e=False, c=False, bias=False) if self.wanted is None else self.wanted

    @property
    def of_mean(self) -> bool:
        """Whether the mean may get a cotangent."""
        return self.numbers.mean and not self.numbers.mean_is_detached

    @property
    def sum_is_linear(self) -> bool:
        """Whether the weighted sum is asked for, and follows from the sums of c's rows (weighted_sum.py)."""
        return self.numbers.sum and self.head.softcap is None

    @property
    def sums_logits(self) -> bool:
        """Whether the weighted sum is asked for, and logits must be summed: XLA does that (engines/xla)."""
        return self.numbers.sum and not self.sum_is_linear

    @property
    def forms_dz(self) -> bool:
        """Whether dz is more than a number for each token times the exponentials, but at the target."""
        return self.numbers.sum or self.of_mean

    @property
    def can_be_saved(self) -> bool:
        """Whether exponentials can be. Only in bfloat16: float16 lacks the range, and float32 is for its accuracy."""
        can_form = self.head.softcap is None and not (self.of_mean and self.wide_de)
        return self.dtype == "bfloat16" and not self.ids and (can_form or not self.forms_dz)

    @property
    def knows_cotangents(self) -> bool:
        """Whether the forward pass knows the cotangents up to one factor, or one matmul gives de for all of them: where
        de is wanted alone, and is not a part of a sum over devices. In float16 such a de would underflow.
        """
        alone = self.wanted == Wanted(e=True, c=False, bias=False)
        others = self.forms_dz or self.ids or self.wide_de
        return self.one_factor or (alone and not others and self.dtype != "float16")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def sum_dtype(self) -> str:
        """The type of sums: at least float32."""
        return self.dtype if self.itemsize > 4 else "float32"

    @property
    def de_dtype(self) -> str:
        return self.sum_dtype if self.wide_de else self.dtype

    @property
    def left_de_dtype(self) -> str:
        """The type of de between the forward and the backward pass; int16 for block floating point.

        Rounding dz of a divergence to 16 bits costs de as much as rounding the result does. If de were rounded to that
        type before its factor as well, the error could be above 1.75 times that of rounding the result.
        """
        return "int16" if self.teacher_width and ITEMSIZE[self.de_dtype] == 2 else self.de_dtype

    @property
    def divides_de(self) -> bool:
        """Whether the forward pass divides de by numbers of its rows (gradients.divided): float16 may not hold a row
        before the backward pass multiplies it by its factor.
        """
        return self.one_factor and self.left_de_dtype in ("float16", "int16")

    @property
    def unit_columns(self) -> int:
        """How many columns of a row of de are divided by the same number."""
        return block_of(self.width) if self.left_de_dtype == "int16" else self.width

    def units_shape(self, rows: int) -> tuple[int, int]:
        """The shape of the numbers by which de is divided."""
        return rows, -(-self.width // self.unit_columns)

    @property
    def dc_dtype(self) -> str:
        return self.sum_dtype if self.wide_dc else self.dtype

    @property
    def sums_dc_in_16_bits(self) -> bool:
        """Whether dc is summed over chunks in block floating point (cce_kernels/block_floats.py)."""
        return self.wants.c and self.dc_itemsize == 2

    @property
    def sum_itemsize(self) -> int:
        return ITEMSIZE[self.sum_dtype]

    @property
    def dc_itemsize(self) -> int:
        return ITEMSIZE[self.dc_dtype]
