"""The keyword arguments of linear_cross_entropy as types, which its overloads share."""

from typing import Literal, Protocol, TypedDict

import jax
import numpy as np

from cce_jax.losses import Reduction
from cce_jax.passes import Impl


class HasJaxArray(Protocol):
    """What converts itself to an array, such as Flax NNX's Param."""

    def __jax_array__(self) -> jax.Array: ...


Array = jax.Array | np.ndarray | HasJaxArray


class Options(TypedDict, total=False):
    """All keyword arguments but return_lse, which decides the type of the result."""

    bias: Array | None
    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: bool | int
    logit_scale: float | None
    class_weight: Array | None
    label_smoothing: float
    z_loss: float
    token_weight: Array | None
    num_items: float | Array | None
    vocab_axis: Literal[0, 1]
    impl: Impl
    memory_budget: float | Literal["all"]
    precision: jax.lax.PrecisionLike
    check_targets: bool
    sharding: tuple[jax.sharding.PartitionSpec, jax.sharding.PartitionSpec] | None
