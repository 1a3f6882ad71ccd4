"""Every loss as plain arithmetic on the core's numbers, differentiated by JAX.

`columns`, int32, stands for the targets: the column of the logits that a target names; V where a target is out of
range and names no column; -1 where the token is ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.numbers import Cotangents, Numbers

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Loss:
    """The static part of a loss: a program is compiled for each. `linear_cross_entropy` explains the options."""

    reduction: Reduction = "mean"
    smooths: bool = False  # whether label_smoothing is above 0, which needs the core's weighted sum of the logits
    has_z_loss: bool = False  # whether z_loss is not 0
    fn: Callable[..., jax.Array] | None = None  # (TokenNumbers, *arguments) -> the loss of each token, the user's own


class TokenNumbers(NamedTuple):
    """What the user sees of each token; 0 where it is ignored, None where not asked for."""

    log_probs: jax.Array | None  # log p of the target; NaN where the target is out of range
    lse: jax.Array  # the log-sum-exp of the logits
    entropy: jax.Array | None  # −Σ p log p, in nats


class Terms(NamedTuple):
    """What the loss of each token depends on besides the core's numbers, of the shape of targets; None: not used."""

    columns: jax.Array  # int32
    target_weight: jax.Array | None  # the class weight of the token's target
    weight: jax.Array  # the weight of the token; 0 where it is ignored, if there are token weights
    arguments: tuple[jax.Array, ...] = ()  # of Loss.fn


class Common(NamedTuple):
    """What the losses of all tokens depend on: numbers or scalar arrays, and an array (V,); None: not used."""

    label_smoothing: Any
    z_loss: Any
    class_weight: jax.Array | None  # at least float32


def columns(targets: jax.Array, ignore_index: int, vocabulary: int) -> jax.Array:
    in_vocabulary = (targets >= 0) & (targets < vocabulary)
    return jnp.where(targets != ignore_index, jnp.where(in_vocabulary, targets, vocabulary), -1)


def terms(
    columns: jax.Array,
    class_weight: jax.Array | None,
    token_weight: jax.Array | None,
    vocabulary: int,
    dtype: Any,
    out_sharding: Any = None,
) -> Terms:
    """The terms of tokens from the weights of all classes and of the tokens.

    dtype: of the weights. out_sharding: of columns, where the mesh has Explicit axes.
    """
    target_weight = None
    if class_weight is not None:
        target_weight = class_weight.at[jnp.clip(columns, 0, vocabulary - 1)].get(out_sharding=out_sharding)
    weight = jnp.ones_like(columns, dtype)
    if token_weight is not None:
        weight = jnp.where(columns >= 0, token_weight.astype(dtype), 0)
    return Terms(columns, target_weight, weight)


def loss(
    numbers: Numbers,
    terms: Terms,
    common: Common,
    num_items: jax.Array | float | None,
    options: Loss,
    vocabulary: int,
    summed: tuple[str, ...] = (),
) -> tuple[jax.Array, TokenNumbers]:
    """The loss, a scalar or for "none" of the shape of targets, and what the user sees of each token.

    numbers: each of the shape of targets. summed: the axes of jax.shard_map over whose devices the tokens are split:
    "mean" and "sum" extend over them.
    """
    total, shown = totals(numbers, terms, common, options, vocabulary)
    total = jnp.where(terms.columns >= 0, terms.weight * total, 0)
    if options.reduction == "none":
        return total, shown
    return reduced(jnp.sum(total), terms, num_items, options, summed), shown


def totals(
    numbers: Numbers, terms: Terms, common: Common, options: Loss, vocabulary: int
) -> tuple[jax.Array, TokenNumbers]:
    """The loss of each token before its token weight, 0 where it is ignored, and what the user sees of each token."""
    kept = terms.columns >= 0
    if options.fn is not None:
        shown = token_numbers(numbers, terms.columns, vocabulary)
        total = jnp.asarray(options.fn(shown, *terms.arguments), numbers.target.dtype)
        return jnp.where(kept, total, 0), shown
    numbers = jax.tree.map(lambda x: jnp.where(kept, x, 0), numbers._replace(ids=None))
    lse = numbers.lse
    ce = (1.0 if terms.target_weight is None else terms.target_weight) * -numbers.log_p(numbers.target)
    if options.smooths:
        assert numbers.sum is not None
        whole = vocabulary if common.class_weight is None else jnp.sum(common.class_weight)
        smooth = (whole * numbers.log_mass - numbers.sum) / vocabulary
        ce = (1 - common.label_smoothing) * ce + common.label_smoothing * smooth
    total = ce + common.z_loss * lse**2 if options.has_z_loss else ce
    return jnp.where(kept, _poison(terms.columns, vocabulary, lse.dtype) * total, 0), TokenNumbers(None, lse, None)


def token_numbers(numbers: Numbers, columns: jax.Array, vocabulary: int) -> TokenNumbers:
    kept = columns >= 0
    log_probs = _poison(columns, vocabulary, numbers.target.dtype) * numbers.log_p(numbers.target)
    of_tokens = log_probs, numbers.lse, None if numbers.mean is None else numbers.entropy
    return TokenNumbers(*[None if x is None else jnp.where(kept, x, 0) for x in of_tokens])  # type: ignore[arg-type]


def _poison(columns: jax.Array, vocabulary: int, dtype: Any) -> jax.Array:
    """NaN where a target is out of range, else 1: a factor, so that gradients are NaN too."""
    return jnp.where(columns == vocabulary, jnp.nan, 1.0).astype(dtype)


def cotangents_of(common: Common, options: Loss, vocabulary: int) -> Callable[[Numbers, Terms], Cotangents]:
    """(numbers, terms) -> the cotangents of the numbers where that of Σ weight · total is 1."""

    def cotangents(numbers: Numbers, terms: Terms) -> Cotangents:
        def weighted(x: Numbers) -> jax.Array:
            return jnp.sum(terms.weight * totals(x, terms, common, options, vocabulary)[0])

        return Cotangents.of(jax.grad(weighted)(numbers))

    return cotangents


def reduced(
    value: jax.Array, terms: Terms, num_items: jax.Array | float | None, options: Loss, summed: tuple[str, ...] = ()
) -> jax.Array:
    """The "sum" or "mean" from the sum over this device's tokens."""

    def sum_of(x: jax.Array) -> jax.Array:
        return lax.psum(x, summed) if summed else x

    value = sum_of(value)
    if options.reduction == "mean":
        if num_items is None:
            weight, target_weight = terms.weight, terms.target_weight
            of_items = weight if target_weight is None else weight * target_weight
            items = sum_of(jnp.sum(jnp.where(terms.columns >= 0, of_items, 0)))
        else:
            items = jnp.asarray(num_items)
        items = items.astype(value.dtype)
        value = jnp.where(items == 0, 0, value / jnp.where(items == 0, 1, items))
    return value
