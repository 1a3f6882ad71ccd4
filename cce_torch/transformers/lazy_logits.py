"""An object that stands for the logits while a model's forward runs, and becomes the loss in its cross-entropy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

UNDERSTOOD = (
    "multiplication and division by a number, tanh, slices, view, reshape and flatten of all axes but the last, "
    "contiguous, float, to, and torch.nn.functional.cross_entropy"
)


class NotUnderstoodError(TypeError, AttributeError):
    """A model does something with its logits that LazyLogits does not understand. hasattr needs an AttributeError."""


@dataclass(eq=False, repr=False)
class LazyLogits:
    """The logits (..., V) of embeddings h (..., D), which are not computed.

    A slice or a new shape of the logits is one of h. A scale and a softcap are recorded in three fields: the logits are
    inner·z, or outer·tanh(inner·z) if they are capped, with z = h @ weight.T + bias. cross_entropy of this object calls
    `loss` with the object, the targets and the options of torch.nn.functional.cross_entropy.

    dtype is that of the logits that this object stands for; they are never rounded to it. tokens is the shape of the
    tokens before they were flattened.
    """

    h: Tensor
    vocabulary: int
    dtype: torch.dtype
    loss: Callable[..., Tensor]
    inner: float = 1.0
    outer: float = 1.0
    capped: bool = False
    tokens: Any = None

    def __post_init__(self) -> None:
        self.tokens = self.h.shape[:-1] if self.tokens is None else self.tokens

    # What the loss needs.

    @property
    def scale_and_softcap(self) -> tuple[float | None, float | None]:
        """outer·tanh(inner·z) is softcap·tanh(scale·z / softcap) with softcap = |outer|, scale = inner·outer."""
        scale = self.inner * self.outer
        return (None if scale == 1 else scale), (abs(self.outer) if self.capped else None)

    # What a model asks of logits.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.h.shape[:-1], self.vocabulary))

    @property
    def ndim(self) -> int:
        return self.h.ndim

    @property
    def device(self) -> torch.device:
        return self.h.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.h.ndim

    # What a model does with logits.

    def __mul__(self, other: Any) -> "LazyLogits":
        factor = _number("multiplication", other)
        if self.capped:
            return replace(self, outer=self.outer * factor)
        return replace(self, inner=self.inner * factor)

    __rmul__ = mul = multiply = __mul__

    def __truediv__(self, other: Any) -> "LazyLogits":
        return self * (1 / _number("division", other))

    div = true_divide = __truediv__

    def tanh(self) -> "LazyLogits":
        return refuse("a second tanh") if self.capped else replace(self, capped=True)

    def float(self) -> "LazyLogits":
        return replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> "LazyLogits":
        found = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if found.device != self.device or not found.dtype.is_floating_point:
            refuse(f"to({found.device}, {found.dtype})")
        return replace(self, dtype=found.dtype)

    def contiguous(self) -> "LazyLogits":
        return self

    def __getitem__(self, index: Any) -> "LazyLogits":
        index = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(i, slice) or i is Ellipsis for i in index):
            refuse(f"the index {index}")
        if Ellipsis not in index:
            index = (*index, Ellipsis)
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (self.ndim + 1 - len(index)), *index[at + 1 :])
        start, stop, step = index[-1].indices(self.vocabulary)
        if start or step != 1:
            refuse(f"a slice of the vocabulary from {start} in steps of {step}")
        h = self.h[index[:-1]]
        return replace(self, h=h, vocabulary=stop, tokens=h.shape[:-1])

    def reshape(self, *shape: Any) -> "LazyLogits":
        shape = tuple(shape[0]) if isinstance(shape[0], (tuple, list)) else shape
        if shape[-1] not in (self.vocabulary, -1):
            refuse(f"the shape {shape}, whose last axis is not the vocabulary of {self.vocabulary}")
        return replace(self, h=self.h.reshape(*shape[:-1], self.h.shape[-1]))

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "LazyLogits":
        if end_dim % self.ndim == self.ndim - 1:
            refuse("flatten of the vocabulary's axis")
        return replace(self, h=self.h.flatten(start_dim, end_dim % self.ndim))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if function is torch.tanh:
            return args[0].tanh()
        if function is torch.mul or function is torch.Tensor.mul:
            return args[0] * args[1] if isinstance(args[0], LazyLogits) else args[1] * args[0]
        if (function is torch.div or function is torch.true_divide) and not kwargs:
            return args[0] / args[1]
        return refuse(getattr(function, "__name__", repr(function)))

    def __getattr__(self, name: str) -> NoReturn:
        refuse(name)


def refuse(operation: str) -> NoReturn:
    raise NotUnderstoodError(
        f"a model that is patched by cce_patch computes its loss without the logits, and cce_patch does not understand "
        f"this operation on them: {operation}. It understands {UNDERSTOOD}. "
        f'cce_patch(model, evaluation="logits") gives the logits back in evaluation, and cce_unpatch(model) everywhere'
    )


def _operator(name: str) -> Callable[..., NoReturn]:
    def operator(self: LazyLogits, *_: Any) -> NoReturn:
        refuse(name)

    return operator


# Python looks for operators in the class and never asks __getattr__. Its own == and iteration would give nonsense.
_NAMES = "add radd sub rsub rtruediv floordiv mod pow rpow matmul rmatmul neg abs eq ne lt le gt ge"
for _name in f"{_NAMES} setitem iter len bool int float".split():
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _number(operation: str, x: Any) -> float:
    """x as a number. A tensor is refused, also one that holds a single number: it may be learned."""
    if isinstance(x, (int, float)):
        return x
    return refuse(f"{operation} by a {type(x).__name__}")


def _cross_entropy(
    logits: Any,
    targets: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy of LazyLogits."""
    if not isinstance(logits, LazyLogits):
        refuse("cross_entropy with logits as targets")
    if size_average is not None or reduce is not None:
        refuse("cross_entropy with size_average or reduce")
    if logits.ndim != 2 or targets.ndim != 1:
        shapes = f"{tuple(logits.shape)} with targets {tuple(targets.shape)}"
        refuse(f"cross_entropy of {shapes}, which are not (N, V) and (N,)")
    if len(logits.h) != len(targets):
        raise ValueError(
            f"labels must have the shape of input_ids: the model has logits of {len(logits.h)} tokens, "
            f"{tuple(logits.tokens)}, and its loss function got {len(targets)} labels"
        )
    return logits.loss(
        logits,
        targets,
        class_weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
