"""The largest logits of each token, for PyTorch alone and for a split vocabulary. No (N, V) tensor.

Other calls get them from the JAX program that computes the statistics (cce_kernels/selections.py). They have no
derivative. Chunks of tokens and windows of the vocabulary are multiplied by torch.mm, and the largest logits of each
are taken. Where processes split the vocabulary, each has the logits of its own columns, and the largest are gathered.

It takes at most ROOM bytes at a time, or the memory budget if that is less. A budget below LEAST_ROOM counts as
LEAST_ROOM: with less, PyTorch's loop over tokens and columns would have millions of steps. One token is always taken.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cce_kernels.default_budget import default_budget
from cce_torch.call import Operands, Selections
from cce_torch.operators import of_torch
from cce_torch.processes.collectives import gathered, summed, whole
from cce_torch.processes.vocab_parallel import Setting
from cce_torch.torch_alone import blocks

ROOM = 256 * 2**20
LEAST_ROOM = 8 * 2**20
MOST_COLUMNS = 16384  # of a window: wide enough for a fast matmul
BYTES_OF_LOGIT = 32  # of a logit among which the largest are looked for: the logit, copies, an integer key, and sorted


def _whole(e: Tensor, setting: Setting) -> Tensor:
    """e of all tokens, (N, D)."""
    e = e if setting.shard is None else whole(e, setting.tokens, setting.shard)
    return e.reshape(-1, e.shape[-1])


def _room(e: Tensor, memory_budget: int | None) -> int:
    budget = default_budget(e.shape[0], e.shape[1], e.itemsize) if memory_budget is None else memory_budget
    return min(max(budget, LEAST_ROOM), ROOM)


class Options(NamedTuple):
    """Of the operator."""

    scale: float
    softcap: float | None
    memory_budget: int | None


def selections(operands: Operands, count: int, setting: Setting) -> Selections:
    """The `count` largest logits of each token and their ids, and the mean logit. Arbitrary for an ignored token.

    The lowest id comes first among equal logits. A count of 0 gives the mean alone.
    """
    bias, shard, call = operands.bias, setting.shard, setting.call
    e, c, bias = _whole(operands.e.detach(), setting), operands.c.detach(), None if bias is None else bias.detach()
    options = Options(setting.scheduled[2], call.softcap, call.memory_budget)
    values, ids, total = largest_logits(e, c, bias, operands.inverse_temperature, count, options)
    if shard is None:
        return Selections(values, ids, total / len(c))
    values = gathered(values, shard).transpose(0, 1).flatten(1)
    ids = gathered(ids + shard.start, shard).transpose(0, 1).flatten(1)
    return Selections(*_merged(values, ids, count), summed(total, shard) / shard.vocabulary)


def _fake_largest(
    e: Tensor, c: Tensor, bias: Tensor | None, inverse_temperature: Tensor | None, count: int, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    accumulate, shape, new = torch.promote_types(e.dtype, torch.float32), (e.shape[0], count), e.new_empty
    return new(shape, dtype=accumulate), new(shape, dtype=torch.int64), new(e.shape[0], dtype=accumulate)


@of_torch("largest_logits", "(Tensor, Tensor, Tensor)", _fake_largest)
def largest_logits(
    e: Tensor, c: Tensor, bias: Tensor | None, inverse_temperature: Tensor | None, count: int, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits and their ids, (N, count), and the sum of the logits, (N,). Fewer than count: -inf."""
    scale, softcap, memory_budget = options
    (accumulate, operand), room = blocks.types(e), _room(e, memory_budget)
    values = e.new_full((len(e), count), -torch.inf, dtype=accumulate)
    ids, total = torch.full_like(values, len(c), dtype=torch.int64), values.new_zeros(len(e))
    columns = max(min(room // (4 * accumulate.itemsize * max(e.shape[1], 1)), MOST_COLUMNS), 1)
    for part in blocks.runs(len(e), room // (BYTES_OF_LOGIT * min(columns, max(len(c), 1)))):
        of_part = e[part].to(operand)
        inverse = None if inverse_temperature is None else inverse_temperature[part]
        for window in blocks.runs(len(c), columns):
            raw = blocks.product(of_part, c[window].to(e.dtype).to(operand).t(), accumulate)
            raw = raw if bias is None else raw + bias[window].to(e.dtype).to(accumulate)
            z = blocks.capped(raw, scale, softcap)
            z = z if inverse is None else z * inverse[:, None]
            total[part] += z.sum(1)
            if count:
                more, where = _largest(z, min(count, z.shape[1]))
                both = torch.cat([values[part], more], 1), torch.cat([ids[part], where + window.start], 1)
                values[part], ids[part] = _merged(*both, count)
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


def _merged(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of values, (n, m), descending, and their ids; of equal ones the lowest ids first."""
    ids, order = torch.sort(ids, dim=1)
    values, by_value = torch.sort(values.gather(1, order), dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, by_value)[:, :count]
