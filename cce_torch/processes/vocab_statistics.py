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
    forward     where they are asked for, the largest logits of each process' columns and their ids, gathered; and the
                sum of the logits, summed
    backward    de, N·D float32, summed

Under sequence parallelism each process has only a part of e: e is gathered forward, and de is reduce-scattered.
Where the forward pass forms the gradients, it exchanges de too (cce_torch/in_forward.py).
All processes of the group make the same calls on as many tokens, so they meet in the same collectives, even if one
of them holds no column.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_torch.autograd import Gradients, Recomputed, Tensors, applied
from cce_torch.call import Numbers, Operands, Residuals, Saved, Selections, are_left, selects, without_selections
from cce_torch.in_torch.largest import merged
from cce_torch.processes import shards
from cce_torch.processes.collectives import gathered, one_cotangent, reduced, summed, whole
from cce_torch.processes.vocab_parallel import Setting, VocabParallel


def numbers(operands: Operands, setting: Setting, called: str) -> Numbers:
    """The numbers of each token over the whole vocabulary, equal on all processes.

    The statistics are differentiable once in e, c and bias. The cotangents must be equal on all processes too. The
    lowest id comes first among equal logits.
    operands: e (*tokens, D), or its part under sequence parallelism; c (stop - start, D); bias (stop - start,); columns
    (N,) of the whole vocabulary; weights (V,). called: the public function.
    """
    (e, c, bias, columns, *_), shard = operands, setting.shard
    call = setting.call._replace(reduction="none", has_z_loss=False)  # PyTorch computes the loss from the statistics
    setting = setting._replace(call=call)
    # A graph of torch.compile would need the saved size; a program with selections leaves nothing.
    saving = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not selects(call)
    wanted = [saving and x is not None and x.requires_grad for x in (e, c, bias)]
    saving_for = wanted if any(wanted) else []
    constant = operands._replace(e=e.detach(), c=c.detach(), bias=None if bias is None else bias.detach())
    own = shards.rounded(of_own_columns(constant, setting), call)
    whole_e = None if shard.sequence_axis is None else own.e
    copies = own[1:3] if shards.rounds(call) else (None, None)
    task = _Numbers(setting, called, saving_for, shards.handover(own, saving_for, call))
    found, *selected = applied(Recomputed, task, e, c, bias, whole_e, *copies, *own[3:], columns)
    return Numbers(found, Selections(*selected))


class _Numbers(NamedTuple):
    """The task. Its tensors: e, c, bias; the operands of this process' columns; the columns of the whole vocabulary.

    Of these operands e, c and bias are None where they are the first three tensors.
    """

    setting: Setting
    called: str
    saving_for: Sequence[bool]
    left: Any  # what the forward pass leaves, as programs.Handover; None: nothing

    results, differentiable = 4, 1

    def of_backward(self) -> "_Numbers":
        call = without_selections(self.setting.call.of_backward)
        return self._replace(setting=self.setting._replace(call=call))

    def own(self, arrays: Tensors) -> Operands:
        e, c, bias, *copies = arrays[:6]
        e, c, bias = (x if y is None else y for x, y in zip((e, c, bias), copies, strict=True))
        return Operands(e.reshape(-1, e.shape[-1]), c, bias, *arrays[6:10])

    def forward(self, *arrays: Any) -> tuple[Tensor | None, ...]:
        (call, (_, _, scale), _, _), operands, columns = self.setting, self.own(arrays), arrays[-1]
        of_target = references(operands, columns, self.saving_for, self.setting)
        (own, selected), left = shards.numbers(operands, of_target, self.saving_for, call, scale, self.left)
        kept = columns >= 0
        found = of_all_columns(own, kept, operands.weights, self.setting)
        numbers = found[: call.of_backward.rows].clone()
        between = torch.where(kept, numbers[1] - own[1], 0)
        numbers[0] += between
        numbers[1] -= between
        if call.of_backward.with_mean:
            numbers[-1] += between
        selected = _selections(selected, operands, self.setting)
        return found, *selected, numbers, *(left if self.saving_for else ())

    def saves(self, given: Tensors, found: Tensors) -> Tensors:
        return *given[:10], *found[self.results :]

    def backward(self, cotangents: Tensors, saved: Tensors, wanted: Sequence[bool]) -> Gradients:
        """de, summed over the group, dc and dbias."""
        (call, (_, _, scale), tokens, shard), of = self.setting, one_cotangent(cotangents[0])[: self.setting.call.rows]
        numbers, *left = saved[10:]
        kept = Saved(numbers, Residuals(*left), self.saving_for if are_left(left) else [])
        handover, wanted, e = self.left if are_left(left) else None, wanted[:3], saved[0]
        de, dc, dbias = shards.gradients(of, self.own(saved), kept, wanted, call, scale, handover)
        return reduced(de, e.shape, tokens, shard).to(e.dtype) if wanted[0] and de is not None else None, dc, dbias


def of_own_columns(operands: Operands, setting: Setting) -> Operands:
    """The operands of this process' columns, with e of all tokens, (N, D)."""
    if setting.shard is None:
        return operands
    (e, c, bias, columns, weights, inverse_temperature, ids), shard = operands, setting.shard
    e = whole(e, setting.tokens, shard).reshape(-1, e.shape[-1])
    weights = own_weights(weights, shard)
    if ids is not None:
        ids = torch.where((ids >= shard.start) & (ids < shard.stop), ids - shard.start, -1)
    return Operands(e, c, bias, shard.held(columns), weights, inverse_temperature, ids)


def own_weights(weights: Tensor | None, shard: VocabParallel | None) -> Tensor | None:
    """The weights of this process' columns."""
    return weights if weights is None or shard is None else weights[shard.start : shard.stop]


def references(operands: Operands, columns: Tensor, saving_for: Sequence[bool], setting: Setting) -> Tensor | None:
    """The logits of the targets, (N,): -inf where no process holds the target.

    None where no kernel takes them, as beside selections, and where one process holds all columns: its programs find
    them.

    columns: of the whole vocabulary.
    """
    call, (_, _, scale), _, shard = setting
    if shard is None or selects(call) or not shards.needs_reference(operands.e, call):
        return None
    target = summed(shards.target(operands, saving_for, call, scale), shard)
    return torch.where((columns >= 0) & (columns < shard.vocabulary), target, -torch.inf)


def of_all_columns(own: Tensor, kept: Tensor, weights: Tensor | None, setting: Setting) -> Tensor:
    """The statistics over all columns, from those over this process' columns; 0 where a token is ignored.

    Relative to the largest reference. weights: of this process' columns; None: 1.
    """
    (call, _, _, shard), of_sum, of_ids, own = setting, [], [], torch.where(kept, own, 0)
    if shard is None:
        return own
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
    mean = []
    if call.with_mean:  # as cce_kernels.mean.over_runs
        share = torch.where(log_mass > -torch.inf, torch.softmax(log_mass, 0), 0)
        mean = [(share * (sums.pop() + between)).sum(0)]
    rows += [(x + between * weight).sum(0) for x, weight in zip(sums, of_sum, strict=True)]
    found = [torch.stack([torch.logsumexp(log_mass, 0), *rows]), *of_ids, *(x[None] for x in mean)]
    return torch.where(kept, torch.cat(found), 0)


def _selections(own: Selections, operands: Operands, setting: Setting) -> Selections:
    """Those over all columns, from those over this process' columns, whose operands these are."""
    (values, ids, mean), (call, _, _, shard) = own, setting
    if values is not None and ids is not None:
        values, ids = (gathered(x, shard).transpose(0, 1).flatten(1) for x in (values, ids + shard.start))
        values, ids = merged(values, ids, call.top_k)
    return Selections(values, ids, None if mean is None else summed(mean * len(operands.c), shard) / shard.vocabulary)
