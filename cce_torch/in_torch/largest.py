"""The largest logits of each token, for PyTorch alone and for a split vocabulary. No (N, V) tensor.

Other calls get them from the JAX program that computes the statistics (cce_kernels/selections.py). They have no
derivative. Blocks are chunks of tokens by windows of the vocabulary, and the largest logits of each are taken.

It takes at most ROOM bytes at a time, or the memory budget if that is less. A budget below LEAST_ROOM counts as
LEAST_ROOM: with less, PyTorch's loop over tokens and columns would have millions of steps. One token is always taken.
"""

import torch
from torch import Tensor

from cce_torch.call import Call, Operands
from cce_torch.in_torch import blocks
from cce_torch.operators import of_torch

ROOM = 256 * 2**20
LEAST_ROOM = 8 * 2**20
MOST_COLUMNS = 16384  # of a window: wide enough for a fast matmul
BYTES_OF_LOGIT = 32  # of a logit among which the largest are looked for: the logit, copies, an integer key, and sorted


def _fake(operands: Operands, call: Call, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    e, shape = operands.e, (operands.e.shape[0], call.top_k)
    values, ids = e.new_empty(shape, dtype=blocks.sum_type(e)), e.new_empty(shape, dtype=torch.int64)
    return values, ids, values.new_empty(shape[:1])


@of_torch("largest_logits", "(Tensor, Tensor, Tensor)", _fake)
def largest_logits(operands: Operands, call: Call, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits and their ids, (N, call.top_k), and the sum of the logits, (N,). Fewer than top_k: -inf.

    The lowest id comes first among equal logits.
    """
    e, count, vocabulary = operands.e, call.top_k, len(operands.c)
    values, ids, total = _fake(operands, call, scale)
    values, ids, total = values.fill_(-torch.inf), ids.fill_(vocabulary), total.zero_()
    room = min(max(blocks.budget_of(e, call.memory_budget), LEAST_ROOM), ROOM)
    columns = max(min(room // (4 * values.itemsize * max(e.shape[1], 1)), MOST_COLUMNS), 1)
    for part in blocks.runs(len(e), room // (BYTES_OF_LOGIT * min(columns, max(vocabulary, 1)))):
        of_part, windows = blocks.of_rows(operands, part, blocks.operand_type(e)), blocks.runs(vocabulary, columns)
        for window, _, block in blocks.each(of_part, scale, call.softcap, e.dtype, windows):
            _, z = blocks.logits(block)
            total[part] += z.sum(1)
            if count:
                more, where = _largest(z, min(count, z.shape[1]))
                both = torch.cat([values[part], more], 1), torch.cat([ids[part], where + window.start], 1)
                values[part], ids[part] = merged(*both, count)
    return values, ids, total


def _largest(z: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of z, (n, V), in any order, and their columns; of equal ones those of the lowest columns.

    torch.topk takes any of equal elements. So it gets integers that differ: the order of a float32 z in the upper half,
    and the columns, counted from the end, in the lower half.
    """
    if z.dtype == torch.float64:
        values, columns = torch.sort(z, dim=1, descending=True, stable=True)
        return values[:, :count], columns[:, :count]
    bits = (z + 0.0).view(torch.int32)  # -0 becomes 0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative numbers are ordered by their other bits, reversed
    last = z.shape[1] - 1
    keys = (bits.long() << 32) + (last - torch.arange(z.shape[1], device=z.device))
    columns = last - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)
    return z.gather(1, columns), columns


def merged(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of values, (n, m), descending, and their ids; of equal ones the lowest ids first."""
    ids, order = torch.sort(ids, dim=1)
    values, by_value = torch.sort(values.gather(1, order), dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, by_value)[:, :count]
