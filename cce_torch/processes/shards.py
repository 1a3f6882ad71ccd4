"""The core on one shard of the vocabulary, by each impl: what a process computes between two collectives.

`columns` are the targets as columns of the shard: negative for an ignored token, the number of the shard's columns
where the shard does not hold the token's target.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cce_torch import ops
from cce_torch.arguments import OF_TORCH
from cce_torch.call import Call, Given, Numbers, OfResults, Operands, Residuals, Saved, Scheduled, Selections
from cce_torch.in_torch import reference, rule
from cce_torch.in_torch.largest import NO_ID
from cce_torch.on_jax import tensors


def needs_reference(e: Tensor, call: Call) -> bool:
    """Whether the exponentials are relative to the target's logit, summed over all shards."""
    if call.impl in OF_TORCH:
        return False
    from cce_kernels.engines import needs_reference  # imports JAX

    return needs_reference(e.itemsize, call.impl)  # type: ignore[arg-type]


def rounds(call: Call) -> bool:
    """Whether c and bias are rounded. PyTorch's impls round a float32 c and bias themselves."""
    return call.wide_dc and call.impl not in OF_TORCH


def rounded(operands: Operands, call: Call) -> Operands:
    """The operands with c and bias as `numbers` takes them."""
    if not rounds(call):
        return operands
    e, c, bias, *_ = operands
    return operands._replace(c=tensors.rounded(c, e), bias=tensors.rounded(bias, e))


def handover(operands: Operands, saving_for: Sequence[bool], call: Call) -> Any:
    """What `numbers` leaves, as programs.Handover, which a graph with saved exponentials holds: it knows their size.

    None where it leaves nothing.
    """
    if not saving_for or call.impl in OF_TORCH or not operands.e.shape[0] or not operands.c.shape[0]:
        return None
    return ops.programs().handover(_given(operands), call, saving_for)


def _given(operands: Operands) -> Given:
    """The operands as ops.py takes them. Call.ignore_index is -1."""
    e, c, bias, columns, weights, inverse_temperature, ids = operands
    return Given(e, c, bias, columns.long(), weights, inverse_temperature=inverse_temperature, ids=ids)


def target(operands: Operands, saving_for: Sequence[bool], call: Call, scale: float) -> Tensor:
    """The logit of each token's target, (N,): 0 where the shard does not hold it."""
    if not operands.e.shape[0] or not operands.c.shape[0]:
        return operands.e.new_zeros(operands.e.shape[0], dtype=torch.float32)
    return ops.target_of(_given(operands), Scheduled(scale=scale), saving_for, call)


def numbers(
    operands: Operands, of_target: Tensor | None, saving_for: Sequence[bool], call: Call, scale: float, left: Any = None
) -> tuple[Numbers, Residuals]:
    """The numbers over the shard's columns, and what is left for `gradients`.

    The selections have call.top_k places: -inf and NO_ID where the shard has no column for one. The ids count from the
    shard's first column, and the mean logit is of its columns.

    of_target: (N,), the reference of the exponentials if needs_reference; saving_for: the gradients that will be asked
    for; []: none. left: `handover`, if it is known.
    """
    tokens, columns, residuals = operands.e.shape[0], operands.c.shape[0], Residuals()
    of_columns = call._replace(top_k=min(call.top_k, columns))
    if not tokens or not columns:
        found = of_no_columns(operands.e, call)
    elif call.impl == "reference":
        found = reference.numbers(operands, of_columns, scale)
    elif call.impl == "torch_compile":
        found = rule.run_numbers(operands, of_columns, scale)
    else:
        given, scheduled = _given(operands), Scheduled(scale=scale)
        results = ops.loss_of(given, scheduled, of_target, saving_for, of_columns, left=left)
        found, residuals = Numbers(results.statistics, results.selections), results.residuals
    return found._replace(selections=_padded(found.selections, call)), residuals


def _padded(own: Selections, call: Call) -> Selections:
    """The selections with as many places as are asked for; None for what is not asked for, on every process."""
    values, ids, mean = own
    if call.top_k and values is not None and ids is not None:
        more = [0, call.top_k - values.shape[1]]
        values, ids = pad(values, more, value=-torch.inf), pad(ids.long(), more, value=NO_ID)
        return Selections(values, ids, mean if call.mean_logit else None)
    return Selections(mean_logit=mean if call.mean_logit else None)


def of_no_columns(e: Tensor, call: Call) -> Numbers:
    tokens, dtype = e.shape[0], torch.promote_types(e.dtype, torch.float32)
    empty = e.new_zeros((call.rows, tokens), dtype=dtype)
    empty[0], empty[1] = -torch.inf, torch.finfo(torch.float32).min  # the reference of other columns is larger
    no_places = e.new_empty((tokens, 0), dtype=dtype)
    return Numbers(empty, Selections(no_places, no_places.long(), e.new_zeros(tokens, dtype=dtype)))


def gradients(
    cotangents: Tensor, operands: Operands, saved: Saved, wanted: Sequence[bool], call: Call, scale: float, left: Any
) -> tuple[Tensor | None, ...]:
    """de of the shard's columns alone, at least float32, dc and dbias, in their types. None where not wanted.

    cotangents: of the statistics over the whole vocabulary. saved.statistics: these, relative to the references of the
    shard's columns. left: of the forward pass, if it saved something.
    """
    e, c, bias, *_ = operands
    tensors.check({"e": e, "c": c, "bias": bias})  # FSDP may have freed one after the forward pass
    if not e.shape[0] or not c.shape[0]:
        de = torch.zeros_like(e, dtype=torch.promote_types(e.dtype, torch.float32))
        return de, torch.zeros_like(c), None if bias is None else torch.zeros_like(bias)
    if call.impl in OF_TORCH:
        run: Any = reference.gradients if call.impl == "reference" else rule.run_gradients
        return run(cotangents, operands, saved.statistics, call, scale, list(wanted))[:3]
    of, numbers, asked = OfResults(None, cotangents), Scheduled(scale=scale), [*wanted, False]
    return ops.gradients_of(of, _given(operands), numbers, saved, asked, call, left=left)[:3]
