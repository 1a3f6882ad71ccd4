"""The JAX programs of a chunk of tokens, where the forward pass forms the gradients of a loss that PyTorch computes.

The tokens come in chunks, kept ones first (cce_kernels/blocks.py). A chunk is two programs:

    chunk_statistics    the statistics over the process' columns; the exponentials, or in plain XLA the logits; and with
                        a gradient_tolerance the blocks of them that are multiplied (cce_kernels/block_sparse.py)
    chunk_gradients     from the statistics over all columns and their cotangents: the chunk's de, its part of dc and of
                        dbias

For label smoothing a program before them sums the rows of c (cce_kernels/weighted_sum.py).
In between PyTorch computes the cotangents; where the processes share the vocabulary, they exchange statistics first.
All processes take the same number of chunks of the same sizes, whatever columns they hold: these are planned for the
largest shard. A number of tokens N is planned as the end of its span (kinds.py), which depends on nothing else. The
programs depend on the chunk's size, and not on N.

`columns`, int32, are the targets as columns of the shard: negative for an ignored token, the number of the shard's
columns where the shard does not hold the token's target. `reference`: as in programs.loss. One process that holds the
whole vocabulary is a shard that has all columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import plans
from cce_kernels import blocks, weighted_sum
from cce_kernels.block_sparse import Blocks
from cce_kernels.exponentials import saved_shape
from cce_kernels.numbers import Cotangents, Inputs, Numbers, Wanted
from cce_kernels.plan import Plan, residuals
from cce_kernels.plan.residuals import Residuals, shapes_of
from cce_kernels.tokens import Chunks
from cce_kernels.weighted_sum import Weighted
from cce_torch import call as records
from cce_torch.call import Call, Operands
from cce_torch.on_jax import bridge
from cce_torch.on_jax.kinds import Kind, kind_of, kind_of_tensors
from cce_torch.on_jax.programs import (
    PROGRAMS,
    ResidualShapes,
    Tokens,
    dense,
    finite,
    jitted,
    stacked,
    unstacked,
    viewed,
)


def inputs_of(e, c, bias, columns, weights, scale, inverse_temperature=None, ids=None) -> Inputs:
    scale = None if scale is None else scale.reshape(1)
    return Inputs(e, c, bias, columns, weights, scale, inverse_temperature, ids)


@dataclass(frozen=True, eq=False)
class Way:
    """How a process that holds some columns forms their gradients."""

    kind: Kind
    plan: Plan

    @property
    def stores(self) -> bool:
        """Whether a chunk stores exponentials; else logits."""
        return self.plan.forward is not None

    @cached_property
    def left(self) -> ResidualShapes:
        """What the forward pass leaves."""
        return ResidualShapes(shapes_of(self.plan))

    @cached_property
    def sums(self) -> ResidualShapes:
        """The same without de, which a chunk's program gives apart: it is of all columns."""
        return ResidualShapes(self.left.shapes._replace(de=None, units=None))


class Results(NamedTuple):
    """What the second program of a chunk writes, tensors or JAX arrays; None where it writes nothing."""

    columns: Any  # exponentials, read too
    de: Any  # (n, D), float32 if it is a part of a sum over processes, else of e's type
    dc: Any  # read and added to, as steps and dbias
    steps: Any
    dbias: Any
    q: Any


def ways(operands: Operands, largest: int | None, wanted: Wanted, call: Call) -> tuple[Chunks | None, Way | None]:
    """The chunks of all processes, and the way of this one.

    largest: the most columns of a process; None: one process has all columns. Without chunks the forward pass forms no
    gradients. Without a way this process has no column.
    """
    e, c, with_bias = operands.e, operands.c, operands.bias is not None
    own = None if largest is not None and not len(c) else kind_of_tensors(e, c, call)
    all_have = own if largest is None else kind_of(call, torch.Size((largest, e.shape[-1])), 0, e.dtype, e.device)
    assert all_have is not None
    size = all_have.sizes.end(len(operands.columns))
    chunks = _chunks(all_have, size, with_bias, wanted)
    if chunks is None or own is None:
        return chunks, None
    size = size if own is all_have else own.sizes.end(len(operands.columns))
    return chunks, _way(own, size, with_bias, chunks, wanted)


@lru_cache(maxsize=PROGRAMS)
def _chunks(kind: Kind, size: int, with_bias: bool, wanted: Wanted) -> Chunks | None:
    how = plans.plan_for(kind.shapes(size, with_bias), kind.static, wanted, one_factor=True).in_forward
    return None if how is None else how.chunks


@lru_cache(maxsize=PROGRAMS)
def _way(kind: Kind, size: int, with_bias: bool, chunks: Chunks, wanted: Wanted) -> Way:
    return Way(kind, plans.plan_for(kind.shapes(size, with_bias), kind.static, wanted, chunks, True))


def cleared(formed: records.Residuals) -> records.Residuals:
    """formed, whose sums are 0. With steps of 0 the sum dc is 0, whatever its memory holds."""
    sums: Any = formed.dc if formed.steps is None else None, formed.steps, formed.dbias, formed.q
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
    weighted: Tensor | None  # of `weighted`


def readable(x: Tensor | None) -> Tensor | None:
    """x as all chunks can read it, without a copy for each."""
    return None if x is None else bridge.aligned(dense(x))


def weighted(way: Way, c: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor | None:
    """weighted_sum.Weighted of the shard's columns as one array, (D + 2,) float32; None where it is not needed."""
    if not way.plan.request.sum_is_linear:
        return None
    output = c.new_empty(way.plan.request.width + 2, dtype=torch.float32)
    return bridge.run(_weighted_program(way), [c, bias, weights], [output])[0]


def chunk_statistics(way: Way, chunk: Chunk) -> tuple[Tensor, blocks.Columns]:
    """The statistics over the shard's columns; the exponentials or logits, and which blocks of them are multiplied."""
    n, request, new = len(chunk.e), way.plan.request, chunk.e.new_empty
    shape = saved_shape(n, request.vocabulary) if way.stores else (n, request.vocabulary)
    memory = new(shape, dtype=chunk.e.dtype if way.stores else torch.float32)
    own = new((way.kind.call.rows, n), dtype=torch.float32)
    outputs = [own, memory, *(new(x.shape, dtype=torch.bool) for x in residuals.shapes_of_blocks(request, n) or ())]
    own, values, *multiplied = bridge.run(_chunk_statistics_program(way, n, len(outputs)), chunk, outputs)
    return own, blocks.Columns(values, Blocks(*multiplied) if multiplied else None)  # type: ignore[arg-type]


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
    way: Way,
    formed: records.Residuals,
    factor: Tensor,
    wanted: Sequence[bool],
    in_place: bool,
    live: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """factor times de, in e's type, dc, in its type, and dbias, in float32; None where not wanted. factor: () float32.

    live: (N,), the tokens that are not ignored; None: no de. weights: of the weighted sum, of the process' columns.
    in_place: the gradients take the memory of formed, which is of no use afterwards.
    """
    kind, dbias = way.kind, formed.dbias * factor if wanted[2] and formed.dbias is not None else None
    de, dc = formed.de if wanted[0] and live is not None else None, formed.dc if wanted[1] else None
    if de is None and dc is not None and formed.steps is None and formed.q is None:
        return None, kind.in_order_of_c(torch.mul(dc, factor, out=dc if in_place else torch.empty_like(dc))), dbias
    sums = [(de, kind.dtype), (dc, None if dc is None else dc.dtype)]
    reused = tuple(None if x is None else in_place and x.dtype == dtype for x, dtype in sums)
    memory = [
        x if reuses else torch.empty_like(x, dtype=dtype)
        for (x, dtype), reuses in zip(sums, reused, strict=True)
        if x is not None
    ]
    if memory:
        count = 0 if live is None else len(live)
        live = None if de is None else Tokens(kind, count).padded(live, 0)
        read = [None if reuses else x for (x, _), reuses in zip(sums, reused, strict=True)]
        arrays = [*read, dense(factor), live, *map(dense, (formed.units, formed.steps, formed.q, weights))]
        found = iter(bridge.run(_finish_program(way, reused), arrays, memory))
        de = None if de is None else Tokens(kind, count).cut(next(found))
        dc = None if dc is None else next(found)
    if dc is not None:
        dc = kind.in_order_of_c(dc if formed.steps is None else viewed(dc, kind.dtype))
    return de, dc, dbias


def _chunk(*arrays) -> blocks.Block:
    """arrays: of a Chunk."""
    *given, reference, count, of_all = arrays
    of_all = None if of_all is None else Weighted(of_all[:-2], of_all[-2], of_all[-1])
    return blocks.Block.of(inputs_of(*given), finite(reference), count, of_all)


@lru_cache(maxsize=PROGRAMS)
def _weighted_program(way: Way) -> Callable:
    def torch_weighted(_, c, bias, weights):
        unread = jnp.zeros((0,), jnp.int32)
        of_all = weighted_sum.weighted(Inputs(unread, c, bias, unread, weights), way.plan.request)
        assert of_all is not None
        return (jnp.concatenate([jnp.atleast_1d(x) for x in of_all]),)

    return jitted(torch_weighted, 1)


@lru_cache(maxsize=PROGRAMS)
def _chunk_statistics_program(way: Way, size: int, count: int) -> Callable:
    def torch_chunk_statistics(*arrays):
        given = arrays[count:]  # the first are the results' memory
        own, columns = blocks.numbers_of(_chunk(*given), way.plan)
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
        own, whole = (unstacked(Numbers, x, way.kind.call) for x in exchanged[:2])
        cotangents = unstacked(Cotangents, exchanged.cotangents, way.kind.call)
        chunk = _chunk(*arrays[count + fields :])
        values = given.columns if exchanged.logits is None else exchanged.logits
        multiplied = None if exchanged.blocks_of_de is None else Blocks(exchanged.blocks_of_de, exchanged.blocks_of_dc)
        columns = blocks.Columns(values, multiplied)
        de, part, dbias, q = blocks.gradients_of(chunk, columns, own, whole, cotangents, plan)
        dc, steps = given.dc, given.steps
        if steps is not None:  # not in the result's type outside of a program: the integers might be taken for NaN
            dc, steps = blocks.add_dc(lax.bitcast_convert_type(dc, chunk.inputs.e.dtype), steps, part, plan)
            dc = lax.bitcast_convert_type(dc, jnp.int16)
        elif dc is not None:
            dc, _ = blocks.add_dc(dc, None, part, plan)
        dbias = None if given.dbias is None else given.dbias + dbias
        q = None if given.q is None else given.q + q
        found = Results(part.left, None if de is None else de.values, dc, steps, dbias, q)
        return tuple(x for x, y in zip(found, written, strict=True) if y)

    return jitted(torch_chunk_gradients, count)


@lru_cache(maxsize=PROGRAMS)
def _finish_program(way: Way, reused: tuple[bool | None, bool | None]) -> Callable:
    """reused: for de and dc, whether the result's memory holds what is left of it; None: not wanted."""
    count = len([x for x in reused if x is not None])

    def torch_chunk_finish(*arrays):
        memory, (de, dc, factor, live, units, steps, q, weights) = iter(arrays[:count]), arrays[count:]
        own = [None if reuses is None else next(memory) for reuses in reused]
        de, dc = (x if reuses else y for x, y, reuses in zip(own, (de, dc), reused, strict=True))
        formed = Residuals(de=de, dc=dc, steps=steps, units=units, q=q)
        found: Any = blocks.finish(formed, factor, live, way.plan, weights)
        dc = found.c if steps is None or found.c is None else lax.bitcast_convert_type(found.c, jnp.int16)
        return tuple(x for x in (found.e, dc) if x is not None)

    return jitted(torch_chunk_finish, count)
