"""The loss of DTensors: the public function on the local tensors, and the placements of its result and its gradients.

Along each axis of the mesh, e and c are placed in one of these ways, or are redistributed so that they are:

    e split by tokens, c whole     each process has the loss of its tokens. Sums over tokens are summed over the axis,
                                   and so is the gradient of c.
    e whole, c split by rows       vocab_parallel.py. At most one axis of the mesh splits c so.
    both split                     the smaller of the two is gathered: c, which makes it the first way, or e, which is
                                   sequence parallelism. Its gradient is reduce-scattered.
    both whole                     the processes of the axis do the same.

The result is that of all tokens. A scalar is replicated; numbers for each token are placed as e is, or replicated where
e was gathered. Each gradient has the placements of its tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cce_kernels import contract
from cce_torch import arguments, losses
from cce_torch.on_jax import tensors
from cce_torch.processes.collectives import one_cotangent
from cce_torch.processes.vocab_parallel import VocabParallel

OF_TOKENS = "targets", "token_weight"


@torch.compiler.disable  # for torch.compile the rank in a mesh is an unknown number, and so are a shard's rows
def loss(function: Callable, given: dict[str, Any], num_items: Any, options: dict[str, Any]) -> Any:
    """function(**given, num_items=num_items, **options), the public function, of DTensors.

    Raises:
      TypeError: one of the tensors is plain, and it cannot be told which part of the whole it is.
      ValueError: the tensors are on different meshes, or shift needs targets of another process.
    """
    options = dict(options)
    contract.num_items(num_items, options["reduction"])
    contract.choice("vocab_axis", options["vocab_axis"], (0, 1))
    _check(given, options)
    if options["check_targets"]:  # of all processes: if one raised alone, the other processes would wait for ever
        options["check_targets"], targets = False, given["targets"]
        whole_targets = targets.full_tensor() if isinstance(targets, DTensor) else targets
        vocabulary = given["c"].shape[options["vocab_axis"]]
        wide, ignored = arguments.int64(whole_targets, options["ignore_index"])
        tensors.check_targets(wide, vocabulary, ignored, int(options["shift"]), whole_targets)
    e, c, mesh, shift = given["e"], given["c"], given["e"].device_mesh, int(options["shift"])
    of_e, of_c, split, gathered = _placements(e, c, options["vocab_axis"])
    token_axes = [i for i, p in enumerate(of_e) if p.is_shard() and i != gathered]
    if shift and any(of_e[i].dim == e.dim() - 2 for i in token_axes):
        raise ValueError(
            f"shift={options['shift']} needs targets of the next process where e is split along its last axis of "
            f"tokens, got e with placements {e.placements}: shift the targets before you distribute them"
        )
    whole = [Replicate()] * mesh.ndim
    of_tokens = [p if i in token_axes else Replicate() for i, p in enumerate(of_e)]
    of_bias = [Shard(0) if i == split else Replicate() for i in range(mesh.ndim)]
    wanted = {"e": of_e, "c": of_c, "bias": of_bias, "class_weight": whole, **dict.fromkeys(OF_TOKENS, of_tokens)}

    def placed(name: str, x: Any) -> Any:
        if isinstance(x, DTensor):
            return x.redistribute(placements=wanted[name])
        _check_plain(name, x, wanted[name], given)
        return x

    def local(name: str, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        # Each process of a token axis adds its tokens' part to the gradient of a tensor that is replicated there.
        partial = [Partial() if i in token_axes and p.is_replicate() else p for i, p in enumerate(wanted[name])]
        return x.to_local(grad_placements=partial)

    distributed = {name: placed(name, x) for name, x in given.items()}
    parts = {name: local(name, x) for name, x in distributed.items()}
    if isinstance(num_items, DTensor):
        num_items = num_items.full_tensor()
    if split is not None:
        axis = None if gathered is None else of_e[gathered].dim
        shard = VocabParallel.from_dtensor(distributed["c"], vocab_axis=options["vocab_axis"], sequence_axis=axis)
        options["vocab_parallel"] = shard
    returned = options["return_lse"]

    def called(**more: Any) -> tuple[Tensor, Any]:
        """The loss, and lse if it was asked for."""
        found = function(**parts, **more, **options)
        return found if returned else (found, None)

    def summed(x: Tensor) -> Tensor:
        """x summed over the axes that split the tokens. Every process differentiates the same sum."""
        placements = [Partial() if i in token_axes else Replicate() for i in range(mesh.ndim)]
        return DTensor.from_local(x, mesh, placements, run_check=False).redistribute(placements=whole).to_local()

    if token_axes and options["reduction"] == "mean":
        options["reduction"] = "sum"
        value, lse = called()
        if num_items is None:
            own = _items(parts, options, shift, c.shape[options["vocab_axis"]], value.dtype)
            value, items = summed(torch.stack([value, own])).unbind()
        else:
            value, items = summed(value), arguments.scalar(num_items, value)
        value = losses.quotient(value, items)
    else:
        value, lse = called(num_items=num_items)
        if token_axes and options["reduction"] == "sum":
            value = summed(value)

    for x in (value, lse):
        if x is not None and x.requires_grad:
            x.register_hook(one_cotangent)  # before PyTorch sums a gradient over the processes, which it does not batch

    def of_each_token(x: Tensor) -> Tensor:
        *leading, last = (*given["targets"].shape,) or (0,)
        shape = torch.Size((*leading, max(last - shift, 0))) if shift else given["targets"].shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, mesh, of_tokens, run_check=False, shape=shape, stride=stride)

    if options["reduction"] == "none":
        value = of_each_token(value)
    else:
        value = DTensor.from_local(value, mesh, whole, run_check=False)
    return (value, of_each_token(lse)) if returned else value


def _check(given: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise unless e and c are DTensors, and all DTensors are on one mesh."""
    meshes = {name: x.device_mesh for name, x in given.items() if isinstance(x, DTensor)}
    for name in ("vocab_parallel", "vocab_parallel_options"):
        if options[name] is not None:
            raise TypeError(
                f"{name} is for plain tensors, and {', '.join(meshes)} is a DTensor: leave {name} out, or pass "
                "to_local() of each tensor"
            )
    for name, other in (("e", "c"), ("c", "e")):
        if name not in meshes:
            other = other if other in meshes else next(iter(meshes))
            raise TypeError(
                f"{name} is a plain tensor and {other} a DTensor, so it cannot be told which part of the whole {name} "
                "this process has. If c is a weight that is sharded by FSDP, compute the loss inside the forward of "
                "the module that FSDP wraps, where it is a plain tensor. Under tensor parallelism use "
                "cce_torch.LinearCrossEntropyHead with cce_torch.VocabParallelStyle; or make "
                f"{name} a DTensor by DTensor.from_local({name}, {other}.device_mesh, placements)"
            )
    if any(mesh != meshes["e"] for mesh in meshes.values()):
        found = ", ".join(f"{name} {mesh}" for name, mesh in meshes.items())
        raise ValueError(f"all DTensors must be on one mesh, got {found}")


def _check_plain(name: str, x: Any, placements: list, given: dict[str, Any]) -> None:
    """Raise unless a plain x is the whole, which it is where no axis of the mesh splits it."""
    if x is not None and not all(p.is_replicate() for p in placements):
        like = "e" if name in OF_TOKENS else "c"
        raise TypeError(
            f"{name} is a plain tensor, and {like} is split with placements {given[like].placements}, so it cannot be "
            f"told whether {name} is the whole or a part: pass distribute_tensor({name}, e.device_mesh, placements) of "
            f"the whole, or DTensor.from_local({name}, e.device_mesh, placements) of this process' part"
        )


def _placements(e: Any, c: Any, vocab_axis: int) -> tuple[list, list, int | None, int | None]:
    """The placements to compute with: of e, of c; the axis of the mesh that splits the vocabulary; and that axis again
    if it splits the tokens too, so that e is to be gathered over it.
    """
    of_e: list = [p if type(p) is Shard and p.dim < e.dim() - 1 else Replicate() for p in e.placements]
    of_c: list = [p if p == Shard(vocab_axis) else Replicate() for p in c.placements]
    split = gathered = None
    for i in reversed(range(len(of_c))):
        if not of_c[i].is_shard():
            continue
        both = of_e[i].is_shard()
        innermost = both and of_e[i] not in of_e[i + 1 :]  # else the parts along this axis do not follow one another
        if split is None and (not both or (innermost and e.numel() < c.numel())):
            split, gathered = i, i if both else None
        else:
            of_c[i] = Replicate()
    return of_e, of_c, split, gathered


def _items(parts: dict[str, Any], options: dict[str, Any], shift: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """The part that this process' tokens have in the number by which "mean" divides."""
    targets, token_weight, class_weight = parts["targets"].long(), parts["token_weight"], parts["class_weight"]
    if shift:
        targets, token_weight = targets[..., shift:], None if token_weight is None else token_weight[..., shift:]
    columns = losses.columns(targets, options["ignore_index"], vocabulary)
    class_weight = None if class_weight is None else class_weight.detach()
    return losses.items(losses.Terms(columns, class_weight, token_weight, vocabulary), dtype)
