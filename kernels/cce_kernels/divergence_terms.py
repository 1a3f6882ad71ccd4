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

For the jsd let p be s_v or t_v and q the other one, r the share of q in m, β or 1 − β, and w = r·(q/p − 1), where
q/p − 1 is E if p is the larger one and −E / (1 + E) if it is the smaller one. So m = p·(1 + w), log(p/m) = −log(1 + w),
and the terms are p·(w − log(1 + w)). As β goes to 0 or 1 the divergence goes to 0 as β or 1 − β does, and one of the
two w with it: no number of the size of 1 may be subtracted from another. Hence both shares are given, and a large
1 + w is (1 − r) + r·q/p.

h and w − log(1 + w) are about d²/2 and w²/2 where d and w are small. Polynomials give them there. ∂L/∂z_v of the KL
divergences needs none: log s_v − log t_v itself has the rounding errors of the logits.
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
from cce_kernels.numbers import divided

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
        z = self.logits if inverse_temperature is None else divided(self.logits, inverse_temperature)
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
    shares: Any  # of a jsd, (2,): the teacher's and the student's share of the mixture, β and 1 − β

    @property
    def logs(self) -> tuple[jax.Array, jax.Array]:
        """log s and log t."""
        return self.student.log_p(self.inverse_temperature), self.teacher.log_p(self.inverse_temperature)

    def terms(self, static: Static, f: Functions = FUNCTIONS) -> list[jax.Array]:
        """The terms (n, columns) of the sums."""
        log_s, log_t = self.logs
        found = list(terms_of(log_s, log_t, static.kind, self.shares, f)) if static.divergence else []
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
            ratio, size = -Mixed.of(Gap.of(log_s, log_t, f), True, self.shares, f).log, self.shares[1] * size
        # KL(s‖t) is infinite where t lacks an id that s has: of a token that is left out, 0 · inf would be NaN.
        return jnp.where((s > 0) & (size != 0), s * (size * (ratio - self.of_student[:, None])), 0)


class Gap(NamedTuple):
    """How far the student's and the teacher's probability of an id are apart, (n, columns) each."""

    larger: jax.Array  # M: the larger of the two
    ratio: jax.Array  # exp(−d): the smaller of the two over M
    e: jax.Array  # E: the smaller of the two is M·(1 + E)
    h: jax.Array  # d + E
    of_student: jax.Array  # whether s is the larger one

    @classmethod
    def of(cls, log_s: jax.Array, log_t: jax.Array, f: Functions) -> "Gap":
        d = jnp.where(log_s == log_t, 0, jnp.abs(log_s - log_t))  # both may be −inf
        ratio = f.exp(-d)
        if d.dtype == jnp.float64:
            e = jnp.expm1(-d)
            h = d + e
        else:
            near, far = d < NEAR_D, ratio - 1
            h = jnp.where(near, d * d * _polynomial(d, OF_EXP), d + far)
            e = jnp.where(near, h - d, far)
        return cls(f.exp(jnp.maximum(log_s, log_t)), ratio, e, h, log_s >= log_t)


class Mixed(NamedTuple):
    """The mixture m beside one of the two distributions, p, (n, columns) each."""

    log: jax.Array  # log(m/p) = log(1 + w); where p is 0, some finite number
    term: jax.Array  # p·(w − log(1 + w))

    @classmethod
    def of(cls, gap: Gap, of_student: bool, shares: Any, f: Functions) -> "Mixed":
        """of_student: whether p is the student's, else it is the teacher's."""
        own, r = shares[int(of_student)], shares[int(not of_student)]
        is_larger = gap.of_student if of_student else ~gap.of_student
        p, q, to_q = (
            jnp.where(is_larger, x, y) for x, y in ((1, gap.ratio), (gap.ratio, 1), (gap.e, -gap.e))
        )  # over M
        over_p = 1 / jnp.maximum(p, jnp.finfo(p.dtype).tiny)
        w = r * (to_q * over_p)
        near, far = (w > NEAR_W[0]) & (w < NEAR_W[1]), f.log(own + r * (q * over_p))
        less = w - jnp.log1p(jnp.where(near, w, 0)) if w.dtype == jnp.float64 else w * w * _polynomial(w, OF_LOG)
        return cls(jnp.where(near, w - less, far), gap.larger * jnp.where(near, p * less, r * to_q - p * far))


LARGE = 1e30


def _fitted(series: list[float], domain: tuple[float, float], degree: int) -> list[float]:
    """The factors of the polynomial of this degree that equals a series at the Chebyshev points of the domain."""
    at_points = Chebyshev.interpolate(Polynomial(series), degree, domain)
    return at_points.convert(kind=Polynomial).coef.tolist()


# exp(−d) − 1 + d = d²·(1/2 − d/6 + d²/24 − …) and w − log(1 + w) = w²·(1/2 − w/3 + w²/4 − …), to a relative 1e-7
NEAR_D, NEAR_W = 0.5, (-0.25, 0.3)
OF_EXP = _fitted([(-1) ** n / math.factorial(n + 2) for n in range(20)], (0, NEAR_D), 4)
OF_LOG = _fitted([(-1) ** n / (n + 2) for n in range(40)], NEAR_W, 7)


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
    log_s: jax.Array, log_t: jax.Array, kind: Kind, shares: Any, f: Functions = FUNCTIONS
) -> tuple[jax.Array] | tuple[jax.Array, jax.Array]:
    """The terms (n, columns) whose sum is the divergence; of a jsd those of KL(s‖m) and of KL(t‖m)."""
    gap = Gap.of(log_s, log_t, f)
    if kind != "jsd":
        first = gap.of_student if kind == "reverse_kl" else ~gap.of_student
        of_smaller = gap.e * gap.e - (1 + gap.e) * jnp.minimum(gap.h, LARGE)  # 1 where the smaller one is 0
        term = gap.larger * jnp.where(first, gap.h, of_smaller)
        return (jnp.where(gap.larger > 0, term, 0),)  # 0 times an infinite h
    of_s, of_t = (Mixed.of(gap, of_student, shares, f).term for of_student in (True, False))
    return of_s, of_t
