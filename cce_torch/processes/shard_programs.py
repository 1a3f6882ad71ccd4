"""The JAX programs of a process that holds a shard of the vocabulary. The processes exchange numbers in between.

`columns`, int32, are the targets as columns of the shard: negative for an ignored token, the number of the shard's
columns where the shard does not hold the token's target. `reference` is the logit of each token's target, which one of
the shards holds. All shards get it, as the kernels' exponentials are relative to it. It is −inf where no shard holds
the target, and None for plain XLA, which needs no reference.

On all tokens: `target`, `statistics` and `gradients`.

Where the forward pass forms the gradients, the tokens come in chunks, kept ones first (cce_kernels/in_forward.py). A
chunk is two programs:

    chunk_statistics    the statistics over the shard's columns; the exponentials, or in plain XLA the logits; and with
                        a gradient_tolerance the blocks of them that are multiplied (cce_kernels/block_sparse.py)
    chunk_gradients     from the statistics over all columns: the chunk's de, its part of dc and of dbias

All processes take the same number of chunks of the same sizes, whatever columns they hold: these are planned for the
largest shard. A number of tokens N is planned as the padded size of N, which depends on nothing else. The programs
depend on the chunk's size, and not on N. The last chunk's part of dc is left to the backward pass: `finish` adds it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor

from cce_jax import losses, passes, plans
from cce_kernels import block_sparse, in_forward
from cce_kernels.block_sparse import Blocks
from cce_kernels.exponentials import saved_shape
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Shard, Statistics, Wanted
from cce_kernels.plan import Chunks, Plan
from cce_kernels.residuals import Left, Residuals, shapes_of
from cce_torch.call import Call, Operands
from cce_torch.on_jax import bridge
from cce_torch.on_jax.kinds import Kind, kind_of, kind_of_tensors, padded_size
from cce_torch.on_jax.programs import (
    PROGRAMS,
    Tokens,
    dense,
    handover_of,
    jitted,
    options_on,
    real,
    scale_of,
    stacked,
    unstacked,
    viewed,
)


class _Shard(Tokens):
    """The tensors of a call on a shard, as its programs take them."""

    def __init__(self, kind: Kind, operands: Operands, scale: float) -> None:
        e, c, bias, columns, weights, inverse_temperature = operands
        super().__init__(kind, e.shape[0])
        self.c = kind.in_memory(c)
        self.arrays = [
            self.padded(e, 0),
            self.c,
            dense(bias),
            self.padded(columns, -1),
            dense(real(weights)),
            scale_of(scale),
            self.padded(inverse_temperature, 1),
        ]

    def of_tokens(self, *each: Tensor | None) -> list[Tensor | None]:
        """(..., N) with as many tokens as the programs take; the new ones hold 0. None stays None."""
        return [None if x is None else self.padded(x, 0, axis=x.dim() - 1) for x in each]


def target(operands: Operands, saving_for: tuple[bool, ...], call: Call, scale: float) -> Tensor:
    """The logit of each token's target, (N,) float32: 0 where the shard does not hold it."""
    shard = _Shard(kind_of_tensors(operands.e, operands.c, call), operands, scale)
    output = operands.e.new_empty(shard.size, dtype=torch.float32)
    program = _target_program(shard.kind, shard.size, Wanted(*saving_for) if any(saving_for) else None)
    return shard.first(bridge.run(program, shard.arrays, [output])[0])


def statistics(
    operands: Operands, reference: Tensor | None, saving_for: tuple[bool, ...], call: Call, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The statistics over the shard's columns, and the saved exponentials or None."""
    shard, new = _Shard(kind_of_tensors(operands.e, operands.c, call), operands, scale), operands.e.new_empty
    wanted = Wanted(*saving_for) if any(saving_for) else None
    left = handover_of(shard.kind, shard.size, operands.bias is not None, wanted)
    outputs = [new((call.rows, shard.size), dtype=torch.float32), *(new(x, dtype=dtype) for x, dtype in left.leaves)]
    program = _statistics_program(shard.kind, shard.size, wanted, len(outputs))
    found, *exponentials = bridge.run(program, [*shard.of_tokens(reference), *shard.arrays], outputs)
    return shard.first(found), exponentials[0] if exponentials else None


class Held(NamedTuple):
    """What a process holds from the forward pass."""

    own: Tensor  # the statistics over the shard's columns
    lse: Tensor  # (N,), of the whole vocabulary
    mean: Tensor | None  # (N,), of the whole vocabulary, if Call.with_mean
    reference: Tensor | None  # (N,)
    saved: Tensor | None  # exponentials


def gradients(
    kind: Kind, cotangents: Tensor, operands: Operands, held: Held, wanted: tuple[bool, ...], scale: float
) -> list[Tensor]:
    """The wanted ones of de (the part of the shard's columns, in float32), dc and dbias.

    cotangents: of the statistics over the whole vocabulary. The program overwrites parts of held.saved that no later
    call reads.
    """
    shard, asked = _Shard(kind, operands, scale), Wanted(*wanted)
    overwritten = [] if held.saved is None else [held.saved]
    outputs = []
    if asked.e:
        outputs.append(operands.e.new_empty((shard.size, operands.e.shape[1]), dtype=torch.float32))
    if asked.c:
        outputs.append(shard.of_parameter(shard.c))
    if asked.bias and operands.bias is not None:
        outputs.append(shard.of_parameter(operands.bias))
    inputs = [*shard.of_tokens(cotangents, *held[:-1]), *shard.arrays]
    program = _gradients_program(kind, asked, bool(overwritten), shard.size)
    found = list(bridge.run(program, inputs, outputs, scratch=overwritten))
    if asked.e:
        found[0] = shard.cut(found[0])
    if asked.c:
        found[int(asked.e)] = kind.in_order_of_c(found[int(asked.e)])
    return found


def _inputs(e, c, bias, columns, weights, scale, inverse_temperature=None) -> Inputs:
    scale = None if scale is None else scale.reshape(1)
    return Inputs(e, c, bias, columns, weights, scale, inverse_temperature)


def _finite(reference: jax.Array | None) -> jax.Array | None:
    """reference as numbers.Shard has it: −FLOAT32_MAX where no shard holds the target."""
    return None if reference is None else jnp.maximum(reference, -FLOAT32_MAX)


@lru_cache(maxsize=PROGRAMS)
def _target_program(kind: Kind, size: int, wanted: Wanted | None) -> Callable:
    def torch_shard_target(_, *arrays):
        return (passes.target_logits(_inputs(*arrays), kind.static, wanted),)

    return jitted(torch_shard_target, 1)


@lru_cache(maxsize=PROGRAMS)
def _statistics_program(kind: Kind, size: int, wanted: Wanted | None, count: int) -> Callable:
    def torch_shard_statistics(*arrays):
        reference, *others = arrays[count:]  # the first `count` are the results' memory
        found, residuals = passes.forward_pass(_inputs(*others), kind.static, wanted, _finite(reference))
        return stacked(found), *jax.tree.leaves(residuals)

    return jitted(torch_shard_statistics, count)


@lru_cache(maxsize=PROGRAMS)
def _gradients_program(kind: Kind, wanted: Wanted, with_saved: bool, size: int) -> Callable:
    count = with_saved + wanted.e + wanted.c + wanted.bias

    def torch_shard_gradients(*arrays):
        residuals = Residuals(exponentials=arrays[0] if with_saved else None)
        cotangents, own, lse, mean, reference, *others = arrays[count:]  # the first `count` are the results' memory
        own, of = unstacked(Statistics, own, kind.call), unstacked(Cotangents, cotangents, kind.call)
        shard = Shard(lse, _finite(reference), mean)
        found, residuals = passes.gradients(_inputs(*others), own, residuals, of, kind.static, wanted, shard)
        return tuple(jax.tree.leaves((residuals, list(found))))

    return jitted(torch_shard_gradients, count, options_on(kind))


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
    def shapes(self) -> Residuals:
        """What the forward pass leaves of dc and dbias, as shapes. de is left apart, as it is of all columns."""
        return shapes_of(self.plan)._replace(de=None)

    def new(self, make: Callable[[Any, torch.dtype], Tensor]) -> Residuals:
        """Tensors make(shape, dtype) for the shapes."""
        return jax.tree.map(lambda x: make(x.shape, getattr(torch, x.dtype.name)), self.shapes)

    def residuals(self, leaves: Any) -> Residuals:
        return jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)


def leaves_of(residuals: Residuals | None) -> list[Tensor]:
    return jax.tree.leaves(residuals)


class Results(NamedTuple):
    """What the second program of a chunk writes, tensors or JAX arrays; None where it writes nothing."""

    columns: Any  # exponentials, read too; or, of the last chunk, dz
    de: Any  # (n, D) float32
    dc: Any  # read and added to, as steps and dbias
    steps: Any
    dbias: Any
    e: Any  # of the last chunk
    unit: Any


def chunks_of(operands: Operands, largest: int, wanted: Wanted, call: Call) -> Chunks | None:
    """The chunks of all processes, of which none has more than `largest` columns.

    None: the forward pass forms no gradients.
    """
    e = operands.e
    kind = kind_of(call, torch.Size((largest, e.shape[-1])), 0, e.dtype, e.device)
    return _chunks(kind, padded_size(len(operands.columns)), operands.bias is not None, wanted)


@lru_cache(maxsize=PROGRAMS)
def _chunks(kind: Kind, size: int, with_bias: bool, wanted: Wanted) -> Chunks | None:
    how = plans.plan_for(kind.shapes(size, with_bias), kind.static, wanted, one_factor=True).in_forward
    return None if how is None else how.chunks


def way_of(operands: Operands, chunks: Chunks, wanted: Wanted, vocabulary: int, call: Call) -> Way:
    """The way of this process, which holds at least one row of c."""
    kind = kind_of_tensors(operands.e, operands.c, call)
    return _way(kind, padded_size(len(operands.e)), operands.bias is not None, chunks, wanted, vocabulary)


@lru_cache(maxsize=PROGRAMS)
def _way(kind: Kind, size: int, with_bias: bool, chunks: Chunks, wanted: Wanted, vocabulary: int) -> Way:
    decided = plans.Decided(0, chunks=chunks)
    return Way(kind, plans.plan_for(kind.shapes(size, with_bias), kind.static, wanted, decided, True), vocabulary)


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
    reference: Tensor | None  # (n,): -inf where no process holds the target
    count: Tensor  # type: ignore[assignment]  # (1,) int32: how many tokens are kept


class Losses(NamedTuple):
    """What the losses of a chunk's tokens depend on besides their statistics."""

    columns: Tensor  # (n,) int32, of the whole vocabulary, as in losses.py
    target_weight: Tensor | None  # (n,)
    weight: Tensor  # (n,)
    label_smoothing: float | None
    z_loss: float | None
    class_weight: Tensor | None  # (V,), of the whole vocabulary


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
    """The statistics of a chunk, and what its first program gave besides."""

    own: Tensor  # over the shard's columns
    whole: Tensor  # over all columns
    logits: Tensor | None  # None where the program gave exponentials, which are in the Results
    blocks_of_de: Tensor | None  # the blocks of exponentials or logits that are multiplied for de; None: all
    blocks_of_dc: Tensor | None


def chunk_gradients(way: Way, chunk: Chunk, of: Losses, exchanged: Exchanged, results: Results) -> None:
    """Writes the results."""
    written = tuple(x is not None for x in results)
    bridge.run(
        _chunk_gradients_program(way, len(chunk.e), written),
        [*exchanged, *of, *chunk],
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


def _chunk(*arrays) -> in_forward.Chunk:
    *inputs, reference, count = arrays
    return in_forward.Chunk.of(_inputs(*inputs), _finite(reference), count)


@lru_cache(maxsize=PROGRAMS)
def _chunk_statistics_program(way: Way, size: int, count: int) -> Callable:
    def torch_chunk_statistics(*arrays):
        own, columns = in_forward.numbers_of(_chunk(*arrays[count:]), way.plan)  # the first are the results' memory
        return stacked(own), *jax.tree.leaves(columns)

    return jitted(torch_chunk_statistics, count)


@lru_cache(maxsize=PROGRAMS)
def _chunk_gradients_program(way: Way, size: int, written: tuple[bool, ...]) -> Callable:
    count, plan = sum(written), way.plan

    def torch_chunk_gradients(*arrays):
        memory = iter(arrays[:count])  # of the results
        given = Results(*(next(memory) if x else None for x in written))
        exchanged: Any = Exchanged(*arrays[count:][:5])
        of: Any = Losses(*arrays[count:][5:11])
        own, whole = (unstacked(Statistics, x, way.kind.call) for x in exchanged[:2])
        chunk = _chunk(*arrays[count:][11:])
        common = losses.Common(of.label_smoothing, of.z_loss, of.class_weight)
        cotangents = losses.cotangents_of(common, way.kind.loss, way.vocabulary)(whole, losses.Terms(*of[:3]))
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
        found = Results(left.left, de, dc, steps, dbias, left.e, left.unit)
        return tuple(x for x, y in zip(found, written, strict=True) if y)

    return jitted(torch_chunk_gradients, count)


@lru_cache(maxsize=PROGRAMS)
def _finish_program(way: Way, rows: int, in_place: bool) -> Callable:
    def torch_chunk_finish(memory, dc, factor, steps, *last):
        formed = Residuals(dc=memory if in_place else dc, steps=steps, last=Left(*last))
        found: Any = in_forward.finish(formed, factor, jnp.zeros(0, bool), way.plan)
        return (lax.bitcast_convert_type(found.c, jnp.int16),)

    return jitted(torch_chunk_finish, 1)
