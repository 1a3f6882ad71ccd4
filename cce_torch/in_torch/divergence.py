"""Divergences from a teacher, and their gradients, in chunks of tokens, in PyTorch alone.

The equations are in cce_kernels/divergence.py. A chunk of n tokens is a block of all columns: the student's and the
teacher's logits, (n, V) each, at least float32. dz takes the place of the student's. What lies between the logits and
dz is computed for a few tokens at a time, so that its temporary arrays are small. Four matmuls: both logits, de, and a
part of dc, which is added to a sum in at least float32. On CUDA from PyTorch 2.8 on, 16-bit inputs are multiplied in
their own type, and dz is rounded to it. Elsewhere they are widened to float32. The sum for dc, and c where it is cast,
are held besides the memory budget.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cce_torch.call import Distillation, DivergenceCall, Divergences, Operands
from cce_torch.in_torch import blocks

LEAST_TOKENS = 16  # of a chunk, however small the budget is
TEMPORARIES = 12  # arrays of the size of the logits between the logits and dz
STEP_BYTES = 256 * 2**20  # of these arrays at a time, at most


def formed(
    given: Distillation, how: DivergenceCall, wanted: Sequence[bool], types: Sequence[torch.dtype]
) -> Divergences:
    """types: of the gradients of e, c and bias."""
    (e, c, bias), weight, inverse = given[:3], given.weight, given.inverse_temperature
    accumulate, factor = blocks.sum_type(e), given.factor
    operand, of_teacher = (blocks.operand_type(x) for x in (e, given.teacher_e))
    beta, scale, teacher_scale = given.scheduled.tolist()
    columns, budget = torch.where(weight != 0, 0, -1), blocks.budget_of(e, how.memory_budget)
    student = blocks.of_type(Operands(e, c, bias, columns, None, inverse), operand)
    teacher = blocks.of_type(Operands(*given[3:6], columns, None, inverse), of_teacher)
    de = e.new_zeros(e.shape, dtype=types[0]) if wanted[0] else None
    dc = torch.zeros_like(c, dtype=accumulate) if wanted[1] else None
    dbias = c.new_zeros(len(c), dtype=accumulate) if wanted[2] else None
    total, entropy = (weight.new_zeros(len(e), dtype=accumulate) for _ in range(2))
    for rows in _chunks(given, budget):
        own = blocks.of_rows(student, rows, operand)
        y = _block(blocks.of_rows(teacher, rows, of_teacher), teacher_scale, how.teacher_softcap)
        x, live = _block(own, scale, how.softcap), own.columns >= 0
        by = torch.where(live, scale * (weight if inverse is None else weight * inverse)[rows], 0)
        for step in blocks.runs(len(live), _step_bytes(budget) // (TEMPORARIES * accumulate.itemsize * len(c))):
            (before, z), (_, of_y) = (blocks.logits(side.of_rows(step)) for side in (x, y))
            log_s, log_t = log_softmax(z), log_softmax(of_y).to(accumulate)
            at = slice(rows.start + step.start, rows.start + step.stop)
            numbers, dz = of_logs(log_s, log_t, (how.kind, beta))
            total[at] = torch.where(live[step], numbers, 0)
            if how.entropy:
                entropy[at] = torch.where(live[step], entropy_of(log_s), 0)
            if any(wanted):  # an ignored token's may be NaN
                dz = dz.mul_(by[step, None]).masked_fill_(~live[step, None], 0)
                x.raw[step] = blocks.through_cap(dz, before, how.softcap)
        if dbias is not None:
            dbias += x.raw.sum(0)
        if de is not None or dc is not None:
            dz, unit = blocks.in_units(x.raw, x.raw.abs()) if operand == torch.float16 else (x.raw, None)
            dz = dz.to(operand)
            if de is not None:
                blocks.put(de[rows], dz, student.c, factor if unit is None else factor * unit, add=False)
            if dc is not None:
                blocks.put(dc, dz.t(), own.e, unit, add=True)
            del dz
        del x, y
    summed = torch.where(weight != 0, weight * total, 0).sum()
    dc, dbias = (None if x is None else x.mul_(factor).to(t) for x, t in zip((dc, dbias), types[1:], strict=True))
    return Divergences(summed, total, entropy if how.entropy else None, de, dc, dbias)


def _block(operands: Operands, scale: float, softcap: float | None) -> blocks.Block:
    """Of all columns."""
    of_type, whole = operands.e.dtype, [slice(0, len(operands.c))]
    ((_, _, block),) = blocks.each(operands, scale, softcap, of_type, whole)
    return block


def _chunks(given: Distillation, budget: int) -> Iterator[slice]:
    """Nearly equal chunks of tokens, each as large as the budget allows: two logits, and a rounded dz, for a token."""
    e, tokens = given.e, len(given.e)
    types = blocks.sum_type(e), blocks.sum_type(given.teacher_e), blocks.operand_type(e)
    row = len(given.c) * sum(x.itemsize for x in types)
    most = max((budget - _step_bytes(budget)) // row, LEAST_TOKENS)
    return blocks.runs(tokens, -(-tokens // max(-(-tokens // most), 1)))


def _step_bytes(budget: int) -> int:
    """What the temporary arrays may take."""
    return min(budget // 3, STEP_BYTES)


def log_softmax(z: Tensor) -> Tensor:
    """log p, (n, V). The largest logit is subtracted first: the rounding of a large log-sum-exp would be in all."""
    z = z - z.amax(1, keepdim=True)
    return z.sub_(torch.exp(z).sum(1, keepdim=True).log_())


def entropy_of(log_p: Tensor) -> Tensor:
    return -torch.where(log_p > -torch.inf, torch.exp(log_p) * log_p, 0).sum(1)


def of_logs(log_s: Tensor, log_t: Tensor, measure: tuple[str, float]) -> tuple[Tensor, Tensor]:
    """The divergence of each token, (n,), and its derivative by the logits from which s is, (n, V).

    measure: the kind, and beta.
    """
    (kind, beta), s, t = measure, torch.exp(log_s), torch.exp(log_t)
    delta = torch.where(log_s == log_t, 0, log_t - log_s)  # both may be −inf
    if kind == "forward_kl":
        return _terms(t, delta, s).sum(1), s - t
    if kind == "reverse_kl":
        total = _terms(s, -delta, t).sum(1)
        return total, torch.where(s > 0, s * (-delta - total[:, None]), 0)
    of_s, of_t = logs_of_mixture(delta, beta)
    m = beta * t + (1 - beta) * s
    of_student = _terms(s, of_s, m).sum(1)
    total = beta * _terms(t, of_t, m).sum(1) + (1 - beta) * of_student
    return total, (1 - beta) * torch.where(s > 0, s * (of_s - of_student[:, None]), 0)


def logs_of_mixture(delta: Tensor, beta: float) -> tuple[Tensor, Tensor]:
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
