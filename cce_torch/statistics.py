"""The numbers (call.py) of calls that are not one JAX program, and the log-probabilities of all calls."""

from typing import Any

from torch import Tensor

from cce_torch import losses, ops
from cce_torch.arguments import Prepared, flat, shifted
from cce_torch.call import Call, Given, Numbers, Operands, Scheduled, Selections
from cce_torch.in_torch import reference, rule
from cce_torch.processes import vocab_statistics
from cce_torch.processes.vocab_parallel import Setting


def operands_of(x: Prepared) -> Operands:
    """The tensors of the core, without weights and temperatures. e of a shard keeps its shape."""
    targets = shifted(x.targets, x.shift, x.ignore_index) if x.shift else x.targets
    columns = losses.columns(flat(targets), x.ignore_index, x.vocabulary)
    return Operands(flat(x.e, 1) if x.shard is None else x.e, x.c, x.bias, columns, None)


def numbers(x: Prepared, operands: Operands, call: Call, scheduled: tuple[float, float, float]) -> Numbers:
    """The statistics are differentiable. scheduled: label_smoothing, z_loss and scale."""
    if x.shard is not None:
        return vocab_statistics.numbers(operands, Setting(call, scheduled, x.targets.shape, x.shard), x.called)
    if x.impl == "torch_compile":
        return rule.numbers(operands, call, scheduled[2], x.called)
    return reference.numbers(operands, call, scheduled[2])


def of_tokens(
    x: Prepared, call: Call, inverse: Tensor | None, scale: float, ids: Tensor | None = None
) -> tuple[Tensor, Any, Selections]:
    """The log-probabilities of the targets, (N,), 0 for ignored tokens; the statistics; the selections (call.py).

    By whichever impl, JAX programs too. ids: (N, call.ids) int32.
    """
    scheduled = Scheduled(scale=scale)
    if x.alone:
        given = Given(flat(x.e, 1), x.c, x.bias, x.targets, inverse_temperature=inverse, ids=ids)
        nll, found, selected = ops.loss(given, scheduled, call, True, x.called)
        return 0 - nll, found, selected
    operands = operands_of(x)._replace(inverse_temperature=inverse, ids=ids)
    found, selected = numbers(x, operands, call, scheduled)
    terms = losses.Terms(operands.columns, None, None, x.vocabulary)
    return 0 - losses.loss(found[:3], terms, None, "none", scheduled)[0], found, selected
