"""A loss whose gradients are formed in the forward pass, where PyTorch computes the loss from the tokens' statistics.

Let S be the sum of the tokens' losses. The tokens are taken in chunks, kept ones first. For each chunk:

    its statistics over the process' columns    a JAX program (on_jax/chunk_programs.py)
    the statistics over all columns             exchanged, if processes share the vocabulary (processes/)
    their cotangents                            `OfTokens.totals` under PyTorch's autograd: a loss of the user's own, or
                                                the built-in one where processes share the vocabulary
    de, and what is added to dc and dbias       a JAX program

The backward pass multiplies de, dc and dbias by the cotangent of S. cce_kernels/blocks.py says why this is the
gradient, and why each row of de is divided by a unit in float16. A built-in loss in one process is one JAX program
instead (on_jax/programs.py).

Where processes share the vocabulary, a chunk's statistics are over the process' columns, and the processes gather them.
de is then of the process' columns alone, in float32. It is summed over the processes while the next chunk's statistics
are computed, and rounded to e's type. The backward pass exchanges nothing. Under sequence parallelism the whole float32
de is reduce-scattered after the last chunk.

With a gradient_tolerance each process chooses by itself which blocks of its columns it leaves out: the bounds over the
columns of the processes add up to the bound over all columns (cce_kernels/block_sparse.py).

All processes take the same chunks, so they meet in the same collectives, even if one of them holds no column.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cce_kernels.float16 import FLOAT16_LARGEST, OF_EXPONENT, SMALLEST_ROW
from cce_torch import autograd
from cce_torch.arguments import OF_TORCH
from cce_torch.autograd import Formed, Gradients, Tensors
from cce_torch.call import Operands, Residuals
from cce_torch.on_jax import tensors
from cce_torch.processes import collectives, shards, vocab_statistics
from cce_torch.processes.vocab_parallel import Setting


class OfTokens(Protocol):
    """The loss of each token."""

    @property
    def called(self) -> str:
        """The public function's name."""
        ...

    @property
    def weight(self) -> Tensor | None:
        """(N,), that may want a gradient; None: 1."""
        ...

    def in_order(self, order: Tensor) -> "OfTokens":
        """The same of the tokens in this order, without their weights."""
        ...

    def totals(self, statistics: Tensor, span: slice) -> Tensor:
        """(n,): the losses of these tokens before their weights, differentiable in statistics, (Call.rows, n).

        The statistics of ignored tokens are 0, and their losses are arbitrary.
        """
        ...


class De(NamedTuple):
    """de as values · units. The last axis of values is D."""

    values: Tensor
    units: Tensor | None  # float32, one for each row of values; None: 1

    @classmethod
    def empty(cls, e: Tensor) -> "De":
        """Memory for de of e, in e's type."""
        units = e.new_empty(e.shape[:-1], dtype=torch.float32) if e.dtype == torch.float16 else None
        return cls(torch.empty_like(e), units)

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> "De":
        """x, rounded to this type. float32 becomes float16 as in cce_kernels.gradients.divided."""
        if dtype != torch.float16:
            return cls(x.to(dtype), None)
        largest = torch.linalg.vector_norm(x, torch.inf, -1)  # holds no array of x's size
        largest = torch.where(largest.isfinite(), largest.clamp(min=SMALLEST_ROW), FLOAT16_LARGEST)
        units = (largest.view(torch.int32) & OF_EXPONENT).view(torch.float32) / FLOAT16_LARGEST
        return cls(torch.div(x, units.unsqueeze(-1), out=torch.empty_like(x, dtype=dtype)), units)

    def put(self, rows: Tensor, part: "De") -> None:
        self.values.index_copy_(0, rows, part.values)
        if self.units is not None and part.units is not None:
            self.units.index_copy_(0, rows, part.units)


class _Rows:
    """de of all tokens, (N, D), whose rows come chunk by chunk, as parts of sums if processes share the vocabulary."""

    def __init__(self, e: Tensor, setting: Setting) -> None:
        _, _, self.tokens, self.shard = setting
        self.scattered = self.shard is not None and self.shard.sequence_axis is not None
        self.summed = self.shard is not None and self.shard.reduce_e_grad and not self.scattered
        self.de = De(torch.empty_like(e, dtype=torch.float32), None) if self.scattered else De.empty(e)
        self.type_of_e, self.pending = e.dtype, None
        wide = self.shard is not None or e.dtype == torch.float16
        self.dtype = torch.float32 if wide else e.dtype  # of a chunk's part

    def put(self, rows: Tensor, part: Tensor) -> None:
        """Begins to sum the part over the processes, for these rows."""
        part = part[: len(rows)]
        self.pending = rows, collectives.being_summed(part, self.shard) if self.summed else part
        if self.shard is None:
            self.settle()

    def settle(self) -> None:
        """Waits for the sum, and writes it into its rows. Called before the next chunk's part exists."""
        if self.pending is not None:
            (rows, part), self.pending = self.pending, None
            part = torch.ops._c10d_functional.wait_tensor(part) if self.summed else part
            self.de.put(rows, De.of(part, self.de.values.dtype))

    def whole(self, shape: torch.Size) -> De:
        """de of this process' e, of its shape, in its type."""
        self.settle()
        if self.scattered:
            return De.of(collectives.reduced(self.de.values, shape, self.tokens, self.shard), self.type_of_e)
        values, units = self.de
        return De(values.view(shape), None if units is None else units.view(shape[:-1]))


class Planned(NamedTuple):
    """What is decided before a call runs."""

    setting: Setting
    chunks: Any  # cce_kernels.plan.Chunks
    wanted: Any  # cce_kernels.numbers.Wanted
    way: Any  # chunk_programs.Way; None: this process has no column


@cache
def programs() -> Any:
    """cce_torch.on_jax.chunk_programs, which imports JAX."""
    from cce_torch.on_jax import chunk_programs

    return chunk_programs


def total(operands: Operands, of_tokens: OfTokens, setting: Setting) -> tuple[Tensor, Tensor] | None:
    """S, differentiable once in e, c, bias and the tokens' weights; and the statistics, (rows, N), which are not.

    Equal on all processes. None where the plan for the largest shard forms no gradients in the forward pass: then all
    processes get None. operands: e (..., D), c (V, D), of the process' columns.
    """
    how = _planned(operands, setting)
    if how is None:
        return None
    return autograd.applied(Formed, _Total(how, of_tokens, of_tokens.called), *operands, of_tokens.weight)  # type: ignore[return-value]


def _planned(operands: Operands, setting: Setting) -> Planned | None:
    (call, _, _, shard), e = setting, operands.e
    wanted = [x is not None and x.requires_grad for x in operands[:3]]
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or call.impl in OF_TORCH or not any(wanted):
        return None
    if not len(operands.columns) or not (autograd.is_usual(operands) if shard is None else shard.largest):
        return None
    wide_de = call.of_shard or e.dtype == torch.float16  # `De.of` rounds a chunk's part
    call, of = call._replace(reduction="sum", of_shard=wide_de), programs().Wanted(*wanted)
    chunks, way = programs().ways(operands, None if shard is None else shard.largest, of, call)
    return None if chunks is None else Planned(setting._replace(call=call), chunks, of, way)


class _Total(NamedTuple):
    """The task. Its tensors: Operands, and the tokens' weights."""

    how: Planned
    of_tokens: OfTokens | None  # None: in the backward pass
    called: str

    results, differentiable = 2, 1

    def of_backward(self) -> "_Total":
        return self._replace(of_tokens=None)

    def forward(self, *arrays: Any) -> tuple[Any, ...]:
        operands, weight, setting = Operands(*arrays[:-1]), arrays[-1], self.how.setting
        assert self.of_tokens is not None
        run = _Run(operands, self.of_tokens, self.how)
        drops = autograd.drops_what_is_saved()  # the gradients are formed when the forward pass runs again
        statistics, totals, de, formed = (run.evaluated if drops else run.formed)(operands.e.shape)
        # ignored tokens have no part in S, whatever their totals and weights are
        of_tokens = torch.where(run.kept, totals if weight is None else weight.to(totals.dtype) * totals, 0)
        of_weight = totals if weight is not None and weight.requires_grad else None
        kept = collectives.own_tokens(run.kept, setting.tokens, setting.shard)
        values, units = (None, None) if de is None else de
        return of_tokens.sum(), statistics, kept, of_weight, *formed._replace(de=values, units=units)

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        e, c, bias, _, weights, *_, weight = given
        return e, c, bias, weights if self.how.setting.call.smooths else None, weight, *found[2:]

    def finish(self, factor: Tensor, saved: Any, wanted: Sequence[bool], in_place: bool) -> Gradients:
        _, c, bias, weights, weight, kept, totals, *left = saved
        formed, of_sum = Residuals(*left), vocab_statistics.own_weights(weights, self.how.setting.shard)
        tensors.check({"c": c, "bias": bias})  # FSDP may have freed one after the forward pass
        way: Any = self.how.way
        de: Any = formed.de
        if way is None:
            dc, dbias = torch.zeros_like(c), None if bias is None else torch.zeros_like(bias)
        else:
            _, dc, dbias = programs().finish(way, formed, factor, wanted, in_place, weights=of_sum)
            dbias = None if dbias is None else dbias.to(bias.dtype)
        if wanted[0]:
            of_token = factor if formed.units is None else factor * formed.units
            of_token = torch.where(kept, of_token, 0).unsqueeze(-1)  # inf times the 0 of an ignored token is NaN
            de = torch.mul(de, of_token, out=de if in_place else torch.empty_like(de))
        of_weight = (factor * totals).to(weight.dtype) if wanted[-1] else None
        return de, dc, dbias, *[None] * 4, of_weight


class _Run:
    """The forward pass of a process."""

    def __init__(self, operands: Operands, of_tokens: OfTokens, how: Planned) -> None:
        self.setting, self.chunks, self.wanted, self.way = how
        self.call, (_, _, self.scale), _, _ = self.setting
        self.of_tokens, self.programs, self.targets = of_tokens, programs(), operands.columns
        self.own, self.kept = (
            shards.rounded(vocab_statistics.of_own_columns(operands, self.setting), self.call),
            operands.columns >= 0,
        )
        self.e = self.own.e
        if self.way is not None:
            readable = self.programs.readable
            self.c, self.bias = readable(self.way.kind.in_memory(self.own.c)), readable(self.own.bias)
            self.weights = readable(self.own.weights)

    @cached_property
    def weighted(self) -> Tensor | None:
        """For all chunks, as it reads c."""
        return self.programs.weighted(self.way, self.c, self.bias, self.weights)

    def evaluated(self, shape: torch.Size) -> tuple[Tensor, Tensor, De | None, Residuals]:
        """As `formed`, but the gradients are tensors of one element, expanded."""
        nothing, call = [], self.call._replace(reduction="none", has_z_loss=False)
        reference = vocab_statistics.references(self.own, self.targets, nothing, self.setting._replace(call=call))
        (own, _), _ = shards.numbers(self.own, reference, nothing, call, self.scale)

        def new(shape: Any, dtype: torch.dtype) -> Tensor:
            return self.e.new_empty((), dtype=dtype).expand(shape)

        formed = Residuals() if self.way is None else self.way.sums.made(new)
        found, de = vocab_statistics.of_all_columns(own, self.kept, self.own.weights, self.setting), None
        if self.wanted.e:
            units = new(shape[:-1], torch.float32) if self.e.dtype == torch.float16 else None
            de = De(new(shape, self.e.dtype), units)
        return found, self.of_tokens.totals(found, slice(None)), de, formed

    def formed(self, shape: torch.Size) -> tuple[Tensor, Tensor, De | None, Residuals]:
        """The statistics over all columns; the totals; de of S, of this shape, in e's type; dc and dbias as Residuals.

        Nothing is left of dc and dbias if this process has no column.
        """
        formed = Residuals()
        if self.way is not None:
            formed = self.programs.cleared(self.way.sums.made(lambda n, t: self.e.new_empty(n, dtype=t)))
        tokens, size = len(self.e), self.chunks.size
        starts = range(0, max(tokens, 1), size)
        given, de = self._in_order(starts[-1] + size), _Rows(self.e, self.setting) if self.wanted.e else None
        chunks = [self._chunk(chunk, given, de, formed) for chunk in self._chunks(starts)]
        statistics, of_tokens = chunks[0] if len(chunks) == 1 else (torch.cat(x, -1) for x in zip(*chunks, strict=True))
        order, new = given.order[:tokens], self.e.new_empty
        found = new((self.call.rows, tokens), dtype=torch.float32).index_copy_(1, order, statistics)
        totals = new(tokens, dtype=torch.float32).index_copy_(0, order, of_tokens)
        return found, totals, None if de is None else de.whole(shape), formed

    def _in_order(self, rows: int) -> "_InOrder":
        """The kept tokens first, in their order. rows: of all chunks."""
        order = torch.argsort(self.kept, descending=True, stable=True)
        order = torch.nn.functional.pad(order, (0, max(rows - len(order), 0)))
        wanted = [self.wanted.e, self.wanted.c, self.wanted.bias]
        reference = vocab_statistics.references(self.own, self.targets, wanted, self.setting)
        own = self.own.columns, self.own.inverse_temperature, reference
        own = (None if x is None else x[order] for x in own)
        return _InOrder(order, *own, self.of_tokens, self.kept)  # type: ignore[arg-type]

    def _chunks(self, starts: Sequence[int]) -> Iterator["_Chunk"]:
        """The last ones may reach beyond the tokens."""
        tokens, size, count = len(self.e), self.chunks.size, self.kept.sum(dtype=torch.int32).reshape(1)
        for start in starts:
            own = count if len(starts) == 1 else (count - start).clamp(0, size)
            yield _Chunk(slice(start, start + size), slice(start, min(start + size, tokens)), own)

    def _chunk(self, of: "_Chunk", given: "_InOrder", de: Any, formed: Residuals) -> tuple[Tensor, Tensor]:
        """The statistics of the chunk's tokens over all columns, (rows, n), and their totals, (n,).

        Adds the chunk's gradients to de and formed.
        """
        way, rows = self.way, given.order[of.tokens]
        n, count = of.padded.stop - of.padded.start, len(rows)
        chunk: Any = None
        columns: Any = None
        if way is None:
            own = shards.of_no_columns(self.e.new_empty((n, 0)), self.call).statistics
        else:
            chunk = self._inputs(of, given)
            own, columns = self.programs.chunk_statistics(way, chunk)
        statistics = vocab_statistics.of_all_columns(
            own[:, :count], given.kept[of.tokens], self.own.weights, self.setting
        )
        totals, cotangents = self._cotangents(statistics, given, of.tokens)
        part: Any = None
        if de is not None:
            de.settle()  # now, so that no two chunks' de exist while this chunk's is formed
            new = self.e.new_zeros if way is None else self.e.new_empty
            part = new((n, self.e.shape[1]), dtype=de.dtype)
        if way is not None:
            whole = statistics
            if count < n:
                whole, cotangents = (torch.nn.functional.pad(x, (0, n - count)) for x in (whole, cotangents))
            logits, blocks = None if way.stores else columns.values, columns.blocks or (None, None)
            exchanged = self.programs.Exchanged(own, whole, cotangents, logits, *blocks)
            exponentials = columns.values if way.stores else None
            results = self.programs.Results(exponentials, part, formed.dc, formed.steps, formed.dbias, formed.q)
            self.programs.chunk_gradients(way, chunk, exchanged, results)
        if de is not None:
            de.put(rows, part)
        return statistics, totals

    def _cotangents(self, statistics: Tensor, of: "_InOrder", span: slice) -> tuple[Tensor, Tensor]:
        """The totals of these tokens, (n,), and the cotangents of their statistics, (Call.rows, n).

        Those of ignored tokens may be NaN: chunk_gradients does not read them.
        """
        of_tokens, of_total = of.of_tokens, of.of_total[span]
        # Hooks on saved tensors are for what outlives this function: checkpoints would count what is saved here. Where
        # there are none, none are set: in fn torch.func.grad refuses them.
        own = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is) if autograd.hooks() else nullcontext()
        with torch.enable_grad(), own:
            given = statistics.detach().requires_grad_()
            totals = of_tokens.totals(given, span)
            if not totals.requires_grad:  # it depends on no number
                return totals, torch.zeros_like(statistics)
            (found,) = torch.autograd.grad(totals, given, of_total, allow_unused=True, materialize_grads=True)
        return totals.detach(), found

    def _inputs(self, of: "_Chunk", given: "_InOrder") -> Any:
        """The chunk as chunk_programs.Chunk."""
        own = given.columns, given.inverse_temperature, given.reference
        held, inverse, reference = (None if x is None else x[of.padded] for x in own)
        scale, e = None if self.scale == 1 else float(self.scale), self.e[given.order[of.padded]]
        of_chunk = e, self.c, self.bias, held, self.weights, scale, inverse, reference, of.count
        return self.programs.Chunk(*of_chunk, self.weighted)


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class _InOrder:
    """What belongs to the tokens, kept ones first; then any tokens, up to the rows of all chunks.

    The properties are computed when they are first asked for. By then the GPU runs the first chunk's program.
    """

    order: Tensor  # (rows,): their rows of e
    columns: Tensor  # (rows,), as are the others
    inverse_temperature: Tensor | None
    reference: Tensor | None
    given: OfTokens  # in the order of e, as is the next
    live: Tensor  # (N,) bool: whether a token is kept

    @cached_property
    def of_tokens(self) -> OfTokens:
        return self.given.in_order(self.order)

    @cached_property
    def kept(self) -> Tensor:
        return self.live[self.order]

    @cached_property
    def of_total(self) -> Tensor:
        """The derivative of S by each token's total; 0 where it is ignored."""
        kept, weight = self.kept.float(), self.given.weight
        return kept if weight is None else torch.where(self.kept, weight.detach().float()[self.order], kept)


class _Chunk(NamedTuple):
    """Which tokens are a chunk, of those in order."""

    padded: slice  # n of them
    tokens: slice  # the first of these: each token is in one chunk
    count: Tensor  # type: ignore[assignment]  # (1,) int32: how many are kept
