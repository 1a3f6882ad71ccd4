"""The JAX programs of a process that holds a shard of the vocabulary, where the forward pass forms the gradients.

The tokens come in chunks, kept ones first (cce_kernels/in_forward.py). A chunk is two programs, and the processes
exchange its numbers in between:

    numbers      the numbers over the shard's columns; the exponentials, or in plain XLA the logits
    gradients    from the numbers over all columns: the chunk's de, its part of dc and of dbias

All processes take the same number of chunks of the same sizes, whatever columns they hold: these are planned for the
largest shard. A number of tokens N is planned as the padded size of N, which depends on nothing else. The programs
depend on the chunk's size, and not on N.

The last chunk's part of dc is left to the backward pass, as in_forward.py says: `finish` adds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import losses, passes
from cce_jax.core import Common, Terms, cotangents_of, totals_of
from cce_kernels import in_forward
from cce_kernels.block_floats import steps_shape
from cce_kernels.exponentials import saved_shape
from cce_kernels.numbers import FLOAT32_MAX, Inputs, Statistics, Wanted
from cce_kernels.plan import Chunks, Plan
from cce_kernels.residuals import Left, Residuals
from cce_torch.on_jax import bridge
from cce_torch.on_jax.in_forward import viewed
from cce_torch.on_jax.programs import (
    PROGRAMS,
    Call,
    Kind,
    dense,
    jitted,
    kind_of,
    kind_of_tensors,
    named,
    padded_size,
    rows_of,
)


@dataclass(frozen=True, eq=False)
class Way:
    """How a process that holds some columns forms their gradients."""

    kind: Kind
    plan: Plan
    vocabulary: int  # of all processes

    @property
    def stores(self) -> bool:
        """Whether a chunk stores exponentials; else logits."""
        assert self.plan.in_forward is not None
        return self.plan.in_forward.forward is not None

    @property
    def wanted(self) -> Wanted:
        assert self.plan.call.wanted is not None
        return self.plan.call.wanted


class Formed(NamedTuple):
    """The gradients of a shard's columns that the forward pass leaves; None where there is nothing to leave."""

    dc: Tensor | None  # as cce_kernels.residuals.Residuals has it, in c's order of memory
    steps: Tensor | None
    dbias: Tensor | None  # (V,) float32
    left: Tensor | None  # the last chunk's fields of cce_kernels.in_forward.Left
    e: Tensor | None
    unit: Tensor | None
    count: Tensor | None  # type: ignore[assignment]


class Results(NamedTuple):
    """What the second program of a chunk writes, tensors or JAX arrays; None where it writes nothing."""

    columns: Any  # exponentials, read too; or, of the last chunk, dz
    de: Any  # (n, D) float32
    dc: Any  # read and added to, as steps and dbias
    steps: Any
    dbias: Any
    e: Any  # of the last chunk
    unit: Any


def call_of(with_sum: bool, has_z_loss: bool, softcap: float | None, precision: str | None, impl: Any,
            memory_budget: int | None, wide_dc: bool) -> Call:  # fmt: skip
    loss = losses.Loss("sum", with_sum, has_z_loss)
    return Call(-1, 0, loss, softcap, precision, impl, memory_budget, wide_dc, of_shard=True)


def chunks_of(e: Tensor, tokens: int, columns: int, with_bias: bool, wanted: Wanted, call: Call) -> Chunks | None:
    """The chunks of all processes, of which none has more columns. None: the forward pass forms no gradients."""
    kind = kind_of(call, torch.Size((columns, e.shape[-1])), 0, e.dtype, e.device)
    return _chunks(kind, padded_size(tokens), with_bias, wanted)


@lru_cache(maxsize=PROGRAMS)
def _chunks(kind: Kind, size: int, with_bias: bool, wanted: Wanted) -> Chunks | None:
    how = passes.plan_for(kind.shapes(size, with_bias), kind.static, wanted, one_factor=True).in_forward
    return None if how is None else how.chunks


def way_of(
    e: Tensor, c: Tensor, bias: Tensor | None, chunks: Chunks, wanted: Wanted, vocabulary: int, call: Call
) -> Way:
    """The way of this process. e: (N, D); c: its rows of the classifier, at least one."""
    return _way(kind_of_tensors(e, c, call), padded_size(len(e)), bias is not None, chunks, wanted, vocabulary)


@lru_cache(maxsize=PROGRAMS)
def _way(kind: Kind, size: int, with_bias: bool, chunks: Chunks, wanted: Wanted, vocabulary: int) -> Way:
    decided = passes.Decided(0, chunks=chunks)
    return Way(kind, passes.plan_for(kind.shapes(size, with_bias), kind.static, wanted, decided, True), vocabulary)


def spans(chunks: Chunks, tokens: int) -> list[tuple[int, int]]:
    """The first token and the size of each chunk of so many tokens. The last ones may reach beyond the tokens."""
    whole = max(-(-(tokens - chunks.last) // chunks.size), 0) if chunks.size else 0
    found = [(i * chunks.size, chunks.size) for i in range(whole)]
    return [*found, (whole * chunks.size, chunks.last)] if chunks.last else found


def formed(way: Way, new: Callable[[Sequence[int], torch.dtype], Tensor]) -> Formed:
    """Tensors new(shape, dtype) of the shapes of what the chunks leave."""
    assert way.plan.in_forward is not None
    wanted, call, chunks = way.wanted, way.plan.call, way.plan.in_forward.chunks
    f32, dtype, c_shape = torch.float32, way.kind.dtype, way.kind.c_shape
    dbias = new((call.vocabulary,), f32) if wanted.bias else None
    if not chunks.last:
        return Formed(new(c_shape, f32) if wanted.c else None, None, dbias, *[None] * 4)
    unit = new((), f32) if dtype == torch.float16 and not way.stores else None
    return Formed(
        new(c_shape, torch.int16), new(steps_shape(call.vocabulary, call.width, chunks.block), f32), dbias,
        new(saved_shape(chunks.last, call.vocabulary), dtype), new((chunks.last, call.width), dtype), unit,
        new((1,), torch.int32),
    )  # fmt: skip


def cleared(begun: Formed) -> Formed:
    """begun, whose sums are 0. With steps of 0 the sum dc is 0, whatever its memory holds."""
    for x in (begun.dc if begun.steps is None else None, begun.steps, begun.dbias):
        if x is not None:
            x.zero_()
    return begun


class Chunk(NamedTuple):
    """A chunk's arrays, n tokens, as the programs take them. Rows from `count` on may hold anything."""

    e: Tensor  # (n, D)
    c: Tensor  # of the shard, in the order of memory
    bias: Tensor | None
    targets: Tensor  # (n,) int32, as columns of the shard
    weights: Tensor | None  # of the shard's columns
    scale: float | None
    reference: Tensor | None  # (n,): -inf where no process holds the target
    count: Tensor  # type: ignore[assignment]  # (1,) int32: how many tokens are kept


class Losses(NamedTuple):
    """What the losses of a chunk's tokens depend on besides their numbers."""

    columns: Tensor  # (n,) int32, of the whole vocabulary, as in losses.py
    target_weight: Tensor | None  # (n,)
    weight: Tensor  # (n,)
    label_smoothing: float | None
    z_loss: float | None
    class_weight: Tensor | None  # (V,), of the whole vocabulary


def laid_out(x: Tensor | None) -> Tensor | None:
    """x as all chunks can read it, without a copy for each."""
    return None if x is None else bridge.aligned(dense(x))


def laid_out_c(way: Way, c: Tensor) -> Tensor | None:
    """c, (V, D), in its order of memory."""
    return laid_out(c.T if way.kind.static.head.vocab_axis == 1 else c)


def numbers(way: Way, chunk: Chunk, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """The numbers over the shard's columns, (2 or 3, n) float32; the exponentials or logits.

    memory: takes the exponentials; None: a new tensor.
    """
    n, call, e = len(chunk.e), way.plan.call, chunk.e
    if memory is None and way.stores:
        memory = e.new_empty(saved_shape(n, call.vocabulary))
    elif memory is None:
        memory = e.new_empty((n, call.vocabulary), dtype=torch.float32)
    outputs = [e.new_empty((2 + call.with_sum, n), dtype=torch.float32), memory]
    own, columns = bridge.run(_numbers_program(way, n), chunk, outputs)
    return own, columns


def gradients(way: Way, chunk: Chunk, of: Losses, own: Tensor, logits: Tensor | None, numbers: Tensor,
              results: Results) -> None:  # fmt: skip
    """Writes the results. own, logits: of `numbers`, logits None where it gave exponentials, which are in the results.

    numbers: over all columns, (2 or 3, n).
    """
    present = tuple(x is not None for x in results)
    bridge.run(_gradients_program(way, len(chunk.e), present), [logits, own, numbers, *of, *chunk],
               [x for x in results if x is not None])  # fmt: skip


def finish(way: Way, begun: Formed, factor: Tensor, wanted: Wanted, in_place: bool
           ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """factor · dc and factor · dbias, float32 or dc in e's type; None where not wanted. factor: () float32.

    in_place: dc takes the memory of begun, which is of no use afterwards.
    """
    dbias = begun.dbias * factor if wanted.bias and begun.dbias is not None else None
    dc = begun.dc if wanted.c else None
    if dc is None:
        return None, dbias
    output = dc if in_place else torch.empty_like(dc)
    if begun.left is None:
        dc = torch.mul(dc, factor, out=output)
    else:
        last = map(dense, (begun.left, begun.e, begun.unit, begun.count))
        others = [None if in_place else dc, dense(factor), dense(begun.steps), *last]
        dc = viewed(bridge.run(_finish_program(way, len(begun.left), in_place), others, [output])[0], way.kind.dtype)
    return (dc.T if way.kind.static.head.vocab_axis == 1 else dc), dbias


def _chunk(e, c, bias, targets, weights, scale, reference, count) -> in_forward.Chunk:
    reference = None if reference is None else jnp.maximum(reference, -FLOAT32_MAX)
    scale = None if scale is None else scale.reshape(1)
    return in_forward.Chunk.of(Inputs(e, c, bias, targets, weights, scale), reference, count)


@lru_cache(maxsize=PROGRAMS)
def _numbers_program(way: Way, size: int) -> Callable:
    def torch_chunk_numbers(*arrays):
        own, columns = in_forward.numbers_of(_chunk(*arrays[2:]), way.plan)  # the first two are the results' memory
        return rows_of(own), columns

    return jitted(torch_chunk_numbers, 2)


@lru_cache(maxsize=PROGRAMS)
def _gradients_program(way: Way, size: int, present: tuple[bool, ...]) -> Callable:
    count, plan = sum(present), way.plan

    def torch_chunk_gradients(*arrays):
        memory = iter(arrays[:count])  # of the results
        given = Results(*(next(memory) if x else None for x in present))
        logits, own, numbers, columns, target_weight, weight, label_smoothing, z_loss, class_weight, *others = arrays[
            count:
        ]
        chunk, numbers = _chunk(*others), named(Statistics, numbers)
        common = Common(label_smoothing, z_loss, class_weight)
        totals = totals_of(way.vocabulary, way.kind.call.loss, common)
        of = cotangents_of(totals)(numbers, Terms(columns, target_weight, weight))
        held = given.columns if logits is None else logits
        de, left, dbias = in_forward.gradients_of(chunk, held, named(Statistics, own), numbers, of, plan)
        dc, steps = given.dc, given.steps
        if steps is not None:  # not in the result's type outside of a program: the integers might be taken for NaN
            dc, steps = in_forward.add_dc(lax.bitcast_convert_type(dc, chunk.inputs.e.dtype), steps, left, plan)
            dc = lax.bitcast_convert_type(dc, jnp.int16)
        elif dc is not None:
            dc, _ = in_forward.add_dc(dc, None, left, plan)
        dbias = None if given.dbias is None else given.dbias + dbias
        found = Results(left.left, de, dc, steps, dbias, left.e, left.unit)
        return tuple(x for x, y in zip(found, present, strict=True) if y)

    return jitted(torch_chunk_gradients, count)


@lru_cache(maxsize=PROGRAMS)
def _finish_program(way: Way, rows: int, in_place: bool) -> Callable:
    def torch_chunk_finish(memory, dc, factor, steps, *last):
        dc = memory if in_place else dc
        begun = Residuals(dc=dc, steps=steps, last=Left(*last))  # type: ignore[arg-type]
        found = in_forward.finish(begun, factor, jnp.zeros(0, bool), way.plan)
        return (lax.bitcast_convert_type(found.c, jnp.int16),)  # type: ignore[arg-type]

    return jitted(torch_chunk_finish, 1)
