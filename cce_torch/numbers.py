"""The numbers of each token that linear_log_probs and linear_token_loss have in common."""

from torch import Tensor

from cce_torch import losses, ops, statistics
from cce_torch.arguments import Prepared, flat
from cce_torch.call import Call, Given


def of_tokens(x: Prepared, call: Call, inverse: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """The log-probabilities of the targets, (N,), 0 for ignored tokens; the statistics; the selections (call.py).

    Only if x.alone may the call ask for selections.
    """
    scheduled = 0.0, 0.0, scale
    if x.alone:
        row_length = x.targets.shape[-1] if x.shift else 1
        tokens = flat(x.targets), None, None, None, inverse
        given = Given(flat(x.e, 1), x.c, x.bias, *tokens, scheduled, row_length)
        nll, found, *selected = ops.loss(given, call, True, x.called)
        return 0 - nll, found, *selected
    operands = statistics.operands_of(x)._replace(inverse_temperature=inverse)
    found = statistics.statistics(x, operands, call, scheduled)
    terms = losses.Terms(operands.columns, None, None, x.vocabulary)
    return 0 - losses.loss(found[:3], terms, None, "none", scheduled)[0], found
