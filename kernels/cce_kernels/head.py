"""How a logit z is made from the raw product e·c, and the raw product's cotangent dz: elementwise, for every engine.

    y = scale · (e·c + b)        x = softcap · tanh(y / softcap)  if softcap is set, else  x = y
    z = τ·x                      τ = 1 / temperature of the token
    ∂z/∂(e·c) = ∂z/∂b = scale · τ · (1 − (x / softcap)²)

Let a, t̂, s and μ be the cotangents of the log-sum-exp, of the target's logit, of the weighted sum of the logits and of
their mean, and p = exp(z − lse) the softmax. Then, with P = exp(z − ρ) relative to a reference ρ of the token, and the
cotangents a" and μ" of cce_kernels/mean.py,

    dz = ((a" + μ"·log P)·P + t̂·[v = t] + s·w_v) · ∂z/∂(e·c)

and at a given id the cotangents of its logit are added to the sum in brackets (cce_kernels/given_ids.py).

cce_jax/core.py derives this.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.numbers import FLOAT32_MAX, Cotangents, logarithm, rounded

Precision = lax.PrecisionLike


def is_highest(precision: Precision) -> bool:
    """Whether float32 matmuls of this precision are exact, and not TF32."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return precision in ("highest", "float32") or precision == lax.Precision.HIGHEST


@dataclass(frozen=True)
class Head:
    """The static part of a language model's head. The scale is an array instead: a new scale needs no compilation."""

    softcap: float | None = None
    vocab_axis: int = 0  # 0: c is (V, D); 1: c is (D, V)
    precision: Precision = None

    def vocabulary(self, c: jax.Array | jax.ShapeDtypeStruct) -> int:
        return c.shape[self.vocab_axis]

    def product(self, e: jax.Array, c: jax.Array, axis: int) -> jax.Array:
        """The raw product of e (rows, D) and c, contracted over c's axis `axis`; at least float32."""
        contract, wide = (((1,), (axis,)), ((), ())), jnp.promote_types(e.dtype, jnp.float32)
        return lax.dot_general(e, c, contract, precision=self.precision, preferred_element_type=wide)

    def logits(self, raw: jax.Array, bias: jax.Array | None, scale) -> jax.Array:
        """x from the raw product e·c. bias (None: 0) and scale (None: 1) broadcast against raw."""
        y = raw if bias is None else raw + bias
        z = y if scale is None else y * scale
        if self.softcap is not None:
            return jnp.minimum(self.softcap * jnp.tanh(z / self.softcap), FLOAT32_MAX)  # as in `rounded`
        return z if z is y else rounded(z, y)

    def whole_logits(self, e: jax.Array, c: jax.Array, bias: jax.Array | None, scale: jax.Array | None) -> jax.Array:
        """x of all columns, (rows, V), at least float32; of some columns if c and bias are theirs.

        XLA would compute them again in each pass that reads them. It may round them otherwise there, and a low
        temperature multiplies the difference: behind a barrier all passes read the same.
        """
        raw = self.product(e, c, 1 - self.vocab_axis)
        return lax.optimization_barrier(self.logits(raw, None if bias is None else bias.astype(raw.dtype), scale))

    def cotangent(self, x, p, is_target, of: Cotangents, weights, factor, log_p=None) -> jax.Array:
        """dz, the cotangent of the raw product e·c. Every argument broadcasts against x.

        x is read only if the softcap is set. weights, factor: None for 1; factor: numbers.Inputs.factor.
        p, log_p: exp(z − ρ) and its logarithm, read only if of.mean is there, which may be −inf. of: of mean.relative.
        """
        of_lse = of.lse
        if of.mean is not None:
            assert log_p is not None
            of_lse += of.mean * logarithm(log_p)
        dz = of_lse * p + jnp.where(is_target, of.target, 0.0)
        if of.sum is not None:
            dz += of.sum if weights is None else of.sum * weights
        if of.ids is not None:
            dz += of.ids
        if self.softcap is not None:
            dz *= self.slope(x)
        return dz if factor is None else dz * factor

    def slope(self, x):
        """∂x/∂y, where the softcap is set."""
        assert self.softcap is not None
        return 1 - (x / self.softcap) ** 2
