"""For which calls a program is compiled: the Kind of a call, and the size to which its tokens are padded.

JAX compiles a program for each shape, and the number of tokens N differs from batch to batch. So N is padded with
ignored tokens to one of few sizes. Each span of N has one size, its end. The first EXACT spans that occur have another
one, the first N that occurs in them, which smaller N of the span are padded to.

For kernels a span is an octave, from above one power of 2 to the next one: they stop at the last kept token, so that
padding costs them memory, but hardly time. XLA's own loops compute padding too: for them a span is a quarter of an
octave. No span is shorter than SMALLEST. So no octave compiles kernels for a third size.
"""

import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import jax
import torch
from jax import lax
from torch import Tensor

from cce_jax import losses, plans
from cce_kernels.default_budget import default_budget
from cce_kernels.device import gpu_of
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, WantedNumbers
from cce_torch.call import Call
from cce_torch.on_jax import jax_devices

EXACT = 2
SMALLEST = 256
SPANS_OF_KERNELS, SPANS_OF_XLA = 1, 4  # in an octave

_choosing = threading.Lock()


class Sizes:
    """The number of tokens that programs are compiled for, as a function of N: the same N always gets the same size."""

    def __init__(self, spans: int = SPANS_OF_KERNELS) -> None:
        """spans: in an octave."""
        self.spans = spans
        self.chosen: dict[int, int] = {}
        self.first: dict[int, int] = {}  # the first size of each span, by the span's end

    def __call__(self, tokens: int) -> int:
        if tokens not in self.chosen:
            with _choosing:
                self.chosen.setdefault(tokens, self._choose(tokens))
        return self.chosen[tokens]

    def _choose(self, tokens: int) -> int:
        end = self.end(tokens)
        first = self.first.setdefault(end, tokens if len(self.first) < EXACT else end)
        return first if tokens <= first else end

    def end(self, tokens: int) -> int:
        """The largest size of the span of so many tokens."""
        return padded_size(tokens, self.spans)


def padded_size(tokens: int, spans: int = SPANS_OF_KERNELS) -> int:
    """The end of the span of so many tokens."""
    octave = 2 ** (max(tokens - 1, 1).bit_length() - 1)
    length = max(octave // spans, SMALLEST)
    return -(-tokens // length) * length


@dataclass(frozen=True, eq=False)
class Kind:
    """What is common to all calls with the same options, types, device and shapes, except N.

    A Kind lives as long as one of its programs is kept, or a graph holds a saved array whose size the Kind chose.
    """

    call: Call
    static: plans.Core  # the static part of the core's call
    c_shape: torch.Size  # in the order of memory
    dtype: torch.dtype
    device: Any  # JAX's device
    sizes: Sizes

    @property
    def vocab_axis(self) -> int:
        """In the order of memory."""
        return self.static.head.vocab_axis

    @property
    def vocabulary(self) -> int:
        return self.c_shape[self.vocab_axis]

    @property
    def loss(self) -> losses.Loss:
        call: Any = self.call
        return losses.Loss(call.reduction, call.smooths, call.has_z_loss)

    @property
    def of_backward(self) -> "Kind":
        """The Kind of the backward pass: a mean without a cotangent is nothing to it. The sizes are the same."""
        return self._without_mean if self.call.mean_is_detached else self

    @cached_property
    def _without_mean(self) -> "Kind":
        static = replace(self.static, numbers=WantedNumbers(sum=self.call.smooths))
        return replace(self, call=self.call.of_backward, static=static)

    def shapes(self, size: int, with_bias: bool) -> Inputs:
        """The core's inputs in a program of `size` tokens, as shapes without memory."""
        dtype = str(self.dtype)[6:]
        e = jax.ShapeDtypeStruct((size, self.c_shape[1 - self.vocab_axis]), dtype)
        bias = jax.ShapeDtypeStruct((self.vocabulary,), dtype) if with_bias else None
        targets, inverse = (jax.ShapeDtypeStruct((size,), x) for x in ("int32", "float32"))
        inverse = inverse if self.call.with_temperature else None
        ids = jax.ShapeDtypeStruct((size, self.call.ids), "int32") if self.call.ids else None
        c = jax.ShapeDtypeStruct(tuple(self.c_shape), dtype)
        return Inputs(e, c, bias, targets, inverse_temperature=inverse, ids=ids)  # type: ignore[arg-type]

    def of_gradients(self, size: int) -> tuple[tuple[Any, torch.dtype], ...]:
        """The shape and the type of de of `size` tokens, of dc, in the order of memory, and of dbias."""
        of_e = torch.float32 if self.call.of_shard else self.dtype
        of_c = torch.float32 if self.call.wide_dc else self.dtype
        of_tokens, of_columns = (size, self.c_shape[1 - self.vocab_axis]), (self.vocabulary,)
        return (of_tokens, of_e), (self.c_shape, of_c), (of_columns, of_c)

    def in_memory(self, c: Tensor) -> Tensor:
        """c, (V, D), row-major in this Kind's order of memory. A hook on saved tensors may have changed c's order."""
        return (c.T if self.vocab_axis == 1 else c).resolve_neg().contiguous()

    def in_order_of_c(self, dc: Tensor) -> Tensor:
        """(V, D), from the order of memory."""
        return dc.T if self.vocab_axis == 1 else dc


_kinds: MutableMapping[tuple, Kind] = WeakValueDictionary()


def kind_of(call: Call, c_shape: torch.Size, vocab_axis: int, dtype: torch.dtype, device: torch.device) -> Kind:
    """The one Kind of such calls, even if several threads ask for it at once. The first call starts JAX."""
    jax_devices.check_can_run(device)
    exact = is_exact(call.precision, dtype)
    key = call, c_shape, vocab_axis, dtype, device, exact
    found = _kinds.get(key)
    if found is None:
        on = jax_devices.jax_device(device)
        head = Head(call.softcap, vocab_axis, lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT)
        gpu = gpu_of(on) if device.type == "cuda" else None
        impl: Any = call.impl
        static = plans.Core(
            head,
            impl,
            call.memory_budget,
            gpu,
            wide_de=call.of_shard,
            wide_dc=call.wide_dc,
            gradient_tolerance=call.gradient_tolerance,
            numbers=WantedNumbers(call.smooths, call.with_mean, call.mean_is_detached),
            one_platform=True,
        )
        new = Kind(call, static, c_shape, dtype, on, Sizes())
        if not plans.stops(new.shapes(SMALLEST, with_bias=False), static):
            new = replace(new, sizes=Sizes(SPANS_OF_XLA))
        with _choosing:
            found = _kinds.setdefault(key, new)
    return found


def kind_of_tensors(e: Tensor, c: Tensor, call: Call) -> Kind:
    """The Kind of a call on these tensors, c (V, D). A symbolic shape is made a constant."""
    axis = 0 if c.is_contiguous() or not c.T.is_contiguous() else 1
    return kind_of(call, torch.Size(map(int, (c.T if axis else c).shape)), axis, e.dtype, e.device)


def is_exact(precision: str | None, dtype: torch.dtype) -> bool:
    """Whether float32 matmuls are exact: not TF32. It depends on PyTorch's setting, which may change between calls."""
    return dtype == torch.float32 and (precision or _float32_precision()) == "highest"


def _float32_precision() -> str:
    """PyTorch's setting for float32 matmuls, whichever of its two interfaces set it last: the newer one has both."""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # from PyTorch 2.9 on
    if newer is None:
        return torch.get_float32_matmul_precision()
    return "highest" if newer in ("ieee", "none") else "high"


def without_results(call: Call, e: Tensor, c: Tensor, wanted: Sequence[bool]) -> Call:
    """call, whose memory budget is reduced by the bytes of de and dc.

    Of an octave's end for all its N: each budget has a Kind of its own, and so programs of its own.
    """
    (tokens, width), itemsize = map(int, e.shape), e.dtype.itemsize
    tokens, budget = padded_size(tokens), call.memory_budget
    if budget is None:
        budget = default_budget(tokens, width, itemsize)
    de = itemsize * width * tokens * wanted[0]
    dc = (4 if call.wide_dc else itemsize) * int(c.numel()) * wanted[1]
    return call._replace(memory_budget=max(budget - de - dc, 0))
