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
    kept = columns >= 0
    lse, target = jnp.where(kept, numbers.lse, 0), jnp.where(kept, numbers.target, 0)
    target_weight = 1.0
    if class_weight is not None:
        target_weight = class_weight.at[jnp.clip(columns, 0, vocabulary - 1)].get(out_sharding=out_sharding)
    ce = target_weight * (lse - target)
    if options.smooths:
        assert numbers.sum is not None
        whole = vocabulary if class_weight is None else jnp.sum(class_weight)
        smooth = (whole * lse - jnp.where(kept, numbers.sum, 0)) / vocabulary
        ce = (1 - label_smoothing) * ce + label_smoothing * smooth
    total = ce + z_loss * lse**2 if options.has_z_loss else ce
    weight = jnp.ones_like(lse) if token_weight is None else jnp.where(kept, token_weight.astype(lse.dtype), 0)
    poison = jnp.where(columns == vocabulary, jnp.nan, 1.0).astype(lse.dtype)  # a factor, so that gradients are NaN too
    total = jnp.where(kept, poison * weight * total, 0)
    if options.reduction == "none":
        return total, lse

    def sum_of(x: jax.Array) -> jax.Array:
        return lax.psum(jnp.sum(x), summed) if summed else jnp.sum(x)

    value = sum_of(total)
    if options.reduction == "mean":
        items = sum_of(jnp.where(kept, weight * target_weight, 0)) if num_items is None else jnp.asarray(num_items)
        items = items.astype(value.dtype)
        value = jnp.where(items == 0, 0, value / jnp.where(items == 0, 1, items))
    return value, lse
