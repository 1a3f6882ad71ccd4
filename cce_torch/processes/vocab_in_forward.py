"""Vocabulary parallelism of a "mean" or "sum" whose gradients are formed in the forward pass.

Let S be the sum of the tokens' losses. A process goes over the tokens in chunks (chunk_programs.py). For each chunk:

    its numbers over the process' columns     a JAX program
    the numbers over all columns              gathered from the processes, 2 or 3 float32 a token
    de, and what is added to dc and dbias     a JAX program; de is of the process' columns alone, in float32
    de over all columns                       summed over the processes, while the next chunk's numbers are computed

de is then rounded to e's type. The backward pass multiplies de, dc and dbias by the cotangent of S, and exchanges
nothing. Under sequence parallelism the whole float32 de is reduce-scattered after the last chunk.

All processes take the same chunks, so they meet in the same collectives, even if one of them holds no column.
"""

from collections.abc import Iterator
from dataclasses import astuple
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch import losses, ops
from cce_torch.on_jax import tensors
from cce_torch.processes import shards
from cce_torch.processes import vocab_parallel as parallel
from cce_torch.processes.vocab_parallel import VocabParallel

OF_TORCH = "torch_compile", "reference"  # the impls that form gradients in the backward pass alone


class Setting(NamedTuple):
    """What is known of a call before it runs."""

    chunks: Any  # cce_kernels.plan.Chunks
    wanted: Any  # cce_kernels.numbers.Wanted
    call: Any  # cce_torch.programs.Call
    tokens: torch.Size  # the shape of targets
    shard: VocabParallel
    options: shards.Options
    label_smoothing: float
    z_loss: float


def total(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, weights: Tensor | None, token_weight: Tensor | None,
    *, tokens: torch.Size, shard: VocabParallel, options: shards.Options, label_smoothing: float, z_loss: float,
) -> Tensor | None:  # fmt: skip
    """S, the sum of the tokens' losses, differentiable once in e, c, bias and token_weight; equal on all processes.

    None where the plan for the largest shard forms no gradients in the forward pass: all processes then get None.
    Arguments as for vocab_parallel.numbers; token_weight: (N,).
    """
    wanted = [x is not None and x.requires_grad for x in (e, c, bias)]
    usual = torch.is_grad_enabled() and not torch.compiler.is_compiling() and options.impl not in OF_TORCH
    if not usual or not any(wanted) or not len(columns) or not shard.largest:
        return None
    programs = _programs()
    call = programs.call_of(options.with_sum, z_loss != 0, options.softcap, options.precision, options.impl,
                            options.memory_budget, options.wide_dc)  # fmt: skip
    of = programs.Wanted(*wanted)
    chunks = programs.chunks_of(e, len(columns), shard.largest, bias is not None, of, call)
    if chunks is None:
        return None
    setting = Setting(chunks, of, call, tokens, shard, options, label_smoothing, z_loss)
    return _Total.apply(e, c, bias, token_weight, columns, weights, setting)  # type: ignore[no-any-return]


@cache
def _programs() -> Any:
    """cce_torch.chunk_programs, which imports JAX."""
    from cce_torch.processes import chunk_programs

    return chunk_programs


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e, c, bias, token_weight, columns, weights, x: Setting) -> Tensor:
        run = _Run(parallel.whole(e, x.tokens, x.shard), c, bias, columns, weights, token_weight, x)
        drops = ops.drops_what_is_saved()  # the gradients are formed when the forward pass runs again
        numbers, de, begun = run.evaluated(e.shape) if drops else run.formed(e.shape)
        found, _ = losses.totals(numbers, columns, weights, vocabulary=x.shard.vocabulary,
                                 label_smoothing=x.label_smoothing, z_loss=x.z_loss)  # fmt: skip
        ctx.way, ctx.types = run.way, [y is not None and y.dtype for y in (c, bias, token_weight)]
        ctx.in_place = ops.may_be_overwritten()
        kept = columns >= 0
        of_weight = found if token_weight is not None and token_weight.requires_grad else None
        ctx.save_for_backward(c, bias, de, parallel.own_tokens(kept, x.tokens, x.shard), of_weight, *(begun or ()))
        return torch.where(kept, losses.weights(columns, token_weight, found.dtype) * found, 0).sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        guarded = torch.is_grad_enabled()
        # What the forward pass left is free for the results if no other backward pass can come.
        kept = guarded or torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        run = parallel.FirstOrder.apply if guarded else parallel.called
        found = run(_finished, factor, ctx.way, ctx.types, ctx.needs_input_grad[:4], ctx.in_place and not kept,
                    *ctx.saved_tensors)  # fmt: skip
        return *found, None, None, None


def _finished(
    factor: Tensor, way: Any, types: list, wanted: tuple[bool, ...], in_place: bool, c: Tensor, bias: Tensor | None,
    de: Tensor | None, kept: Tensor, found: Tensor | None, *begun: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of e, c, bias and token_weight; None where not wanted. way: None if this process has no column."""
    tensors.check({"c": c, "bias": bias})  # FSDP may have freed one after the forward pass
    of_e, of_c, of_bias, of_weight = wanted
    dc = dbias = dweight = None
    if of_e:
        assert de is not None
        of_token = torch.where(kept, factor, 0).unsqueeze(-1)  # inf times the 0 of an ignored token is NaN
        de = torch.mul(de, of_token, out=de if in_place else torch.empty_like(de))
    if way is None:
        dc, dbias = torch.zeros_like(c), None if bias is None else torch.zeros_like(bias)
    elif of_c or of_bias:
        programs = _programs()
        asked = programs.Wanted(of_e, of_c, of_bias)
        dc, dbias = programs.finish(way, programs.Formed(*begun), factor, asked, in_place)
        dbias = None if dbias is None else dbias.to(types[1])
    if of_weight:
        assert found is not None
        dweight = (factor * found).to(types[2])
    return de if of_e else None, dc if of_c else None, dbias if of_bias else None, dweight


class _Run:
    """The forward pass of a process."""

    def __init__(self, e, c, bias, columns, weights, token_weight, x: Setting) -> None:
        self.x, self.programs, self.e = x, _programs(), e.reshape(-1, e.shape[-1])
        self.c, self.bias = shards.operands(self.e, c, bias, x.options)
        self.columns, self.held, self.weights, self.token_weight = columns, x.shard.held(columns), weights, token_weight
        self.own_weights = None if weights is None else weights[x.shard.start : x.shard.stop]
        self.kept = columns >= 0
        self.way: Any = None  # where this process has no column
        if len(c):
            self.way = self.programs.way_of(self.e, self.c, self.bias, x.chunks, x.wanted, x.shard.vocabulary, x.call)
            self.of_columns: Any = self.programs.laid_out_c(self.way, self.c), self.programs.laid_out(self.bias)
            self.of_weights: Any = self.programs.laid_out(self.own_weights), self.programs.laid_out(weights)

    def references(self, saving_for: tuple[bool, ...]) -> Tensor | None:
        return parallel.references(self.e, self.c, self.bias, self.columns, saving_for, self.x.shard, self.x.options)

    def evaluated(self, shape: torch.Size) -> tuple[Tensor, Tensor | None, Any]:
        """As `formed`, but the gradients are tensors of one element, expanded."""
        nothing = (False,) * 3
        own, _ = shards.statistics(self.e, self.c, self.bias, self.held, self.own_weights, self.references(nothing),
                                   nothing, self.x.options)  # fmt: skip

        def new(shape: Any, dtype: torch.dtype) -> Tensor:
            return self.e.new_empty((), dtype=dtype).expand(shape)

        begun = None if self.way is None else self.programs.formed(self.way, new)
        de = new(shape, self.e.dtype) if self.x.wanted.e else None
        return parallel.of_all_columns(own, self.kept, self.x.shard), de, begun

    def formed(self, shape: torch.Size) -> tuple[Tensor, Tensor | None, Any]:
        """The numbers over all columns, (2 or 3, N); de of S, of this shape, in e's type; chunk_programs.Formed.

        Formed is None if this process has no column.
        """
        x, begun = self.x, None
        if self.way is not None:
            begun = self.programs.cleared(self.programs.formed(self.way, lambda n, t: self.e.new_empty(n, dtype=t)))
        found = self.e.new_empty((2 + x.options.with_sum, len(self.e)), dtype=torch.float32)
        de = _Rows(self.e, x) if x.wanted.e else None
        for chunk in self._chunks():
            found.index_copy_(1, chunk.rows, self._chunk(chunk, de, begun))
        return found, None if de is None else de.whole(shape), begun

    def _chunks(self) -> Iterator["_Chunk"]:
        tokens, spans = len(self.e), self.programs.spans(self.x.chunks, len(self.e))
        order = torch.argsort((~self.kept).to(torch.uint8), stable=True)  # the kept tokens first, in their order
        count = self.kept.sum(dtype=torch.int32).reshape(1)
        order = torch.nn.functional.pad(order, (0, max(sum(spans[-1]) - tokens, 0)))
        reference = self.references(astuple(self.x.wanted))
        for start, size in spans:
            own = (count - start).clamp(0, size)
            rows = order[start : start + size]
            live = torch.arange(size, device=own.device) < own
            is_last = self.x.chunks.last > 0 and start == spans[-1][0]
            yield _Chunk(rows, rows[: max(tokens - start, 0)], live, own, reference, is_last)

    def _chunk(self, of: "_Chunk", de: "_Rows | None", begun: Any) -> Tensor:
        """The numbers of the chunk's tokens over all columns, (2 or 3, rows). Adds its gradients to de and begun."""
        x, programs, way, n, count = self.x, self.programs, self.way, len(of.padded), len(of.rows)
        e, f32 = self.e, torch.float32
        chunk: Any = None
        columns: Any = None  # of this process
        if way is None:
            own = e.new_zeros((2 + x.options.with_sum, n), dtype=f32)
            own[0] = -torch.inf
        else:
            chunk = programs.Chunk(
                e[of.padded], *self.of_columns, self.held[of.padded], self.of_weights[0],
                None if x.options.scale == 1 else float(x.options.scale),
                None if of.reference is None else of.reference[of.padded], of.count,
            )  # fmt: skip
            room = begun.left if way.stores else None  # where the last chunk's exponentials will be
            own, columns = programs.numbers(way, chunk, None if room is None or n > len(room) else room[:n])
        numbers = parallel.of_all_columns(own[:, :count], of.live[:count], x.shard)
        part = None
        if de is not None:
            de.settle()  # now, so that no two chunks' de exist while this chunk's is formed
            part = (e.new_zeros if way is None else e.new_empty)((n, e.shape[1]), dtype=f32)
        if way is not None:
            left = begun.left if of.is_last and not way.stores else columns if way.stores else None
            results = programs.Results(left, part, begun.dc, begun.steps, begun.dbias, None, None)
            if of.is_last:
                begun.count.copy_(of.count)
                results = results._replace(dc=None, steps=None, e=begun.e, unit=begun.unit)
            padded = torch.nn.functional.pad(numbers, (0, n - count))
            programs.gradients(way, chunk, self._losses(of), own, None if way.stores else columns, padded, results)
        if de is not None:
            de.put(of.rows, part)
        return numbers

    def _losses(self, of: "_Chunk") -> Any:
        """The chunk's chunk_programs.Losses."""
        x, columns = self.x, self.columns[of.padded]
        token_weight = None if self.token_weight is None else self.token_weight[of.padded]
        return self.programs.Losses(
            columns, losses.target_weights(columns, self.weights), losses.weights(columns, token_weight, torch.float32),
            x.label_smoothing if x.call.loss.smooths else None, x.z_loss if x.call.loss.has_z_loss else None,
            self.of_weights[1],
        )  # fmt: skip


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

    def __init__(self, e: Tensor, x: Setting) -> None:
        self.x, self.scattered = x, x.shard.sequence_axis is not None
        self.de = torch.empty_like(e, dtype=torch.float32 if self.scattered else e.dtype)
        self.dtype, self.pending = e.dtype, None

    def put(self, rows: Tensor, part: Tensor | None) -> None:
        """Begins to sum the part over the processes, for these rows."""
        assert part is not None
        here = self.scattered or not self.x.shard.reduce_e_grad
        part = part[: len(rows)]
        self.pending = rows, part if here else parallel.being_summed(part, self.x.shard), here

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
        return parallel.reduced(self.de, shape, self.x.tokens, self.x.shard).to(self.dtype)
