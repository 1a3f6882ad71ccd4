"""The mean loss in JAX: ours, and written with full logits."""

import jax
import jax.numpy as jnp
import optax

from bench.calls import Loss
from cce_jax import linear_cross_entropy
from cce_kernels.call import Call
from cce_kernels.device import H200
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.xla import XLA
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted
from cce_kernels.plan.budget import Bytes
from cce_kernels.tokens import gathered_rows


def whole_bytes(tokens: int, width: int, vocabulary: int) -> int:
    """What saving everything of a call in bfloat16 takes at most, multiplied by XLA."""
    call = Call(tokens, width, vocabulary, "bfloat16", Head(), False, False, Wanted(True, True, False), 0)
    return Bytes(call, H200, gathered_rows(tokens), HOPPER, XLA).everything()


SIZES = {
    "300 MiB": 300 * 2**20,
    "600 MB": 600_000_000,
    "1 GiB": 2**30,
    "1.2 GB": 1_200_000_000,
    "2.4 GB": 2_400_000_000,
}


def budget(name: str, tokens: int, width: int, vocabulary: int) -> dict[str, int]:
    """The argument memory_budget of that name; none for the default.

    "2NV" is 2·N·V bytes, as many as bfloat16 logits have; "all" is what saving everything takes.
    """
    named = {**SIZES, "2NV": 2 * tokens * vocabulary, "all": whole_bytes(tokens, width, vocabulary)}
    return {"memory_budget": named[name]} if name else {}


def ours(impl: str = "auto", memory: str = "") -> Loss:
    """memory: the name of a budget."""

    def loss(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
        return linear_cross_entropy(e, c, targets, impl=impl, **budget(memory, *e.shape, c.shape[0]))  # type: ignore

    return loss


def full_logits(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss as people write it: logits in the type of the model, cross-entropy in float32."""
    logits = (e @ c.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def full_float32_logits(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.matmul(e, c.T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
