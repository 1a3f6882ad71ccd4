"""The core in PyTorch alone, on any device, for one window of the vocabulary after another.

The derivation, and the equations cited here, are in cce_jax/core.py. Forward: one matmul a window and a running
log-sum-exp. Backward: the window's logits are computed again and turned into dz; two matmuls follow. A window's logits,
its rows of c and its rows of dc take at most blocks.BLOCK_BYTES each, or 1024 columns if those are more. At most three
such blocks exist at a time. Besides them there are an (N, D) float32 sum for de, and for 16-bit inputs another such sum
and a copy of e.

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
from cce_torch.call import Call, Operands
from cce_torch.operators import of_torch
from cce_torch.torch_alone import blocks


def statistics(operands: Operands, call: Call, scale: float, called: str) -> Tensor:
    """The statistics of cce_torch.torch_alone.reference, without holding the logits.

    Differentiable once in e, c and bias.
    c with any strides, which its gradient gets too. c and bias have e's type, or are float32 and are rounded to it, one
    window at a time. Logits and sums are float32 (float64 for float64). On CUDA from PyTorch 2.8 on, 16-bit inputs are
    multiplied in their own type, and dz is rounded to it. Elsewhere they are widened to float32, c by windows.
    Saved for the backward pass: inputs and result. called: the public function.

    NotImplementedError if a second derivative is asked for.
    """
    return applied(Recomputed, _Statistics(Options.of(call, scale), call.of_backward, called), *operands)[0]


class Options(NamedTuple):
    """The options of both operators."""

    scale: float
    softcap: float | None
    with_sum: bool
    with_mean: bool
    memory_budget: int | None

    @classmethod
    def of(cls, call: Call, scale: float) -> "Options":
        return cls(scale, call.softcap, call.smooths, call.with_mean, call.memory_budget)


class _Statistics(NamedTuple):
    """The task. Its tensors are Operands."""

    options: Options
    call: Call  # of the backward pass
    called: str

    differentiable = 1

    def of_backward(self) -> "_Statistics":
        return self._replace(options=Options.of(self.call, self.options.scale))

    def forward(self, *operands: Any) -> tuple[Tensor]:
        return (run_statistics(Operands(*operands), self.options),)

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        return *given, found[0]

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Gradients:
        *operands, output = saved
        of = cotangents[0][: self.call.rows], Operands(*operands), output[: self.call.rows]
        return run_gradients(*of, self.options, list(wanted[:3]), False)


def _new_statistics(operands: Operands, options: Options) -> Tensor:
    e, ids = operands.e, operands.ids
    rows = 3 + int(options.with_sum) + int(options.with_mean) + (0 if ids is None else ids.shape[1])
    return e.new_empty((rows, e.shape[0]), dtype=torch.promote_types(e.dtype, torch.float32))


@of_torch("compiled_statistics", "Tensor", _new_statistics)
def run_statistics(operands: Operands, options: Options) -> Tensor:
    """Equations (1), (2), with_sum (3), with ids (3"), and with_mean (3')."""
    scale, softcap, with_sum, with_mean, memory_budget = options
    e, columns = operands.e, operands.columns
    accumulate, operand = blocks.types(e)
    if not e.shape[0]:
        return _new_statistics(operands, options)
    largest = e.new_full(columns.shape, -torch.inf, dtype=accumulate)
    # Each zeros is its own: torch.compile compiles again where one tensor is given twice.
    asked = True, True, with_sum, with_sum, with_mean
    rows: tuple[Any, ...] = (largest, *(torch.zeros_like(largest) if x else None for x in asked))
    of_ids = None if operands.ids is None else e.new_zeros(operands.ids.shape, dtype=accumulate)
    operands = operands._replace(e=e.to(operand))
    for _, _, block in blocks.each(operands, scale, softcap, memory_budget, e.dtype):
        rows, of_ids = blocks.fused(blocks.reduced, block, rows, of_ids)
        del block
    largest, mass, target, total, _, moment = rows
    mean = None if moment is None else moment / torch.where(mass == 0, 1, mass)
    found = torch.log(mass), blocks.finite(largest), target, total, *([] if of_ids is None else of_ids.unbind(1)), mean
    return torch.where(columns >= 0, torch.stack([x for x in found if x is not None]), 0)


def _fake_gradients(
    cotangents: Tensor, operands: Operands, output: Tensor, options: Options, wanted: Sequence[bool], wide_e: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return new_gradients(operands, wanted, wide_e)


@of_torch("compiled_gradients", "(Tensor, Tensor, Tensor)", _fake_gradients)
def run_gradients(
    cotangents: Tensor, operands: Operands, output: Tensor, options: Options, wanted: Sequence[bool], wide_e: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Equations (6) and (7): de, dc and dbias. A gradient that is not wanted has no elements. dc is written once.

    output: the statistics. wide_e: de is not rounded to e's type.
    """
    e, _, _, columns, weights, inverse, _ = operands
    scale, softcap, with_sum, with_mean, memory_budget = options
    want_e, want_c, want_bias = wanted
    accumulate, operand = blocks.types(e)
    de, dc, dbias = new_gradients(operands, wanted, wide_e)
    if not e.shape[0]:
        return de, dc.zero_(), dbias.zero_()
    live = columns >= 0
    inverse = blocks.of_kept(inverse, live, 1)
    # a, t̂, s and μ, each times scale and the inverse of the temperature
    factors = torch.where(live, cotangents, 0).contiguous() * scale
    factors = factors if inverse is None else factors * inverse
    unit = None
    if operand == torch.float16:
        factors, unit = blocks.fit_float16(factors, output, weights if with_sum else None, with_mean)
    of = blocks.Cotangents.of(output, factors, live, with_sum, with_mean)
    sums = torch.zeros_like(de, dtype=accumulate)
    e_live = torch.where(live[:, None], e, 0).to(operand)  # dz = 0 is not enough: 0 · NaN is NaN
    operands = operands._replace(e=e_live, inverse_temperature=inverse)
    for window, c_g, block in blocks.each(operands, scale, softcap, memory_budget, e.dtype):
        if want_bias:
            dbias[window] = blocks.times(blocks.fused(blocks.sums, block, of), unit)
        if not want_e and not want_c:
            continue
        dz = blocks.fused(blocks.cotangents, block, of, operand)
        del block
        if want_e and operand == accumulate:
            sums.addmm_(dz, c_g)
        elif want_e:
            sums += blocks.product(dz, c_g, accumulate)  # addmm cannot add 16-bit products to float32 everywhere
        if want_c and dc.dtype == operand == accumulate:
            torch.mm(dz.t(), e_live, out=dc[window])
        elif want_c:
            dc[window] = blocks.times(blocks.product(dz.t(), e_live, accumulate), unit)
        del dz
    return blocks.times(sums, unit).to(de.dtype), dc, dbias


def new_gradients(operands: Operands, wanted: Sequence[bool], wide_e: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised de, dc (with c's strides) and dbias. A gradient that is not wanted has no elements."""
    (e, c, bias, *_), (want_e, want_c, want_bias) = operands, wanted
    de = e.new_empty(e.shape if want_e else 0, dtype=torch.promote_types(e.dtype, torch.float32) if wide_e else e.dtype)
    dc = torch.empty_like(c) if want_c else c.new_empty(0)
    return de, dc, e.new_empty(0) if bias is None or not want_bias else bias.new_empty(bias.shape)
