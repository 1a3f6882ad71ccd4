"""Divergences from a teacher, and their gradients, in chunks of tokens, in PyTorch alone.

The equations are in cce_kernels/divergence.py. A chunk of n tokens holds the student's and the teacher's logits, (n, V)
each, at least float32. dz takes the place of the student's. What lies between the logits and dz is computed for a few
tokens at a time, so that its temporary arrays are small. Four matmuls: both logits, de, and a part of dc, which is
added to a sum in at least float32. On CUDA from PyTorch 2.8 on, 16-bit inputs are multiplied in their own type, and dz
is rounded to it. Elsewhere they are widened to float32. The sum for dc, and c where it is cast, are held besides the
memory budget.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cce_kernels.default_budget import default_budget
from cce_torch.torch_alone import blocks

LEAST_TOKENS = 16  # of a chunk, however small the budget is
TEMPORARIES = 12  # arrays of the size of the logits between the logits and dz
STEP_BYTES = 256 * 2**20  # of these arrays at a time, at most


class Side(NamedTuple):
    """A student or a teacher. c and bias may be float32 beside an e of 16 bits, and are rounded to its type."""

    e: Tensor  # (N, D)
    c: Tensor  # (V, D), of any strides
    bias: Tensor | None  # (V,)
    scale: float
    softcap: float | None


class Pair(NamedTuple):
    """What the divergences of N tokens depend on."""

    student: Side
    teacher: Side
    weight: Tensor  # (N,) at least float32. A token of weight 0 is left out, whatever its rows hold
    inverse_temperature: Tensor | None  # (N,) at least float32


class Measure(NamedTuple):
    kind: str  # "forward_kl", "reverse_kl" or "jsd"
    beta: float


class Found(NamedTuple):
    """What `formed` returns. A gradient that is not wanted is None."""

    summed: Tensor  # (), Σ weight · divergence
    total: Tensor  # (N,), the divergences, 0 where the weight is 0
    entropy: Tensor | None  # (N,), of the student, 0 where the weight is 0; None: not asked for
    de: Tensor | None
    dc: Tensor | None
    dbias: Tensor | None


class Asked(NamedTuple):
    entropy: bool
    gradients: Sequence[bool]  # of the student's e, c and bias
    types: Sequence[torch.dtype]  # of these gradients
    memory_budget: int | None  # bytes; None for the default


def formed(pair: Pair, measure: Measure, factor: Tensor, asked: Asked) -> Found:
    """The divergences, and the gradients of factor · Σ weight · divergence. factor: ()."""
    e, c, weight = *pair.student[:2], pair.weight
    accumulate, operand = blocks.types(e)
    (want_e, want_c, want_bias), types = asked.gradients, asked.types
    de = e.new_zeros(e.shape, dtype=types[0]) if want_e else None
    dc = torch.zeros_like(c, dtype=accumulate) if want_c else None
    dbias = c.new_zeros(len(c), dtype=accumulate) if want_bias else None
    total = weight.new_zeros(len(e), dtype=accumulate)
    entropy = torch.zeros_like(total) if asked.entropy else None
    student, teacher = _Logits(pair.student), _Logits(pair.teacher)
    budget = asked.memory_budget
    budget = default_budget(len(e), e.shape[1], e.itemsize) if budget is None else budget
    for part in _chunks(pair, budget):
        live = weight[part] != 0
        e_live = torch.where(live[:, None], e[part], 0).to(operand)
        y = teacher.raw(torch.where(live[:, None], pair.teacher.e[part], 0)).to(accumulate)
        x = student.raw(e_live)
        inverse = blocks.of_kept(None if pair.inverse_temperature is None else pair.inverse_temperature[part], live, 1)
        for step in blocks.runs(len(x), _step_bytes(budget) // (TEMPORARIES * x.itemsize * x.shape[1])):
            divided = None if inverse is None else inverse[step, None]
            logits = student.capped(x[step]), teacher.capped(y[step])
            log_s, log_t = (log_softmax(z if divided is None else z * divided) for z in logits)
            numbers, dz = of_logs(log_s, log_t, live[step, None], measure)
            at = slice(part.start + step.start, part.start + step.stop)
            total[at] = torch.where(live[step], numbers, 0)
            if entropy is not None:
                entropy[at] = torch.where(live[step], entropy_of(log_s), 0)
            if any(asked.gradients):
                by = (torch.where(live[step], weight[at], 0) * pair.student.scale)[:, None]
                by = by if divided is None else by * divided
                dz = dz.mul_(by)
                cap = pair.student.softcap
                x[step] = dz if cap is None else dz * (1 - (logits[0] / cap) ** 2)
        if dbias is not None:
            dbias += x.sum(0)
        if want_e or want_c:
            dz, unit = blocks.in_units(x, x.abs()) if operand == torch.float16 else (x, None)
            dz = dz.to(operand)
            if de is not None:
                de[part] = (blocks.times(blocks.product(dz, student.c, accumulate), unit) * factor).to(types[0])
            if dc is not None:
                _add_dc(dc, dz, e_live, unit)
            del dz
        del x, y
    summed = torch.where(weight != 0, weight * total, 0).sum()
    dc = None if dc is None else dc.mul_(factor).to(types[1])
    return Found(summed, total, entropy, de, dc, None if dbias is None else dbias.mul_(factor).to(types[2]))


class _Logits:
    """The logits of a side before the temperature. Holds c in the type in which it is multiplied."""

    def __init__(self, side: Side) -> None:
        self.side, (self.accumulate, self.operand) = side, blocks.types(side.e)
        self.c = side.c.to(side.e.dtype).to(self.operand)
        self.bias = None if side.bias is None else side.bias.to(side.e.dtype).to(self.accumulate)

    def raw(self, e: Tensor) -> Tensor:
        """e @ c.T, (n, V), at least float32."""
        return blocks.product(e.to(self.operand), self.c.t(), self.accumulate)

    def capped(self, raw: Tensor) -> Tensor:
        scale, cap = self.side.scale, self.side.softcap
        z = raw if self.bias is None else raw + self.bias.to(raw.dtype)
        z = z if scale == 1 else scale * z
        return z if cap is None else cap * torch.tanh(z / cap)


def _chunks(pair: Pair, budget: int) -> Iterator[slice]:
    """Nearly equal chunks of tokens, each as large as the budget allows: two logits, and a rounded dz, for a token."""
    (e, c, *_), (accumulate, operand) = pair.student, blocks.types(pair.student.e)
    row = len(c) * (2 * accumulate.itemsize + operand.itemsize)
    most = max((budget - _step_bytes(budget)) // row, LEAST_TOKENS)
    count = max(-(-len(e) // most), 1)
    return blocks.runs(len(e), -(-len(e) // count))


def _step_bytes(budget: int) -> int:
    """What the temporary arrays may take."""
    return min(budget // 3, STEP_BYTES)


def log_softmax(z: Tensor) -> Tensor:
    """log p, (n, V). The largest logit is subtracted first: the rounding of a large log-sum-exp would be in all."""
    z = z - z.amax(1, keepdim=True)
    return z.sub_(torch.exp(z).sum(1, keepdim=True).log_())


def entropy_of(log_p: Tensor) -> Tensor:
    return -torch.where(log_p > -torch.inf, torch.exp(log_p) * log_p, 0).sum(1)


def of_logs(log_s: Tensor, log_t: Tensor, live: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """The divergence of each token, (n,), and its derivative by the logits from which s is, (n, V).

    live, (n, 1): whether a token counts; the derivative of another one is finite, and so 0 after its weight.
    """
    (kind, beta), s, t = measure, torch.exp(log_s), torch.exp(log_t)
    delta = torch.where(log_s == log_t, 0, log_t - log_s)  # both may be −inf
    if kind == "forward_kl":
        return _terms(t, delta, s).sum(1), s - t
    if kind == "reverse_kl":
        total = _terms(s, -delta, t).sum(1)
        return total, torch.where((s > 0) & live, s * (-delta - total[:, None]), 0)
    of_s, of_t = _logs_of_mixture(delta, beta)
    m = beta * t + (1 - beta) * s
    of_student = _terms(s, of_s, m).sum(1)
    total = beta * _terms(t, of_t, m).sum(1) + (1 - beta) * of_student
    return total, (1 - beta) * torch.where(s > 0, s * (of_s - of_student[:, None]), 0)


def _logs_of_mixture(delta: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(s/m) and log(t/m), where delta is log(t/s). They keep their digits where beta is close to 0 or to 1."""

    def log_mixed(x: Tensor, share: float, rest: float) -> Tensor:
        """log(rest + share·exp(x)). As cce_jax.reference._log_mixed."""
        x = x.clamp(max=80)  # where it is more, the probability that the result belongs to is below exp(−80)
        low, peak = x < -1, x.detach().clamp(min=0)
        less = share * torch.where(low, torch.exp(torch.where(low, x, -1)) - 1, torch.expm1(torch.where(low, 0, x)))
        near, large = less.abs() < 0.5, peak + torch.log(rest * torch.exp(-peak) + share * torch.exp(x - peak))
        return torch.where(near, torch.log1p(torch.where(near, less, 0)), large)

    return -log_mixed(delta, beta, 1 - beta), -log_mixed(-delta, 1 - beta, beta)


def _terms(p: Tensor, x: Tensor, q: Tensor) -> Tensor:
    """p·log(p/q) − p + q, where x = log(p/q)."""
    near = x.abs() < 1
    small = torch.where(near, x, 0)
    return torch.where(near, p * (small + torch.expm1(-small)), torch.where(p > 0, p * x, 0) + (q - p))


def _add_dc(dc: Tensor, dz: Tensor, e: Tensor, unit: Tensor | None) -> None:
    """dc += dzᵀ · e · unit, for windows of the vocabulary, whose products are small."""
    if dz.dtype == dc.dtype:  # no unit either
        dc.addmm_(dz.t(), e)
        return
    for window in blocks.runs(len(dc), blocks.BLOCK_BYTES // (dc.itemsize * dc.shape[1])):
        dc[window] += blocks.times(blocks.product(dz[:, window].t(), e, dc.dtype), unit)


def reference(z: tuple[Tensor, Tensor], weight: Tensor, measure: Measure) -> tuple[Tensor, Tensor]:
    """The divergences and the entropies, (N,), from the full logits (N, V). PyTorch differentiates the former."""
    live = weight != 0
    finite = (torch.where(live[:, None], x, 0) for x in (z[0], z[1].detach()))  # else a divergence may be infinite
    log_s, log_t = (torch.log_softmax(x, 1).to(z[0].dtype) for x in finite)
    (kind, beta), s, t = measure, torch.exp(log_s), torch.exp(log_t)

    neither = (log_s == log_t) & log_s.isinf()  # of other equal ones the difference has a derivative
    delta = torch.where(neither, 0, log_t - log_s)

    def kl(p: Tensor, log_p_over_q: Tensor) -> Tensor:
        return (p * torch.where(p > 0, log_p_over_q, 0)).sum(1)

    if kind == "jsd":
        of_s, of_t = _logs_of_mixture(delta, beta)
        total = beta * kl(t, of_t) + (1 - beta) * kl(s, of_s)
    else:
        total = kl(t, delta) if kind == "forward_kl" else kl(s, -delta)
    return torch.where(live, total, 0), torch.where(live, entropy_of(log_s.detach()), 0)
