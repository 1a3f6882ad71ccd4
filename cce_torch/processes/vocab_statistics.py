"""Vocabulary parallelism: each process holds some rows of c. The statistics are those of the whole vocabulary.

A process has the logits z_iv of its own columns v alone. It computes the statistics of each token over them, and the
processes of the group exchange these: lse = log Σ exp(lse of a process); target and sum are sums; the mean of the
logits is Σ exp(lse of a process − lse) · (mean of a process). So all have the same statistics, and the same loss.
Backward, equation (6) of cce_jax/core.py holds for each column with lse and mean of the whole vocabulary. So dc and
dbias of a process' own rows are complete. de is a sum over all columns: each process has a part of it in float32, the
parts are summed, and only then rounded to e's type.

With N tokens, the processes exchange at each call:

    forward     the targets' logits, N float32, summed, where kernels take them as reference of their exponentials
    forward     the statistics, Call.rows·N float32, which every process gathers; but of given ids the sums
    backward    de, N·D float32, summed

Under sequence parallelism each process has only a part of e: e is gathered forward, and de is reduce-scattered.
Where the forward pass forms the gradients, it exchanges de too (vocab_in_forward.py).
All processes of the group make the same calls on as many tokens, so they meet in the same collectives, even if one
of them holds no column.
"""

from typing import Any

import torch
from torch import Tensor

from cce_torch.call import Operands
from cce_torch.processes import shards
from cce_torch.processes.collectives import gathered, one_cotangent, reduced, summed, whole
from cce_torch.processes.vocab_parallel import Setting
from cce_torch.reverse_mode import applied, first_order
from cce_torch.torch_alone import blocks


def statistics(operands: Operands, setting: Setting, called: str) -> Tensor:
    """The statistics of each token over the whole vocabulary, (Call.rows, N), equal on all processes.

    Differentiable once in e, c and bias. The cotangents must be equal on all processes too.
    operands: e (*tokens, D), or its part under sequence parallelism; c (stop - start, D); bias (stop - start,); columns
    (N,) of the whole vocabulary; weights (V,). called: the public function.
    """
    saving = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # whose graph would need the saved size
    saving_for = tuple(saving and x is not None and x.requires_grad for x in operands[:3])
    call = setting.call._replace(reduction="none", has_z_loss=False)  # PyTorch computes the loss from the statistics
    return applied(_Statistics, *operands, saving_for, setting._replace(call=call), called)  # type: ignore[no-any-return]


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, e, c, bias, columns, weights, inverse_temperature, ids, saving_for, *others):
        setting, ctx.called = others
        (call, (_, _, scale), _, _), kept = setting, columns >= 0
        ctx.part, ctx.dtype, ctx.setting = e.shape, e.dtype, setting._replace(call=call.of_backward)
        inputs = e, c, bias
        operands = of_own_columns(Operands(e, c, bias, columns, weights, inverse_temperature, ids), setting)
        operands = shards.rounded(operands, call)
        of_target = references(operands, columns, saving_for, setting)
        own, saved = shards.statistics(operands, of_target, saving_for, call, scale)
        ctx.kind = None if saved is None else shards.kind(operands, call).of_backward
        found = of_all_columns(own, kept, operands.weights, setting)
        numbers = found[: ctx.setting.call.rows].clone()
        between = torch.where(kept, numbers[1] - own[1], 0)
        numbers[0] += between
        numbers[1] -= between
        if ctx.setting.call.with_mean:
            numbers[-1] += between
        inputs = [x for x, y in zip(inputs, operands, strict=False) if x is not y]  # for first_order
        ctx.inputs = len(inputs)
        ctx.save_for_backward(*inputs, *operands, numbers, saved)
        return found

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (call, (_, _, scale), tokens, shard), wanted = ctx.setting, ctx.needs_input_grad[:3]
        kind, part, dtype, cotangents = ctx.kind, ctx.part, ctx.dtype, one_cotangent(cotangents)

        def run(cotangents: Tensor, *arrays: Any) -> tuple[Tensor | None, ...]:
            """de, summed over the group, dc and dbias. None where not wanted."""
            operands, held = Operands(*arrays[:7]), shards.Held(*arrays[7:])
            de, dc, dbias = shards.gradients(cotangents, operands, held, wanted, call, scale, kind)
            return None if de is None else reduced(de, part, tokens, shard).to(dtype), dc, dbias

        saved: Any = ctx.saved_tensors  # a checkpoint lets them be read once
        inputs, arrays = saved[: ctx.inputs], saved[ctx.inputs :]
        return *first_order(ctx.called, run, (cotangents[: call.rows], *arrays), inputs), *[None] * 7


def of_own_columns(operands: Operands, setting: Setting) -> Operands:
    """The operands of this process' columns, with e of all tokens, (N, D)."""
    (e, c, bias, columns, weights, inverse_temperature, ids), shard = operands, setting.shard
    e = whole(e, setting.tokens, shard).reshape(-1, e.shape[-1])
    weights = None if weights is None else weights[shard.start : shard.stop]
    if ids is not None:
        ids = torch.where((ids >= shard.start) & (ids < shard.stop), ids - shard.start, -1)
    return Operands(e, c, bias, shard.held(columns), weights, inverse_temperature, ids)


def references(operands: Operands, columns: Tensor, saving_for: tuple[bool, ...], setting: Setting) -> Tensor | None:
    """The logits of the targets, (N,): -inf where no process holds the target. None where no kernel takes them.

    columns: of the whole vocabulary.
    """
    call, (_, _, scale), _, shard = setting
    if not shards.needs_reference(operands.e, call):
        return None
    target = summed(shards.target(operands, saving_for, call, scale), shard)
    return torch.where((columns >= 0) & (columns < shard.vocabulary), target, -torch.inf)


def of_all_columns(own: Tensor, kept: Tensor, weights: Tensor | None, setting: Setting) -> Tensor:
    """The statistics over all columns, from those over this process' columns; 0 where a token is ignored.

    Relative to the largest reference. weights: of this process' columns; None: 1.
    """
    (call, _, _, shard), of_sum, of_ids, own = setting, [], [], torch.where(kept, own, 0)
    if call.smooths:
        weight = shard.stop - shard.start if weights is None else weights.sum(dtype=own.dtype)
        of_sum = [torch.ones_like(own[:1]) * weight]
    first = 3 + call.smooths
    if call.ids:  # each is the logit of one process' column, and 0 on the others
        of_ids = [summed(own[first : first + call.ids].clone(), shard)]
    each = gathered(torch.cat([own[:first], own[first + call.ids :], *of_sum]), shard).unbind(1)
    (log_mass, references, target, *sums), of_sum = (each[:-1], each[-1:]) if of_sum else (each, ())
    reference = references.amax(0)
    between = references - reference
    log_mass, rows = log_mass + between, [reference, target.sum(0)]
    mean = [blocks.mean_over_runs(log_mass, sums.pop() + between)] if call.with_mean else []
    rows += [(x + between * weight).sum(0) for x, weight in zip(sums, of_sum, strict=True)]
    found = [torch.stack([torch.logsumexp(log_mass, 0), *rows]), *of_ids, *(x[None] for x in mean)]
    return torch.where(kept, torch.cat(found), 0)
