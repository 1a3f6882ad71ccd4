"""Vocabulary parallelism: each process holds some rows of c. The core's numbers are those of the whole vocabulary.

A process has the logits z_iv of its own columns v alone. It computes the three numbers of each token over them, and the
processes of the group exchange these: lse = log Σ exp(lse of a process); target and sum are sums. So all have the same
numbers, and the same loss. Backward, equation (6) of cce_jax/core.py holds for each column with the lse of the whole
vocabulary. So dc and dbias of a process' own rows are complete. de is a sum over all columns: each process has a part
of it in float32, the parts are summed, and only then rounded to e's type.

With N tokens, the processes exchange at each call:

    forward     the targets' logits, N float32, summed, where kernels take them as reference of their exponentials
    forward     the numbers, 2·N float32, or 3·N with label smoothing, which every process gathers
    backward    de, N·D float32, summed

Under sequence parallelism each process has only a part of e: e is gathered forward, and de is reduce-scattered.
Where the forward pass forms the gradients, it exchanges de too (vocab_in_forward.py).
All processes of the group make the same calls on as many tokens, so they meet in the same collectives, even if one
of them holds no column.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from cce_torch.processes import shards


@dataclass(frozen=True)
class VocabParallel:
    """The rows of c that this process holds, of a vocabulary that the processes of a group share.

    Making one with vocabulary=None is a collective: the processes of the group tell each other their rows, so all must
    make theirs at the same place in the program. Make it once, not at each step.

    Attributes:
      group: the processes that share the vocabulary; None: all.
      start: the first row of the whole c that this process holds.
      stop: the row after the last one. With stop = start the process holds no row.
      reduce_e_grad: whether the gradient of e is summed over the group. With False each process gets its own part of
        the sum, rounded to e's type, and the caller sums.
      vocabulary: V, the number of rows of the whole c. None: the last stop of the group.
      sequence_axis: None: e is whole, and equal on all processes. An axis of e: e is split along it over the group, in
        the parts of torch.chunk, as sequence parallelism leaves it. targets and the result are whole nevertheless.
      largest: the number of rows of the process that holds most of them, equal on all processes: so many rows are kept
        within the memory budget. None: that of the group; or, with vocabulary given, that of the parts of torch.chunk.

    Raises:
      ValueError: the rows of the processes overlap, or leave out some.
    """

    group: Any
    start: int
    stop: int
    reduce_e_grad: bool = True
    vocabulary: int = None  # type: ignore[assignment]  # None is replaced when the object is made
    sequence_axis: int | None = None
    largest: int = None  # type: ignore[assignment]  # None is replaced when the object is made
    size: int = field(init=False, repr=False, compare=False)  # of the group
    rank: int = field(init=False, repr=False, compare=False)  # in the group
    name: str = field(init=False, repr=False, compare=False)  # the group's: torch.compile can hold a string

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"start={self.start} and stop={self.stop} must be rows with 0 <= start <= stop")
        group = dist.group.WORLD if self.group is None else self.group
        values: dict[str, Any] = {"group": group, "size": dist.get_world_size(group), "rank": dist.get_rank(group)}
        values["name"] = group.group_name  # type: ignore[union-attr]
        if self.vocabulary is None:
            values["vocabulary"], largest = _vocabulary(self.start, self.stop, group)
        elif self.stop > self.vocabulary:
            raise ValueError(f"stop={self.stop} must be at most vocabulary={self.vocabulary}")
        else:
            largest = -(-self.vocabulary // values["size"])
        values["largest"] = self.largest or largest
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict) -> Self:
        """Itself: it never changes, and a process group has no copy."""
        return self

    @classmethod
    def from_dtensor(
        cls, c: Any, *, vocab_axis: int = 0, reduce_e_grad: bool = True, sequence_axis: int | None = None
    ) -> Self:
        """The rows of the DTensor c that this process holds: pass c.to_local() with it. No collective.

        Raises:
          TypeError: c is no DTensor.
          ValueError: not exactly one axis of c's mesh splits the vocabulary, or another splits c's width.
        """
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(c, DTensor):
            raise TypeError(f"c must be a DTensor, got {type(c).__name__}: write VocabParallel(group, start, stop)")
        others = [p for p in c.placements if p != Shard(vocab_axis)]
        if len(others) != len(c.placements) - 1 or not all(p.is_replicate() for p in others):
            raise ValueError(
                f"c must be split along its axis {vocab_axis}, the vocabulary, by one axis of its mesh and replicated "
                f"over the others, got placements {c.placements}"
            )
        return cls.from_placements(c.shape, c.device_mesh, c.placements, vocab_axis=vocab_axis,
                                   reduce_e_grad=reduce_e_grad, sequence_axis=sequence_axis)  # fmt: skip

    @classmethod
    def from_placements(
        cls, shape: torch.Size, mesh: Any, placements: Sequence[Any], *, vocab_axis: int = 0,
        reduce_e_grad: bool = True, sequence_axis: int | None = None,
    ) -> Self:  # fmt: skip
        """As from_dtensor, for a DTensor's shape, mesh and placements, exactly one of which splits the vocabulary."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        axis = next(i for i, p in enumerate(placements) if p.is_shard())
        local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        rows, vocabulary = local[vocab_axis], shape[vocab_axis]
        start = min(offset[vocab_axis], vocabulary)  # the offset of an empty shard may be larger
        group = mesh.get_group(axis)
        largest = -(-vocabulary // mesh.size(axis))
        return cls(group, start, start + rows, reduce_e_grad, vocabulary, sequence_axis, largest)

    def held(self, columns: Tensor) -> Tensor:
        """Columns of the whole vocabulary as columns of this process: `stop - start` where it does not hold them."""
        here = (columns >= self.start) & (columns < self.stop)
        return torch.where(columns < 0, columns, torch.where(here, columns - self.start, self.stop - self.start))


def _vocabulary(start: int, stop: int, group: Any) -> tuple[int, int]:
    """V, the end of the rows of all processes, and the most rows of one of them.

    Raises on every process if a row is held twice or by none.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (start, stop), group)
    end = 0
    for first, last in sorted(x for x in found if x[0] < x[1]):
        if first != end:
            raise ValueError(
                f"the rows [start, stop) of the processes must follow one another from 0 on, each held once, got "
                f"{', '.join(f'[{a}, {b})' for a, b in found)}"
            )
        end = last
    return end, max(last - first for first, last in found)


_converted: dict[int, VocabParallel] = {}


def of(options: Any) -> VocabParallel:
    """The VocabParallel with the fields of cut_cross_entropy's VocabParallelOptions.

    The first call with one such object is a collective, as making a VocabParallel is.
    """
    key = id(options)
    if key not in _converted:
        try:
            given = options.group, options.start, options.stop, options.reduce_e_grad
        except AttributeError as error:
            raise TypeError(
                f"vocab_parallel_options must be cut_cross_entropy's VocabParallelOptions, got "
                f"{type(options).__name__}: {error}"
            ) from None
        made = VocabParallel(*given)
        weakref.finalize(options, _converted.pop, key)
        _converted[key] = made
    return _converted[key]


def of_whole(shapes: dict[str, Any], vocab_axis: int, shard: VocabParallel) -> dict[str, Any]:
    """The shapes that e, c and bias would have in one process. Raises if one has not the size of this process' part."""
    e, c, targets, bias = (shapes[name] for name in ("e", "c", "targets", "bias"))
    rows = shard.stop - shard.start
    found = dict(shapes)
    if len(c) == 2:
        if c[vocab_axis] != rows:
            raise ValueError(
                f"c must hold the {rows} rows [{shard.start}, {shard.stop}) of the vocabulary, as vocab_parallel says, "
                f"got c {c} with vocab_axis={vocab_axis}"
            )
        found["c"] = (shard.vocabulary, c[1]) if vocab_axis == 0 else (c[0], shard.vocabulary)
    if bias is not None:
        if bias != (rows,):
            raise ValueError(f"bias must hold the same rows of the vocabulary as c, ({rows},), got bias {bias}")
        found["bias"] = (shard.vocabulary,)
    axis = shard.sequence_axis
    if axis is not None:
        if not 0 <= axis < len(targets) or len(e) != len(targets) + 1:
            raise ValueError(f"sequence_axis={axis} must be an axis of targets {targets}, which e {e} has too")
        part = part_of(targets[axis], shard)
        if e[axis] != part:
            raise ValueError(
                f"e must hold {part} of the {targets[axis]} tokens along sequence_axis={axis}, the part of process "
                f"{shard.rank} of {shard.size}, got e {e} and targets {targets}"
            )
        found["e"] = (*e[:axis], targets[axis], *e[axis + 1 :])
    return found


def numbers(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, *, tokens: Sequence[int],
    shard: VocabParallel, options: shards.Options,
) -> Tensor:  # fmt: skip
    """The core's three numbers of each token over the whole vocabulary, (2 or 3, N), equal on all processes.

    Differentiable once in e, c and bias. The cotangents must be equal on all processes too.
    e: (*tokens, D), or its part under sequence parallelism; c: (stop - start, D); bias: (stop - start,); columns: (N,)
    columns of the whole vocabulary; weights: (V,).
    """
    weights = None if weights is None else weights[shard.start : shard.stop]
    saving = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # for the reason that is given in ops.loss
    wanted = tuple(saving and x is not None and x.requires_grad for x in (e, c, bias))
    return _Numbers.apply(e, c, bias, columns, weights, tuple(tokens), wanted, shard, options)  # type: ignore


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e, c, bias, columns, weights, tokens, saving_for, shard: VocabParallel, options):
        ctx.part, ctx.dtype = e.shape, e.dtype
        ctx.tokens, ctx.shard, ctx.options = tokens, shard, options
        e = whole(e, tokens, shard).reshape(-1, e.shape[-1])
        c, bias = shards.operands(e, c, bias, options)
        held, kept = shard.held(columns), columns >= 0
        reference = references(e, c, bias, columns, saving_for, shard, options)
        own, saved = shards.statistics(e, c, bias, held, weights, reference, saving_for, options)
        ctx.kind = None if saved is None else shards.kind(e, c, options)
        found = of_all_columns(own, kept, shard)
        own, lse = torch.where(kept, own, 0), found[0].clone()
        ctx.save_for_backward(e, c, bias, held, weights, own, lse, reference, saved)
        return found

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        guarded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        run = FirstOrder.apply if guarded else called
        wanted = ctx.needs_input_grad[:3]
        e, c, *others = ctx.saved_tensors
        if ctx.kind is not None:
            c = ctx.kind.laid_out(c)
        found = run(
            _gradients, cotangents, e, c, *others, wanted, ctx.options, ctx.part, ctx.dtype, ctx.tokens, ctx.shard
        )
        return *found, *[None] * 6


def references(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, saving_for: tuple[bool, ...], shard: VocabParallel,
    options: shards.Options,
) -> Tensor | None:  # fmt: skip
    """The logits of the targets, (N,): -inf where no process holds the target. None where no kernel takes them."""
    if not shards.needs_reference(e, options):
        return None
    target = summed(shards.target(e, c, bias, shard.held(columns), saving_for, options), shard)
    return torch.where((columns >= 0) & (columns < shard.vocabulary), target, -torch.inf)


def of_all_columns(own: Tensor, kept: Tensor, shard: VocabParallel) -> Tensor:
    """The numbers over all columns, (2 or 3, N), from those over this process' columns; 0 where a token is ignored."""
    lse, *sums = gathered(torch.where(kept, own, 0), shard).unbind(1)
    return torch.where(kept, torch.stack([torch.logsumexp(lse, 0), *(x.sum(0) for x in sums)]), 0)


def _gradients(*given: Any) -> tuple[Tensor | None, ...]:
    """de, summed over the group, dc and dbias. None where not wanted.

    given: the arguments of shards.gradients; the shape and type of e, the shape of tokens, and the VocabParallel.
    """
    *arguments, part, dtype, tokens, shard = given
    de, dc, dbias = shards.gradients(*arguments)
    return None if de is None else reduced(de, part, tokens, shard).to(dtype), dc, dbias


def called(function: Callable, *arguments: Any) -> Any:
    return function(*arguments)


class FirstOrder(torch.autograd.Function):
    """function(*arguments), with an error for its own derivative."""

    @staticmethod
    def forward(ctx: Any, function: Callable, *arguments: Any) -> tuple[Tensor | None, ...]:
        return function(*arguments)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError("linear_cross_entropy has first derivatives only where the vocabulary is split")


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


def part_of(tokens: int, shard: VocabParallel) -> int:
    """How many of so many tokens along sequence_axis this process has: the size of its part by torch.chunk."""
    part = -(-tokens // shard.size)
    return max(min(part, tokens - shard.rank * part), 0)


def own_tokens(x: Tensor, tokens: Sequence[int], shard: VocabParallel) -> Tensor:
    """x, (N,), of the tokens in this process' part of e, in the shape of e without D."""
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


def gathered(x: Tensor, shard: VocabParallel) -> Tensor:
    """x of each process of the group, along a new first axis."""
    found = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), shard.size, shard.name)
    return torch.ops._c10d_functional.wait_tensor(found).view(shard.size, *x.shape)
