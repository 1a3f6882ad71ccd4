"""A loss whose gradients are formed in the forward pass, where PyTorch computes the loss from the tokens' statistics.

Let S be the sum of the tokens' losses. The tokens are taken in chunks, kept ones first. For each chunk:

    its statistics over the process' columns    a JAX program (on_jax/chunk_programs.py)
    the statistics over all columns             exchanged, if processes share the vocabulary (processes/)
    their cotangents                            `OfTokens.totals` under PyTorch's autograd: a loss of the user's own, or
                                                the built-in one where processes share the vocabulary
    de, and what is added to dc and dbias       a JAX program

The backward pass multiplies de, dc and dbias by the cotangent of S. cce_kernels/in_forward.py says why this is the
gradient, and why each row of de is divided by a unit in float16. A built-in loss in one process is one JAX program
instead (on_jax/programs.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cce_kernels.float16 import FLOAT16_LARGEST, OF_EXPONENT, SMALLEST_ROW
from cce_torch import ops
from cce_torch.arguments import OF_TORCH
from cce_torch.call import Call, Operands
from cce_torch.on_jax import tensors
from cce_torch.processes import shards
from cce_torch.reverse_mode import applied, first_order


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


class Rows:
    """de of the whole vocabulary, whose rows come chunk by chunk."""

    def __init__(self, e: Tensor) -> None:
        self.de, self.type_of_e = De.empty(e), e.dtype
        self.dtype = torch.float32 if e.dtype == torch.float16 else e.dtype  # of a chunk's part

    def put(self, rows: Tensor, part: Tensor) -> None:
        self.de.put(rows, De.of(part[: len(rows)], self.type_of_e))

    def settle(self) -> None:
        """Called before the next chunk's part exists."""

    def whole(self, shape: torch.Size) -> De:
        """de of this process' e, of its shape and type."""
        return self.de


class Columns:
    """Which columns this process holds, and what it exchanges with those that hold the others: here it holds all.

    processes/vocab_in_forward.py has the same for some of the columns.
    """

    def chunks(self, operands: Operands, wanted: Any, call: Call) -> Any:
        """cce_kernels.plan.Chunks, the same in all processes. None: the forward pass forms no gradients."""
        return programs().chunks_of(operands, None, wanted, call) if ops.is_usual(operands) else None

    def own(self, operands: Operands) -> Operands:
        """The operands of this process' columns, with e of all tokens, (N, D)."""
        return operands

    def references(self, own: Operands, columns: Tensor, saving_for: tuple[bool, ...], call: Call) -> Tensor | None:
        """The logits of the targets, (N,): -inf where a target names no column. None where no chunk needs them."""
        return None  # the programs of each chunk find them

    def of_all(self, own: Tensor, kept: Tensor, weights: Tensor | None) -> Tensor:
        """The statistics over all columns, 0 where a token is ignored. weights: of this process' columns."""
        return torch.where(kept, own, 0)

    def rows(self, e: Tensor) -> Any:
        """Where de of all tokens is put together: as `Rows`."""
        return Rows(e)

    def own_tokens(self, x: Tensor) -> Tensor:
        """x, (N,), of the tokens of e as it is given to `total`, in e's shape without D."""
        return x


class Planned(NamedTuple):
    """What is decided before a call runs."""

    call: Call
    scale: float
    columns: Columns
    chunks: Any  # cce_kernels.plan.Chunks
    wanted: Any  # cce_kernels.numbers.Wanted


@cache
def programs() -> Any:
    """cce_torch.on_jax.chunk_programs, which imports JAX."""
    from cce_torch.on_jax import chunk_programs

    return chunk_programs


def planned(operands: Operands, call: Call, scale: float, columns: Columns) -> Planned | None:
    """How `total` runs. None where the forward pass forms no gradients: then all processes get None.

    operands: e (..., D), c (V, D), of the process' columns.
    """
    wanted = [x is not None and x.requires_grad for x in operands[:3]]
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or call.impl in OF_TORCH or not any(wanted):
        return None
    if not len(operands.columns):
        return None
    wide_de = call.of_shard or operands.e.dtype == torch.float16  # `De.of` rounds a chunk's part
    call, of = call._replace(reduction="sum", of_shard=wide_de), programs().Wanted(*wanted)
    chunks = columns.chunks(operands, of, call)
    return None if chunks is None else Planned(call, scale, columns, chunks, of)


def total(operands: Operands, of_tokens: OfTokens, how: Planned) -> tuple[Tensor, Tensor]:
    """S, differentiable once in e, c, bias and the tokens' weights; and the statistics, (rows, N), which are not."""
    return applied(_Total, *operands, of_tokens.weight, of_tokens, how)  # type: ignore[no-any-return]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        operands, (weight, of_tokens, how) = Operands(*arguments[:7]), arguments[7:]
        run, ctx.called = _Run(operands, of_tokens, how), of_tokens.called
        drops = ops.drops_what_is_saved()  # the gradients are formed when the forward pass runs again
        statistics, totals, de, formed = (run.evaluated if drops else run.formed)(operands.e.shape)
        ctx.way, ctx.types = run.way, [y is not None and y.dtype for y in (operands.bias, weight)]
        ctx.in_place = ops.may_be_overwritten()
        kept = run.kept
        of_weight = totals if weight is not None and weight.requires_grad else None
        kept_here = how.columns.own_tokens(kept)
        leaves = programs().leaves_of(formed)
        saved = *(de or (None, None)), kept_here, of_weight, *leaves
        ctx.save_for_backward(operands.c, operands.bias, *saved, operands.e, weight)  # the last two for first_order
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        # ignored tokens have no part in S, whatever their totals and weights are
        return torch.where(kept, totals if weight is None else weight.to(totals.dtype) * totals, 0).sum(), statistics

    @staticmethod
    def backward(ctx: Any, factor: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_e, of_c, of_bias, *_, of_weight, _, _ = ctx.needs_input_grad
        if factor is None:
            return (None,) * len(ctx.needs_input_grad)
        # What the forward pass left is free for the results if no other backward pass can come.
        kept = torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        in_place, wanted, way, types = ctx.in_place and not kept, (of_e, of_c, of_bias, of_weight), ctx.way, ctx.types

        def run(factor: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
            of_parameters = _of_parameters(way, factor, saved, wanted, in_place)
            de, dweight = _of_tokens(factor, saved, wanted, in_place)
            dc, dbias = (x if w else None for x, w in zip(of_parameters, wanted[1:], strict=False))
            dbias = None if dbias is None else dbias.to(types[0])
            return de, dc, dbias, None if dweight is None else dweight.to(types[1])

        (*saved, e, weight), factors = ctx.saved_tensors, factor if ops.is_batched(factor) else None
        if factors is not None:  # the programs take no such tensor, and the gradients are linear in it
            factor, in_place = torch.ones((), dtype=factor.dtype, device=saved[0].device), False
        found = first_order(ctx.called, run, (factor, *saved), (e, weight))
        if factors is not None:
            found = tuple(None if x is None else (factors * x).to(x.dtype) for x in found)
        de, dc, dbias, dweight = found
        return de, dc, dbias, *[None] * 4, dweight, None, None


def _of_tokens(factor: Tensor, saved: tuple, wanted: tuple[bool, ...], in_place: bool) -> tuple[Tensor | None, ...]:
    """The gradients of e and of the tokens' weights; None where not wanted."""
    _, _, de, units, kept, totals, *_ = saved
    if wanted[0]:
        of_token = factor if units is None else factor * units
        of_token = torch.where(kept, of_token, 0).unsqueeze(-1)  # inf times the 0 of an ignored token is NaN
        de = torch.mul(de, of_token, out=de if in_place else torch.empty_like(de))
    return de if wanted[0] else None, factor * totals if wanted[3] else None


def _of_parameters(way: Any, factor: Tensor, saved: tuple, wanted: tuple[bool, ...], in_place: bool) -> tuple:
    """dc and dbias. way: None if this process has no column."""
    c, bias, _, _, _, _, *formed = saved
    tensors.check({"c": c, "bias": bias})  # FSDP may have freed one after the forward pass
    if way is None:
        return torch.zeros_like(c), None if bias is None else torch.zeros_like(bias)
    if not wanted[1] and not wanted[2]:
        return None, None
    return programs().finish(way, way.residuals(formed), factor, wanted[:3], in_place)


class _Run:
    """The forward pass of a process."""

    def __init__(self, operands: Operands, of_tokens: OfTokens, how: Planned) -> None:
        self.call, self.scale, self.columns, self.chunks, self.wanted = how
        self.of_tokens, self.programs, self.targets = of_tokens, programs(), operands.columns
        self.own, self.kept = shards.rounded(self.columns.own(operands), how.call), operands.columns >= 0
        self.e = self.own.e
        self.way: Any = None  # where this process has no column
        if len(operands.c):
            readable = self.programs.readable
            self.way = self.programs.way_of(self.own, self.chunks, self.wanted, self.call)
            self.c, self.bias = readable(self.way.kind.in_memory(self.own.c)), readable(self.own.bias)
            self.weights = readable(self.own.weights)

    def evaluated(self, shape: torch.Size) -> tuple[Tensor, Tensor, De | None, Any]:
        """As `formed`, but the gradients are tensors of one element, expanded."""
        nothing, call = (False,) * 3, self.call._replace(reduction="none", has_z_loss=False)
        reference = self.columns.references(self.own, self.targets, nothing, call)
        own, _ = shards.statistics(self.own, reference, nothing, call, self.scale)

        def new(shape: Any, dtype: torch.dtype) -> Tensor:
            return self.e.new_empty((), dtype=dtype).expand(shape)

        formed = None if self.way is None else self.way.new(new)
        found, de = self.columns.of_all(own, self.kept, self.own.weights), None
        if self.wanted.e:
            units = new(shape[:-1], torch.float32) if self.e.dtype == torch.float16 else None
            de = De(new(shape, self.e.dtype), units)
        return found, self.of_tokens.totals(found, slice(None)), de, formed

    def formed(self, shape: torch.Size) -> tuple[Tensor, Tensor, De | None, Any]:
        """The statistics over all columns; the totals; de of S, of this shape, in e's type; Residuals of dc and dbias.

        The Residuals are None if this process has no column.
        """
        formed = None
        if self.way is not None:
            formed = self.programs.cleared(self.way.new(lambda n, t: self.e.new_empty(n, dtype=t)))
        tokens, spans = len(self.e), self.programs.spans(self.chunks, len(self.e))
        given, de = self._in_order(sum(spans[-1])), self.columns.rows(self.e) if self.wanted.e else None
        chunks = [self._chunk(chunk, given, de, formed) for chunk in self._chunks(given, spans)]
        statistics, of_tokens = zip(*chunks, strict=True)
        found = self.e.new_empty((self.call.rows, tokens), dtype=torch.float32)
        found.index_copy_(1, given.order[:tokens], torch.cat(statistics, 1))
        totals = self.e.new_empty(tokens, dtype=torch.float32)
        totals.index_copy_(0, given.order[:tokens], torch.cat(of_tokens))
        return found, totals, None if de is None else de.whole(shape), formed

    def _in_order(self, rows: int) -> "_InOrder":
        """The kept tokens first, in their order. rows: of all chunks."""
        order = torch.argsort(self.kept, descending=True, stable=True)
        order = torch.nn.functional.pad(order, (0, max(rows - len(order), 0)))
        wanted = self.wanted.e, self.wanted.c, self.wanted.bias
        reference = self.columns.references(self.own, self.targets, wanted, self.call)
        own = self.own.columns, self.own.inverse_temperature, reference
        own = (None if x is None else x[order] for x in own)
        return _InOrder(order, *own, self.of_tokens, self.kept)  # type: ignore[arg-type]

    def _chunks(self, given: "_InOrder", spans: Sequence[tuple[int, int]]) -> Iterator["_Chunk"]:
        tokens, count = len(self.e), self.kept.sum(dtype=torch.int32).reshape(1)
        for start, size in spans:
            is_last = self.chunks.last > 0 and start == spans[-1][0]
            of_tokens = slice(start, max(start, min(start + size, tokens)))
            yield _Chunk(slice(start, start + size), of_tokens, (count - start).clamp(0, size), is_last)

    def _chunk(self, of: "_Chunk", given: "_InOrder", de: Any, formed: Any) -> tuple[Tensor, Tensor]:
        """The statistics of the chunk's tokens over all columns, (rows, n), and their totals, (n,).

        Adds the chunk's gradients to de and formed.
        """
        way, rows = self.way, given.order[of.tokens]
        n, count = of.padded.stop - of.padded.start, len(rows)
        chunk: Any = None
        columns: Any = None
        if way is None:
            own = shards.of_no_columns(self.e.new_empty((n, 0)), self.call)
        else:
            chunk = self._inputs(of, given)
            # The memory of the last chunk's exponentials.
            last = formed.last.left if way.stores and formed.last is not None else None
            memory = None if last is None or n > len(last) else last[:n]
            own, columns = self.programs.chunk_statistics(way, chunk, memory)
        statistics = self.columns.of_all(own[:, :count], given.kept[of.tokens], self.own.weights)
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
            self.programs.chunk_gradients(way, chunk, exchanged, self._results(of, formed, columns, part))
        if de is not None:
            de.put(rows, part)
        return statistics, totals

    def _cotangents(self, statistics: Tensor, of: "_InOrder", span: slice) -> tuple[Tensor, Tensor]:
        """The totals of these tokens, (n,), and the cotangents of their statistics, (Call.rows, n).

        Those of ignored tokens may be NaN: chunk_gradients does not read them.
        """
        of_tokens, of_total = of.of_tokens, of.of_total[span]
        # Hooks on saved tensors are for what outlives this function: checkpoints would count what is saved here.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
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
        return self.programs.Chunk(e, self.c, self.bias, held, self.weights, scale, inverse, reference, of.count)

    def _results(self, of: "_Chunk", formed: Any, columns: Any, de: Tensor | None) -> Any:
        """What the chunk's second program writes: chunk_programs.Results. columns: what the first one gave."""
        exponentials = columns.values if self.way.stores else None
        if not of.is_last:
            return self.programs.Results(exponentials, de, formed.dc, formed.steps, formed.dbias, None, None)
        last = formed.last
        last.count.copy_(of.count)
        if last.blocks is not None:
            last.blocks.copy_(columns.blocks.dc)
        written = last.left if exponentials is None else exponentials
        return self.programs.Results(written, de, None, None, formed.dbias, last.e, last.unit)


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
    is_last: bool  # whether its part of dc is left to the backward pass
