"""How far a student's distribution is from a teacher's at each token, and its gradients, in chunks of tokens.

cce_kernels/divergence_terms.py has the sums over the vocabulary, and the derivatives.

Each chunk of tokens holds dz (n, V) in e's type, which becomes de and a part of dc as in cce_kernels/blocks.py:
three matmuls of the student and one of the teacher. XLA's matmuls give the logits of both, at least float32, which are
read in passes: for the log-sum-exps, for sums of terms, and for dz. In bfloat16 kernels make the passes, for a part of
the chunk's tokens at a time, so that the logits of a part alone are held. One kernel finds the sums and forms dz. XLA's
passes are over all tokens of the chunk.

For a program of another framework there is

    formed(given: Given, of: Divergence, plan: Plan) -> Found(loss, total, entropy, de, dc, dbias)

which is pure and jitted; `of` and `plan` are static. The weights are those of each token over the number of items, so
that loss = Σ weight·total is the mean, and de, dc and dbias are its gradients. plan = plan_of(request, gpu, impl) with
Request(..., one_factor=True, teacher_width=D'), where wanted says which gradients are formed; None: none, as total
alone is asked for. For a loss per token call it a second time in the backward pass, with the cotangents of total as
weights.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_kernels.blocks import Parts, finish, of_dz, over_chunks, taken
from cce_kernels.divergence_terms import Kind, Pass, Static, Whole
from cce_kernels.engines.engine import Problem, Step
from cce_kernels.exponentials import saved_shape
from cce_kernels.float16 import FLOAT16_LARGEST, SMALLEST_ROW
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs
from cce_kernels.plan.plan import Plan, Schedule
from cce_kernels.plan.residuals import Residuals
from cce_kernels.request import Request
from cce_kernels.tokens import Kept, over_kept

PARTS_OF_STEP = 4


@dataclass(frozen=True)
class Divergence:
    """The static part of a divergence. The student's head is plan.request.head."""

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
    shares: jax.Array | None = None  # (2,), of a jsd: the teacher's and the student's in the mixture, β and 1 − β

    @property
    def inputs(self) -> Inputs:
        """The student's, in which a token of weight 0 counts as ignored."""
        (e, c, bias, scale), kept = self.student, jnp.where(self.weight == 0, -1, 0).astype(jnp.int32)
        return Inputs(e, c, bias, kept, None, scale, self.inverse_temperature)


class Divergences(NamedTuple):
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


def begin(given: Given, of: Divergence, plan: Plan) -> tuple[Divergences, Residuals]:
    """The numbers of all tokens, and the gradients of Σ weight·total, for blocks.finish."""
    way = plan.in_forward
    assert way is not None
    inputs, teacher, rows = given.inputs, given.teacher, way.chunks.rows
    kept, zeros = Kept.of(inputs.targets, rows), jnp.zeros(rows, plan.request.sum_dtype)

    def chunk(start: Any) -> tuple[Divergences, Parts]:
        of_student, (weight, e) = taken(kept, start, way.chunks.size, inputs, (given.weight, teacher.e))
        live = of_student.live
        own = Tokens(of_student.inputs, teacher._replace(e=jnp.where(live[:, None], e, 0)), jnp.where(live, weight, 0))
        if way.passes is None:
            numbers, dz, unit = _by_xla(own, given.shares, of, plan)
            dz = dz.astype(inputs.e.dtype)
        else:
            (numbers, dz), unit = _by_kernels(own, of_student.count[0], given.shares, of, plan), None
        dbias = _dbias_of(dz, plan.request) if plan.request.wants.bias else None
        return numbers, of_dz(of_student, dz, dbias, unit, plan)

    return over_chunks(chunk, Divergences(zeros, zeros if of.entropy else None), kept, plan)


class Tokens(NamedTuple):
    """Some tokens, n. Rows of tokens that are left out are 0."""

    inputs: Inputs  # the student's
    teacher: Side
    weight: jax.Array  # (n,)

    def part(self, start: Any, size: int) -> "Tokens":
        def of(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, size)

        inputs = self.inputs._replace(**{name: of(x) for name, x in self.inputs.of_tokens.items()})
        return Tokens(inputs, self.teacher._replace(e=of(self.teacher.e)), of(self.weight))

    @property
    def size(self) -> jax.Array:
        """What multiplies the derivative by the logits, without the slope of the softcap, (n,)."""
        return self.weight if self.inputs.factor is None else self.weight * self.inputs.factor

    @property
    def of_teacher(self) -> Inputs:
        """The teacher's inputs, with the student's temperatures."""
        (e, c, bias, scale), (_, _, _, targets, *_) = self.teacher, self.inputs
        return Inputs(e, c, bias, targets, None, scale, self.inputs.inverse_temperature)


def _logits_of_teacher(own: Tokens, way: Schedule, of: Divergence, plan: Plan) -> tuple[Step, Request]:
    """The step that computes the teacher's logits, and their call: the student's if its engine takes these arrays."""
    e, bias = own.teacher.e, own.teacher.bias
    request = replace(plan.request, width=e.shape[1], dtype=str(e.dtype), head=of.teacher, with_bias=bias is not None)
    assert way.logits is not None
    assert way.passes is not None
    if way.logits.engine.serves(request, plan.gpu):
        return way.logits, request
    return way.passes.engine.step("whole_logits", request, plan.gpu), request


def _by_kernels(
    own: Tokens, count: jax.Array, shares: jax.Array | None, of: Divergence, plan: Plan
) -> tuple[Divergences, jax.Array]:
    """The numbers of a chunk's tokens, and dz, (n, columns of saved_shape).

    dz is 0 from token `count` on, or not written where no matmul reads it.
    """
    way, request, tokens = plan.in_forward, plan.request, len(own.weight)
    assert way is not None
    assert way.passes is not None
    passes, size, dz_wanted = way.passes, way.most_logits, request.wanted is not None
    assert way.logits is not None
    logits = (way.logits, request), _logits_of_teacher(own, way, of, plan)

    def of_part(i: Any, found: tuple[Divergences, jax.Array]) -> tuple[Divergences, jax.Array]:
        start = jnp.minimum(i * size, tokens - size)  # the last part begins earlier if it is shorter than the others
        part, here, (numbers, dz) = own.part(start, size), jnp.clip(count - start, 0, size), found

        sides = tuple(
            by.engine.whole_logits(by, Problem(replace(of_side, tokens=size), plan.gpu, inputs), here)
            for (by, of_side), inputs in zip(logits, (part.inputs, part.of_teacher), strict=True)
        )
        given = Pass(sides[0], sides[1], part.inputs.inverse_temperature, None, part.size, shares)
        static, problem = Static(of.kind, True, of.entropy, dz_wanted), Problem(request, plan.gpu, part.inputs)
        at = (dz, start) if dz_wanted else None
        sums, formed = passes.engine.divergence_pass(passes, problem, given, here, at, static)
        dz = dz if formed is None else formed
        total = _total(of, shares, sums)
        own_numbers = Divergences(total, sums[-1] if of.entropy else None)
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, start, 0), numbers, own_numbers), dz

    zeros, shape, parts = (
        jnp.zeros(tokens, request.sum_dtype),
        saved_shape(tokens, request.vocabulary),
        -(-tokens // size),
    )
    numbers = Divergences(zeros, zeros if of.entropy else None)
    if all(by.engine.whole_stops for by, _ in logits):
        return lax.fori_loop(0, parts, of_part, (numbers, lax.empty(shape, request.dtype)))
    of_step = next(n for n in range(PARTS_OF_STEP, 0, -1) if parts % n == 0)
    return over_kept(count, size, of_step, of_part, (numbers, jnp.zeros(shape, request.dtype)))


def _by_xla(
    own: Tokens, shares: jax.Array | None, of: Divergence, plan: Plan
) -> tuple[Divergences, jax.Array, jax.Array | None]:
    """The numbers of some tokens, (n,); dz, (n, V), at least float32, divided by a unit; the unit, or None for 1."""
    head, teacher = plan.request.head, own.of_teacher
    x = head.whole_logits(own.inputs.e, own.inputs.c, own.inputs.bias, own.inputs.scale)
    y = of.teacher.whole_logits(teacher.e, teacher.c, teacher.bias, teacher.scale).astype(x.dtype)
    divided, on_cpu = own.inputs.divided, plan.gpu is None or plan.gpu.interpreted
    # Each pass begins with the logits behind a barrier: XLA then holds no other array of their size.
    both, found = lax.optimization_barrier(((x, y), _reduced(lax.max, -jnp.inf, on_cpu, divided(x), divided(y))))
    peaks = [jnp.where(jnp.isfinite(peak), peak, 0) for peak in found]
    exponentials = (jnp.exp(divided(x) - peak[:, None]) for x, peak in zip(both, peaks, strict=True))
    masses = _reduced(lax.add, 0.0, on_cpu, *exponentials)
    sides = [Whole(x, peak, jnp.log(mass)) for x, peak, mass in zip(both, peaks, masses, strict=True)]
    given = lax.optimization_barrier(Pass(sides[0], sides[1], own.inputs.inverse_temperature, None, None, shares))
    sums: list[jax.Array] = []
    for k in range(2 if of.kind == "jsd" else 1):  # one after the other: XLA would store what both are made from
        terms = [given.terms(Static(of.kind, True, False))[k]]
        if of.entropy and k == 0:
            terms += given.terms(Static(of.kind, False, True))
        given, found = lax.optimization_barrier((given, _reduced(lax.add, 0.0, on_cpu, *terms)))
        sums += found
    size, unit = own.size, None
    if plan.request.dtype == "float16":
        unit = _unit(size * _largest_derivative(of, shares, sums[0]))
        size = size / unit
    dz = given._replace(of_student=sums[0], size=size).dz(of.kind, head)
    return Divergences(_total(of, shares, [sums[0], sums[-1]]), sums[1] if of.entropy else None), dz, unit


def _total(of: Divergence, shares: Any, sums: list[jax.Array]) -> jax.Array:
    """The divergence, from the sum of its terms; of a jsd from KL(s‖m) and KL(t‖m)."""
    return sums[0] if of.kind != "jsd" else shares[0] * sums[1] + shares[1] * sums[0]


def _reduced(combine: Any, start: float, on_cpu: bool, *arrays: jax.Array) -> list[jax.Array]:
    """Each array (n, V), reduced over V. One operation reduces all: XLA then reads what they are made from once.

    on_cpu: there XLA adds one term after the other, and a sum of V equal terms is off by up to V/4 roundings. So runs
    of about √V columns are reduced first, and then what these give.
    """

    def of_pair(some: Any, more: Any) -> Any:
        return tuple(map(combine, some, more))

    def reduced(*arrays: jax.Array) -> list[jax.Array]:
        of_nothing = tuple(jnp.asarray(start, x.dtype) for x in arrays)
        return lax.reduce(arrays, of_nothing, of_pair, (arrays[0].ndim - 1,))

    rows, columns = arrays[0].shape
    run = 1 << (columns.bit_length() + 1) // 2
    if not on_cpu or columns < 4 * run:
        return reduced(*arrays)
    whole = columns - columns % run
    found = reduced(*(x[:, :whole].reshape(rows, whole // run, run) for x in arrays))
    return reduced(*(jnp.concatenate([x, y[:, whole:]], axis=1) for x, y in zip(found, arrays, strict=True)))


def _dbias_of(dz: jax.Array, request: Request) -> jax.Array:
    """The sums of the columns of dz, (V,), at least float32. In 16 bits by a matmul, which holds no partial sums."""
    if request.itemsize > 2:
        return jnp.sum(dz, axis=0)
    ones = jnp.ones((1, len(dz)), dz.dtype)
    return lax.dot(ones, dz, preferred_element_type=jnp.float32)[0, : request.vocabulary]


def _largest_derivative(of: Divergence, shares: Any, of_student: jax.Array) -> jax.Array | float:
    """A bound of the derivative by a logit, (n,), where of_student is KL(s‖t), or of a jsd KL(s‖m).

    It is 1 for the forward KL, however large that is: it is s − t. For the reverse KL s·(log(s/t) − KL(s‖t))
    is at most 1 + KL(s‖t): the negative terms of KL(s‖t) are the s·log(t/s) ≤ t − s of some ids, and their sum is at
    most 1. For a jsd the s·log(m/s) ≤ m − s are β·(t − s), and their sum is at most β.
    """
    if of.kind == "forward_kl":
        return 1.0
    return shares[1] * (shares[0] + of_student) if of.kind == "jsd" else 1 + of_student


def _unit(bound: jax.Array) -> jax.Array:
    """What dz of a chunk is divided by in float16, so that no element is above FLOAT16_LARGEST.

    bound: of the elements of dz of each token, (n,).
    """
    size = jnp.abs(bound)
    largest = jnp.max(jnp.where(jnp.isfinite(size), size, 0))
    return jnp.maximum(largest, SMALLEST_ROW) / FLOAT16_LARGEST
