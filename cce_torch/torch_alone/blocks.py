"""Blocks of logits in PyTorch: one for each window of the vocabulary, and the functions of a block.

The equations cited here are in cce_jax/core.py.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_kernels.default_budget import default_budget
from cce_kernels.float16 import FLOAT16_LARGEST, SMALLEST_ROW
from cce_kernels.windows import vocabulary_windows
from cce_torch.call import Operands

BLOCK_BYTES = 64 * 2**20
LEAST_LOG = -1000.0  # of p: exp(LEAST_LOG) is 0, and LEAST_LOG times a cotangent is finite
_uncompilable: set[str] = set()  # device types on which torch.compile has failed


def types(e: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The type of logits and sums, and the type of the operands of matmuls."""
    accumulate = torch.promote_types(e.dtype, torch.float32)
    return accumulate, e.dtype if _multiplies(e.dtype, accumulate, e.device) else accumulate


@functools.cache
def _multiplies(dtype: torch.dtype, accumulate: torch.dtype, device: torch.device) -> bool:
    """Whether torch.mm multiplies dtype with a result in accumulate, found by trying: on CUDA, from PyTorch 2.8 on."""
    if dtype == accumulate:
        return True
    x = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.mm(x, x, out_dtype=accumulate)
    except (TypeError, RuntimeError):  # NotImplementedError and cuBLAS's errors are RuntimeErrors
        return False
    return True


def product(left: Tensor, right: Tensor, accumulate: torch.dtype) -> Tensor:
    return torch.mm(left, right) if left.dtype == accumulate else torch.mm(left, right, out_dtype=accumulate)


def _windows(e: Tensor, c: Tensor, memory_budget: int | None) -> Iterator[slice]:
    """The fewest windows of the vocabulary, nearly equal, whose logits, part of c and part of dc each fit in a block.

    A block has a third of the budget without the sums for de, but at most BLOCK_BYTES.
    """
    vocabulary, width = c.shape
    if memory_budget is None:
        memory_budget = default_budget(e.shape[0], width, e.dtype.itemsize)
    itemsize = torch.promote_types(e.dtype, torch.float32).itemsize
    column_bytes, sums = itemsize * max(e.shape[0], width), 2 * itemsize * e.shape[0] * width
    block = min(BLOCK_BYTES, (memory_budget - sums) // 3)
    columns = vocabulary_windows(vocabulary, block, column_bytes, cost=lambda *_: 1.0).columns
    return runs(vocabulary, columns)


def runs(count: int, size: int) -> Iterator[slice]:
    """The runs of `size` elements, or of one where that is less, of which the last may be shorter."""
    size = max(size, 1)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


class Block(NamedTuple):
    """A window's product of e and c, and what makes logits of it.

    torch.compile compiles again for a None, and in some versions of PyTorch for each Python number. So zeros stand for
    no bias, ones for no weights, and tensors for numbers.
    """

    raw: Tensor  # (N, n)
    bias: Tensor  # (n,)
    weights: Tensor  # (n,)
    own: Tensor  # (N,): each target's column minus the window's first
    scale: Tensor
    softcap: Tensor | None
    inverse_temperature: Tensor | None  # (N,)
    ids: Tensor | None  # (N, K): each id minus the window's first column; it may be outside of the window


class Cotangents(NamedTuple):
    """The references, and the cotangents of the statistics times ∂z/∂y without the softcap, (N,) each."""

    reference: Tensor  # ρ of P = exp(z − ρ); P is 0 for ignored tokens
    of_p: Tensor  # a" of cce_kernels/mean.py
    of_target: Tensor
    of_sum: Tensor | None = None
    of_log_p: Tensor | None = None  # μ" of cce_kernels/mean.py
    of_ids: Tensor | None = None  # (N, K)

    @classmethod
    def of(cls, numbers: Tensor, rows: Tensor, live: Tensor, with_sum: bool, with_mean: bool) -> "Cotangents":
        """numbers: the statistics; rows: their cotangents, in their order, 0 for ignored tokens. live: the others."""
        (of_mass, _, of_target, *others), share = rows, torch.where(live, torch.exp(-numbers[0]), 0)
        of_log_p, of_sum = None, others.pop(0) if with_sum else None
        if with_mean:
            of_mean = others.pop()
            of_mass, of_log_p = of_mass + torch.where(live, of_mean * (1 - numbers[-1]), 0), of_mean * share
        reference = torch.where(live, numbers[1], torch.finfo(numbers.dtype).max)
        of_ids = torch.stack(others, 1) if others else None
        return cls(reference, of_mass * share, of_target, of_sum, of_log_p, of_ids)


def of_kept(x: Tensor | None, kept: Tensor, fill: float) -> Tensor | None:
    """x, (N,), with fill for the tokens that are not kept: x may be NaN there."""
    return None if x is None else torch.where(kept, x, fill)


def each(
    operands: Operands, scale: float, softcap: float | None, memory_budget: int | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Block]]:
    """For each window: its columns, its rows of c in e's type, and its Block. c and bias are rounded to dtype."""
    e, c, bias, columns, weights, inverse_temperature, ids = operands
    accumulate = torch.promote_types(e.dtype, torch.float32)
    scalars = [None if x is None else e.new_full((), x, dtype=accumulate) for x in (scale, softcap)]
    for window in _windows(e, c, memory_budget):
        c_g, size = c[window].to(dtype).to(e.dtype), window.stop - window.start
        yield (
            window,
            c_g,
            Block(
                product(e, c_g.t(), accumulate),  # has no name here, so that the caller can free it
                e.new_zeros(size, dtype=accumulate) if bias is None else bias[window].to(dtype).to(accumulate),
                e.new_ones(size, dtype=accumulate) if weights is None else weights[window].to(accumulate),
                columns - window.start,
                *scalars,  # type: ignore[arg-type]
                inverse_temperature=inverse_temperature,
                ids=None if ids is None else ids - window.start,
            ),
        )


def fit_float16(factors: Tensor, numbers: Tensor, weights: Tensor | None, with_mean: bool) -> tuple[Tensor, Tensor]:
    """factors divided by a unit, and the unit, so that dz does not overflow float16 and few elements underflow.

    factors: the cotangents of the statistics; numbers: the statistics; weights: of the sum. |p·log p| ≤ 1, so that the
    mean's needs no more room than the others beside what cce_kernels.gradients.fitted adds to the first.
    """
    of_mass, _, *others = factors
    if with_mean:
        of_mass = of_mass + others[-1] * (1 + numbers[0] - numbers[-1])
    sizes = [x.abs() for x in (of_mass, *others)]
    if weights is not None:
        sizes[2] = sizes[2] * weights.abs().amax()
    return in_units(factors, torch.stack(sizes).sum(0))


def in_units(x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """x divided by a unit, so that a bound of its elements' sizes is at most FLOAT16_LARGEST, and the unit."""
    largest = torch.where(bound.isfinite(), bound, 0).amax()
    unit = largest.clamp(min=SMALLEST_ROW) / FLOAT16_LARGEST
    return x / unit, unit


def times(x: Tensor, unit: Tensor | None) -> Tensor:
    return x if unit is None else x.mul_(unit)


def fused(function: Callable, *arguments: Any) -> Any:
    """function(*arguments), compiled by torch.compile if that works on this device."""
    device = arguments[0].raw.device.type
    if device not in _uncompilable:
        from torch._dynamo import exc  # imported here: importing the compiler takes seconds

        try:
            return _compiled(function, _variant(arguments))(*arguments)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            _uncompilable.add(device)
            warnings.warn(
                f"impl='torch_compile' runs uncompiled on {device}, slower and in more memory, since torch.compile "
                f"failed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return function(*arguments)


def _variant(x: Any) -> Any:
    """What makes torch.compile compile again for an argument: any size but 1 shares one compilation."""
    if isinstance(x, tuple):
        return tuple(map(_variant, x))
    if not isinstance(x, Tensor):
        return x
    return x.dtype, x.device, x.is_inference(), *(n == 1 for n in x.shape)


@functools.cache
def _compiled(function: Callable, variant: tuple) -> Callable:
    """function, compiled for arguments of one variant.

    torch.compile counts compilations by a function's code, and after eight of them it runs the function uncompiled. So
    each variant has code of its own. With fullgraph=True the limit would be an error.
    """
    own = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(own, dynamic=True, fullgraph=True)


def capped(raw: Tensor, scale: Any, softcap: Any) -> Tensor:
    """The logits before their division by a temperature, from e·c + b. scale, softcap: numbers, or tensors of one."""
    z = scale * raw
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _divided(z: Tensor, block: Block) -> Tensor:
    """The logits of z, each rounded before a reference is subtracted, as cce_kernels.numbers.divided explains."""
    inverse = block.inverse_temperature
    if inverse is None:
        return z
    divided = z * inverse[:, None]
    return torch.where(z < torch.inf, divided.clamp(max=torch.finfo(z.dtype).max), divided)


def mean_of(z: Tensor) -> Tensor:
    """Equation (3') of logits (N, V), (N,). A logit of -inf has no share."""
    p = torch.softmax(z, 1)
    return (p * torch.where(p == 0, 0, z)).sum(1)


def mean_over_runs(lse: Tensor, mean: Tensor) -> Tensor:
    """cce_kernels.mean.over_runs: (3') of the whole vocabulary, (N,), from (1) and (3') of its runs, (runs, N) each."""
    peak = lse.amax(0)
    share = torch.exp(lse - torch.where(peak.isinf(), 0, peak))
    whole = share.sum(0)
    return (share * mean).sum(0) / torch.where(whole == 0, 1, whole)


def reduced(block: Block, rows: tuple, of_ids: Tensor | None) -> tuple[tuple, Tensor | None]:
    """The sums of equations (1)-(3') over the windows up to this one, from those over the windows before it; and (3").

    rows: the largest logit, to which the sums are relative; Σ exp; the targets' logits; Σ w·z and Σ w; Σ exp·z. None
    where a sum is not asked for.
    """
    (before, mass, target, total, weight, moment), own, weights = rows, block.own, block.weights
    z = _divided(capped(block.raw + block.bias, block.scale, block.softcap), block)
    target = _picked(z, own[:, None], target[:, None])[:, 0]
    of_ids = None if block.ids is None or of_ids is None else _picked(z, block.ids, of_ids)
    largest = torch.maximum(before, z.amax(1))
    origin = finite(largest)
    between, share, z = finite(before) - origin, torch.exp(before - origin), z - origin[:, None]
    p = torch.exp(z)
    if total is not None:
        total = total + between * weight + torch.where(weights == 0, 0, weights * z).sum(1)
        weight = weight + weights.sum()
    if moment is not None:
        moment = share * (moment + between * mass) + (p * torch.where(p == 0, 0, z)).sum(1)
    return (largest, mass * share + p.sum(1), target, total, weight, moment), of_ids


def _picked(z: Tensor, columns: Tensor, otherwise: Tensor) -> Tensor:
    """z at the columns, (N, K), of this window; what others had, otherwise."""
    here, last = (columns >= 0) & (columns < z.shape[1]), z.shape[1] - 1
    return torch.where(here, z.gather(1, columns.clamp(0, last).long()), otherwise)


def finite(largest: Tensor) -> Tensor:
    """What the logits are relative to: 0 where no largest logit is finite."""
    return torch.where(largest.isfinite(), largest, 0)


def cotangents(block: Block, of: Cotangents, dtype: torch.dtype) -> Tensor:
    """dz of equation (6), in dtype."""
    softcap = block.softcap
    before = capped(block.raw + block.bias, block.scale, softcap)
    log_p, factor = _divided(before, block) - of.reference[:, None], of.of_p[:, None]
    if of.of_log_p is not None:
        factor = factor + of.of_log_p[:, None] * log_p.clamp(min=LEAST_LOG)
    dz = factor * torch.exp(log_p)
    is_target = torch.arange(dz.shape[1], device=dz.device) == block.own[:, None]
    dz = dz + torch.where(is_target, of.of_target[:, None], 0)
    if of.of_sum is not None:
        dz = dz + of.of_sum[:, None] * block.weights
    if of.of_ids is not None and block.ids is not None:
        here, last = (block.ids >= 0) & (block.ids < dz.shape[1]), dz.shape[1] - 1
        dz = dz.scatter_add(1, block.ids.clamp(0, last).long(), torch.where(here, of.of_ids, 0))
    if softcap is not None:
        dz = dz * (1 - (before / softcap) ** 2)
    return dz.to(dtype)


def sums(block: Block, of: Cotangents) -> Tensor:
    """Σ_i dz_iv of equation (7), from a dz that is not rounded to the operands' type."""
    return cotangents(block, of, block.raw.dtype).sum(0)
