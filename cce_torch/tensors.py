"""Whether a tensor is plain memory that can be read now. A kernel that is given anything else reads address 0."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

PLAIN = {Tensor, torch.nn.Parameter}
TRACED = FakeTensor, FunctionalTensor  # torch.compile passes these instead of memory
ADDRESSED = {"cpu", "cuda", "meta"}  # devices whose tensors have a storage with an address, or none
ADVICE = (
    "compute the loss inside the forward of the module that FSDP wraps: there its weights are whole, plain tensors in "
    "memory"
)


def check(tensors: dict[str, Tensor | None]) -> None:
    """Raise TypeError, with its name, for a tensor of a type that is not understood, or without its memory.

    Takes about a microsecond a tensor. Says nothing of what torch.compile traces, which has no memory yet.
    """
    if torch.compiler.is_compiling():
        return
    wrapped = torch._C._are_functorch_transforms_active()  # its tensors are of the plain type, and refuse data_ptr
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
    # A freed storage has no bytes; data_ptr of a view into it is not 0, but the offset of the view.
    return x.data_ptr() != 0 and x.untyped_storage().nbytes() >= (x.storage_offset() + last) * x.itemsize


def _is_awaited(x: Tensor) -> bool:
    """Whether x is the result of a collective, which waits for it when an operator is called on x."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # slow to import

    return isinstance(x, AsyncCollectiveTensor)
