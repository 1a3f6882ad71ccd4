"""The divergences of a token as sums over the vocabulary, and their derivatives: elementwise, for every engine.

Let s and t be the distributions of the student and the teacher at a token, and m = β·t + (1 − β)·s. The divergences are

    forward_kl    KL(t‖s) = Σ_v t_v·log(t_v / s_v)
    reverse_kl    KL(s‖t) = Σ_v s_v·log(s_v / t_v)
    jsd           β·KL(t‖m) + (1 − β)·KL(s‖m)                0 < β < 1

The teacher is constant. With z the student's logits, ∂s_u/∂z_v = s_u·([u = v] − s_v), so that an L with the partial
derivatives g_v = ∂L/∂s_v has ∂L/∂z_v = s_v·(g_v − Σ_u s_u·g_u). The derivatives are

    forward_kl    g_v = −t_v / s_v                                ∂L/∂z_v = s_v − t_v
    reverse_kl    g_v = log(s_v / t_v) + 1                        ∂L/∂z_v = s_v·(log(s_v / t_v) − KL(s‖t))
    jsd           g_v = (1 − β)·(log(s_v / m_v) + 1)              ∂L/∂z_v = (1 − β)·s_v·(log(s_v / m_v) − KL(s‖m))
                        − m_v·(1 − β) / m_v

and dz, the cotangent of the raw product e·c, is that times the token's weight, the factor of the inputs and the slope
of the softcap (cce_kernels/head.py).

Rounding. A sum Σ p·log(p/q) has terms of both signs that cancel where p and q are about equal. As Σ p = Σ q = 1, it is
also the sum of p·log(p/q) − p + q, in which no term is negative. Let M be the larger one of s_v and t_v, and
d = |log s_v − log t_v|, E = expm1(−d), so that the smaller one is M·(1 + E). The terms of the KL divergences are then

    M·(d + E)                    where p is the larger one
    −M·((1 + E)·d + E)           where p is the smaller one

For the jsd let r be the share of the smaller one in m, β or 1 − β, and w = r·E, so that m = M·(1 + w). The terms are

    M·(w − log1p(w))                                   of the larger one, whose log(p/m) is −log1p(w)
    −M·((1 + E)·(d + log1p(w)) + (1 − r)·E)            of the smaller one, whose log(p/m) is −log1p(w) − d

Where s is written over log s − log t instead, with z and y the logits,

    KL(s‖t) = Σ_v s_v·(z_v − y_v) − lse(z) + lse(y)

which one pass finds together with both log-sum-exps. Its error is that of the logits, which ∂L/∂z_v has anyway. The
divergence itself is the sum of the terms above.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels.head import Head

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


class Norms(NamedTuple):
    """What makes probabilities of the logits of some tokens, (n,) each, at least float32."""

    largest_s: jax.Array  # the largest logit of the student's; 0, or any finite number, if that is −inf
    largest_t: jax.Array  # and of the teacher's
    mass_s: jax.Array  # log Σ_v exp(z_v − largest)
    mass_t: jax.Array


class Both(NamedTuple):
    """The logits of some tokens before the temperature, (n, columns)."""

    student: Any
    teacher: Any
    inverse_temperature: Any  # (n,); None: 1

    @property
    def logits(self) -> tuple[jax.Array, jax.Array]:
        """After the temperature."""
        x, y, inverse = self
        return (x, y) if inverse is None else (x * inverse[:, None], y * inverse[:, None])

    def logs(self, norms: Norms) -> tuple[jax.Array, jax.Array]:
        """log s and log t.

        The largest logit is subtracted first: the rounding of a large log-sum-exp would be in all of them.
        """
        (x, y), (largest_s, largest_t, mass_s, mass_t) = self.logits, norms
        return (x - largest_s[:, None]) - mass_s[:, None], (y - largest_t[:, None]) - mass_t[:, None]


@dataclass(frozen=True)
class Static:
    """What a pass over the logits of some tokens finds."""

    kind: Kind
    divergence: bool  # the sums of the terms: of a jsd those of KL(t‖m) and of KL(s‖m)
    entropy: bool  # and the sum of the entropy's
    dz: bool

    @property
    def sums(self) -> int:
        return self.divergence * (1 + (self.kind == "jsd")) + self.entropy


class Pass(NamedTuple):
    """What a pass over the logits of some tokens reads. (n,): at least float32."""

    both: Both
    norms: Norms
    of_student: jax.Array | None  # (n,): KL(s‖t), or of a jsd KL(s‖m); None: not needed
    size: jax.Array | None  # (n,): what multiplies the derivative, without the softcap's slope; None: 1
    beta: jax.Array | None  # (1,), of a jsd

    def terms(self, static: Static) -> list[jax.Array]:
        """The terms (n, columns) of the sums."""
        log_s, log_t = self.both.logs(self.norms)
        found = list(terms_of(log_s, log_t, static.kind, self.beta)) if static.divergence else []
        return [*found, entropy_terms(log_s)] if static.entropy else found

    def dz(self, static: Static, head: Head) -> jax.Array:
        """The cotangent of the raw product of the student, (n, columns)."""
        log_s, log_t = self.both.logs(self.norms)
        found = derivative_of(log_s, log_t, self.of_student, static.kind, self.beta)
        found = found if self.size is None else found * self.size[:, None]
        return found if head.softcap is None else found * head.slope(self.both.student)


def entropy_terms(log_p: jax.Array) -> jax.Array:
    p = jnp.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0)


class Gap(NamedTuple):
    """How far the student's and the teacher's probability of an id are apart, (n, V) each."""

    larger: jax.Array  # M: the larger of the two
    distance: jax.Array  # d, at least 0: |log s − log t|
    e: jax.Array  # E = expm1(−d); the smaller of the two is M·(1 + E)
    of_student: jax.Array  # whether s is the larger one

    @classmethod
    def of(cls, log_s: jax.Array, log_t: jax.Array) -> "Gap":
        distance = jnp.where(log_s == log_t, 0, jnp.abs(log_s - log_t))  # both may be −inf
        return cls(jnp.exp(jnp.maximum(log_s, log_t)), distance, _expm1(-distance), log_s >= log_t)

    def times(self, x: jax.Array) -> jax.Array:
        """M·x, 0 where M is 0."""
        return jnp.where(self.larger > 0, self.larger * x, 0)

    def smaller_times(self, x: jax.Array) -> jax.Array:
        """(1 + E)·x, 0 where 1 + E is 0."""
        return jnp.where(self.e > -1, (1 + self.e) * x, 0)

    def mixed(self, beta: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The share r of the smaller one in m, w = r·E and log1p(w), which is log(m / M)."""
        share = jnp.where(self.of_student, beta, 1 - beta)
        w = share * self.e
        return share, w, _log1p(w)


SMALL = 0.125


def _expm1(x: jax.Array) -> jax.Array:
    """exp(x) − 1 for x ≤ 0. XLA's own takes several times as many instructions on a GPU."""
    if x.dtype == jnp.float64:
        return jnp.expm1(x)
    return jnp.where(x > -SMALL, _series(x, [1 / math.factorial(n) for n in range(1, 7)]), jnp.exp(x) - 1)


def _log1p(x: jax.Array) -> jax.Array:
    """log(1 + x) for −1 ≤ x ≤ 0, in the same way."""
    if x.dtype == jnp.float64:
        return jnp.log1p(x)
    return jnp.where(x > -SMALL, _series(x, [-((-1) ** n) / n for n in range(1, 9)]), jnp.log(1 + x))


def _series(x: jax.Array, factors: list[float]) -> jax.Array:
    """Σ_n factors[n − 1]·xⁿ."""
    found = jnp.full_like(x, factors[-1])
    for factor in factors[-2::-1]:
        found = found * x + factor
    return found * x


def terms_of(
    log_s: jax.Array, log_t: jax.Array, kind: Kind, beta: jax.Array | None
) -> tuple[jax.Array] | tuple[jax.Array, jax.Array]:
    """The terms (n, V) whose sum is the divergence; of a jsd those of KL(t‖m) and of KL(s‖m)."""
    gap = Gap.of(log_s, log_t)
    if kind != "jsd":
        of_larger = gap.distance + gap.e
        of_smaller = -(gap.smaller_times(gap.distance) + gap.e)
        first = gap.of_student if kind == "reverse_kl" else ~gap.of_student
        return (gap.times(jnp.where(first, of_larger, of_smaller)),)
    assert beta is not None
    share, w, log_m = gap.mixed(beta)
    of_larger, of_smaller = w - log_m, -(gap.smaller_times(gap.distance + log_m) + (1 - share) * gap.e)
    of_t, of_s = (jnp.where(first, of_larger, of_smaller) for first in (~gap.of_student, gap.of_student))
    return gap.times(of_t), gap.times(of_s)


def derivative_of(
    log_s: jax.Array, log_t: jax.Array, of_student: jax.Array | None, kind: Kind, beta: jax.Array | None
) -> jax.Array:
    """The derivative of the divergence by the student's logits, (n, columns). of_student: of Pass."""
    gap = Gap.of(log_s, log_t)
    if kind == "forward_kl":
        return gap.times(jnp.where(gap.of_student, -gap.e, gap.e))
    assert of_student is not None
    if kind == "reverse_kl":
        ratio, factor = jnp.where(gap.of_student, gap.distance, -gap.distance), 1.0
    else:
        assert beta is not None
        log_m = gap.mixed(beta)[2]
        ratio, factor = jnp.where(gap.of_student, -log_m, -log_m - gap.distance), 1 - beta
    s = jnp.exp(log_s)
    return factor * jnp.where(s > 0, s * (ratio - of_student[:, None]), 0)
