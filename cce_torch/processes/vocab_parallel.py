"""VocabParallel: which rows of the classifier a process holds, and of which whole shapes its tensors are parts."""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from cce_torch.call import Call


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
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if not isinstance(c, DTensor):
            raise TypeError(f"c must be a DTensor, got {type(c).__name__}: write VocabParallel(group, start, stop)")
        others = [p for p in c.placements if p != Shard(vocab_axis)]
        if len(others) != len(c.placements) - 1 or not all(p.is_replicate() for p in others):
            raise ValueError(
                f"c must be split along its axis {vocab_axis}, the vocabulary, by one axis of its mesh and replicated "
                f"over the others, got placements {c.placements}"
            )
        mesh, vocabulary = c.device_mesh, c.shape[vocab_axis]
        axis = next(i for i, p in enumerate(c.placements) if p.is_shard())
        local, offset = compute_local_shape_and_global_offset(c.shape, mesh, c.placements)
        rows = local[vocab_axis]
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


def part_of(tokens: int, shard: VocabParallel) -> int:
    """How many of so many tokens along sequence_axis this process has: the size of its part by torch.chunk."""
    part = -(-tokens // shard.size)
    return max(min(part, tokens - shard.rank * part), 0)


class Setting(NamedTuple):
    """What is common to the processes of a call. shard: a VocabParallel, or None for one process alone."""

    call: Call
    scheduled: tuple[float, float, float]  # label_smoothing, z_loss and scale
    tokens: torch.Size  # the shape of targets
    shard: Any
