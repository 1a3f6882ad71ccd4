"""The core in PyTorch alone, on any device: the vocabulary in groups whose block of logits is bounded.

The derivation, and the equations cited here, are in cce_jax/core.py. Forward: one matmul a group and a running
log-sum-exp. Backward: the same block of logits once more, turned into dz, and two matmuls. A block, and a group's rows
of c and dc, take at most BLOCK_BYTES, or 1024 columns if those are more; at most three such are alive at a time. Beside
them an (N, D) sum for de in float32, and for 16-bit inputs another, and a copy of e.

Both passes are operators that torch.compile does not look into. Traced, the backward's logits would be the same
expression as the forward's, so AOTAutograd merges the two and saves every block: the full logits. And the time to
compile would grow with the number of groups. Only what happens between the matmuls is compiled, once for all groups, by
torch.compile when it is first used. Where that fails (no C++ compiler, no Triton, a device without a backend) the same
functions run operation by operation, after one warning: the same numbers up to rounding, slower, with up to six blocks.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 64 * 2**20
COLUMN_MULTIPLE = 128
FEWEST_COLUMNS = 1024
FLOAT16_LARGEST = 2.0**14  # what the largest cotangent becomes in float16, which holds 28 binary orders below it
_uncompilable: set[str] = set()  # device types on which torch.compile has failed


def statistics(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, *, scale: float,
    softcap: float | None, with_sum: bool,
) -> Tensor:  # fmt: skip
    """As cce_torch.reference.statistics, (2 or 3, N), without the logits; differentiable once in e, c and bias.

    e: (N, D), bfloat16, float16, float32 or float64; c: (V, D), of e's type and any strides, which its gradient shares;
    bias: (V,), of e's type; columns: (N,) integers; weights: (V,). Logits and sums are float32 (float64 for float64).
    16-bit inputs multiply in their own type on CUDA from PyTorch 2.8 on, where dz is rounded to it; elsewhere a group
    at a time is widened to float32. Saved for the backward pass: the inputs and the result.

    Raises NotImplementedError where a second derivative is asked for.
    """
    return _Statistics.apply(e, c, bias, columns, weights, scale, softcap, with_sum)  # type: ignore[no-any-return]


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return _statistics(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        *tensors, ctx.scale, ctx.softcap, _ = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wanted = ctx.needs_input_grad[:3]
        run = _gradients if torch.compiler.is_compiling() else _Gradients.apply  # Dynamo traces no Function in another
        gradients = run(cotangents, *ctx.saved_tensors, ctx.scale, ctx.softcap, *wanted)
        return (*(g if w else None for g, w in zip(gradients, wanted, strict=True)), *[None] * 5)


class _Gradients(torch.autograd.Function):
    """_gradients, whose own derivative is an error. Not the operator's autograd rule, which torch.func cannot use."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise NotImplementedError(
            "linear_cross_entropy has first derivatives only with impl='torch_compile'; impl='reference' has "
            "higher-order derivatives, and holds the full logits"
        )


@torch.library.custom_op("cce_torch::compiled_statistics", mutates_args=())
def _statistics(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, scale: float,
    softcap: float | None, with_sum: bool,
) -> Tensor:  # fmt: skip
    """(1), (2) and, with_sum, (3)."""
    with _plainly(e):
        accumulate, operand = _types(e)
        if not e.shape[0]:
            return e.new_empty((2 + with_sum, 0), dtype=accumulate)
        lse = e.new_full(columns.shape, -torch.inf, dtype=accumulate)
        rows = (lse, torch.zeros_like(lse), torch.zeros_like(lse) if with_sum else None)
        for _, _, block in _blocks(e.to(operand), c, bias, columns, weights, scale, softcap):
            rows = _fused(_reduced, *block, *rows)
            del block
        return torch.where(columns >= 0, torch.stack([x for x in rows if x is not None]), 0)


@torch.library.custom_op("cce_torch::compiled_gradients", mutates_args=())
def _gradients(
    cotangents: Tensor, e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None,
    output: Tensor, scale: float, softcap: float | None, want_e: bool, want_c: bool, want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(6) and (7): de, dc and dbias, each of no elements where it is not wanted; dc's rows are written once."""
    with _plainly(e):
        accumulate, operand = _types(e)
        de, dc, dbias = _new_gradients(e, c, bias, want_e, want_c, want_bias)
        if not e.shape[0]:
            return de, dc.zero_(), dbias.zero_()
        live = columns >= 0
        lse = torch.where(live, output[0], torch.inf)  # so p = 0
        factors = torch.where(live, cotangents, 0).contiguous() * scale  # a, t̂ and s, times what dz has of them all
        unit = None
        if operand == torch.float16:
            factors, unit = _fit_float16(factors, weights)
        of = (lse, *factors, None)[:4]
        de = torch.zeros_like(de, dtype=accumulate)
        e_live = torch.where(live[:, None], e, 0).to(operand)  # 0 · NaN is NaN: that dz is 0 does not suffice
        for group, c_g, block in _blocks(e_live, c, bias, columns, weights, scale, softcap):
            if want_bias:
                dbias[group] = _times(_fused(_sums, *block, *of), unit)
            if not want_e and not want_c:
                continue
            dz = _fused(_cotangents, *block, *of, operand)
            del block
            if want_e and operand == accumulate:
                de.addmm_(dz, c_g)
            elif want_e:
                de += _product(dz, c_g, accumulate)  # not every addmm adds 16-bit products to float32
            if want_c and dc.dtype == accumulate:
                torch.mm(dz.t(), e_live, out=dc[group])
            elif want_c:
                dc[group] = _times(_product(dz.t(), e_live, accumulate), unit)
            del dz
        return _times(de, unit).to(e.dtype), dc, dbias


@_statistics.register_fake
def _(e, c, bias, columns, weights, scale, softcap, with_sum):
    return e.new_empty((2 + with_sum, e.shape[0]), dtype=torch.promote_types(e.dtype, torch.float32))


@_gradients.register_fake
def _(cotangents, e, c, bias, columns, weights, output, scale, softcap, want_e, want_c, want_bias):
    return _new_gradients(e, c, bias, want_e, want_c, want_bias)


def _new_gradients(e: Tensor, c: Tensor, bias: Tensor | None, want_e: bool, want_c: bool, want_bias: bool):
    """Uninitialised de, dc with c's strides, and dbias; of no elements where not wanted."""
    de = e.new_empty(e.shape if want_e else 0)
    dc = torch.empty_like(c) if want_c else c.new_empty(0)
    return de, dc, e.new_empty(0) if bias is None or not want_bias else bias.new_empty(bias.shape)


@contextmanager
def _plainly(x: Tensor) -> Iterator[None]:
    """Neither autograd nor autocast: the types are ours to choose."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        yield


def _types(e: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The type of logits and sums, and that of the operands of matmuls."""
    accumulate = torch.promote_types(e.dtype, torch.float32)
    return accumulate, e.dtype if _multiplies(e.dtype, accumulate, e.device) else accumulate


@functools.cache
def _multiplies(dtype: torch.dtype, accumulate: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies dtype with a result in accumulate: PyTorch 2.8 and up, on CUDA. Asked by trying."""
    if dtype == accumulate:
        return True
    x = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.mm(x, x, out_dtype=accumulate)
    except (TypeError, RuntimeError):  # RuntimeError: NotImplementedError and cuBLAS's errors are some
        return False
    return True


def _product(left: Tensor, right: Tensor, accumulate: torch.dtype) -> Tensor:
    return torch.mm(left, right) if left.dtype == accumulate else torch.mm(left, right, out_dtype=accumulate)


def _groups(e: Tensor, c: Tensor) -> Iterator[slice]:
    """Groups of the vocabulary, as even as may be, whose rows of e·cᵀ, c and dc each fit in BLOCK_BYTES."""
    vocabulary, width = c.shape
    column_bytes = torch.promote_types(e.dtype, torch.float32).itemsize * max(e.shape[0], width)
    most = max(BLOCK_BYTES // column_bytes, FEWEST_COLUMNS)
    even = -(-vocabulary // -(-vocabulary // most))
    columns = min(most, -(-even // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)
    return (slice(start, min(start + columns, vocabulary)) for start in range(0, vocabulary, columns))


def _blocks(e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, scale: float,
            softcap: float | None) -> Iterator[tuple[slice, Tensor, tuple]]:  # fmt: skip
    """Of each group its columns, its rows of c in e's type, and the first six arguments of _reduced and _cotangents.

    None, and in some versions of PyTorch a Python number, is a reason to compile anew: so zeros, ones and tensors.
    """
    accumulate = torch.promote_types(e.dtype, torch.float32)
    scalars = [None if x is None else e.new_full((), x, dtype=accumulate) for x in (scale, softcap)]
    for group in _groups(e, c):
        c_g, size = c[group].to(e.dtype), group.stop - group.start
        yield (
            group,
            c_g,
            (
                _product(e, c_g.t(), accumulate),  # no name here holds on to it
                e.new_zeros(size, dtype=accumulate) if bias is None else bias[group].to(accumulate),
                e.new_ones(size, dtype=accumulate) if weights is None else weights[group].to(accumulate),
                columns - group.start,
                *scalars,
            ),
        )


def _fit_float16(factors: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Factors scaled so that float16 holds dz without overflow and with the least underflow, and their unit."""
    size = factors.abs()
    if size.shape[0] == 3 and weights is not None:
        size[2] *= weights.abs().amax()
    bound = size.sum(0)
    largest = torch.where(bound.isfinite(), bound, 0).amax()
    unit = torch.where(largest > 0, largest, 1) / FLOAT16_LARGEST
    return factors / unit, unit


def _times(x: Tensor, unit: Tensor | None) -> Tensor:
    return x if unit is None else x.mul_(unit)


def _fused(function: Callable, *arguments: Any) -> Any:
    """function(*arguments), compiled where torch.compile can."""
    device = arguments[0].device.type
    if device not in _uncompilable:
        from torch._dynamo.exc import TorchDynamoException  # here, since it imports the compiler: seconds

        try:
            return _compiled(function)(*arguments)
        except TorchDynamoException as error:
            _uncompilable.add(device)
            warnings.warn(
                f"impl='torch_compile' runs uncompiled on {device}, slower and in more memory, since torch.compile "
                f"failed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    return function(*arguments)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def _logits(raw: Tensor, bias: Tensor, scale: Tensor, softcap: Tensor | None) -> Tensor:
    z = scale * (raw + bias)
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _reduced(raw, bias, weights, own, scale, softcap, lse, target, total):
    """(1)-(3) of the groups so far; own: the target's column in this group, if it is there."""
    z = _logits(raw, bias, scale, softcap)
    here = (own >= 0) & (own < z.shape[1])
    picked = z.gather(1, own.clamp(0, z.shape[1] - 1).long()[:, None])[:, 0]
    if total is not None:
        total = total + torch.where(weights == 0, 0, weights * z).sum(1)
    return torch.logaddexp(lse, torch.logsumexp(z, 1)), torch.where(here, picked, target), total


def _cotangents(raw, bias, weights, own, scale, softcap, lse, of_lse, of_target, of_sum, dtype):
    """dz of (6), scale being in the factors, in dtype."""
    z = _logits(raw, bias, scale, softcap)
    dz = of_lse[:, None] * torch.exp(z - lse[:, None])
    is_target = torch.arange(z.shape[1], device=z.device) == own[:, None]
    dz = dz + torch.where(is_target, of_target[:, None], 0)
    if of_sum is not None:
        dz = dz + of_sum[:, None] * weights
    if softcap is not None:
        dz = dz * (1 - (z / softcap) ** 2)
    return dz.to(dtype)


def _sums(*terms):
    """Σ_i dz_iv of (7), of what was not rounded."""
    return _cotangents(*terms, dtype=terms[0].dtype).sum(0)
