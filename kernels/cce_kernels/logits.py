"""How a logit is made from a raw product, and its cotangent: elementwise, for every implementation alike.

    y = scale · (e·c + b)        z = softcap · tanh(y / softcap)  if softcap is set, else  z = y
    ∂z/∂(e·c) = ∂z/∂b = scale · (1 − (z / softcap)²)

Given a, t̂ and s, the cotangents of the log-sum-exp, the target's logit and the weighted sum of the logits, and the
softmax p = exp(z − lse), the cotangent of the raw product is  dz = (a·p + t̂·[v = t] + s·w_v) · ∂z/∂(e·c).
cce_jax/core.py derives it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

Precision = lax.PrecisionLike


@dataclass(frozen=True)
class Head:
    """The static part of a language model's head: everything about its logits but the arrays."""

    scale: float = 1.0
    softcap: float | None = None
    vocab_axis: int = 0  # 0: c is (V, D); 1: c is (D, V)
    precision: Precision = None

    def product(self, e: jax.Array, c: jax.Array, axis: int) -> jax.Array:
        """The raw product of e (rows, D) and c, contracted over c's axis `axis`; at least float32."""
        return lax.dot_general(e, c, (((1,), (axis,)), ((), ())), precision=self.precision,
                               preferred_element_type=jnp.promote_types(e.dtype, jnp.float32))  # fmt: skip

    def logits(self, raw: jax.Array, bias: jax.Array | None) -> jax.Array:
        """z from the raw product e·c; bias broadcasts against it."""
        z = raw if bias is None else raw + bias
        if self.scale != 1.0:
            z = z * self.scale
        return z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap)

    def cotangent(self, z, p, is_target, of_lse, of_target, of_sum=None, weights: jax.Array | float = 1.0) -> jax.Array:
        """dz, the cotangent of the raw product e·c; every argument broadcasts against z."""
        dz = of_lse * p + jnp.where(is_target, of_target, 0.0)
        if of_sum is not None:
            dz += of_sum * weights
        if self.softcap is not None:
            dz *= 1 - (z / self.softcap) ** 2
        return dz if self.scale == 1.0 else dz * self.scale


def vocabulary_size(c: jax.Array, head: Head) -> int:
    return c.shape[head.vocab_axis]
