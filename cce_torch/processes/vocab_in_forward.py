"""Vocabulary parallelism of a "mean" or "sum" whose gradients are formed in the forward pass (cce_torch/in_forward.py).

A chunk's statistics are over the process' columns, and the processes gather them. de is then of the process' columns
alone, in float32. It is summed over the processes while the next chunk's statistics are computed, and rounded to e's
type. The backward pass exchanges nothing. Under sequence parallelism the whole float32 de is reduce-scattered after the
last chunk.

With a gradient_tolerance each process chooses by itself which blocks of its columns it leaves out: the bounds over the
columns of the processes add up to the bound over all columns (cce_kernels/block_sparse.py).

All processes take the same chunks, so they meet in the same collectives, even if one of them holds no column.
"""

from typing import Any

import torch
from torch import Tensor

from cce_torch import in_forward, losses
from cce_torch.call import Call, Operands
from cce_torch.in_forward import Columns, De
from cce_torch.processes import collectives, vocab_statistics
from cce_torch.processes.vocab_parallel import Setting


def total(operands: Operands, terms: losses.Terms, setting: Setting) -> Tensor | None:
    """S, the sum of the tokens' losses, differentiable once in e, c, bias and token_weight; equal on all processes.

    None where the plan for the largest shard forms no gradients in the forward pass: all processes then get None.
    operands: as for vocab_statistics.statistics, without temperatures.
    """
    how = in_forward.planned(operands, setting.call, setting.scheduled[2], OwnColumns(setting))
    return None if how is None else in_forward.total(operands, _BuiltIn(terms, setting.scheduled), how)[0]


class _BuiltIn:
    """The built-in loss of each token."""

    called = "linear_cross_entropy"

    def __init__(self, terms: losses.Terms, scheduled: tuple[float, float, float]) -> None:
        self.terms, self.scheduled, self.weight = terms, scheduled, terms.token_weight

    def in_order(self, order: Tensor) -> "_BuiltIn":
        return _BuiltIn(self.terms._replace(columns=self.terms.columns[order], token_weight=None), self.scheduled)

    def totals(self, statistics: Tensor, span: slice) -> Tensor:
        terms = self.terms._replace(columns=self.terms.columns[span], token_weight=None)
        return losses.totals(statistics, terms, self.scheduled)[0]


class OwnColumns(Columns):
    """The process' columns, of a vocabulary that the processes of a group share."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.shard = setting, setting.shard

    def chunks(self, operands: Operands, wanted: Any, call: Call) -> Any:
        largest = self.shard.largest
        return in_forward.programs().chunks_of(operands, largest, wanted, call) if largest else None

    def own(self, operands: Operands) -> Operands:
        return vocab_statistics.of_own_columns(operands, self.setting)

    def references(self, own: Operands, columns: Tensor, saving_for: tuple[bool, ...], call: Call) -> Tensor | None:
        return vocab_statistics.references(own, columns, saving_for, self.setting._replace(call=call))

    def of_all(self, own: Tensor, kept: Tensor, weights: Tensor | None) -> Tensor:
        return vocab_statistics.of_all_columns(own, kept, weights, self.setting)

    def rows(self, e: Tensor) -> "_Rows":
        return _Rows(e, self.setting)

    def own_tokens(self, x: Tensor) -> Tensor:
        return collectives.own_tokens(x, self.setting.tokens, self.shard)


class _Rows:
    """de, whose rows come chunk by chunk as parts of sums over the processes."""

    dtype = torch.float32

    def __init__(self, e: Tensor, setting: Setting) -> None:
        _, _, self.tokens, self.shard = setting
        self.scattered = self.shard.sequence_axis is not None
        self.de = De(torch.empty_like(e, dtype=self.dtype), None) if self.scattered else De.empty(e)
        self.type_of_e, self.pending = e.dtype, None

    def put(self, rows: Tensor, part: Tensor) -> None:
        """Begins to sum the part over the processes, for these rows."""
        here = self.scattered or not self.shard.reduce_e_grad
        part = part[: len(rows)]
        self.pending = rows, part if here else collectives.being_summed(part, self.shard), here

    def settle(self) -> None:
        """Waits for the sum, and writes it into its rows."""
        if self.pending is not None:
            (rows, part, here), self.pending = self.pending, None
            part = part if here else torch.ops._c10d_functional.wait_tensor(part)
            self.de.put(rows, De.of(part, self.de.values.dtype))

    def whole(self, shape: torch.Size) -> De:
        """de of this process' e, of its shape, in its type."""
        self.settle()
        if not self.scattered:
            values, units = self.de
            return De(values.view(shape), None if units is None else units.view(shape[:-1]))
        whole = collectives.reduced(self.de.values, shape, self.tokens, self.shard)
        return De.of(whole, self.type_of_e)
