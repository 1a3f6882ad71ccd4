"""The mean loss in JAX: ours, which is that in PyTorch too, and written with full logits."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench.calls import Loss

SIZES = {"300 MiB": 300 * 2**20, "600 MB": 6 * 10**8, "1 GiB": 2**30, "1.2 GB": 12 * 10**8, "2.4 GB": 24 * 10**8}
BUDGETS = ("", *SIZES, "2NV", "all")


def budget(name: str, tokens: int, vocabulary: int) -> dict[str, Any]:
    """The argument memory_budget of that name; none for the default. "2NV": as many bytes as bfloat16 logits have."""
    return {"memory_budget": {**SIZES, "2NV": 2 * tokens * vocabulary, "all": "all"}[name]} if name else {}


def ours(package: str = "cce_jax", memory: str = "", **options: Any) -> Loss:
    """memory: the name of a budget. options: of linear_cross_entropy."""
    loss = import_module(package).linear_cross_entropy
    return lambda e, c, targets: loss(e, c, targets, **budget(memory, e.shape[0], c.shape[0]), **options)


def full_logits(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss as people write it: logits in the type of the model, cross-entropy in float32."""
    logits = (e @ c.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
