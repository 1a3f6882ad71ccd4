"""How far a student's distribution is from a teacher's at each token, and its gradients, in chunks of tokens.

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

Each chunk of tokens holds dz (n, V) in e's type, which becomes de and a part of dc as in cce_kernels/in_forward.py:
three matmuls of the student and one of the teacher. dz is formed of a part of the chunk's tokens at a time, of which
the logits of both are held in float32. Passes read both logits: for the largest, the masses Σ exp(z − largest), the
divergence, of a jsd KL(s‖m), and dz.

For a program of another framework there is

    formed(given: Given, of: Divergence, plan: Plan) -> Found(loss, total, entropy, de, dc, dbias)

which is pure and jitted; `of` and `plan` are static. The weights are those of each token over the number of items, so
that loss = Σ weight·total is the mean, and de, dc and dbias are its gradients. plan = plan_of(call, gpu, impl) with
Call(..., one_factor=True, teacher_width=D'), where wanted says which gradients are formed; None: none, as total alone
is asked for. For a loss per token call it a second time in the backward pass, with the cotangents of total as weights.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.float16 import FLOAT16_LARGEST
from cce_kernels.head import Head
from cce_kernels.in_forward import Formed, finish, of_dz, over_chunks, taken
from cce_kernels.numbers import Inputs
from cce_kernels.plan.plan import Plan
from cce_kernels.residuals import Residuals
from cce_kernels.tokens import Kept, in_chunks

Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Divergence:
    """The static part of a divergence. The student's head is plan.call.head."""

    kind: Kind
    teacher: Head
    entropy: bool = False  # whether the student's entropies are asked for


class Side(NamedTuple):
    """A student or a teacher. c and bias have e's type; the widths and the types of the two may differ."""

    e: jax.Array  # (N, D): bfloat16, float16 or float32; float64 only by XLA
    c: jax.Array  # (V, D), or (D, V) if its head's vocab_axis is 1
    bias: jax.Array | None = None  # (V,)
    scale: jax.Array | None = None  # (1,) at least float32: multiplies the logits; None: 1


class Given(NamedTuple):
    """The arrays of a call. A token whose weight is 0 is left out, whatever its rows hold."""

    student: Side
    teacher: Side
    weight: jax.Array  # (N,) at least float32
    inverse_temperature: jax.Array | None = None  # (N,) at least float32: multiplies both logits; None: 1
    beta: jax.Array | None = None  # (), of a jsd

    @property
    def inputs(self) -> Inputs:
        """The student's, in which a token of weight 0 counts as ignored."""
        (e, c, bias, scale), kept = self.student, jnp.where(self.weight == 0, -1, 0).astype(jnp.int32)
        return Inputs(e, c, bias, kept, None, scale, self.inverse_temperature)


class Numbers(NamedTuple):
    """Numbers of each token, (N,), at least float32; 0 where its weight is 0."""

    total: jax.Array  # the divergence
    entropy: jax.Array | None  # the student's; None: not asked for


class Found(NamedTuple):
    """What `formed` returns. None: not asked for."""

    loss: jax.Array  # ()
    total: jax.Array  # (N,)
    entropy: jax.Array | None  # (N,)
    de: jax.Array | None  # (N, D), (V, D) or (D, V), and (V,): in the types that the plan's call says
    dc: jax.Array | None
    dbias: jax.Array | None


@partial(jax.jit, static_argnames=("of", "plan"))
def formed(given: Given, of: Divergence, plan: Plan) -> Found:
    """The sum of weight · divergence over the tokens, and its gradients by the student's arrays."""
    numbers, left = begin(given, of, plan)
    kept = given.weight != 0
    loss = jnp.sum(jnp.where(kept, given.weight * numbers.total, 0))
    return Found(loss, *numbers, *finish(left, jnp.ones((), loss.dtype), kept, plan))


def begin(given: Given, of: Divergence, plan: Plan, cleared: bool = False) -> tuple[Numbers, Residuals]:
    """The numbers of all tokens, and the gradients of Σ weight·total, for in_forward.finish. cleared: as there."""
    way = plan.in_forward
    assert way is not None
    inputs, teacher, rows = given.inputs, given.teacher, way.chunks.rows
    kept, zeros = Kept.of(inputs.targets, rows), jnp.zeros(rows, plan.call.sum_dtype)

    def chunk(start: Any, size: int) -> Formed:
        of_student, (weight, e) = taken(kept, start, size, inputs, (given.weight, teacher.e))
        live = of_student.live
        of_tokens = of_student.inputs.of_tokens, jnp.where(live[:, None], e, 0), jnp.where(live, weight, 0)

        def of_part(of_tokens: Any) -> tuple[Numbers, jax.Array, jax.Array | None]:
            of_inputs, of_teacher, own_weight = of_tokens
            own, other = of_student.inputs._replace(**of_inputs), teacher._replace(e=of_teacher)
            numbers, dz, unit = _numbers_and_dz(own, other, own_weight, given.beta, of, plan)
            return numbers, dz.astype(inputs.e.dtype), unit

        numbers, dz, unit = in_chunks(of_part, of_tokens, way.logits_of(size), of_student.count[0])
        dbias = _dbias_of(dz, inputs.e.dtype) if plan.call.wants.bias else None
        return Formed(numbers, *of_dz(of_student, dz, dbias, unit, plan))

    return over_chunks(chunk, Numbers(zeros, zeros if of.entropy else None), kept, plan, cleared)


def _numbers_and_dz(
    inputs: Inputs, teacher: Side, weight: jax.Array, beta: jax.Array | None, of: Divergence, plan: Plan
) -> tuple[Numbers, jax.Array, jax.Array | None]:
    """The numbers of some tokens, (n,); dz, (n, V), at least float32, divided by a unit; the unit, or None for 1."""
    head = plan.call.head
    x = head.whole_logits(inputs.e, inputs.c, inputs.bias, inputs.scale)
    y = of.teacher.whole_logits(*teacher).astype(x.dtype)
    both: Any = _Both(x, y, inputs.inverse_temperature)
    both, found = lax.optimization_barrier((both, _largest(*both.logits)))
    peaks = tuple(jnp.where(jnp.isfinite(peak), peak, 0) for peak in found)
    masses = _sums(*(jnp.exp(z - peak[:, None]) for z, peak in zip(both.logits, peaks, strict=True)))
    both, norms = lax.optimization_barrier((both, (*peaks, *map(jnp.log, masses))))
    sums: list[jax.Array] = []
    for k in range(2 if of.kind == "jsd" else 1):  # one after the other: XLA would store what both are made from
        log_s, log_t = both.logs(norms)
        terms = [terms_of(log_s, log_t, of.kind, beta)[k]]
        if of.entropy and k == 0:
            terms.append(entropy_terms(log_s))
        both, norms, found = lax.optimization_barrier((both, norms, _sums(*terms)))
        sums += found
    total = of_student = sums[0]
    if beta is not None and of.kind == "jsd":
        of_student = sums[-1]
        total = beta * total + (1 - beta) * of_student
    size, unit = weight[:, None] if inputs.factor_of_rows is None else weight[:, None] * inputs.factor_of_rows, None
    if plan.call.dtype == "float16":
        unit = _unit(size[:, 0] * (1 + of_student))
        size = size / unit
    log_s, log_t = both.logs(norms)
    dz = derivative_of(log_s, log_t, of_student, of.kind, beta) * size
    if head.softcap is not None:
        dz = dz * head.slope(both.student)
    return Numbers(total, sums[1] if of.entropy else None), dz, unit


class _Both(NamedTuple):
    """The logits of a chunk. Each pass over them begins with them, and XLA holds no other array of their size."""

    student: jax.Array  # (n, V), before the temperature
    teacher: jax.Array  # the same
    inverse_temperature: jax.Array | None  # (n,)

    @property
    def logits(self) -> tuple[jax.Array, jax.Array]:
        """After the temperature."""
        inverse = self.inverse_temperature
        x, y = self.student, self.teacher
        return (x, y) if inverse is None else (x * inverse[:, None], y * inverse[:, None])

    def logs(self, norms: Any) -> tuple[jax.Array, jax.Array]:
        """log s and log t. norms: the largest logit of each, and the logarithm of Σ exp(z − largest).

        The largest logit is subtracted first: the rounding of a large log-sum-exp would be in all of them.
        """
        x, y = self.logits
        peak_x, peak_y, mass_x, mass_y = norms
        return (x - peak_x[:, None]) - mass_x[:, None], (y - peak_y[:, None]) - mass_y[:, None]


def _largest(*arrays: jax.Array) -> list[jax.Array]:
    return _reduced(lax.max, -jnp.inf, arrays)


def _sums(*arrays: jax.Array) -> list[jax.Array]:
    return _reduced(lax.add, 0.0, arrays)


def _reduced(combine: Any, start: float, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Each array (n, V), reduced over V. One operation reduces all: XLA then reads what they are made from once."""

    def of_pair(some: Any, more: Any) -> Any:
        return tuple(map(combine, some, more))

    return lax.reduce(arrays, tuple(jnp.asarray(start, x.dtype) for x in arrays), of_pair, (1,))


def entropy_terms(log_p: jax.Array) -> jax.Array:
    p = jnp.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0)


class _Gap(NamedTuple):
    """How far the student's and the teacher's probability of an id are apart, (n, V) each."""

    larger: jax.Array  # M: the larger of the two
    distance: jax.Array  # d, at least 0: |log s − log t|
    e: jax.Array  # E = expm1(−d); the smaller of the two is M·(1 + E)
    of_student: jax.Array  # whether s is the larger one

    @classmethod
    def of(cls, log_s: jax.Array, log_t: jax.Array) -> "_Gap":
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
    gap = _Gap.of(log_s, log_t)
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
    log_s: jax.Array, log_t: jax.Array, of_student: jax.Array, kind: Kind, beta: jax.Array | None
) -> jax.Array:
    """The derivative of the divergence by the student's logits, (n, V). of_student: KL(s‖t), or KL(s‖m), (n,)."""
    gap = _Gap.of(log_s, log_t)
    if kind == "forward_kl":
        return gap.times(jnp.where(gap.of_student, -gap.e, gap.e))
    if kind == "reverse_kl":
        ratio, factor = jnp.where(gap.of_student, gap.distance, -gap.distance), 1.0
    else:
        assert beta is not None
        log_m = gap.mixed(beta)[2]
        ratio, factor = jnp.where(gap.of_student, -log_m, -log_m - gap.distance), 1 - beta
    s = jnp.exp(log_s)
    return factor * jnp.where(s > 0, s * (ratio - of_student[:, None]), 0)


def _dbias_of(dz: jax.Array, dtype: Any) -> jax.Array:
    """The sums of the columns of dz, (V,), at least float32. In 16 bits by a matmul, which holds no partial sums."""
    if jnp.dtype(dtype).itemsize > 2:
        return jnp.sum(dz, axis=0)
    return lax.dot(jnp.ones((1, len(dz)), dtype), dz.astype(dtype), preferred_element_type=jnp.float32)[0]


def _unit(bound: jax.Array) -> jax.Array:
    """What dz of a chunk is divided by in float16, so that no element is above FLOAT16_LARGEST.

    An element is at most 1 of the forward KL. Of the others s·(log(s/q) − KL(s‖q)) is at most 1 + KL(s‖q): the negative
    terms of KL(s‖q) are the s·log(q/s) ≤ q − s of some ids, and their sum is at most 1. bound: that for each token,
    (n,), times its weight and the factor of the inputs.
    """
    size = jnp.abs(bound)
    largest = jnp.max(jnp.where(jnp.isfinite(size), size, 0))
    return jnp.where(largest > 0, largest, 1.0) / FLOAT16_LARGEST
