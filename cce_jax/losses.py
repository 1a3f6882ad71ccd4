"""Every loss as plain arithmetic on the core's three numbers, differentiated by JAX.

`columns`, int32, stands for the targets: the column of the logits that a target names; V where a target is out of
range and names no column; -1 where the token is ignored.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.numbers import Statistics

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True)
class Loss:
    """The static part of a loss: a program is compiled for each. `linear_cross_entropy` explains the options."""

    reduction: Reduction = "mean"
    smooths: bool = False  # whether label_smoothing is above 0, which needs the core's weighted sum of the logits
    has_z_loss: bool = False  # whether z_loss is not 0


def columns(targets: jax.Array, ignore_index: int, vocabulary: int) -> jax.Array:
    in_vocabulary = (targets >= 0) & (targets < vocabulary)
    return jnp.where(targets != ignore_index, jnp.where(in_vocabulary, targets, vocabulary), -1)


def loss(
    numbers: Statistics,
    columns: jax.Array,
    class_weight: jax.Array | None,
    token_weight: jax.Array | None,
    num_items: jax.Array | float | None,
    *,
    vocabulary: int,
    options: Loss,
    label_smoothing: Any = None,
    z_loss: Any = None,
    summed: tuple[str, ...] = (),
    out_sharding: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The loss, a scalar or for "none" of the shape of columns, and lse, which is 0 for ignored tokens.

    numbers: each of the shape of columns; class_weight: (V,) at least float32; token_weight: of the shape of columns;
    label_smoothing, z_loss: numbers or scalar arrays, None if options.smooths or options.has_z_loss is False.
    summed: the axes of jax.shard_map over whose devices the tokens are split: "mean" and "sum" extend over them.
    out_sharding: of columns, where the mesh has Explicit axes.
    """
    target_weight = target_weights(columns, class_weight, vocabulary, out_sharding)
    total, lse = totals(numbers, columns, class_weight, target_weight, vocabulary=vocabulary, options=options,
                        label_smoothing=label_smoothing, z_loss=z_loss)  # fmt: skip
    weight = weights(columns, token_weight, lse.dtype)
    total = jnp.where(columns >= 0, weight * total, 0)
    if options.reduction == "none":
        return total, lse

    return reduced(jnp.sum(total), columns, weight, target_weight, num_items, options=options, summed=summed), lse


def target_weights(
    columns: jax.Array, class_weight: jax.Array | None, vocabulary: int, out_sharding: Any = None
) -> Any:
    """The class weight of each token's target, of the shape of columns; None where there are no class weights."""
    if class_weight is None:
        return None
    return class_weight.at[jnp.clip(columns, 0, vocabulary - 1)].get(out_sharding=out_sharding)


def weights(columns: jax.Array, token_weight: jax.Array | None, dtype: Any) -> jax.Array:
    """The weight of each token: 1 everywhere if there are no weights, else 0 where the token is ignored."""
    if token_weight is None:
        return jnp.ones_like(columns, dtype)
    return jnp.where(columns >= 0, token_weight.astype(dtype), 0)


def totals(
    numbers: Statistics,
    columns: jax.Array,
    class_weight: jax.Array | None,
    target_weight: jax.Array | None,
    *,
    vocabulary: int,
    options: Loss,
    label_smoothing: Any,
    z_loss: Any,
) -> tuple[jax.Array, jax.Array]:
    """The loss of each token before its token weight, and lse; both 0 where the token is ignored."""
    kept = columns >= 0
    lse, target = jnp.where(kept, numbers.lse, 0), jnp.where(kept, numbers.target, 0)
    ce = (1.0 if target_weight is None else target_weight) * (lse - target)
    if options.smooths:
        assert numbers.sum is not None
        whole = vocabulary if class_weight is None else jnp.sum(class_weight)
        smooth = (whole * lse - jnp.where(kept, numbers.sum, 0)) / vocabulary
        ce = (1 - label_smoothing) * ce + label_smoothing * smooth
    total = ce + z_loss * lse**2 if options.has_z_loss else ce
    poison = jnp.where(columns == vocabulary, jnp.nan, 1.0).astype(lse.dtype)  # a factor, so that gradients are NaN too
    return jnp.where(kept, poison * total, 0), lse


def reduced(
    value: jax.Array,
    columns: jax.Array,
    weight: jax.Array,
    target_weight: jax.Array | None,
    num_items: jax.Array | float | None,
    *,
    options: Loss,
    summed: tuple[str, ...] = (),
) -> jax.Array:
    """The "sum" or "mean" from the sum over this device's tokens. weight: `weights`."""

    def sum_of(x: jax.Array) -> jax.Array:
        return lax.psum(x, summed) if summed else x

    value = sum_of(value)
    if options.reduction == "mean":
        if num_items is None:
            of_items = weight if target_weight is None else weight * target_weight
            items = sum_of(jnp.sum(jnp.where(columns >= 0, of_items, 0)))
        else:
            items = jnp.asarray(num_items)
        items = items.astype(value.dtype)
        value = jnp.where(items == 0, 0, value / jnp.where(items == 0, 1, items))
    return value
