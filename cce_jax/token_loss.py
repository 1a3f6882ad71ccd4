"""A loss of the user's own over the numbers of each token, at the price of the built-in loss."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from cce_jax import arguments as checks
from cce_jax import losses, settings
from cce_jax.api import Array, loss_of
from cce_jax.plans import Impl
from cce_jax.prepare import Arrays, Asked, needs_whole_sequences, prepared
from cce_kernels import contract
from cce_kernels.numbers import WantedNumbers

NAME = "linear_token_loss"


def linear_token_loss(
    e: Array,
    c: Array,
    targets: Array,
    fn: Callable[..., jax.Array],
    *arguments: Array,
    bias: Array = None,
    entropy: bool = False,
    temperature: Array = 1.0,
    num_items: Array = None,
    reduction: losses.Reduction = "mean",
    return_numbers: bool = False,
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
) -> Any:
    """The mean or sum of `fn(numbers, *arguments)` over the tokens, where fn computes each token's loss.

    Equivalent to the following, without holding the logits:

        numbers = linear_log_probs(e, c, targets, bias, entropy=entropy, temperature=temperature)
        total = where(targets == ignore_index, 0, fn(numbers, *arguments))
        loss = sum(total) / num_items                           # for reduction="mean"

    What a token's loss does to its logits is known as soon as its numbers are. So the gradients can be formed in the
    forward pass, as those of `linear_cross_entropy`. Policy losses such as GRPO's and PPO's with a clip, focal losses
    and entropy bonuses are a few lines (docs/log-probabilities.md).

    Args:
      e, c, targets, bias: as for `linear_cross_entropy`; so are all options that are not named here.
      fn: `fn(numbers, *arguments)` returns an array of the shape of numbers.log_probs: the loss of each token, which
        depends on the numbers and arguments of that token alone. numbers has the fields log_probs, lse and entropy. fn
        is pure, and is called on arrays (n,) of any number n of tokens, any number of times. What it returns for
        ignored tokens is discarded. Define it once, outside of the training step: JAX compiles for each new function.
        What it closes over must not be traced by JAX, nor have a number for each token: give that as an argument.
      arguments: arrays and numbers that broadcast to the shape of targets after the shift. They have no gradient.
      entropy: whether numbers.entropy is computed; else it is None.
      temperature: as for `linear_log_probs`.
      num_items: the number that "mean" divides by; by default the number of tokens that are not ignored.
      reduction: "mean", "sum", or "none" for the loss of each token.
      return_numbers: return (loss, numbers). The numbers have the shape of targets after the shift, no gradient, and
        are 0 for ignored tokens.

    Returns:
      The loss, float32 (float64 for float64 inputs): a scalar; for reduction="none" an array.

    Raises:
      TypeError: an array has a wrong type, fn is not callable, not hashable, returns no real numbers or closes over an
        array that JAX traces, or an argument of fn needs a gradient.
      ValueError: shapes do not fit, fn does not return a loss for each of 2 and of 3 tokens, or an option is out of its
        range.
      NotImplementedError: the GPU cannot run impl="cce", or XLA would have to split the kernels over devices.

    Examples:
      A policy loss with a clip and an entropy bonus:

      >>> import jax, jax.numpy as jnp
      >>> from cce_jax import linear_token_loss
      >>> def policy(numbers, old, advantage):
      ...     ratio = jnp.exp(numbers.log_probs - old)
      ...     gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
      ...     return -gain - 0.01 * numbers.entropy
      >>> e = jax.random.normal(jax.random.key(0), (2, 16, 64))
      >>> c = jax.random.normal(jax.random.key(1), (1000, 64))
      >>> ids = jax.random.randint(jax.random.key(2), (2, 16), 0, 1000)
      >>> old, advantage = jnp.full((2, 16), -7.0), jnp.array([[1.0], [-0.5]])
      >>> loss = lambda e, c: linear_token_loss(e, c, ids, policy, old, advantage, entropy=True)
      >>> value, (of_e, of_c) = jax.value_and_grad(loss, (0, 1))(e, c)
      >>> of_e.shape, of_c.shape
      ((2, 16, 64), (1000, 64))
    """
    contract.choice("reduction", reduction, contract.REDUCTIONS)
    contract.of_token_loss(entropy)
    contract.choice("return_numbers", return_numbers, (False, True))
    arguments = tuple(checks.array(f"argument {k} of fn", x, NAME) for k, x in enumerate(arguments))
    options = ignore_index, softcap, shift, logit_scale, vocab_axis, impl, memory_budget, precision
    asked = Asked(NAME, *options, check_targets, sharding)
    given = Arrays(e, c, bias, targets, num_items=num_items)
    given, core = prepared(given, asked, reduction, numbers=WantedNumbers(mean=entropy))
    e, shape = given.e, given.targets.shape
    if reduction == "none" or return_numbers or arguments:
        needs_whole_sequences(core, "arguments, reduction='none' or return_numbers")
    if core.shift:
        shape = (*shape[:-1], max(shape[-1] - core.shift, 0))
    checks.function(fn, arguments, entropy, np.promote_types(e.dtype, np.float32))
    with settings.defaults():
        whole = tuple(_of_tokens(f"argument {k} of fn", x, shape, core.shift) for k, x in enumerate(arguments))
        given = given._replace(temperature=checks.temperature(temperature, e, NAME), arguments=whole)
        value, numbers = loss_of(given, core, losses.Loss(reduction, fn=fn))
    return (value, jax.tree.map(jax.lax.stop_gradient, numbers)) if return_numbers else value


def _of_tokens(name: str, x: Any, shape: tuple[int, ...], shift: int) -> jax.Array:
    """x for each token of e, of which the last `shift` have no target. ValueError unless x broadcasts to shape."""
    try:
        x = jnp.broadcast_to(_without_gradient(jnp.asarray(x)), shape)
    except ValueError:
        of = f"of targets after the shift, {shape}"
        raise ValueError(f"{name} {np.shape(x)} must broadcast to the shape {of}") from None
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, shift)]) if shift else x


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
    return x


@_without_gradient.defjvp
def _(primals, tangents):
    raise TypeError(
        "an argument of fn needs a gradient, which linear_token_loss does not form: give jax.lax.stop_gradient of it, "
        "or compute the loss from linear_log_probs"
    )
