"""What the processes of a VocabParallel exchange: sums, parts of e and of its gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cce_torch.processes.vocab_parallel import VocabParallel, part_of


def whole(e: Tensor, tokens: tuple[int, ...], shard: VocabParallel) -> Tensor:
    """e of all tokens, (*tokens, D)."""
    axis = shard.sequence_axis
    if axis is None:
        return e
    length = tokens[axis]
    part = -(-length // shard.size)
    parts = gathered(resized(e, axis, part), shard)
    return parts.movedim(0, axis).flatten(axis, axis + 1).narrow(axis, 0, length)


def reduced(de: Tensor, part: torch.Size, tokens: tuple[int, ...], shard: VocabParallel) -> Tensor:
    """de, (N, D), summed over the group. Under sequence parallelism only the part for this process' part of e."""
    axis = shard.sequence_axis
    if axis is None:
        return (summed(de, shard) if shard.reduce_e_grad else de).reshape(part)
    de = resized(de.reshape(*tokens, part[-1]), axis, -(-tokens[axis] // shard.size) * shard.size)
    parts = de.unflatten(axis, (shard.size, -1)).movedim(axis, 0).contiguous()
    found = torch.ops._c10d_functional.reduce_scatter_tensor(parts, "sum", shard.size, shard.name)
    return torch.ops._c10d_functional.wait_tensor(found)[0].narrow(axis, 0, part[axis])


def own_tokens(x: Tensor, tokens: Sequence[int], shard: VocabParallel | None) -> Tensor:
    """x, (N,), of the tokens in this process' part of e, in the shape of e without D. shard: None for one process."""
    if shard is None:
        return x
    axis = shard.sequence_axis
    if axis is None:
        return x.reshape(tuple(tokens))
    part = part_of(tokens[axis], shard)
    start = min(shard.rank * -(-tokens[axis] // shard.size), tokens[axis])
    return x.reshape(tuple(tokens)).narrow(axis, start, part)


def resized(x: Tensor, axis: int, length: int) -> Tensor:
    """x with zeros appended to its axis."""
    padding = [0, 0] * (x.dim() - 1 - axis) + [0, length - x.shape[axis]]
    return torch.nn.functional.pad(x, padding) if padding[-1] else x


def summed(x: Tensor, shard: VocabParallel) -> Tensor:
    """x summed over the group: in place, except under torch.compile, which forbids that in a Function."""
    return torch.ops._c10d_functional.wait_tensor(being_summed(x, shard))


def being_summed(x: Tensor, shard: VocabParallel) -> Tensor:
    """The memory of what `summed` gives, before the processes have exchanged it."""
    functional = torch.ops._c10d_functional
    reduce = functional.all_reduce if torch.compiler.is_compiling() else functional.all_reduce_
    return reduce(x, "sum", shard.name)


def one_cotangent(of: Tensor) -> Tensor:
    """of, a cotangent. Every process raises the same error for batched ones: PyTorch batches no collective.

    Raises:
      NotImplementedError: torch.autograd.grad(is_grads_batched=True) maps over it.
    """
    if torch.compiler.is_compiling():  # which cannot trace the question
        return of
    if torch._C._functorch.is_legacy_batchedtensor(of):  # type: ignore[attr-defined]
        raise NotImplementedError(
            "is_grads_batched=True does not work where processes share a vocabulary or a DTensor: call "
            "torch.autograd.grad once for each cotangent, with retain_graph=True"
        )
    return of


def gathered(x: Tensor, shard: VocabParallel) -> Tensor:
    """x of each process of the group, along a new first axis."""
    found = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), shard.size, shard.name)
    return torch.ops._c10d_functional.wait_tensor(found).view(shard.size, *x.shape)
