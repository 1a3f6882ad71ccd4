"""Calls to be planned, and what saving everything of one takes."""

from cce_kernels.device import H200
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.xla import XLA
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted, WantedNumbers
from cce_kernels.plan.schedules import Setting, backward
from cce_kernels.request import Request

BOTH = Wanted(e=True, c=True, bias=False)


def request_of(
    shape: tuple[int, int, int],
    memory_budget: int,
    head: Head | None = None,
    *,
    dtype: str = "bfloat16",
    with_sum: bool = False,
    wanted: Wanted | None = BOTH,
) -> Request:
    """shape: tokens, width, vocabulary. There is a bias if its gradient is wanted."""
    with_bias = wanted is not None and wanted.bias
    numbers = WantedNumbers(sum=with_sum)
    return Request(*shape, dtype, head or Head(), with_bias, wanted, memory_budget, numbers=numbers)


def whole_bytes(tokens: int, width: int, vocabulary: int, of_c: bool = True) -> int:
    """What saving everything takes at most; of_c: whether the gradient of c is wanted."""
    request = request_of((tokens, width, vocabulary), 0, wanted=Wanted(e=True, c=of_c, bias=False))
    return backward(Setting(request, H200, (TRITON, XLA)), saves=True).held
