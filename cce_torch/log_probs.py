"""The log-probabilities of targets, and the entropy, for PyTorch: a number for each token, without the logits."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import arguments, losses, ops, statistics
from cce_torch.arguments import Prepared, constant, flat
from cce_torch.call import Call, Given
from cce_torch.on_jax import tensors
from cce_torch.options import Impl
from cce_torch.processes.vocab_parallel import VocabParallel

NAME = "linear_log_probs"
COLDEST = 2.0**-100  # a temperature below it is raised to it: float32 does not hold the inverse of a smaller one


class LogProbs(NamedTuple):
    """The numbers of each token, float32 (float64 for float64 inputs). None: not asked for. Ignored tokens have 0."""

    log_probs: Tensor | None  # log p of the target; None if there are no targets
    lse: Tensor  # the log-sum-exp of the logits
    entropy: Tensor | None  # -sum(p * log p), in nats


def linear_log_probs(
    e: Tensor,
    c: Tensor,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["detached"] = False,
    softcap: float | None = None,
    logit_scale: float | None = None,
    ignore_index: int = -100,
    shift: bool | int = False,
    vocab_axis: Literal[0, 1] = 0,
    memory_budget: float | Literal["all"] | None = None,
    impl: Impl = "auto",
    precision: Literal["highest", "high", "medium"] | None = None,
    vocab_parallel: VocabParallel | None = None,
    check_targets: bool = False,
) -> LogProbs:
    """Log-probabilities of `targets` under the softmax of the logits `e @ c.T + bias`, without holding the logits.

    Equivalent to the following, with exact gradients:

        z = logit_scale * (e.float() @ c.float().T + bias)      # (..., V)
        z = softcap * tanh(z / softcap)                         # if softcap
        z = z / temperature[..., None]
        lse = logsumexp(z, -1)
        log_probs = z[targets] - lse                            # 0 where targets == ignore_index
        entropy = lse - sum(softmax(z) * z, -1)

    log_probs, lse and entropy can be differentiated once in e, c and bias with any impl. Policies in reinforcement
    learning, sequence scores and perplexities are made of these numbers.

    Args:
      e: embeddings, (..., D), bfloat16, float16 or float32 (float64 with impl "reference" and "torch_compile").
      c: classifier: (V, D), or (D, V) with vocab_axis=1; of e's type, or float32 beside a 16-bit e, as in
        `linear_cross_entropy`.
      targets: integers of shape (...). A target outside [0, V) that is not ignore_index makes that token's log_probs
        NaN, and every gradient that they contribute to. None: log_probs is None, and every token counts.
      bias: (V,), of c's type.
      temperature: a positive number, or a tensor that broadcasts to (...), a temperature for each token of e. It gets
        no gradient, and is not shifted. Values of a tensor are not checked. A new value compiles nothing.
      entropy: True: return the entropy of each token's distribution, differentiable. "detached": without a gradient,
        which makes the backward pass as cheap as without it.
      softcap: positive; logits become softcap·tanh(logit / softcap).
      logit_scale: a number that multiplies the logits before softcap.
      ignore_index: tokens with this target have numbers of 0 and no gradient, whatever their embedding holds.
      shift: k in [0, T), or True for 1: token i of the last axis of targets predicts target i + k. Not without targets.
      vocab_axis, memory_budget, impl, precision, check_targets: as in `linear_cross_entropy`.
      vocab_parallel: the rows of the whole classifier that c holds, as in `linear_cross_entropy`. The numbers are those
        of the whole vocabulary, equal on all processes of the group.

    Returns:
      LogProbs(log_probs, lse, entropy), in nats, each of the shape of targets after the shift. None for what is not
      asked for.

    Raises:
      ValueError: shapes or devices do not fit, an option is out of its range, or, with check_targets, a target is out
        of range.
      TypeError: a tensor has a wrong type, or temperature requires a gradient.
      NotImplementedError: the impl does not run on this device.

    Examples:
      Log-probabilities and entropy of sampled tokens:

      >>> import torch
      >>> from cce_torch import linear_log_probs
      >>> hidden = torch.randn(2, 16, 64, requires_grad=True)                 # (B, T, D)
      >>> head = torch.randn(1000, 64, requires_grad=True)                    # (V, D)
      >>> tokens = torch.randint(1000, (2, 16))                               # (B, T)
      >>> found = linear_log_probs(hidden, head, tokens, shift=1, temperature=0.7, entropy=True)
      >>> (found.log_probs + 0.01 * found.entropy).sum().backward()
      >>> found.log_probs.shape, found.entropy.shape, hidden.grad.shape
      (torch.Size([2, 15]), torch.Size([2, 15]), torch.Size([2, 16, 64]))
    """
    contract.choice("entropy", entropy, (False, True, "detached"))
    given = dict(e=e, c=c, targets=targets, bias=bias)
    _refuse_dtensors(given | {"temperature": temperature if isinstance(temperature, Tensor) else None})
    options = "none", impl, vocab_axis, precision, logit_scale, softcap, 0.0, 0.0, ignore_index, memory_budget, 0.0
    scale, softcap, _, _, ignore_index, budget, _, shift = arguments.options(*options, shift)
    shard = arguments.shard_of(vocab_parallel, None)
    if targets is None:
        _check_without_targets(shift, shard)
        ignore_index, check_targets = -100, False
        given["targets"] = e.new_zeros(e.shape[:-1], dtype=torch.int64) if isinstance(e, Tensor) else e
    asked = arguments.Asked(NAME, vocab_axis, shift, ignore_index, impl, check_targets, shard, {"logit_scale": scale})
    x = arguments.prepared(given, asked, {})
    inverse = _inverse(temperature, x)
    call = Call(
        softcap,
        budget,
        ignore_index=ignore_index if x.alone else -1,
        shift=x.shift if x.alone else 0,
        reduction="none",
        precision=precision,
        impl=x.impl,
        wide_dc=x.c.dtype != x.e.dtype,
        of_shard=shard is not None,
        with_mean=entropy is not False,
        mean_is_detached=entropy == "detached",
        with_temperature=inverse is not None,
    )
    nll, found = _numbers(x, call, inverse, scale)
    lse, *mean = found[0], *found[2:]
    of_entropy = None
    if mean:
        of_entropy = x.unshifted(lse - mean[0])
        of_entropy = of_entropy.detach() if entropy == "detached" else of_entropy
    return LogProbs(None if targets is None else x.unshifted(0 - nll), x.unshifted(lse).clone(), of_entropy)


def _numbers(x: Prepared, call: Call, inverse: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The negative log-probabilities, (N,), 0 for ignored tokens, and the statistics (call.py)."""
    scheduled = 0.0, 0.0, scale
    if x.alone:
        row_length = x.targets.shape[-1] if x.shift else 1
        tokens = flat(x.targets), None, None, None, inverse
        return ops.loss(Given(flat(x.e, 1), x.c, x.bias, *tokens, scheduled, row_length), call, True)
    operands = statistics.operands_of(x)._replace(inverse_temperature=inverse)
    found = statistics.statistics(x, operands, call, scheduled)
    terms = losses.Terms(operands.columns, None, None, x.vocabulary)
    return losses.loss(found[:2], terms, None, "none", scheduled)[0], found


def _inverse(temperature: Any, x: Prepared) -> Tensor | None:
    """1 / temperature of each token, (N,) at least float32; None for the number 1."""
    tokens, dtype = x.targets.shape, torch.promote_types(x.e.dtype, torch.float32)
    if not isinstance(temperature, Tensor):
        arguments.check_number("temperature", temperature, NAME)
        value = contract.number("temperature", temperature, low=0.0, above=True)
        if constant(value == 1):
            return None
        return x.e.new_ones(tokens.numel(), dtype=dtype) * (1 / max(value, COLDEST))
    tensors.check({"temperature": temperature})
    if temperature.requires_grad:
        raise TypeError("temperature gets no gradient, but requires one: pass temperature.detach()")
    if temperature.is_complex() or temperature.dtype == torch.bool:
        raise TypeError(f"temperature must be real, got temperature {arguments.type_name(temperature)}")
    shape = tuple(temperature.shape)
    if len(shape) > len(tokens) or any(n not in (1, m) for n, m in zip(shape[::-1], tokens[::-1], strict=False)):
        raise ValueError(
            f"temperature must be a number, or broadcast to the shape of e without its last axis, {tuple(tokens)}, got "
            f"temperature {shape}"
        )
    if temperature.device != x.e.device and temperature.numel() != 1:
        raise ValueError(f"all tensors must be on one device, got e {x.e.device}, temperature {temperature.device}")
    inverse = 1 / temperature.to(x.e.device, dtype)
    return inverse.expand(tokens).reshape(-1)


def _check_without_targets(shift: int, shard: VocabParallel | None) -> None:
    if shift:
        raise ValueError(f"shift={shift} moves targets, and there are none: leave shift out, or give targets")
    if shard is not None and shard.sequence_axis is not None:
        raise ValueError(
            f"targets=None does not tell the number of tokens that sequence_axis={shard.sequence_axis} splits: give "
            "targets"
        )


def _refuse_dtensors(given: dict[str, Any]) -> None:
    if tensors.has_dtensor(given):
        name = next(name for name, x in given.items() if type(x).__name__ == "DTensor")
        raise TypeError(
            f"{name} is a DTensor, and linear_log_probs takes plain tensors: pass to_local() of each tensor, and "
            "vocab_parallel=VocabParallel.from_dtensor(c) if c is split by rows"
        )
