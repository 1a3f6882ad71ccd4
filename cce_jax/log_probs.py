"""Numbers of each token's distribution, without the logits: log-probabilities, entropies, likeliest tokens."""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from cce_jax import arguments, losses, settings
from cce_jax.api import Array
from cce_jax.arguments import MOST_IDS
from cce_jax.core import numbers_of
from cce_jax.plans import Core, Impl
from cce_jax.prepare import Arrays, Asked, any_targets, inputs_of, needs_whole_sequences, prepared, unshifted
from cce_kernels import contract
from cce_kernels.numbers import WantedNumbers
from cce_kernels.selections import Asked as Chosen

NAME = "linear_log_probs"


class LogProbs(NamedTuple):
    """What `linear_log_probs` returns; None: not asked for. (...) is the shape of targets after the shift."""

    log_probs: jax.Array | None  # (...): log p of the target
    lse: jax.Array  # (...): the log-sum-exp of the logits
    entropy: jax.Array | None = None  # (...): −Σ p log p, in nats
    id_log_probs: jax.Array | None = None  # (..., K): log p of the given ids; −inf where an id is outside [0, V)
    predicted: jax.Array | None = None  # (...) int32: the likeliest id, the lowest among equals
    top_ids: jax.Array | None = None  # (..., top_k) int32: the likeliest ids in order, the lowest first among equals
    top_log_probs: jax.Array | None = None  # (..., top_k): their log p
    mean_logit: jax.Array | None = None  # (...): Σ z / V


def linear_log_probs(
    e: Array,
    c: Array,
    targets: Array = None,
    bias: Array = None,
    *,
    ids: Array = None,
    predicted: bool = False,
    top_k: int = 0,
    mean_logit: bool = False,
    temperature: Array = 1.0,
    entropy: Literal[False, True, "detached"] = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    shift: bool | int = 0,
    logit_scale: float | None = None,
    vocab_axis: Literal[0, 1] = 0,
    impl: Impl = "auto",
    memory_budget: float | Literal["all"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    check_targets: bool = False,
    sharding: tuple[jax.sharding.PartitionSpec, jax.sharding.PartitionSpec] | None = None,
) -> LogProbs:
    """Log-probabilities of `targets` under softmax(e @ c.T + bias), and more of each token, without holding the logits.

    Equivalent to the following, with exact gradients and O(N) memory in place of O(N·V):

        z = logit_scale * (e @ c.T + bias)                      # float32, (..., V)
        z = softcap * tanh(z / softcap)                         # if softcap
        z = z / temperature                                     # each token has its own
        lse = logsumexp(z, axis=-1)
        log_probs = z[targets] - lse
        id_log_probs = z[ids] - lse                             # K ids of each token
        entropy = lse - sum(softmax(z) * z, axis=-1)

    log_probs, lse, entropy and id_log_probs can be differentiated once in e, c and bias: in reverse mode, or with
    impl="reference" in both modes and any number of times. Policy gradients, PPO, GRPO and DPO need them
    (docs/log-probabilities.md).

    Args:
      e, c, bias: as for `linear_cross_entropy`; so are all options that are not named here.
      targets: integers of shape (...), one id a token, or None: then log_probs is None, and all tokens count. All
        numbers of a token whose target is ignore_index are 0, and it has no gradient. A target outside [0, V) that is
        not ignore_index makes that log-probability NaN.
      ids: integers of shape (..., K), K at most 256: ids of each token whose log-probabilities are asked for too. They
        belong to the tokens of e, and are not shifted. An id outside [0, V), such as -100, gives −inf and has no
        gradient, so that a logsumexp over K renormalizes. Equal ids add their gradients.
      predicted: whether the likeliest id of each token is asked for.
      top_k: how many of the likeliest ids of each token are asked for, at most 256 and V. Their log-probabilities have
        no gradient: for one give the ids as `ids`. With predicted, top_k or mean_logit the backward pass computes the
        logits again, whatever the memory budget.
      mean_logit: whether the mean of the logits over the vocabulary is asked for. It has no gradient.
      temperature: a positive number, or an array of positive numbers that broadcasts to the shape of e without its last
        axis. It divides the logits after the softcap, and has no gradient. A new value compiles nothing.
      entropy: True for the entropies, which can be differentiated; "detached" for entropies without a gradient: the
        backward pass then does no more than without them.
      shift: k in [0, T), or True for 1: token i of the last axis of targets belongs to token i + k of e. It needs
        targets. All results have the shape of targets after the shift.

    Returns:
      LogProbs, in nats, float32 (float64 for float64 inputs). None stands for what was not asked for.

    Raises:
      ValueError: shapes do not fit, an option is out of its range, sharding contradicts mesh or arrays, or, with
        check_targets, a target is out of range.
      TypeError: an array has a wrong type.
      NotImplementedError: the GPU cannot run impl="cce", or XLA would have to split the kernels over devices.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from cce_jax import linear_log_probs
      >>> hidden = jax.random.normal(jax.random.key(0), (2, 16, 64))          # (B, T, D), what the model returns
      >>> embedding = jax.random.normal(jax.random.key(1), (1000, 64))        # (V, D)
      >>> tokens = jax.random.randint(jax.random.key(2), (2, 16), 0, 1000)    # (B, T)
      >>> found = linear_log_probs(hidden, embedding, tokens, shift=1, temperature=0.7, entropy=True)
      >>> found.log_probs.shape, found.entropy.shape
      ((2, 15), (2, 15))
    """
    contract.choice("entropy", entropy, (False, True, "detached"))
    contract.choice("predicted", predicted, (False, True))
    contract.choice("mean_logit", mean_logit, (False, True))
    top_k = contract.integer("top_k", top_k)
    named = targets is not None
    if not named:
        if shift:
            raise ValueError(f"shift={shift!r} needs targets, which it shifts: targets is None")
        e = arguments.array("e", e, NAME)
        targets = any_targets(e)
    options = ignore_index, softcap, shift, logit_scale, vocab_axis, impl, memory_budget, precision
    asked = Asked(NAME, *options, check_targets, sharding)
    given = Arrays(e, c, bias, targets)
    mean = WantedNumbers(mean=bool(entropy), mean_is_detached=entropy == "detached")
    given, core = prepared(given, asked, numbers=mean)
    needs_whole_sequences(core, NAME)
    temperature = arguments.temperature(temperature, given.e, NAME)
    given = given._replace(temperature=temperature, ids=arguments.ids(ids, given.e, NAME))
    most = min(MOST_IDS, core.vocabulary(given.c))
    if not 0 <= top_k <= most:
        raise ValueError(f"top_k={top_k} must be from 0 to {most}: at most {MOST_IDS}, and the size of the vocabulary")
    chosen = Chosen(max(top_k, int(predicted)), mean_logit)
    with settings.defaults():
        found = _log_probs(given, core, chosen, named)
    if predicted:
        assert found.top_ids is not None
        found = found._replace(predicted=found.top_ids[..., 0])
    return found if top_k else found._replace(top_ids=None, top_log_probs=None)


@partial(jax.jit, static_argnames=("core", "chosen", "named"))
def _log_probs(given: Arrays, core: Core, chosen: Chosen, named: bool) -> LogProbs:
    """named: whether targets are given."""
    inputs, id_log_probs = inputs_of(given, core, named), None
    columns, kept = inputs.targets, inputs.targets >= 0
    numbers, selected = numbers_of(inputs, core, chosen)

    def of_tokens(x: jax.Array) -> jax.Array:
        return unshifted(x, core, x.ndim - columns.ndim)

    log_probs, lse, entropy = jax.tree.map(of_tokens, losses.token_numbers(numbers, columns, core.vocabulary(given.c)))
    entropy = jax.lax.stop_gradient(entropy) if core.numbers.mean_is_detached else entropy
    if numbers.ids is not None and inputs.ids is not None:
        id_log_probs = jnp.where(inputs.ids < 0, -jnp.inf, numbers.log_p(numbers.ids))
        id_log_probs = of_tokens(jnp.where(kept[..., None], id_log_probs, 0))
    top_logits, top_ids, mean_logit = jax.tree.map(lambda x: of_tokens(jax.lax.stop_gradient(x)), selected)
    top_log_probs = None
    if top_logits is not None:  # 0 where a token is ignored
        top_log_probs = jnp.minimum(top_logits - jax.lax.stop_gradient(lse)[..., None], 0)  # lse is rounded
        top_log_probs = jnp.where(of_tokens(kept)[..., None], top_log_probs, 0)
    found = LogProbs(log_probs if named else None, lse, entropy, id_log_probs)
    return found._replace(top_ids=top_ids, top_log_probs=top_log_probs, mean_logit=mean_logit)
