"""The core's inputs, its results, their cotangents and its gradients, by name. A new number per token is a field here.

N tokens, width D, vocabulary V. cce_jax/core.py defines every number.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

FLOAT32_MAX = 3e38  # replaces an infinite reference (blocks.py): inf − inf would be NaN
LOG2_E = 1.4426950408889634  # the hardware's exponential is base 2: exp(z) = exp2(z · log2 e)


LEAST_LOG = -1000.0  # of P, to the base e or 2: exp(LEAST_LOG) is 0, and LEAST_LOG times a cotangent is finite


class Inputs(NamedTuple):
    """The arrays of a call."""

    e: jax.Array  # (N, D): bfloat16, float16 or float32; float64 for the xla engine alone
    c: jax.Array  # (V, D), or (D, V) if head.vocab_axis is 1; of e's type
    bias: jax.Array | None  # (V,), of e's type
    targets: jax.Array  # (N,) int32; negative: the token is ignored; V or more: the target names no column
    weights: jax.Array | None = None  # (V,) at least float32: the weights of the weighted sum; None: 1
    scale: jax.Array | None = None  # (1,) at least float32: multiplies the logits; None: 1
    inverse_temperature: jax.Array | None = None  # (N,) at least float32: multiplies a token's logits after softcap
    ids: jax.Array | None = None  # (N, K) int32: columns whose logits are asked for; negative, or V or more: no column

    @property
    def factor(self) -> jax.Array | None:
        """scale times inverse_temperature, which multiply every dz of a token: (1,) or (N,); None: 1."""
        scale, inverse = self.scale, self.inverse_temperature
        return inverse if scale is None else scale if inverse is None else scale * inverse

    @property
    def of_tokens(self) -> dict[str, jax.Array]:
        """The arrays with a row for each token, by name."""
        arrays = {name: getattr(self, name) for name in ("e", "targets", "inverse_temperature", "ids")}
        return {name: x for name, x in arrays.items() if x is not None}

    @property
    def factor_of_rows(self) -> jax.Array | None:
        """factor, which broadcasts against (N, V)."""
        inverse = self.inverse_temperature
        return self.scale if inverse is None else self.factor[:, None]  # type: ignore[index]

    def divided(self, x: jax.Array) -> jax.Array:
        """Logits (N, V), divided by the temperature of each token."""
        return divided(x, self.inverse_temperature)

    def capped(self, z: jax.Array) -> jax.Array:
        """Logits of the tokens, (N,), before inverse_temperature multiplied them."""
        return z if self.inverse_temperature is None else z / self.inverse_temperature


def divided(x: jax.Array, inverse_temperature: jax.Array | None) -> jax.Array:
    """Logits (N, V), divided by the temperature of each token, (N,), each rounded, in plain XLA; None: 1."""
    return x if inverse_temperature is None else rounded(x * inverse_temperature[:, None], x)


def rounded(product: jax.Array, x: jax.Array) -> jax.Array:
    """product: logits that are x times other numbers. They are rounded before a reference is subtracted from them.

    Else a compiler may multiply and subtract in one operation, which rounds once. The reference is a rounded logit: the
    difference of two equal logits would then not be 0 but the rounding of one, which grows with the logit, and its
    exponential may be any number. There is no such operation for the least of a product and a number.
    """
    return jnp.where(jnp.abs(x) < jnp.inf, jnp.minimum(product, jnp.finfo(product.dtype).max), product)


def logarithm(log_p: jax.Array) -> jax.Array:
    """log P, finite where P is 0: a logit may be −inf, and 0 · −inf is NaN."""
    return jnp.maximum(log_p, LEAST_LOG)


@dataclass(frozen=True)
class WantedNumbers:
    """Which numbers of a token a call asks for besides log_mass, reference and target. A number costs only who asks."""

    sum: bool = False
    mean: bool = False  # from which the entropy follows
    mean_is_detached: bool = False  # whether the mean gets no cotangent


NO_OTHERS = WantedNumbers()


class Numbers(NamedTuple):
    """The core's numbers of each token, (N,), at least float32. They are arbitrary for an ignored token.

    Sums over the vocabulary are of z − ρ, with a reference ρ close to the largest logits: what is common to all logits
    of a token, however large it is, is then in no sum, and costs none of them a digit.
    """

    log_mass: jax.Array  # log Σ_v exp(z_v − ρ)
    reference: jax.Array  # ρ, a constant to the derivatives: the logit of the target, or another number near lse
    target: jax.Array  # the logit of its target
    sum: jax.Array | None = None  # Σ_v w_v (z_v − ρ); None: not asked for
    mean: jax.Array | None = None  # Σ_v p_v (z_v − ρ), with p the softmax; None: not asked for
    ids: jax.Array | None = None  # (N, K): the logits of Inputs.ids; 0 where an id names no column, or is ignored

    @classmethod
    def filled(cls, x: Any, wanted: WantedNumbers) -> "Numbers":
        """x for each number that is wanted, but the ids."""
        return cls(x, x, x, x if wanted.sum else None, x if wanted.mean else None)

    @property
    def lse(self) -> jax.Array:
        """The log-sum-exp, rounded. For differences from other logits of the token, `log_p` has more digits."""
        return self.reference + self.log_mass

    def log_p(self, z: jax.Array) -> jax.Array:
        """z − lse, of logits z of the tokens, (N,) or (N, K). At most 0: z may be another product than those summed."""
        numbers = self.reference, self.log_mass
        reference, log_mass = (x if x.ndim == z.ndim else x[..., None] for x in numbers)
        log_p = (z - reference) - log_mass
        return log_p - lax.stop_gradient(jnp.maximum(log_p, 0))

    @property
    def entropy(self) -> jax.Array:
        """−Σ_v p_v log p_v, at least 0."""
        assert self.mean is not None
        entropy = self.log_mass - self.mean
        return entropy - lax.stop_gradient(jnp.minimum(entropy, 0))

    def most(self, inputs: Inputs) -> jax.Array | None:
        """lse, which no logit exceeds, for kernels that compute logits again; None where there is no need of it.

        Two kernels may round the same logit in two ways. A large factor multiplies the difference: an exponential
        relative to lse, which is 1 at most, could then be any number.
        """
        return None if inputs.factor is None else self.lse

    def relative_to(self, reference: jax.Array) -> "Numbers":
        """The same numbers relative to another reference, without the sum."""
        between = self.reference - reference
        mean = None if self.mean is None else self.mean + between
        return self._replace(log_mass=self.log_mass + between, reference=reference, sum=None, mean=mean)


class Cotangents(NamedTuple):
    """The cotangents of Numbers: a, t̂, s, μ and ι in the equations."""

    lse: jax.Array
    target: jax.Array
    sum: jax.Array | None
    mean: jax.Array | None = None
    ids: jax.Array | None = None  # None: 0

    @classmethod
    def of(cls, cotangents: Numbers) -> "Cotangents":
        """Those of all numbers but the reference, which has no derivative: lse moves with log_mass alone."""
        return cls(*(x for name, x in cotangents._asdict().items() if name != "reference"))


@dataclass(frozen=True)
class Wanted:
    """Which gradients a call needs. A gradient that is not wanted costs nothing."""

    e: bool
    c: bool
    bias: bool


class Gradients(NamedTuple):
    """The gradients of e (N, D), of c, in its shape, and of bias (V,). None where not wanted."""

    e: jax.Array | None
    c: jax.Array | None
    bias: jax.Array | None
