"""The largest logits of each token and their mean, from one block of logits after another, for PyTorch alone.

Other calls get them from the JAX program that computes the statistics (cce_kernels/selections.py). They have no
derivative.

A block's logits are taken for a few tokens at a time, in at most ROOM bytes, or a third of the memory budget if that is
less (blocks.py). Less than LEAST_ROOM counts as LEAST_ROOM: PyTorch's loop would have millions of steps. One token is
always taken.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cce_torch.call import Call, Selections

ROOM = 256 * 2**20
LEAST_ROOM = 8 * 2**20
BYTES_OF_LOGIT = 32  # of a logit among which the largest are looked for: the logit, copies, an integer key, and sorted
NO_ID = 2**62  # more than any id: of a place for which there is no logit


class Largest(NamedTuple):
    """What is found in the blocks so far."""

    values: Tensor  # (N, k), -inf where there was no logit yet
    ids: Tensor  # (N, k)
    total: Tensor  # (N,), the sum of the logits

    @classmethod
    def of_nothing(cls, tokens: int, call: Call, like: Tensor) -> "Largest":
        """like: of the logits' type and device."""
        values, total = like.new_full((tokens, call.top_k), -torch.inf), like.new_zeros(tokens)
        return cls(values, values.new_full(values.shape, NO_ID, dtype=torch.int64), total)

    def add(self, rows: slice, z: Tensor, first: int) -> None:
        """The logits of some tokens, (n, V), whose first column has the id `first`."""
        (values, ids, total), count = self, self.values.shape[1]
        total[rows] += z.sum(1)
        if count:
            more, where = _largest(z, min(count, z.shape[1]))
            both = torch.cat([values[rows], more], 1), torch.cat([ids[rows], where + first], 1)
            values[rows], ids[rows] = merged(*both, count)

    def selections(self, call: Call, columns: int) -> Selections:
        """columns: how many there were."""
        top = (self.values, self.ids) if call.top_k else (None, None)
        return Selections(*top, self.total / columns if call.mean_logit else None)


def rows_at_a_time(columns: int, room: int) -> int:
    """Of a block of so many columns, in so many bytes."""
    return min(max(room, LEAST_ROOM), ROOM) // (BYTES_OF_LOGIT * max(columns, 1))


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
