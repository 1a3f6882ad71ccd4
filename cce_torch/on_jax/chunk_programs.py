"""The JAX programs of a chunk of tokens, where the forward pass forms the gradients of a loss that PyTorch computes.

The tokens come in chunks, kept ones first (cce_kernels/in_forward.py). A chunk is two programs:

    chunk_statistics    the statistics over the process' columns; the exponentials, or in plain XLA the logits; and with
                        a gradient_tolerance the blocks of them that are multiplied (cce_kernels/block_sparse.py)
    chunk_gradients     from the statistics over all columns and their cotangents: the chunk's de, its part of dc and of
                        dbias

In between PyTorch computes the cotangents; where the processes share the vocabulary, they exchange statistics first.
All processes take the same number of chunks of the same sizes, whatever columns they hold: these are planned for the
largest shard. A number of tokens N is planned as the padded size of N, which depends on nothing else. The programs
depend on the chunk's size, and not on N. The last chunk's part of dc is left to the backward pass: `finish` adds it.

`columns`, `reference`: as in cce_torch/processes/shard_programs.py. One process that holds the whole vocabulary is a
shard that has all columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import plans
from cce_kernels import block_sparse, in_forward
from cce_kernels.block_sparse import Blocks
from cce_kernels.exponentials import saved_shape
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Statistics, Wanted
from cce_kernels.plan import Chunks, Plan
from cce_kernels.residuals import Left, Residuals, shapes_of
from cce_torch.call import Call, Operands
from cce_torch.on_jax import bridge
from cce_torch.on_jax.kinds import Kind, kind_of, kind_of_tensors, padded_size
from cce_torch.on_jax.programs import PROGRAMS, Handover, dense, jitted, stacked, unstacked, viewed


def inputs_of(e, c, bias, columns, weights, scale, inverse_temperature=None, ids=None) -> Inputs:
    scale = None if scale is None else scale.reshape(1)
    return Inputs(e, c, bias, columns, weights, scale, inverse_temperature, ids)


def finite(reference: jax.Array | None) -> jax.Array | None:
    """reference as cce_kernels.forward.statistics takes it: −FLOAT32_MAX where no shard holds the target."""
    return None if reference is None else jnp.maximum(reference, -FLOAT32_MAX)


@dataclass(frozen=True, eq=False)
class Way:
    """How a process that holds some columns forms their gradients."""

    kind: Kind
    plan: Plan

    @property
    def stores(self) -> bool:
        """Whether a chunk stores exponentials; else logits."""
        assert self.plan.in_forward is not None
        return self.plan.in_forward.forward is not None

    @cached_property
    def _left(self) -> Handover:
        """What the forward pass leaves of dc and dbias. de is left apart, as it is of all columns."""
        return Handover(shapes_of(self.plan)._replace(de=None))

    def new(self, make: Callable[[Any, torch.dtype], Tensor]) -> Residuals:
        """What is left, as tensors make(shape, dtype)."""
        return self.residuals([make(*x) for x in self._left.leaves])

    def residuals(self, leaves: Any) -> Residuals:
        return jax.tree.unflatten(self._left.structure, leaves)


def leaves_of(residuals: Residuals | None) -> list[Tensor]:
    return jax.tree.leaves(residuals)


class Results(NamedTuple):
    """What the second program of a chunk writes, tensors or JAX arrays; None where it writes nothing."""

    columns: Any  # exponentials, read too; or, of the last chunk, dz
    de: Any  # (n, D), float32 if it is a part of a sum over processes, else of e's type
    dc: Any  # read and added to, as steps and dbias
    steps: Any
    dbias: Any
    e: Any  # of the last chunk
    unit: Any


def chunks_of(operands: Operands, largest: int | None, wanted: Wanted, call: Call) -> Chunks | None:
    """The chunks of all processes, of which none has more than `largest` columns; None: one process has all columns.

    None: the forward pass forms no gradients.
    """
    e, c = operands.e, operands.c
    if largest is None:
        kind = kind_of_tensors(e, c, call)
    else:
        kind = kind_of(call, torch.Size((largest, e.shape[-1])), 0, e.dtype, e.device)
    return _chunks(kind, padded_size(len(operands.columns)), operands.bias is not None, wanted)


@lru_cache(maxsize=PROGRAMS)
def _chunks(kind: Kind, size: int, with_bias: bool, wanted: Wanted) -> Chunks | None:
    how = plans.plan_for(kind.shapes(size, with_bias), kind.static, wanted, one_factor=True).in_forward
    return None if how is None else how.chunks


def way_of(operands: Operands, chunks: Chunks, wanted: Wanted, call: Call) -> Way:
    """The way of this process, which holds at least one row of c."""
    kind = kind_of_tensors(operands.e, operands.c, call)
    return _way(kind, padded_size(len(operands.e)), operands.bias is not None, chunks, wanted)


@lru_cache(maxsize=PROGRAMS)
def _way(kind: Kind, size: int, with_bias: bool, chunks: Chunks, wanted: Wanted) -> Way:
    decided = plans.Decided(0, chunks=chunks)
    return Way(kind, plans.plan_for(kind.shapes(size, with_bias), kind.static, wanted, decided, True))


def spans(chunks: Chunks, tokens: int) -> list[tuple[int, int]]:
    """The first token and the size of each chunk of so many tokens. The last ones may reach beyond the tokens."""
    whole = max(-(-(tokens - chunks.last) // chunks.size), 0) if chunks.size else 0
    found = [(i * chunks.size, chunks.size) for i in range(whole)]
    return [*found, (whole * chunks.size, chunks.last)] if chunks.last else found


def cleared(formed: Residuals) -> Residuals:
    """formed, whose sums are 0. With steps of 0 the sum dc is 0, whatever its memory holds."""
    sums: Any = formed.dc if formed.steps is None else None, formed.steps, formed.dbias
    for x in sums:
        if x is not None:
            x.zero_()
    return formed


class Chunk(NamedTuple):
    """A chunk's arrays, n tokens, as the programs take them. Rows from `count` on may hold anything."""

    e: Tensor  # (n, D)
    c: Tensor  # of the shard, in the order of memory
    bias: Tensor | None
    targets: Tensor  # (n,) int32, as columns of the shard
    weights: Tensor | None  # of the shard's columns
    scale: float | None
    inverse_temperature: Tensor | None  # (n,)
    reference: Tensor | None  # (n,): -inf where no process holds the target; None: the program finds it, or needs none
    count: Tensor  # type: ignore[assignment]  # (1,) int32: how many tokens are kept


def readable(x: Tensor | None) -> Tensor | None:
    """x as all chunks can read it, without a copy for each."""
    return None if x is None else bridge.aligned(dense(x))


def chunk_statistics(way: Way, chunk: Chunk, memory: Tensor | None) -> tuple[Tensor, in_forward.Columns]:
    """The statistics over the shard's columns; the exponentials or logits, and which blocks of them are multiplied.

    memory: takes the exponentials; None: a new tensor.
    """
    n, call, new = len(chunk.e), way.plan.call, chunk.e.new_empty
    if memory is None:
        shape = saved_shape(n, call.vocabulary) if way.stores else (n, call.vocabulary)
        memory = new(shape, dtype=chunk.e.dtype if way.stores else torch.float32)
    own = new((way.kind.call.rows, n), dtype=torch.float32)
    outputs = [own, memory, *(new(x.shape, dtype=torch.bool) for x in block_sparse.shapes_of(call, n) or ())]
    own, values, *blocks = bridge.run(_chunk_statistics_program(way, n, len(outputs)), chunk, outputs)
    return own, in_forward.Columns(values, Blocks(*blocks) if blocks else None)  # type: ignore[arg-type]


class Exchanged(NamedTuple):
    """The statistics of a chunk and their cotangents, and what its first program gave besides."""

    own: Tensor  # over the shard's columns
    whole: Tensor  # over all columns
    cotangents: Tensor  # of `whole`
    logits: Tensor | None  # None where the program gave exponentials, which are in the Results
    blocks_of_de: Tensor | None  # the blocks of exponentials or logits that are multiplied for de; None: all
    blocks_of_dc: Tensor | None


def chunk_gradients(way: Way, chunk: Chunk, exchanged: Exchanged, results: Results) -> None:
    """Writes the results."""
    written = tuple(x is not None for x in results)
    bridge.run(
        _chunk_gradients_program(way, len(chunk.e), written),
        [*exchanged, *chunk],
        [x for x in results if x is not None],
    )


def finish(
    way: Way, formed: Residuals, factor: Tensor, wanted: tuple[bool, ...], in_place: bool
) -> tuple[Tensor | None, Tensor | None]:
    """factor · dc and factor · dbias, float32 or dc in e's type; None where not wanted. factor: () float32.

    in_place: dc takes the memory of formed, which is of no use afterwards.
    """
    left: Any = formed
    _, of_c, of_bias = wanted
    dbias = left.dbias * factor if of_bias and left.dbias is not None else None
    dc = left.dc if of_c else None
    if dc is None:
        return None, dbias
    output = dc if in_place else torch.empty_like(dc)
    if left.last is None:
        dc = torch.mul(dc, factor, out=output)
    else:
        arrays = [None if in_place else dc, *map(dense, (factor, left.steps, *left.last))]
        program = _finish_program(way, len(left.last.left), in_place)
        dc = viewed(bridge.run(program, arrays, [output])[0], way.kind.dtype)
    return way.kind.in_order_of_c(dc), dbias


def _chunk(plan: Plan, *arrays, target: jax.Array | None = None) -> in_forward.Chunk:
    """arrays: of a Chunk. target: the targets' logits, if they are known."""
    *given, reference, count = arrays
    return in_forward.referenced(in_forward.Chunk.of(inputs_of(*given), finite(reference), count), plan, target)


@lru_cache(maxsize=PROGRAMS)
def _chunk_statistics_program(way: Way, size: int, count: int) -> Callable:
    def torch_chunk_statistics(*arrays):
        given = arrays[count:]  # the first are the results' memory
        own, columns = in_forward.numbers_of(_chunk(way.plan, *given), way.plan)
        return stacked(own), *jax.tree.leaves(columns)

    return jitted(torch_chunk_statistics, count)


@lru_cache(maxsize=PROGRAMS)
def _chunk_gradients_program(way: Way, size: int, written: tuple[bool, ...]) -> Callable:
    count, plan = sum(written), way.plan

    def torch_chunk_gradients(*arrays):
        memory = iter(arrays[:count])  # of the results
        given = Results(*(next(memory) if x else None for x in written))
        fields = len(Exchanged._fields)
        exchanged: Any = Exchanged(*arrays[count : count + fields])
        own, whole = (unstacked(Statistics, x, way.kind.call) for x in exchanged[:2])
        cotangents = unstacked(Cotangents, exchanged.cotangents, way.kind.call)
        chunk = _chunk(plan, *arrays[count + fields :], target=own.target)
        values = given.columns if exchanged.logits is None else exchanged.logits
        blocks = None if exchanged.blocks_of_de is None else Blocks(exchanged.blocks_of_de, exchanged.blocks_of_dc)
        columns = in_forward.Columns(values, blocks)
        de, left, dbias = in_forward.gradients_of(chunk, columns, own, whole, cotangents, plan)
        dc, steps = given.dc, given.steps
        if steps is not None:  # not in the result's type outside of a program: the integers might be taken for NaN
            dc, steps = in_forward.add_dc(lax.bitcast_convert_type(dc, chunk.inputs.e.dtype), steps, left, plan)
            dc = lax.bitcast_convert_type(dc, jnp.int16)
        elif dc is not None:
            dc, _ = in_forward.add_dc(dc, None, left, plan)
        dbias = None if given.dbias is None else given.dbias + dbias
        found = Results(left.left, None if de is None else de.values, dc, steps, dbias, left.e, left.unit)
        return tuple(x for x, y in zip(found, written, strict=True) if y)

    return jitted(torch_chunk_gradients, count)


@lru_cache(maxsize=PROGRAMS)
def _finish_program(way: Way, rows: int, in_place: bool) -> Callable:
    def torch_chunk_finish(memory, dc, factor, steps, *last):
        formed = Residuals(dc=memory if in_place else dc, steps=steps, last=Left(*last))
        found: Any = in_forward.finish(formed, factor, jnp.zeros(0, bool), way.plan)
        return (lax.bitcast_convert_type(found.c, jnp.int16),)

    return jitted(torch_chunk_finish, 1)
