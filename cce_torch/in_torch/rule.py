"""The derivative rule of the core in PyTorch alone, on any device, and its two operators.

The derivation is in cce_jax/core.py, the arithmetic in blocks.py. A window's logits, its rows of c and its rows of dc
take at most blocks.BLOCK_BYTES each, or 1024 columns if those are more. At most three such blocks exist at a time.
Besides them there are an (N, D) float32 sum for de, and for 16-bit inputs a block of another such sum and a copy of e.

Both passes are operators that torch.compile does not trace. If it traced them, the logits of the backward pass would be
the same expression as those of the forward pass. AOTAutograd would merge the two and save every block: the full logits.
Also, the time to compile would grow with the number of windows. Only the operations between the matmuls are compiled,
by torch.compile at their first use, once for all windows. If that fails (no C++ compiler, no Triton, a device without a
backend), the same functions run operation by operation, after one warning. The numbers are then the same up to
rounding, but it is slower and holds up to six blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch.autograd import Gradients, Recomputed, Tensors, applied
from cce_torch.call import Call, Numbers, OfGiven, Operands, Selections, without_selections
from cce_torch.in_torch import blocks
from cce_torch.operators import of_torch


def numbers(operands: Operands, call: Call, scale: float, called: str) -> Numbers:
    """The numbers of cce_torch.in_torch.reference, without holding the logits.

    The statistics are differentiable once in e, c and bias.
    c with any strides, which its gradient gets too. c and bias have e's type, or are float32 and are rounded to it, one
    window at a time. Logits and sums are float32 (float64 for float64). On CUDA from PyTorch 2.8 on, 16-bit inputs are
    multiplied in their own type, and dz is rounded to it. Elsewhere they are widened to float32, c by windows.
    Saved for the backward pass: inputs and statistics. called: the public function.

    NotImplementedError if a second derivative is asked for.
    """
    found, *selected = applied(Recomputed, _Numbers(call, scale, called), *operands)
    return Numbers(found, Selections(*selected))


class _Numbers(NamedTuple):
    """The task. Its tensors are Operands."""

    call: Call
    scale: float
    called: str

    results, differentiable = 4, 1

    def of_backward(self) -> "_Numbers":
        return self._replace(call=without_selections(self.call.of_backward))

    def forward(self, *operands: Any) -> tuple[Tensor | None, ...]:
        found = run_numbers(Operands(*operands), self.call, self.scale)
        return found.statistics, *found.selections

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        return *given, found[0]

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Gradients:
        (*operands, numbers), rows = saved, self.call.rows
        of = cotangents[0][:rows], Operands(*operands), numbers[:rows]
        return run_gradients(*of, self.call, self.scale, list(wanted[:3]))[:3]


def _fake_numbers(operands: Operands, call: Call, scale: float) -> Numbers:
    e = operands.e
    tokens, dtype = e.shape[0], blocks.sum_type(e)
    selected = (None if x is None else e.new_empty(x[0], dtype=x[1]) for x in call.selected(tokens, dtype, torch.int64))
    return Numbers(e.new_empty((call.rows, tokens), dtype=dtype), Selections(*selected))


@of_torch("numbers_in_torch", _fake_numbers)
def run_numbers(operands: Operands, call: Call, scale: float) -> Numbers:
    return blocks.numbers(operands, call, scale)


def _finished(found: Sequence[Tensor | None], e: Tensor, call: Call) -> OfGiven:
    """The results of the operator: de in e's type, but at least float32 where it is a part of a sum."""
    de, dc, dbias = found
    return OfGiven(de if de is None or call.of_shard else de.to(e.dtype), dc, dbias, None)


def _fake_gradients(
    cotangents: Tensor, operands: Operands, numbers: Tensor, call: Call, scale: float, wanted: Sequence[bool]
) -> OfGiven:
    return _finished(blocks.new_gradients(operands, wanted), operands.e, call)


@of_torch("gradients_in_torch", _fake_gradients)
def run_gradients(
    cotangents: Tensor, operands: Operands, numbers: Tensor, call: Call, scale: float, wanted: Sequence[bool]
) -> OfGiven:
    """de, dc (with c's strides) and dbias. numbers: the statistics."""
    return _finished(blocks.gradients(cotangents, operands, numbers, call, scale, wanted), operands.e, call)
