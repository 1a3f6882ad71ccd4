"""The keyword arguments of linear_cross_entropy as types, which its overloads share."""

from typing import Any, Literal, TypedDict

import jax

from cce_jax.losses import Reduction
from cce_jax.plans import Impl

Array = Any  # or an object with `__jax_array__`; a type checker also finds that Linen's `apply` may return a tuple


class Options(TypedDict, total=False):
    """All keyword arguments but return_lse, which decides the type of the result."""

    bias: Array
    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: bool | int
    logit_scale: float | None
    class_weight: Array
    label_smoothing: float
    z_loss: float
    token_weight: Array
    num_items: Array
    vocab_axis: Literal[0, 1]
    impl: Impl
    memory_budget: float | Literal["all"] | None
    precision: jax.lax.PrecisionLike
    check_targets: bool
    gradient_tolerance: float
    sharding: tuple[jax.sharding.PartitionSpec, jax.sharding.PartitionSpec] | None
