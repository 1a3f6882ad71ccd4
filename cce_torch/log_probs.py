"""Log-probabilities, entropies and the likeliest ids, for PyTorch: a few numbers for each token, without the logits."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import arguments, statistics
from cce_torch.arguments import Prepared
from cce_torch.call import entropy_of, log_p, lse_of
from cce_torch.options import Impl
from cce_torch.processes.vocab_parallel import VocabParallel

NAME = "linear_log_probs"
MOST_IDS = 256


class LogProbs(NamedTuple):
    """The numbers of each token, float32 (float64 for float64 inputs). None: not asked for. Ignored tokens have 0.

    log_probs, lse, entropy and id_log_probs are differentiable.
    """

    log_probs: Tensor | None  # log p of the target; None if there are no targets
    lse: Tensor  # the log-sum-exp of the logits
    entropy: Tensor | None = None  # -sum(p * log p), in nats
    id_log_probs: Tensor | None = None  # (..., K), log p of ids; -inf where an id names no column
    predicted: Tensor | None = None  # int64, the id of the largest logit
    top_ids: Tensor | None = None  # (..., top_k) int64, the ids of the largest logits, descending
    top_log_probs: Tensor | None = None  # (..., top_k), their log p
    mean_logit: Tensor | None = None  # the mean of the logits over the vocabulary


@arguments.traced
def linear_log_probs(
    e: Tensor,
    c: Tensor,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool | Literal["detached"] = False,
    predicted: bool = False,
    top_k: int = 0,
    mean_logit: bool = False,
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
        id_log_probs = z.gather(-1, ids) - lse[..., None]
        top_logits, top_ids = topk(z, top_k)

    log_probs, lse, entropy and id_log_probs can be differentiated once in e, c and bias with any impl. Policies in
    reinforcement learning, sequence scores, distillation from a few ids and perplexities are made of these numbers.
    One product of e and c gives all of them. With predicted, top_k or mean_logit the backward pass computes the logits
    again, whatever the memory budget.

    Args:
      e: embeddings, (..., D), bfloat16, float16 or float32 (float64 with impl "reference" and "torch_compile").
      c: classifier: (V, D), or (D, V) with vocab_axis=1; of e's type, or float32 beside a 16-bit e, as in
        `linear_cross_entropy`.
      targets: integers of shape (...). A target outside [0, V) that is not ignore_index makes that token's log_probs
        NaN, and every gradient that they contribute to. None: log_probs is None, and every token counts.
      bias: (V,), of c's type.
      ids: integers of shape (..., K) with K at most 256, for each token of e. They are not shifted. An id outside
        [0, V) has -inf in id_log_probs and no gradient. Equal ids add their gradients.
      temperature: a positive number, or a tensor that broadcasts to (...), a temperature for each token of e. It gets
        no gradient, and is not shifted. Values of a tensor are not checked. A new value compiles nothing.
      entropy: True: return the entropy of each token's distribution, differentiable. "detached": without a gradient,
        which makes the backward pass as cheap as without it.
      predicted: return the id of each token's largest logit, the lowest among equals.
      top_k: how many of the largest logits to return, at most 256 and at most V: their ids and log-probabilities,
        descending, among equals the lowest id first. Without a gradient: give the ids as `ids` for one.
      mean_logit: return the mean of the logits over the vocabulary, sum(z) / V, without a gradient.
      softcap: positive; logits become softcap·tanh(logit / softcap).
      logit_scale: a number that multiplies the logits before softcap.
      ignore_index: tokens with this target have numbers of 0 and no gradient, whatever their embedding holds.
      shift: k in [0, T), or True for 1: token i of the last axis of targets predicts target i + k. Not without targets.
      vocab_axis, memory_budget, impl, precision, check_targets: as in `linear_cross_entropy`.
      vocab_parallel: the rows of the whole classifier that c holds, as in `linear_cross_entropy`. The numbers are those
        of the whole vocabulary, equal on all processes of the group.

    Returns:
      LogProbs(log_probs, lse, entropy, id_log_probs, predicted, top_ids, top_log_probs, mean_logit), in nats, each of
      the shape of targets after the shift, or with a last axis of K or top_k. None for what is not asked for.

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
    contract.choice("predicted", predicted, (False, True))
    contract.choice("mean_logit", mean_logit, (False, True))
    top_k = contract.integer("top_k", top_k)
    given = dict(e=e, c=c, targets=targets, bias=bias)
    every = given | {"ids": ids, "temperature": temperature if isinstance(temperature, Tensor) else None}
    arguments.refuse_dtensors(every, NAME, ", and vocab_parallel=VocabParallel.from_dtensor(c) if c is split by rows")
    numbers = dict(ignore_index=ignore_index, memory_budget=memory_budget, shift=shift)
    options = arguments.Options("none", impl, vocab_axis, precision, logit_scale, softcap, **numbers)
    options = arguments.checked(options)
    shard = arguments.shard_of(vocab_parallel, None)
    if targets is None:
        _check_without_targets(options.shift, shard)
        options, check_targets = options._replace(ignore_index=-100), False
        arguments.check_tensor("e", e, NAME)
        given["targets"] = e.new_zeros(e.shape[:-1], dtype=torch.int64)
    x = arguments.prepared(NAME, given, options, None, check_targets, shard)
    ids, named = _columns_of(ids, x)
    if not 0 <= top_k <= min(MOST_IDS, x.vocabulary):
        raise ValueError(f"top_k={top_k} must be in [0, {min(MOST_IDS, x.vocabulary)}], for V = {x.vocabulary}")
    inverse, count = arguments.inverse_temperature(temperature, x, NAME), max(top_k, int(predicted))
    call = x.call(
        "none",
        with_mean=entropy is not False,
        mean_is_detached=entropy == "detached",
        with_temperature=inverse is not None,
        top_k=count,
        mean_logit=mean_logit,
        ids=0 if ids is None else ids.shape[1],
    )
    scale: float = options.logit_scale
    log_probs, found, selected = statistics.of_tokens(x, call, inverse, scale, ids)
    of_entropy = None
    if call.with_mean:
        of_entropy = x.unshifted(entropy_of(found[0], found[-1]))
        of_entropy = of_entropy.detach() if entropy == "detached" else of_entropy
    result = LogProbs(None if targets is None else x.unshifted(log_probs), x.unshifted(lse_of(found)), of_entropy)
    if named is None and not (count or mean_logit):
        return result
    columns = statistics.operands_of(x).columns

    def shaped(found: Tensor) -> Tensor:
        """Numbers of the tokens, (N, ...), in the shape of targets after the shift, 0 for ignored tokens."""
        kept, axis = (columns >= 0).reshape(-1, *[1] * (found.dim() - 1)), x.targets.dim() - 1
        found = torch.where(kept, found, 0).reshape((*x.targets.shape, *found.shape[1:]))
        return found.narrow(axis, 0, found.shape[axis] - x.shift) if x.shift else found

    if named is not None:
        of_ids = torch.where(named, log_p(call.ids_of(found), found), -torch.inf)
        result = result._replace(id_log_probs=shaped(of_ids))
    if count and selected.top_logits is not None and selected.top_ids is not None:
        top, top_ids = log_p(selected.top_logits, found.detach()), selected.top_ids.long()
        result = result._replace(
            predicted=shaped(top_ids[:, 0]) if predicted else None,
            top_ids=shaped(top_ids) if top_k else None,
            top_log_probs=shaped(top) if top_k else None,
        )
    if mean_logit and selected.mean_logit is not None:
        result = result._replace(mean_logit=shaped(selected.mean_logit))
    return result


def _columns_of(ids: Any, x: Prepared) -> tuple[Tensor | None, Tensor | None]:
    """The columns that ids name, (N, K) int32, -1 for none; and whether they name one."""
    if ids is None:
        return None, None
    arguments.check_tensor("ids", ids, NAME)
    if ids.dtype not in arguments.INTEGERS:
        raise contract.not_integers("ids", ids.dtype, ids.shape, (), "long()")
    tokens, shape = tuple(x.targets.shape), tuple(ids.shape)
    if shape[:-1] != tokens or len(shape) != len(tokens) + 1 or shape[-1] > MOST_IDS:
        raise ValueError(f"ids must have shape (..., K) with ... = {tokens} as e and K <= {MOST_IDS}, got ids {shape}")
    arguments.check_device("ids", ids, x.e)
    ids, _ = arguments.int64(ids.reshape(x.targets.numel(), shape[-1]))
    named = (ids >= 0) & (ids < x.vocabulary)
    return torch.where(named, ids, -1).int() if shape[-1] else None, named


def _check_without_targets(shift: int, shard: VocabParallel | None) -> None:
    if shift:
        raise ValueError(f"shift={shift} moves targets, and there are none: leave shift out, or give targets")
    if shard is not None and shard.sequence_axis is not None:
        raise ValueError(
            f"targets=None does not tell the number of tokens that sequence_axis={shard.sequence_axis} splits: give "
            "targets"
        )
