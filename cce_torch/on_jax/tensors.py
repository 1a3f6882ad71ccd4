"""Checks of tensors: whether they are plain memory that can be read now, else a kernel would read address 0."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cce_kernels import contract

PLAIN = {Tensor, torch.nn.Parameter}
ORDINARY = {*PLAIN, type(None)}
TRACED = FakeTensor, FunctionalTensor  # torch.compile passes these, which have no memory
ADDRESSED = {"cpu", "cuda", "meta"}  # devices where a storage's address tells whether it has memory
ADVICE = (
    "compute the loss inside the forward of the module that FSDP wraps: there its weights are whole, plain tensors in "
    "memory"
)


def whole_shape(x: Any) -> torch.Size:
    """The shape of x, or that of the whole weight where DeepSpeed's ZeRO 3 has left x empty."""
    return getattr(x, "ds_shape", x.shape)


def refuse_split(name: str, x: Tensor) -> None:
    if whole_shape(x) != x.shape:
        raise TypeError(
            f"{name} of shape {tuple(x.shape)} is a weight of shape {tuple(whole_shape(x))} that DeepSpeed's ZeRO 3 "
            "has split: compute the loss inside the forward of the module that has the weight, where DeepSpeed gathers "
            "it, as cce_torch.LinearCrossEntropyHead does"
        )


def has_dtensor(tensors: dict[str, Tensor | None]) -> bool:
    """Whether one of the tensors is a DTensor."""
    if not torch.compiler.is_compiling() and ORDINARY.issuperset(map(type, tensors.values())):  # nearly always
        return False
    return any(type(x).__name__ == "DTensor" for x in tensors.values())  # a class that is slow to import


def rounded(x: Tensor | None, e: Tensor) -> Any:
    """c or bias in e's type, in which the products are computed."""
    return x if x is None or x.dtype == e.dtype else x.to(e.dtype)


def are_usual(*tensors: Tensor | None) -> bool:
    """Whether all are plain, row-major, in memory and on one device, as in nearly all calls.

    `check` would then find nothing, and take more time than this function.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    device = None
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or not x.is_contiguous():
            return False
        if not x.data_ptr() or x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.itemsize:
            return False
        if x.device != device and device is not None:
            return False
        device = x.device
    return True


def check(tensors: dict[str, Tensor | None]) -> None:
    """Raise a TypeError that names the tensor, if its type is not supported or it has no memory.

    Takes about a microsecond a tensor. Tensors that torch.compile traces are not checked: they have no memory yet.
    """
    if torch.compiler.is_compiling():
        return
    wrapped = torch._C._are_functorch_transforms_active()  # functorch's tensors have the plain type, but no data_ptr
    for name, x in tensors.items():
        if x is None:
            continue
        if type(x) not in PLAIN:
            if isinstance(x, TRACED) or _is_awaited(x):
                continue
            if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
                raise TypeError(
                    f"{name} is a {type(x).__name__}, a subclass of torch.Tensor whose memory is not its own: pass a "
                    f"plain tensor. If {name} is a weight that is sharded by FSDP, {ADVICE}. Of another DTensor pass "
                    f"{name}.full_tensor(), or its to_local() if each rank holds all of it"
                )
        refuse_split(name, x)
        if not wrapped and not _has_memory(x):
            raise TypeError(
                f"{name} of shape {tuple(x.shape)} on {x.device} has no memory: it is on the device meta, or its "
                f"memory has been freed. If {name} is a weight that is sharded by FSDP, {ADVICE}"
            )


def _has_memory(x: Tensor) -> bool:
    """Whether the storage of x holds all elements of x."""
    if x.layout is not torch.strided:
        return True
    if (x.is_cuda or x.is_cpu) and x.is_contiguous():  # nearly always
        last = x.numel()
    elif x.device.type not in ADDRESSED:
        return True
    else:
        last = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    if not last:
        return True
    # A freed storage has 0 bytes. data_ptr of a view into it is the view's offset, which need not be 0.
    return x.data_ptr() != 0 and x.untyped_storage().nbytes() >= (x.storage_offset() + last) * x.itemsize


def _is_awaited(x: Tensor) -> bool:
    """Whether x is the result of a collective that may still run: the first operator on x waits for it."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # slow to import

    return isinstance(x, AsyncCollectiveTensor)


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int, shift: int, given: Tensor) -> None:
    """Raise a ValueError that names the first target outside [0, vocabulary) that is not ignored. Waits for targets.

    given: the targets in the caller's type. int64 does not hold all of uint64.
    """
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if shift:
        bad[..., :shift] = False  # no token predicts these targets
    if bad.any():
        position = torch.nonzero(bad)[0].tolist()
        raise contract.bad_target(position, int(given[tuple(position)].cpu().numpy()), vocabulary, ignore_index)
