"""Vocabulary parallelism of a "mean" or "sum" whose gradients are formed in the forward pass.

Let S be the sum of the tokens' losses. A process goes over the tokens in chunks (shard_programs.py). For each chunk:

    its statistics over the process' columns   a JAX program
    the statistics over all columns            gathered from the processes
    de, and what is added to dc and dbias      a JAX program; de is of the process' columns alone, in float32
    de over all columns                        summed over the processes, while the next chunk's statistics are computed

de is then rounded to e's type. The backward pass multiplies de, dc and dbias by the cotangent of S, and exchanges
nothing. Under sequence parallelism the whole float32 de is reduce-scattered after the last chunk.

With a gradient_tolerance each process chooses by itself which blocks of its columns it leaves out: the bounds over the
columns of the processes add up to the bound over all columns (cce_kernels/block_sparse.py).

All processes take the same chunks, so they meet in the same collectives, even if one of them holds no column.
"""

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import losses, ops
from cce_torch.call import Operands
from cce_torch.on_jax import tensors
from cce_torch.processes import collectives, shards
from cce_torch.processes.shard_ops import programs as _programs
from cce_torch.processes.vocab_parallel import Setting
from cce_torch.processes.vocab_statistics import first_order, of_all_columns, references


class _Planned(NamedTuple):
    """What is decided before the call runs."""

    setting: Setting
    chunks: Any  # cce_kernels.plan.Chunks
    wanted: Any  # cce_kernels.numbers.Wanted


def total(operands: Operands, terms: losses.Terms, setting: Setting) -> Tensor | None:
    """S, the sum of the tokens' losses, differentiable once in e, c, bias and token_weight; equal on all processes.

    None where the plan for the largest shard forms no gradients in the forward pass: all processes then get None.
    operands: as for vocab_statistics.statistics, without temperatures.
    """
    wanted = [x is not None and x.requires_grad for x in operands[:3]]
    usual = torch.is_grad_enabled() and not torch.compiler.is_compiling() and setting.call.impl not in shards.OF_TORCH
    if not usual or not any(wanted) or not len(terms.columns) or not setting.shard.largest:
        return None
    programs, setting = _programs(), setting._replace(call=setting.call._replace(reduction="sum"))
    of = programs.Wanted(*wanted)
    chunks = programs.chunks_of(operands, setting.shard.largest, of, setting.call)
    if chunks is None:
        return None
    planned = _Planned(setting, chunks, of)
    return _Total.apply(*operands[:5], terms.token_weight, planned)  # type: ignore[no-any-return]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e, c, bias, columns, weights, token_weight, planned: _Planned) -> Tensor:
        _, scheduled, tokens, shard = planned.setting
        terms = losses.Terms(columns, weights, token_weight, shard.vocabulary)
        run = _Run(Operands(collectives.whole(e, tokens, shard), c, bias, columns, weights), terms, planned)
        drops = ops.drops_what_is_saved()  # the gradients are formed when the forward pass runs again
        statistics, de, formed = run.evaluated(e.shape) if drops else run.formed(e.shape)
        found, _ = losses.totals(statistics, terms, scheduled)
        ctx.way, ctx.types = run.way, [y is not None and y.dtype for y in (bias, token_weight)]
        ctx.in_place = ops.may_be_overwritten()
        kept = columns >= 0
        of_weight = found if token_weight is not None and token_weight.requires_grad else None
        kept_here = collectives.own_tokens(kept, tokens, shard)
        ctx.save_for_backward(c, bias, de, kept_here, of_weight, *_programs().leaves_of(formed))
        return torch.where(kept, losses.weights(columns, token_weight, found.dtype) * found, 0).sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        guarded = torch.is_grad_enabled()
        # What the forward pass left is free for the results if no other backward pass can come.
        kept = guarded or torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        of_e, of_c, of_bias, _, _, of_weight, _ = ctx.needs_input_grad
        in_place, wanted, way, types = ctx.in_place and not kept, (of_e, of_c, of_bias, of_weight), ctx.way, ctx.types

        def run(factor: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
            of_parameters = _of_parameters(way, factor, saved, wanted, in_place)
            de, dweight = _of_tokens(factor, saved, wanted, in_place)
            dc, dbias = (x if w else None for x, w in zip(of_parameters, wanted[1:], strict=False))
            dbias = None if dbias is None else dbias.to(types[0])
            return de, dc, dbias, None if dweight is None else dweight.to(types[1])

        de, dc, dbias, dweight = first_order(run, guarded, factor, *ctx.saved_tensors)
        return de, dc, dbias, None, None, dweight, None


def _of_tokens(factor: Tensor, saved: tuple, wanted: tuple[bool, ...], in_place: bool) -> tuple[Tensor | None, ...]:
    """The gradients of e and token_weight; None where not wanted."""
    _, _, de, kept, found, *_ = saved
    if wanted[0]:
        of_token = torch.where(kept, factor, 0).unsqueeze(-1)  # inf times the 0 of an ignored token is NaN
        de = torch.mul(de, of_token, out=de if in_place else torch.empty_like(de))
    return de if wanted[0] else None, factor * found if wanted[3] else None


def _of_parameters(way: Any, factor: Tensor, saved: tuple, wanted: tuple[bool, ...], in_place: bool) -> tuple:
    """dc and dbias. way: None if this process has no column."""
    c, bias, _, _, _, *formed = saved
    tensors.check({"c": c, "bias": bias})  # FSDP may have freed one after the forward pass
    if way is None:
        return torch.zeros_like(c), None if bias is None else torch.zeros_like(bias)
    if not wanted[1] and not wanted[2]:
        return None, None
    return _programs().finish(way, way.residuals(formed), factor, wanted[:3], in_place)


class _Run:
    """The forward pass of a process."""

    def __init__(self, operands: Operands, terms: losses.Terms, planned: _Planned) -> None:
        (call, (label_smoothing, z_loss, scale), self.tokens, shard), self.chunks, self.wanted = planned
        self.setting, self.terms, self.shard, self.programs = planned.setting, terms, shard, _programs()
        e, c, bias, columns, weights, _ = operands
        own_weights = None if weights is None else weights[shard.start : shard.stop]
        own = Operands(e.reshape(-1, e.shape[-1]), c, bias, shard.held(columns), own_weights)
        self.own, self.kept, self.e = shards.rounded(own, call), columns >= 0, own.e
        self.scale = self.programs.scale_of(scale)
        self.of_losses = label_smoothing if call.smooths else None, z_loss if call.has_z_loss else None
        self.way: Any = None  # where this process has no column
        if len(c):
            readable = self.programs.readable
            self.way = self.programs.way_of(self.own, self.chunks, self.wanted, shard.vocabulary, call)
            self.c, self.bias = readable(self.way.kind.in_memory(self.own.c)), readable(self.own.bias)
            self.own_weights, self.weights = readable(own_weights), readable(weights)

    def references(self, saving_for: tuple[bool, ...]) -> Tensor | None:
        return references(self.own, self.terms.columns, saving_for, self.setting)

    def evaluated(self, shape: torch.Size) -> tuple[Tensor, Tensor | None, Any]:
        """As `formed`, but the gradients are tensors of one element, expanded."""
        nothing, call = (False,) * 3, self.setting.call._replace(reduction="none", has_z_loss=False)
        scale = self.setting.scheduled[2]
        own, _ = shards.statistics(self.own, self.references(nothing), nothing, call, scale)

        def new(shape: Any, dtype: torch.dtype) -> Tensor:
            return self.e.new_empty((), dtype=dtype).expand(shape)

        formed = None if self.way is None else self.way.new(new)
        de = new(shape, self.e.dtype) if self.wanted.e else None
        return of_all_columns(own, self.kept, self.setting), de, formed

    def formed(self, shape: torch.Size) -> tuple[Tensor, Tensor | None, Any]:
        """The statistics over all columns; de of S, of this shape, in e's type; Residuals of dc and dbias.

        The Residuals are None if this process has no column.
        """
        formed = None
        if self.way is not None:
            formed = self.programs.cleared(self.way.new(lambda n, t: self.e.new_empty(n, dtype=t)))
        found = self.e.new_empty((self.setting.call.rows, len(self.e)), dtype=torch.float32)
        de = _Rows(self.e, self.setting) if self.wanted.e else None
        for chunk in self._chunks():
            found.index_copy_(1, chunk.rows, self._chunk(chunk, de, formed))
        return found, None if de is None else de.whole(shape), formed

    def _chunks(self) -> Iterator["_Chunk"]:
        tokens, spans = len(self.e), self.programs.spans(self.chunks, len(self.e))
        order = torch.argsort((~self.kept).to(torch.uint8), stable=True)  # the kept tokens first, in their order
        count = self.kept.sum(dtype=torch.int32).reshape(1)
        order = torch.nn.functional.pad(order, (0, max(sum(spans[-1]) - tokens, 0)))
        reference = self.references(astuple(self.wanted))
        for start, size in spans:
            own = (count - start).clamp(0, size)
            rows = order[start : start + size]
            live = torch.arange(size, device=own.device) < own
            is_last = self.chunks.last > 0 and start == spans[-1][0]
            yield _Chunk(rows, rows[: max(tokens - start, 0)], live, own, reference, is_last)

    def _chunk(self, of: "_Chunk", de: "_Rows | None", formed: Any) -> Tensor:
        """The statistics of the chunk's tokens over all columns, (rows, n). Adds its gradients to de and formed."""
        n, count, way = len(of.padded), len(of.rows), self.way
        chunk: Any = None
        columns: Any = None
        if way is None:
            own = shards.of_no_columns(self.e.new_empty((n, 0)), self.setting.call)
        else:
            chunk = self._inputs(of)
            # The memory of the last chunk's exponentials.
            last = formed.last.left if way.stores and formed.last is not None else None
            memory = None if last is None or n > len(last) else last[:n]
            own, columns = self.programs.chunk_statistics(way, chunk, memory)
        statistics = of_all_columns(own[:, :count], of.live[:count], self.setting)
        part: Any = None
        if de is not None:
            de.settle()  # now, so that no two chunks' de exist while this chunk's is formed
            part = (self.e.new_zeros if way is None else self.e.new_empty)((n, self.e.shape[1]), dtype=torch.float32)
        if way is not None:
            whole = torch.nn.functional.pad(statistics, (0, n - count))
            logits, blocks = None if way.stores else columns.values, columns.blocks or (None, None)
            exchanged = self.programs.Exchanged(own, whole, logits, *blocks)
            results = self._results(of, formed, columns, part)
            self.programs.chunk_gradients(way, chunk, self._losses(of), exchanged, results)
        if de is not None:
            de.put(of.rows, part)
        return statistics

    def _inputs(self, of: "_Chunk") -> Any:
        """The chunk as shard_programs.Chunk."""
        reference = None if of.reference is None else of.reference[of.padded]
        e, held = self.e[of.padded], self.own.columns[of.padded]
        return self.programs.Chunk(e, self.c, self.bias, held, self.own_weights, self.scale, reference, of.count)

    def _results(self, of: "_Chunk", formed: Any, columns: Any, de: Tensor | None) -> Any:
        """What the chunk's second program writes: shard_programs.Results. columns: what the first one gave."""
        exponentials = columns.values if self.way.stores else None
        if not of.is_last:
            return self.programs.Results(exponentials, de, formed.dc, formed.steps, formed.dbias, None, None)
        last = formed.last
        last.count.copy_(of.count)
        if last.blocks is not None:
            last.blocks.copy_(columns.blocks.dc)
        written = last.left if exponentials is None else exponentials
        return self.programs.Results(written, de, None, None, formed.dbias, last.e, last.unit)

    def _losses(self, of: "_Chunk") -> Any:
        """The chunk's shard_programs.Losses."""
        columns, class_weight, token_weight, _ = self.terms
        columns = columns[of.padded]
        weight = losses.weights(columns, None if token_weight is None else token_weight[of.padded], torch.float32)
        of_target = losses.target_weights(columns, class_weight)
        return self.programs.Losses(columns, of_target, weight, *self.of_losses, self.weights)


class _Chunk(NamedTuple):
    """Which tokens are a chunk."""

    padded: Tensor  # (n,): their rows of e, kept ones first; then any rows
    rows: Tensor  # the first of these: each token is in one chunk
    live: Tensor  # (n,): whether a token is kept
    count: Tensor  # type: ignore[assignment]  # (1,) int32: how many are
    reference: Tensor | None  # (N,), of all tokens
    is_last: bool  # whether its part of dc is left to the backward pass


class _Rows:
    """de, whose rows come chunk by chunk as parts of sums over the processes."""

    def __init__(self, e: Tensor, setting: Setting) -> None:
        _, _, self.tokens, self.shard = setting
        self.scattered = self.shard.sequence_axis is not None
        self.de = torch.empty_like(e, dtype=torch.float32 if self.scattered else e.dtype)
        self.dtype, self.pending = e.dtype, None

    def put(self, rows: Tensor, part: Tensor) -> None:
        """Begins to sum the part over the processes, for these rows."""
        here = self.scattered or not self.shard.reduce_e_grad
        part = part[: len(rows)]
        self.pending = rows, part if here else collectives.being_summed(part, self.shard), here

    def settle(self) -> None:
        """Waits for the sum, and writes it into its rows."""
        if self.pending is not None:
            (rows, part, here), self.pending = self.pending, None
            part = part if here else torch.ops._c10d_functional.wait_tensor(part)
            self.de.index_copy_(0, rows, part.to(self.de.dtype))

    def whole(self, shape: torch.Size) -> Tensor:
        """de of this process' e, of its shape, in its type."""
        self.settle()
        if not self.scattered:
            return self.de.view(shape)
        return collectives.reduced(self.de, shape, self.tokens, self.shard).to(self.dtype)
