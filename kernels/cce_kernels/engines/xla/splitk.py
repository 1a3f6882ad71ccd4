"""Which matmuls XLA splits along the axis that they sum over, and for which of them it copies both operands.

XLA's SplitkRewriter splits a matmul whose result has too few tiles to fill the GPU. If the length of the sum is not a
multiple of what the parts need, XLA pads both operands: it copies whole arrays. This file repeats XLA's rule in JAX
0.11; tests/test_held.py checks it against what XLA compiles. No option of a program turns the rule off.
"""

from cce_kernels.device import Gpu
from cce_kernels.engines.order import cdiv

TILE = 128
FLOPS = 200.0  # the cost of a multiplication, in the rule's own unit
# By the major compute capability: the costs of a byte that is read, of a byte that is reduced, and of one reduction.
WEIGHTS = {8: (0.0666955, 467.815, 5.65307e7), 9: (0.194136, 193.1384, 4.36e7), 10: (0.0848863, 189.711, 1.21563e8)}
MOST_SPLITS = 2**11


def splits(m: int, n: int, k: int, itemsize: int, out: int, gpu: Gpu) -> int:
    """The number of parts into which XLA splits the sum over k of an (m, k) · (k, n) matmul; 1 if it does not split.

    out: bytes of an element of the result.
    """
    major = int(gpu.compute_capability.partition(".")[0] or 9)
    byte, reduced, launch = WEIGHTS[min(max(major, min(WEIGHTS)), max(WEIGHTS))]
    tile_rows, tile_columns = min(m, TILE), min(n, TILE)
    tiles = cdiv(m, TILE) * cdiv(n, TILE)
    slots = gpu.multiprocessors * TILE * TILE / (tile_rows * tile_columns)

    def cost(parts: int) -> float:
        compute = FLOPS * tile_rows * tile_columns * cdiv(k, parts) * max(1.0, parts * tiles / slots)
        memory = ((m + n) * k * itemsize + m * n * parts * (4 if parts > 1 else out)) * byte
        added = launch + (4 * parts * m * n + m * n * out) * reduced if parts > 1 else 0
        return max(compute, memory) + added

    return min((2**i for i in range(MOST_SPLITS.bit_length())), key=cost)


def parts_of(m: int, n: int, k: int, itemsize: int, out: int, gpu: Gpu | None) -> int:
    """The same on any device. XLA splits no matmul whose result has a tile for each multiprocessor."""
    if gpu is None or gpu.interpreted or cdiv(m, TILE) * cdiv(n, TILE) >= gpu.multiprocessors:
        return 1
    return splits(m, n, k, itemsize, out, gpu)


def multiple(m: int, n: int, k: int, itemsize: int, out: int, gpu: Gpu | None) -> int:
    """A power of 2: XLA pads both operands of the matmul if k is no multiple of it. 1 where XLA does not split."""
    parts = parts_of(m, n, k, itemsize, out, gpu)
    return max(parts * 16 // itemsize, 1) if parts > 1 else 1
