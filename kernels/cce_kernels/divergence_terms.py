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
also the sum of p·log(p/q) − p + q, in which no term is negative. Let M be the larger one of s_v and t_v,
d = |log s_v − log t_v|, E = exp(−d) − 1, so that the smaller one is M·(1 + E), and h = d + E. The terms of the KL
divergences are then

    M·h                          where p is the larger one
    M·(E² − (1 + E)·h)           where p is the smaller one

For the jsd let r be the share of the smaller one in m, β or 1 − β, w = r·E, so that m = M·(1 + w), and
g = w − log(1 + w). The terms are

    M·g                                        of the larger one, whose log(p/m) is −log(1 + w)
    M·((1 − r)·E² − (1 + E)·(h − g))           of the smaller one, whose log(p/m) is −log(1 + w) − d

h and g are about d²/2 and w²/2 where d is small. Polynomials give them there. ∂L/∂z_v needs none: log s_v − log t_v
itself has the rounding errors of the logits. Of the jsd log(s_v / m_v) = −log(1 − β + β·exp(log t_v − log s_v)).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpy.polynomial import Chebyshev, Polynomial

from cce_kernels.head import Head

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


class Functions(NamedTuple):
    """The functions that an engine has in a form of its own."""

    exp: Callable[[jax.Array], jax.Array] = jnp.exp
    log: Callable[[jax.Array], jax.Array] = jnp.log


FUNCTIONS = Functions()


class Whole(NamedTuple):
    """The logits of some tokens at all columns, or some of these, and what makes probabilities of them."""

    logits: Any  # (n, columns), at least float32, before the temperature
    largest: Any  # (n,): the largest logit of all columns, after the temperature; any finite number if that is −inf
    log_mass: Any  # (n,): log Σ_v exp(z_v − largest)

    @classmethod
    def of_runs(cls, logits: jax.Array, largest: jax.Array, mass: jax.Array) -> "Whole":
        """largest, mass: of runs of the vocabulary, (runs, n): their largest logit and Σ exp(z − largest)."""

        def of_both(one: tuple, other: tuple) -> tuple:
            (x, of_x), (y, of_y) = one, other
            peak = jnp.maximum(x, y)
            return peak, of_x * jnp.exp(x - peak) + of_y * jnp.exp(y - peak)

        none = jnp.finfo(largest.dtype).min, jnp.zeros((), mass.dtype)
        of_all, mass = lax.reduce((largest, mass), none, of_both, (0,))  # XLA launches one kernel for both
        return cls(logits, of_all, jnp.log(mass))

    def log_p(self, inverse_temperature: Any) -> jax.Array:
        """The largest logit is subtracted first: the rounding of a large log-sum-exp would be in all of them."""
        z, inverse = self.logits, inverse_temperature
        z = z if inverse is None else z * inverse[:, None]
        return (z - self.largest[:, None]) - self.log_mass[:, None]


@dataclass(frozen=True)
class Static:
    """What a pass over the logits of some tokens finds."""

    kind: Kind
    divergence: bool  # the sums of the terms: of a jsd those of KL(s‖m) and of KL(t‖m)
    entropy: bool  # and the sum of the entropy's
    dz: bool = False

    @property
    def twice(self) -> bool:
        """Whether dz needs the first of the sums."""
        return self.dz and self.kind != "forward_kl"

    @property
    def sums(self) -> int:
        return self.divergence * (1 + (self.kind == "jsd")) + self.entropy


class Pass(NamedTuple):
    """What a pass over the logits of some tokens reads. (n,): at least float32."""

    student: Whole
    teacher: Whole
    inverse_temperature: Any  # (n,); None: 1
    of_student: jax.Array | None  # (n,): KL(s‖t), or of a jsd KL(s‖m), which their dz needs; None where it is not known
    size: jax.Array | None  # (n,): what multiplies the derivative, without the softcap's slope
    beta: jax.Array | None  # (1,), of a jsd

    @property
    def logs(self) -> tuple[jax.Array, jax.Array]:
        """log s and log t."""
        return self.student.log_p(self.inverse_temperature), self.teacher.log_p(self.inverse_temperature)

    def terms(self, static: Static, f: Functions = FUNCTIONS) -> list[jax.Array]:
        """The terms (n, columns) of the sums."""
        log_s, log_t = self.logs
        found = list(terms_of(log_s, log_t, static.kind, self.beta, f)) if static.divergence else []
        return [*found, entropy_terms(log_s, f)] if static.entropy else found

    def dz(self, kind: Kind, head: Head, f: Functions = FUNCTIONS) -> jax.Array:
        """The cotangent of the raw product of the student, (n, columns)."""
        assert self.size is not None
        found = self._derivative(kind, self.size[:, None], f)
        return found if head.softcap is None else found * head.slope(self.student.logits)

    def _derivative(self, kind: Kind, size: jax.Array, f: Functions) -> jax.Array:
        """size·∂L/∂z_v."""
        log_s, log_t = self.logs
        if kind == "forward_kl":
            gap = Gap.of(log_s, log_t, f)
            return gap.larger * jnp.where(gap.of_student, -gap.e, gap.e) * size
        assert self.of_student is not None
        s, ratio = f.exp(log_s), log_s - log_t
        if kind == "jsd":
            assert self.beta is not None
            t_over_s = f.exp(jnp.minimum(-ratio, LARGE_EXPONENT))
            ratio, size = -f.log(1 - self.beta + self.beta * t_over_s), (1 - self.beta) * size
        return jnp.where(s > 0, s * (size * (ratio - self.of_student[:, None])), 0)


class Gap(NamedTuple):
    """How far the student's and the teacher's probability of an id are apart, (n, columns) each."""

    larger: jax.Array  # M: the larger of the two
    distance: jax.Array  # d, at least 0
    e: jax.Array  # E: the smaller of the two is M·(1 + E)
    h: jax.Array  # d + E
    of_student: jax.Array  # whether s is the larger one

    @classmethod
    def of(cls, log_s: jax.Array, log_t: jax.Array, f: Functions) -> "Gap":
        d = jnp.where(log_s == log_t, 0, jnp.abs(log_s - log_t))  # both may be −inf
        if d.dtype == jnp.float64:
            e = jnp.expm1(-d)
            h = d + e
        else:
            near, far = d < NEAR_D, f.exp(-d) - 1
            h = jnp.where(near, d * d * _polynomial(d, OF_EXP), d + far)
            e = jnp.where(near, h - d, far)
        return cls(f.exp(jnp.maximum(log_s, log_t)), d, e, h, log_s >= log_t)

    def share(self, beta: jax.Array) -> jax.Array:
        """r: the share of the smaller one in m."""
        return jnp.where(self.of_student, beta, 1 - beta)

    def of_smaller(self, r: Any = 0.0, g: Any = 0.0) -> jax.Array:
        """The term of the smaller one, over M; 1 where the smaller one is 0, and h is infinite."""
        return (1 - r) * self.e * self.e - (1 + self.e) * (jnp.minimum(self.h, LARGE) - g)


LARGE = 1e30
LARGE_EXPONENT = 80.0  # where log t − log s is above it, s is below exp(−80): dz is next to 0 if log(t / s) is finite


def _fitted(series: list[float], domain: tuple[float, float], degree: int) -> list[float]:
    """The factors of the polynomial of this degree that equals a series at the Chebyshev points of the domain."""
    at_points = Chebyshev.interpolate(Polynomial(series), degree, domain)
    return at_points.convert(kind=Polynomial).coef.tolist()


# exp(−d) − 1 + d = d²·(1/2 − d/6 + d²/24 − …) and w − log(1 + w) = w²·(1/2 − w/3 + w²/4 − …), to a relative 1e-7
NEAR_D, NEAR_W = 0.5, -0.25
OF_EXP = _fitted([(-1) ** n / math.factorial(n + 2) for n in range(20)], (0, NEAR_D), 4)
OF_LOG = _fitted([(-1) ** n / (n + 2) for n in range(40)], (NEAR_W, 0), 5)


def _polynomial(x: jax.Array, factors: list[float]) -> jax.Array:
    """Σ_n factors[n]·xⁿ."""
    found = jnp.full_like(x, factors[-1])
    for factor in factors[-2::-1]:
        found = found * x + factor
    return found


def entropy_terms(log_p: jax.Array, f: Functions = FUNCTIONS) -> jax.Array:
    p = f.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0)


def terms_of(
    log_s: jax.Array, log_t: jax.Array, kind: Kind, beta: jax.Array | None, f: Functions = FUNCTIONS
) -> tuple[jax.Array] | tuple[jax.Array, jax.Array]:
    """The terms (n, columns) whose sum is the divergence; of a jsd those of KL(s‖m) and of KL(t‖m)."""
    gap = Gap.of(log_s, log_t, f)
    if kind != "jsd":
        first = gap.of_student if kind == "reverse_kl" else ~gap.of_student
        term = gap.larger * jnp.where(first, gap.h, gap.of_smaller())
        return (jnp.where(gap.larger > 0, term, 0),)  # 0 times an infinite h
    assert beta is not None
    r = gap.share(beta)
    w = r * gap.e
    if w.dtype == jnp.float64:
        g = w - jnp.log1p(w)
    else:
        g = jnp.where(w > NEAR_W, w * w * _polynomial(w, OF_LOG), w - f.log(1 + w))
    of_larger, of_smaller = gap.larger * g, gap.larger * gap.of_smaller(r, g)
    of_s, of_t = (jnp.where(first, of_larger, of_smaller) for first in (gap.of_student, ~gap.of_student))
    return of_s, of_t
