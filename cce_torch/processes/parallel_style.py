"""Tensor parallelism of a LinearCrossEntropyHead, for torch.distributed.tensor.parallel.parallelize_module."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map

from cce_torch.head import LinearCrossEntropyHead


class VocabParallelStyle(ParallelStyle):
    """Splits a LinearCrossEntropyHead by rows of the vocabulary, as ColwiseParallel splits a torch.nn.Linear.

        parallelize_module(model, mesh, {"lm_head": VocabParallelStyle()})

    ColwiseParallel itself would split the loss.

    head(h, targets) returns plain tensors that are equal on all processes of the mesh: the loss and, if it was asked
    for, lse, of all tokens. targets and token_weight are plain tensors, of all tokens on every process of the mesh.
    head(h) returns the logits as output_layouts and use_local_output say.

    A weight that was already split by rows over the same mesh, since it is tied to an embedding, stays as it is.

    Args:
      input_layouts: of h, if it is a plain tensor: Replicate() by default; Shard(1) for an h (B, T, D) that sequence
        parallelism has split by T, in the parts of torch.chunk. Then h is gathered, and its gradient is
        reduce-scattered. head(h) waits for the processes to tell each other the sizes of their parts.
      output_layouts: of the logits, Shard(-1) by default: each process has its columns.
      use_local_output: whether the logits are a plain tensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Shard(-1),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, LinearCrossEntropyHead):
            raise TypeError(f"VocabParallelStyle is for a LinearCrossEntropyHead, got {type(module).__name__}")

        def enter(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if not args:
                raise TypeError("give h as the first argument, not by name")
            return (self._distributed(args[0], kwargs.get("targets"), device_mesh),), kwargs

        def leave(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            if kwargs.get("targets") is None:
                output = output.redistribute(placements=self.output_layouts)
                return output.to_local() if self.use_local_output else output
            # No views: a change in place of a view, such as `loss /= 2`, would lose the hooks of FSDP2 around the head.
            return tree_map(lambda x: x.to_local().clone(), output)

        distribute_module(module, device_mesh, self._split)
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)
        return module

    def _split(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, x in module.named_parameters(recurse=False):
            if not isinstance(x, DTensor):
                split = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=self.src_data_rank)
                module.register_parameter(name, nn.Parameter(split, requires_grad=x.requires_grad))
            elif x.device_mesh != mesh or x.placements != (Shard(0),):
                raise ValueError(
                    f"{name} is a DTensor already, with placements {x.placements} on {x.device_mesh}: it must be split "
                    f"along axis 0 over {mesh}"
                )

    def _distributed(self, h: Tensor, targets: Tensor | None, mesh: DeviceMesh) -> DTensor:
        if not isinstance(h, DTensor):
            whole = self._whole_shape(h, mesh) if targets is None else torch.Size((*targets.shape, h.shape[-1]))
            stride = torch.empty(whole, device="meta").stride()
            h = DTensor.from_local(h, mesh, self.input_layouts, run_check=False, shape=whole, stride=stride)
        return h.redistribute(placements=[Replicate()]) if targets is None else h

    def _whole_shape(self, h: Tensor, mesh: DeviceMesh) -> torch.Size:
        """The shape of the h of which each process has a part."""
        (layout,) = self.input_layouts
        if not layout.is_shard():
            return h.shape
        shape, axis = list(h.shape), layout.dim  # type: ignore[attr-defined]
        own = torch.tensor(shape[axis], device=h.device)
        sizes = [torch.empty_like(own) for _ in range(mesh.size())]
        dist.all_gather(sizes, own, mesh.get_group())
        parts = torch.stack(sizes).tolist()
        shape[axis] = sum(parts)
        of_chunk = [len(x) for x in torch.arange(shape[axis], device="cpu").chunk(len(parts))]
        if parts != of_chunk + [0] * (len(parts) - len(of_chunk)):
            raise ValueError(
                f"h must be split along axis {axis} over the processes in the parts of torch.chunk, of sizes "
                f"{of_chunk}, got parts of sizes {parts}"
            )
        return torch.Size(shape)
