"""Blocks of logits in PyTorch alone, and the two halves of each: every function of this folder is a loop over blocks.

A block is some tokens by some columns of the vocabulary.

    first half     its product e·c, one matmul (`each`); from the logits the numbers of each token: log-sum-exp, targets
                   and others (`reduced`), the largest (largest.py), or a divergence from another head (divergence.py)
    second half    dz, from the logits and the cotangents of the numbers (`form_dz`, divergence.py); from dz the
                   gradients, two matmuls (`put`)

`numbers` and `gradients` take all tokens and one window of the vocabulary after another: dc is written once, and de
is a sum. They compute the logits twice. A divergence takes all columns and one chunk of tokens after another: de is
written once, and dc is a sum.
The equations cited here are in cce_jax/core.py.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_kernels.default_budget import default_budget
from cce_kernels.float16 import FLOAT16_LARGEST, SMALLEST_ROW
from cce_kernels.windows import vocabulary_windows
from cce_torch.call import Call, Numbers, Operands, Selections, selects
from cce_torch.in_torch.compiled import fused, plain
from cce_torch.in_torch.largest import Largest, rows_at_a_time

BLOCK_BYTES = 64 * 2**20
LEAST_LOG = -1000.0  # of p: exp(LEAST_LOG) is 0, and LEAST_LOG times a cotangent is finite


def sum_type(x: Tensor) -> torch.dtype:
    """The type of logits and sums."""
    return torch.promote_types(x.dtype, torch.float32)


def operand_type(x: Tensor) -> torch.dtype:
    """The type in which matmuls take x."""
    return x.dtype if _multiplies(x.dtype, x.device) else sum_type(x)


@functools.cache
def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch.mm multiplies dtype with a result in sum_type, found by trying: on CUDA, from PyTorch 2.8 on."""
    x = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.mm(x, x, out_dtype=sum_type(x))
    except (TypeError, RuntimeError):  # NotImplementedError and cuBLAS's errors are RuntimeErrors
        return False
    return True


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in sum_type."""
    wide = sum_type(left)
    return torch.mm(left, right) if left.dtype == wide else torch.mm(left, right, out_dtype=wide)


def budget_of(e: Tensor, memory_budget: int | None) -> int:
    """The bytes that a call may hold. memory_budget: None for the default."""
    return default_budget(e.shape[0], e.shape[1], e.dtype.itemsize) if memory_budget is None else memory_budget


def _windows(e: Tensor, c: Tensor, memory_budget: int | None) -> Iterator[slice]:
    """The fewest windows of the vocabulary, nearly equal, whose logits, part of c and part of dc each fit in a block.

    A block has at most BLOCK_BYTES.
    """
    block, column_bytes = min(BLOCK_BYTES, _third(e, memory_budget)), sum_type(e).itemsize * max(e.shape)
    return runs(len(c), vocabulary_windows(len(c), block, column_bytes, cost=lambda *_: 1.0).columns)


def _third(e: Tensor, memory_budget: int | None) -> int:
    """The bytes of each of three arrays: a third of the budget without the sums for de."""
    return (budget_of(e, memory_budget) - 2 * sum_type(e).itemsize * e.numel()) // 3


def runs(count: int, size: int) -> Iterator[slice]:
    """The runs of `size` elements, or of one where that is less, of which the last may be shorter."""
    size = max(size, 1)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


class Block(NamedTuple):
    """A block's product of e and c, and what makes logits of it. None stands for no bias, and for factors of 1."""

    raw: Tensor  # (N, n)
    bias: Tensor | None  # (n,)
    weights: Tensor | None  # (n,)
    own: Tensor  # (N,): each target's column minus the first of the block
    scale: Tensor | None
    softcap: Tensor | None
    inverse_temperature: Tensor | None  # (N,)
    ids: Tensor | None  # (N, K): each id minus the first column; it may be outside of the block

    def filled(self) -> "Block":
        """The same with zeros for no bias and ones for factors of 1: torch.compile compiles again for a None.

        In some versions of PyTorch it does so for each Python number too: they are tensors.
        """
        shapes = {"bias": self.raw.shape[1:], "weights": self.raw.shape[1:], "scale": ()}
        missing = {name: shape for name, shape in shapes.items() if getattr(self, name) is None}
        return self._replace(**{name: self.raw.new_full(n, float(name != "bias")) for name, n in missing.items()})

    def of_rows(self, rows: slice) -> "Block":
        of_tokens = {"raw", "own", "inverse_temperature", "ids"}
        found = ((name, getattr(self, name)) for name in of_tokens)
        return self._replace(**{name: x[rows] for name, x in found if x is not None})


def of_rows(operands: Operands, rows: slice, dtype: torch.dtype) -> Operands:
    """Those of some tokens, with e in dtype. It is 0 for ignored tokens: dz = 0 is not enough, as 0 · NaN is NaN."""
    of_tokens = operands.e, operands.columns, operands.inverse_temperature, operands.ids
    e, columns, inverse, ids = (None if x is None else x[rows] for x in of_tokens)
    e = torch.where(columns[:, None] >= 0, e, 0).to(dtype)  # type: ignore[index]
    return operands._replace(e=e, columns=columns, inverse_temperature=inverse, ids=ids)


def of_type(operands: Operands, dtype: torch.dtype) -> Operands:
    """The same with c and bias in dtype, after they are rounded to e's type."""
    c, bias = (None if x is None else x.to(operands.e.dtype).to(dtype) for x in operands[1:3])
    return operands._replace(c=c, bias=bias)


def each(
    operands: Operands, scale: float, softcap: float | None, dtype: torch.dtype, windows: Iterable[slice]
) -> Iterator[tuple[slice, Tensor, Block]]:
    """For each window: its columns, its rows of c in e's type, and its Block. c and bias are rounded to dtype."""
    e, c, bias, columns, weights, inverse, ids = operands
    of_scale, cap = (e.new_full((), 1 if x is None else x, dtype=sum_type(e)) for x in (scale, softcap))
    inverse = None if inverse is None else torch.where(columns >= 0, inverse, 1)  # it may be NaN for an ignored token
    for window in windows:
        c_g = c[window].to(dtype).to(e.dtype)
        yield (
            window,
            c_g,
            Block(
                product(e, c_g.t()),  # has no name here, so that the caller can free it
                None if bias is None else bias[window].to(dtype).to(sum_type(e)),
                None if weights is None else weights[window].to(sum_type(e)),
                columns - window.start,
                None if scale == 1 else of_scale,
                None if softcap is None else cap,
                inverse,
                None if ids is None else ids - window.start,
            ),
        )


def capped(raw: Tensor, scale: Any, softcap: Any) -> Tensor:
    """The logits before their division by a temperature, from e·c + b. scale, softcap: numbers, or tensors of one."""
    z = raw if scale is None else scale * raw
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def through_cap(dz: Tensor, before: Tensor, softcap: Any) -> Tensor:
    """The cotangents of logits without softcap, from those with it. before: the latter logits."""
    return dz if softcap is None else dz * (1 - (before / softcap) ** 2)


def logits(block: Block) -> tuple[Tensor, Tensor]:
    """The logits before their division by a temperature, and after it.

    Each is rounded before a reference is subtracted, as cce_kernels.numbers.rounded explains.
    """
    raw, bias, _, _, scale, softcap, inverse, _ = block
    z = capped(raw if bias is None else raw + bias, scale, softcap)
    if inverse is None:
        return z, z
    divided = z * inverse[:, None]
    return z, torch.where(z < torch.inf, divided.clamp(max=torch.finfo(z.dtype).max), divided)


class Sums(NamedTuple):
    """Sums of equations (1)-(3') over some windows, relative to the largest logit, and (3"). None: not asked for."""

    largest: Tensor  # (N,), as are the others
    mass: Tensor  # Σ exp
    target: Tensor
    total: Tensor | None  # Σ w·z
    weight: Tensor | None  # Σ w
    moment: Tensor | None  # Σ exp·z
    ids: Tensor | None  # (N, K)


def reduced(block: Block, sums: Sums) -> Sums:
    """The sums over the windows up to this one, from those over the windows before it."""
    before, mass, target, total, weight, moment, of_ids = sums
    weights: Any = block.weights
    _, z = logits(block)
    target = _picked(z, block.own[:, None], target[:, None])[:, 0]
    of_ids = None if block.ids is None or of_ids is None else _picked(z, block.ids, of_ids)
    largest = torch.maximum(before, z.amax(1))
    origin = finite(largest)
    between, share, z = finite(before) - origin, torch.exp(before - origin), z - origin[:, None]
    p = torch.exp(z)
    if total is not None:
        total = total + between * weight + torch.where(weights == 0, 0, weights * z).sum(1)  # type: ignore[operator]
        weight = weight + weights.sum()
    if moment is not None:
        moment = share * (moment + between * mass) + (p * torch.where(p == 0, 0, z)).sum(1)
    return Sums(largest, mass * share + p.sum(1), target, total, weight, moment, of_ids)


def _picked(z: Tensor, columns: Tensor, otherwise: Tensor) -> Tensor:
    """z at the columns, (N, K), of this block; what others had, otherwise."""
    here, last = (columns >= 0) & (columns < z.shape[1]), z.shape[1] - 1
    return torch.where(here, z.gather(1, columns.clamp(0, last).long()), otherwise)


def finite(largest: Tensor) -> Tensor:
    """What the logits are relative to: 0 where no largest logit is finite."""
    return torch.where(largest.isfinite(), largest, 0)


def numbers(operands: Operands, call: Call, scale: float) -> Numbers:
    """Equations (1), (2), with call.smooths (3), with ids (3"), and with call.with_mean (3'); and the selections."""
    e, c, _, columns, _, _, ids = operands
    largest = Largest.of_nothing(len(e), call, e.new_empty(0, dtype=sum_type(e))) if selects(call) else None

    def zeros(asked: bool, *more: int) -> Any:
        return e.new_zeros((len(e), *more), dtype=sum_type(e)) if asked else None

    # Each zeros is its own: torch.compile compiles again where one tensor is given twice.
    asked = True, True, call.smooths, call.smooths, call.with_mean
    of_ids = None if ids is None else zeros(True, ids.shape[1])
    sums = Sums(zeros(True) - torch.inf, *map(zeros, asked), of_ids)  # type: ignore[call-arg]
    operands = operands._replace(e=e.to(operand_type(e)))
    windows = _windows(e, c, call.memory_budget) if len(e) else ()
    for window, _, block in each(operands, scale, call.softcap, e.dtype, windows):
        sums = fused(reduced, block.filled(), sums)
        if largest is not None:
            for rows in runs(len(e), rows_at_a_time(block.raw.shape[1], _third(e, call.memory_budget))):
                largest.add(rows, logits(block.of_rows(rows))[1], window.start)
        del block
    peak, mass, target, total, _, moment, of_ids = sums
    mean = None if moment is None else moment / torch.where(mass == 0, 1, mass)
    found = torch.log(mass), finite(peak), target, total, *(() if of_ids is None else of_ids.unbind(1)), mean
    found = torch.where(columns >= 0, torch.stack([x for x in found if x is not None]), 0)
    return Numbers(found, Selections() if largest is None else largest.selections(call, len(c)))


class Cotangents(NamedTuple):
    """The references, and the cotangents of the statistics times ∂z/∂y without the softcap, (N,) each."""

    reference: Tensor  # ρ of P = exp(z − ρ); P is 0 for ignored tokens
    of_p: Tensor  # a" of cce_kernels/mean.py
    of_target: Tensor
    of_sum: Tensor | None
    of_log_p: Tensor | None  # μ" of cce_kernels/mean.py
    of_ids: Tensor | None  # (N, K)

    @classmethod
    def of(
        cls, cotangents: Tensor, operands: Operands, numbers: Tensor, call: Call, scale: float, narrow: bool
    ) -> tuple["Cotangents", Tensor | None]:
        """They are divided by a unit if narrow, for dz in float16; and the unit. cotangents: of `numbers`."""
        kept, inverse, unit = operands.columns >= 0, operands.inverse_temperature, None
        # a, t̂, s and μ, each times scale and the inverse of the temperature
        rows = torch.where(kept, (cotangents if inverse is None else cotangents * inverse) * scale, 0).contiguous()
        if narrow:
            rows, unit = in_units(rows, _bound(rows, numbers, operands.weights, call))
        (of_p, _, of_target, *others), share = rows, torch.where(kept, torch.exp(-numbers[0]), 0)
        of_log_p, of_sum = None, others.pop(0) if call.smooths else None
        if call.with_mean:
            of_mean = others.pop()
            of_p, of_log_p = of_p + torch.where(kept, of_mean * (1 - numbers[-1]), 0), of_mean * share
        reference = torch.where(kept, numbers[1], torch.finfo(numbers.dtype).max)
        of_ids = torch.stack(others, 1) if others else None
        return cls(reference, of_p * share, of_target, of_sum, of_log_p, of_ids), unit


def _bound(rows: Tensor, numbers: Tensor, weights: Tensor | None, call: Call) -> Tensor:
    """A bound of the elements of dz of each token, (N,), from the cotangents of its statistics.

    |p·log p| ≤ 1, so that the mean's needs no more room than the others beside what cce_kernels.gradients.fitted adds
    to the first.
    """
    sizes = rows.abs()
    sizes[1] = 0  # nothing reads the reference's
    if call.with_mean:
        sizes[0] = (rows[0] + rows[-1] * (1 + numbers[0] - numbers[-1])).abs()
    if call.smooths and weights is not None:
        sizes[3] *= weights.abs().amax()
    return sizes.sum(0)


def in_units(x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """x divided by a unit, so that a bound of its elements' sizes is at most FLOAT16_LARGEST, and the unit."""
    largest = torch.where(bound.isfinite(), bound, 0).amax()
    unit = largest.clamp(min=SMALLEST_ROW) / FLOAT16_LARGEST
    return x / unit, unit


def form_dz(block: Block, of: Cotangents, dtype: torch.dtype) -> Tensor:
    """dz of equation (6), in dtype."""
    before, z = logits(block)
    log_p, factor = z - of.reference[:, None], of.of_p[:, None]
    if of.of_log_p is not None:
        factor = factor + of.of_log_p[:, None] * log_p.clamp(min=LEAST_LOG)
    dz = factor * torch.exp(log_p)
    is_target = torch.arange(dz.shape[1], device=dz.device) == block.own[:, None]
    dz = dz + torch.where(is_target, of.of_target[:, None], 0)
    if of.of_sum is not None:
        dz = dz + of.of_sum[:, None] * block.weights  # type: ignore[operator]
    if of.of_ids is not None and block.ids is not None:
        here, last = (block.ids >= 0) & (block.ids < dz.shape[1]), dz.shape[1] - 1
        dz = dz.scatter_add(1, block.ids.clamp(0, last).long(), torch.where(here, of.of_ids, 0))
    return through_cap(dz, before, block.softcap).to(dtype)


def column_sums(block: Block, of: Cotangents) -> Tensor:
    """Σ_i dz_iv of equation (7), from a dz that is not rounded to the operands' type."""
    return form_dz(block, of, block.raw.dtype).sum(0)


def times(x: Tensor, unit: Tensor | None) -> Tensor:
    return x if unit is None else x.mul_(unit)


def put(into: Tensor, left: Tensor, right: Tensor, unit: Tensor | None, *, add: bool) -> None:
    """into = left @ right · unit; with `add` into += it. A product that needs memory of its own is made in parts."""
    if unit is None and into.dtype == left.dtype == sum_type(left):
        into.addmm_(left, right, beta=int(add))
        return
    # addmm cannot add 16-bit products to float32 everywhere
    for rows in runs(len(into), BLOCK_BYTES // (sum_type(left).itemsize * max(into.shape[1], 1))):
        part = times(product(left[rows], right), unit)
        into[rows] = into[rows].add_(part) if add else part


def new_gradients(operands: Operands, wanted: Sequence[bool]) -> list[Tensor | None]:
    """de of zeros, at least float32, and uninitialised dc, with c's strides, and dbias. None where not wanted."""
    (e, c, bias, *_), (want_e, want_c, want_bias) = operands, wanted
    return [
        e.new_zeros(e.shape, dtype=sum_type(e)) if want_e else None,
        torch.empty_like(c) if want_c else None,
        torch.empty_like(bias) if bias is not None and want_bias else None,
    ]


def gradients(
    cotangents: Tensor, operands: Operands, numbers: Tensor, call: Call, scale: float, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Equations (6) and (7): de, at least float32, dc and dbias. None where not wanted. dc is written once.

    numbers: the statistics. With impl="reference" of the full logits, and not compiled.
    """
    (e, c, *_), operand = operands, operand_type(operands.e)
    de, dc, dbias = new_gradients(operands, wanted)
    if not len(e):
        return [None if x is None else x.zero_() for x in (de, dc, dbias)]
    of, unit = Cotangents.of(cotangents, operands, numbers, call, scale, operand == torch.float16)
    operands = of_rows(operands, slice(None), operand)
    whole = call.impl == "reference"
    run, windows = (plain, [slice(0, len(c))]) if whole else (fused, _windows(e, c, call.memory_budget))
    for window, c_g, block in each(operands, scale, call.softcap, e.dtype, windows):
        block = block.filled()
        if dbias is not None:
            dbias[window] = times(run(column_sums, block, of), unit)
        if de is None and dc is None:
            continue
        dz = run(form_dz, block, of, operand)
        del block
        if de is not None:
            put(de, dz, c_g, unit, add=True)
        if dc is not None:
            put(dc[window], dz.t(), operands.e, unit, add=False)
        del dz
    return [de, dc, dbias]
