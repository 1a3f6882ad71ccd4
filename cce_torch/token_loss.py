"""A loss of the user's own over the numbers of each token, at the price of the built-in loss, for PyTorch."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import arguments as checks
from cce_torch import in_forward, losses, statistics
from cce_torch.call import Scheduled, entropy_of, lse_of
from cce_torch.options import Impl, Reduction
from cce_torch.processes.vocab_parallel import Setting, VocabParallel
from cce_torch.token_function import NAME, TokenFunction, TokenNumbers, kept, token_numbers


@checks.traced
def linear_token_loss(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    fn: Callable[..., Tensor],
    *arguments: Any,
    bias: Tensor | None = None,
    entropy: bool = False,
    temperature: float | Tensor = 1.0,
    num_items: float | Tensor | None = None,
    reduction: Reduction = "mean",
    return_numbers: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    shift: bool | int = False,
    logit_scale: float | None = None,
    vocab_axis: Literal[0, 1] = 0,
    impl: Impl = "auto",
    memory_budget: float | Literal["all"] | None = None,
    precision: Literal["highest", "high", "medium"] | None = None,
    check_targets: bool = False,
    vocab_parallel: VocabParallel | None = None,
) -> Any:
    """The mean or sum of `fn(numbers, *arguments)` over the tokens, where fn computes each token's loss.

    Equivalent to the following, without holding the logits:

        numbers = linear_log_probs(e, c, targets, bias, entropy=entropy, temperature=temperature)
        total = where(targets == ignore_index, 0, fn(numbers, *arguments))
        loss = sum(total) / num_items                           # for reduction="mean"

    What a token's loss does to its logits is known as soon as its numbers are. So the gradients can be formed in the
    forward pass, as those of `linear_cross_entropy`. Policy losses such as GRPO's and PPO's with a clip, focal losses
    and entropy bonuses are a few lines (docs/log-probabilities.md).

    The loss can be differentiated once in e, c and bias with any impl.

    Args:
      e, c, targets, bias: as for `linear_cross_entropy`; so are all options that are not named here.
      fn: `fn(numbers, *arguments)` returns a tensor of the shape of numbers.log_probs: the loss of each token, which
        depends on the numbers and arguments of that token alone. numbers has the fields log_probs, lse and entropy,
        float32 (float64 for float64 inputs). fn is pure, and is called on tensors (n,) of any number n of tokens, any
        number of times; first it is tried on 2 and on 3. What it returns for ignored tokens is discarded. It must not
        close over a tensor with a number for each token: give that as an argument.
      arguments: numbers, and tensors that broadcast to the shape of targets after the shift. They have no gradient.
      entropy: whether numbers.entropy is computed; else it is None.
      temperature: as for `linear_log_probs`.
      num_items: the number that "mean" divides by; by default the number of tokens that are not ignored.
      reduction: "mean", "sum", or "none" for the loss of each token.
      return_numbers: return (loss, numbers). The numbers have the shape of targets after the shift, no gradient, and
        are 0 for ignored tokens.
      vocab_parallel: the rows of the whole classifier that c holds, as in `linear_cross_entropy`. fn gets the numbers
        of the whole vocabulary, and must be the same on all processes of the group.

    Returns:
      The loss, float32 (float64 for float64 inputs): a scalar; for reduction="none" a tensor.

    Raises:
      ValueError: shapes or devices do not fit, fn does not return a loss for each of 2 and of 3 tokens, an option is
        out of its range, fn changes an argument in place, or, with check_targets, a target is out of range.
      TypeError: a tensor has a wrong type, fn is not callable or returns no real numbers of a floating type, or an
        argument of fn, or a tensor that fn closes over, requires a gradient.
      NotImplementedError: the impl does not run on this device.

    Examples:
      A policy loss with a clip and an entropy bonus:

      >>> import torch
      >>> from cce_torch import linear_token_loss
      >>> def policy(numbers, old, advantage):
      ...     ratio = (numbers.log_probs - old).exp()
      ...     gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
      ...     return -gain - 0.01 * numbers.entropy
      >>> hidden = torch.randn(2, 16, 64, requires_grad=True)                 # (B, T, D)
      >>> head = torch.randn(1000, 64, requires_grad=True)                    # (V, D)
      >>> tokens = torch.randint(1000, (2, 16))                               # (B, T)
      >>> old, advantage = torch.full((2, 16), -7.0), torch.tensor([[1.0], [-0.5]])
      >>> loss = linear_token_loss(hidden, head, tokens, policy, old, advantage, entropy=True)
      >>> loss.backward()
      >>> hidden.grad.shape, head.grad.shape
      (torch.Size([2, 16, 64]), torch.Size([1000, 64]))
    """
    contract.of_token_loss(entropy)
    contract.choice("return_numbers", return_numbers, (False, True))
    of_call = dict(e=e, c=c, targets=targets, bias=bias)
    others = {f"argument {k} of fn": y for k, y in enumerate(arguments)} | {"temperature": temperature}
    remedy = ", and vocab_parallel=VocabParallel.from_dtensor(c) if c is split by rows"
    checks.refuse_dtensors(of_call | {k: y for k, y in others.items() if isinstance(y, Tensor)}, NAME, remedy)
    numbers = dict(ignore_index=ignore_index, memory_budget=memory_budget, shift=shift)
    options = checks.checked(checks.Options(reduction, impl, vocab_axis, precision, logit_scale, softcap, **numbers))
    shard, scale = checks.shard_of(vocab_parallel, None), options.logit_scale
    x = checks.prepared(NAME, of_call, options, num_items, check_targets, shard)
    operands = statistics.operands_of(x)
    operands = operands._replace(inverse_temperature=checks.inverse_temperature(temperature, x, NAME))
    of_tokens = TokenFunction.of(fn, arguments, x, operands.columns)
    call = x.call("none", with_mean=entropy, with_temperature=operands.inverse_temperature is not None)
    in_chunks = call._replace(ignore_index=-1, shift=0)  # `columns` knows the ignored tokens and the shift
    setting = Setting(in_chunks, Scheduled(scale=scale), x.targets.shape, shard)
    formed = None if reduction == "none" else in_forward.total(operands, of_tokens, setting)
    if formed is None:
        log_probs, found, *_ = statistics.of_tokens(x, call, operands.inverse_temperature, scale)
        entropies = entropy_of(found[0], found[3]) if entropy else None
        value = of_tokens(kept(TokenNumbers(log_probs, lse_of(found), entropies), operands.columns))
        # log_probs is 0 for ignored tokens. Through it a loss that reads no number still has gradients, which are 0.
        value = torch.where(operands.columns >= 0, value, log_probs)
        value = x.unshifted(value) if reduction == "none" else value.sum()
    else:
        value, found = formed
    if reduction != "none":
        value = losses.reduced(value, losses.Terms(operands.columns, None, None, x.vocabulary), x.num_items, reduction)
    if not return_numbers:
        return value
    shown = token_numbers(found.detach(), operands.columns, x.vocabulary)
    return value, TokenNumbers(*(None if y is None else x.unshifted(y) for y in shown))  # type: ignore[arg-type]
