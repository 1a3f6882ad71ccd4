"""What a block of tokens gives: results, cotangents of the logits, and what rounding may move of either.

tests/search/truth.py has the derivation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.search.calls import CROSS_ENTROPY, LOG_PROBS, TOKEN_LOSS, Program
from tests.search.functions import function_of
from tests.search.logits import Block

Named = dict[str, Tensor]
LINEAR = 0.05  # where a logit may be off by more, what follows from it is bounded without a derivative
MOST = 1e300
TINY = 2.0**-124  # float32 has no normal numbers below a quarter of it, and GPUs and XLA may take those for 0
OF_TRUTH = 2.0**-50  # what float64 leaves of terms about 1 that cancel, as in the truth of a small divergence
RESCUED = 30.0  # nats below lse: the references of targets that are lower are another number


@dataclass(frozen=True)
class Number:
    """A number of each token, (n,), what it may be off by, and its derivatives in the logits, (n, V)."""

    value: Tensor
    error: Tensor
    slope: Tensor


@dataclass
class Found:
    """Of a block: results by name, each with its error, (n,) or (n, K)."""

    results: dict[str, tuple[Tensor, Tensor]]
    gradients: "Gradients | None" = None


@dataclass(frozen=True)
class Gradients:
    """The cotangents of a block's logits, (n, V), and their errors."""

    inner: Tensor  # ∂/∂z
    of_p: Tensor  # the part of it that saved exponentials give
    independent: Tensor  # the size of the errors that are independent of each other
    alike: list[Tensor]  # errors that may be there as they are, or with the other sign in all tokens
    largest: Tensor  # (n,): what float16 is scaled for
    of_others: Tensor  # |a|·δp, of whose sum a gradient_tolerance may leave out its share


@dataclass(frozen=True)
class Tokens:
    """Of a block of kept tokens, (n,) each."""

    targets: Tensor  # 0 where there is none
    valid: Tensor  # whether the target is in the vocabulary
    named: bool  # whether there are targets
    weights: Tensor  # (V,), of the classes
    cotangents: Named  # of the results, times what multiplies them
    ids: Tensor | None = None  # (n, K); −1 outside of the vocabulary
    moved: bool = False  # whether the ids' logits are moved as those of the targets are apart
    arguments: tuple[Tensor, ...] = ()

    def column(self, k: int, x: Block) -> Tensor:
        """Each token's id k; where it is outside of the vocabulary, the likeliest one instead."""
        assert self.ids is not None
        return torch.where(self.ids[:, k] < 0, x.z.detach().argmax(1), self.ids[:, k])


class Rounding:
    """What the errors of a block's logits do to a number, and to p."""

    def __init__(self, x: Block, eps: float, more: Tensor | None = None, one_by_one: bool = False):
        """more: other errors of log p, independent of each other. one_by_one: how sums over V go, not in tiles."""
        self.x, self.eps = x, eps
        self.most = x.most if more is None else x.most + more
        self.usual = x.usual if more is None else x.usual + more
        self.linear = torch.amax(self.most, 1, keepdim=True) < LINEAR
        normaliser = torch.logsumexp(x.log_p + self.most, 1, keepdim=True)
        self.sigma = self.most + normaliser.clamp(min=0)  # what log p may be off by
        sigma = self.sigma.clamp(min=1e-300)
        of_exp = torch.where(sigma < 30, torch.log(torch.expm1(sigma.clamp(max=30))), sigma)
        far = x.log_p + of_exp
        # p may be 0 where float32 has no normal number for it, whatever multiplies it then: a log(s/t) may be 100.
        lost = torch.isfinite(x.log_p) * (TINY if eps > 2.0**-30 else 0.0)
        self.p = torch.where(self.linear, x.p * self.usual, torch.exp(far.clamp(max=0))) + lost  # what p may be off by
        # and an exponential that is not divided by the sum of those beside it, but by what another kernel summed
        self.alone = torch.where(self.linear, self.p, torch.exp(far.clamp(max=600)))
        self.tiles = eps * (4 + x.z.shape[1] ** 0.5 / (3 if one_by_one else 32))

    def of_other_product(self, column: Tensor, t: "Tokens") -> Tensor:
        """What a given id's log p is off by, (n, 1), as its logit is another product than those that are summed."""
        if t.moved:
            at_target = t.targets[:, None]
            share = (self.x.lse[:, None] / self.x.z.detach().gather(1, at_target)).nan_to_num().clamp(-1, 1)
            between = share * self.x.cut.gather(1, at_target) - (self.x.p * self.x.cut).sum(1, keepdim=True)
            return 3 * (self.usual.gather(1, column) + self.usual.gather(1, at_target)) + between.abs()
        return self.most.gather(1, column) + (self.x.p * self.most).sum(1, keepdim=True)

    def of(self, slope: Tensor, otherwise: Tensor) -> Tensor:
        """The error of a number with these derivatives; `otherwise` where the errors are large."""
        x = self.x
        z = torch.where(torch.isfinite(x.z), x.z.detach(), 0.0)
        found = 3 * ((slope * self.usual) ** 2).sum(1).sqrt() + (slope * self.most).sum(1).abs()
        found = found + 3 * self.eps * (slope * z).sum(1).abs()
        found = torch.minimum(found, (slope.abs() * self.most).sum(1))
        return torch.where(self.linear[:, 0], found, otherwise)


def numbers(x: Block, r: Rounding, t: Tokens, asked: tuple[str, ...], apart: bool = False) -> dict[str, Number]:
    """Those asked for: target, lse, entropy, smooth, and ids, of which each is one, "id 0" and so on.

    apart: whether the target's logit is another product than those that are summed. The ids' logits always are;
    t.moved says whether they are moved by the difference.
    """
    z, eps = x.z, r.eps
    lse = torch.logsumexp(z, 1)
    log_p = torch.log_softmax(z, 1)  # z − lse has the rounding of both
    p = torch.exp(log_p)
    made: dict[str, Tensor] = {}
    own: Named = {}  # what the rounding of the number itself costs
    far: Named = {}  # the error where errors are large
    every = (r.p * torch.nan_to_num(x.log_p, neginf=0).abs() + (x.p + r.p).clamp(max=1) * r.sigma).sum(1)
    columns = {"target": t.targets} | {f"id {k}": t.column(k, x) for k in range(0 if t.ids is None else t.ids.shape[1])}
    for name, of in columns.items():
        if name not in asked:
            continue
        one = of[:, None]
        made[name], far[name] = log_p.gather(1, one)[:, 0], r.sigma.gather(1, one)[:, 0]
        own[name] = r.tiles + eps * made[name].detach().abs()
        if apart or name != "target":
            own[name] = own[name] + (x.p * r.most).gather(1, one)[:, 0]
        if name != "target":
            own[name] = own[name] + r.of_other_product(one, t)[:, 0]
    if "lse" in asked:
        made["lse"], own["lse"] = lse, r.tiles + 2 * eps * x.lse.abs()
        far["lse"] = torch.logsumexp(x.log_p + r.most, 1).clamp(min=0)
    if "entropy" in asked:
        terms = torch.where(p > 0, p * torch.where(p > 0, log_p, 0.0), 0.0)
        made["entropy"] = -terms.sum(1)
        own["entropy"] = 2 * r.tiles * (1 + made["entropy"].detach())
        if t.targets.numel():
            own["entropy"] += 4 * eps * x.log_p.gather(1, t.targets[:, None])[:, 0].abs().clamp(max=RESCUED)
        far["entropy"] = every
    if "smooth" in asked:
        made["smooth"] = -(t.weights * log_p).sum(1)
        own["smooth"] = 2 * r.tiles * (t.weights * (x.log_p.abs() + r.most)).sum(1)
        far["smooth"] = (t.weights * r.sigma).sum(1)
    found = {}
    for name, value in made.items():
        (slope,) = torch.autograd.grad(value.sum(), z, retain_graph=True)
        found[name] = Number(value.detach(), r.of(slope, far[name]) + own[name], slope)
    return found


def asked_of(p: Program) -> tuple[str, ...]:
    """The numbers that a call needs."""
    if p.function == CROSS_ENTROPY:
        return ("target", "lse", *(["smooth"] if p.label_smoothing else []))
    names = ["target"] * p.targets + ["lse"] + ["entropy"] * bool(p.entropy)
    return (*names, *(f"id {k}" for k in range(p.ids)))


def results_of(p: Program, x: Named, t: Tokens) -> Named:
    """The results of each token from its numbers, the loss without the token's weight."""
    if p.function == LOG_PROBS:
        names = {"target": "log_probs", "lse": "lse", "entropy": "entropy"}
        return {names.get(name, name): value for name, value in x.items()}
    if p.function == TOKEN_LOSS:
        shown = _Shown(x["target"], x["lse"], x.get("entropy"))
        found = {"loss": function_of(p.fn, torch)(shown, *t.arguments)}
        return found | {"log_probs": x["target"], "lse": x["lse"]} | ({"entropy": x["entropy"]} if p.entropy else {})
    loss = -(1 - p.label_smoothing) * t.weights[t.targets] * x["target"]
    if p.label_smoothing:
        loss = loss + p.label_smoothing / t.weights.numel() * x["smooth"]
    return {"loss": loss + p.z_loss * x["lse"] ** 2, "lse": x["lse"]}


@dataclass(frozen=True)
class _Shown:
    """What fn gets."""

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | None


def of_numbers(x: Block, p: Program, t: Tokens, eps: float, gradients: bool) -> Found:
    """Of linear_cross_entropy, linear_log_probs and linear_token_loss."""
    r = Rounding(x, eps)
    have = numbers(x, r, t, asked_of(p), p.impl in ("auto", "cce"))
    poison = torch.where(t.valid, 1.0, torch.nan) if t.named else torch.ones_like(x.lse)
    at = {name: y.value.clone().requires_grad_() for name, y in have.items()}
    results = results_of(p, at, t)

    def total(results: Named) -> Tensor:
        terms = [(t.cotangents[name] * y).sum() for name, y in results.items() if name in t.cotangents]
        return sum(terms[1:], terms[0])

    def cotangents(at: Named, results: Named) -> Named:
        found = torch.autograd.grad(total(results), list(at.values()), allow_unused=True)
        return {name: torch.zeros_like(y) if g is None else g for (name, y), g in zip(at.items(), found, strict=True)}

    # Each number moved by its error, both ways: what that does to results and to their derivatives.
    of = cotangents(at, results) if t.cotangents else {name: torch.zeros_like(y) for name, y in at.items()}
    off = {name: eps * (2 * y.detach().abs()) for name, y in results.items()}
    of_off = {name: 8 * eps * y.abs() for name, y in of.items()}
    for name, number in have.items():
        there = []
        for sign in (1.0, -1.0):
            moved = {k: y.detach() + (sign * number.error if k == name else 0.0) for k, y in at.items()}
            moved = {k: y.requires_grad_() for k, y in moved.items()}
            of_moved = results_of(p, moved, t)
            changed = cotangents(moved, of_moved) if t.cotangents else of
            there.append(({k: y.detach() for k, y in of_moved.items()}, changed))
        for k in off:
            off[k] = off[k] + torch.maximum(*((y[k] - results[k].detach()).abs() for y, _ in there))
        for k in of_off:
            of_off[k] = of_off[k] + torch.maximum(*((y[k] - of[k]).abs() for _, y in there))
    poisoned = {"loss", "log_probs"}
    found = {k: (y.detach() * (poison if k in poisoned else 1.0), off[k]) for k, y in results.items()}
    if p.function == CROSS_ENTROPY:  # summands that cancel
        size = p.z_loss * have["lse"].value ** 2 + t.weights[t.targets] * have["target"].value.abs()
        found["loss"] = found["loss"][0], found["loss"][1] + 4 * eps * size
    found = _joined(found, t)
    if not gradients:
        return Found(found)
    # There each result has a cotangent, 0 if it has no other: 0 · NaN for a token whose target is out of range.
    asked = {*t.cotangents, *(results if p.transformation in ("reentrant checkpoint", "compile") else ())}
    if poisoned & asked:
        of = {name: y * poison for name, y in of.items()}
    return Found(found, _gradients(x, r, t, have, of, of_off, p.impl == "reference"))


def _joined(found: dict[str, tuple[Tensor, Tensor]], t: Tokens) -> dict[str, tuple[Tensor, Tensor]]:
    """The ids' numbers as one result, −inf outside of the vocabulary."""
    if t.ids is None:
        return found
    outside = t.ids < 0
    of_ids = [found.pop(f"id {k}") for k in range(t.ids.shape[1])]
    value, error = (torch.stack([x[k] for x in of_ids], 1) for k in (0, 1))
    return found | {"id_log_probs": (torch.where(outside, -torch.inf, value), torch.where(outside, 0.0, error))}


def _gradients(
    x: Block, r: Rounding, t: Tokens, have: dict[str, Number], of: Named, of_off: Named, normalised: bool
) -> Gradients:
    """normalised: whether the exponentials of the gradients are those that were summed."""
    p, log_p, eps = x.p, torch.nan_to_num(x.log_p, neginf=-MOST), r.eps
    zeros = torch.zeros_like(x.lse)

    def whole(names: Callable[[str], bool], of: Named) -> Tensor:
        return sum((y for name, y in of.items() if names(name)), zeros)

    named = [name for name in have if name == "target" or name.startswith("id ")]
    smooth = t.weights.sum() * of.get("smooth", zeros)
    a = smooth + of.get("lse", zeros) - whole(lambda name: name in named, of)  # what multiplies p
    d_a = whole(lambda name: name not in named and name != "entropy", of_off)
    d_a = d_a + (t.weights.sum() - 1).abs() * of_off.get("smooth", zeros)
    of_targets = [(t.targets if name == "target" else t.column(int(name[3:]), x), name) for name in named]
    inner = sum((of[name][:, None] * have[name].slope for name in have), torch.zeros_like(p))
    largest = sum((y.abs() for name, y in of.items() if name not in ("smooth",)), zeros) + a.abs()
    largest = largest + of.get("smooth", zeros).abs() * t.weights.abs().max()

    reached = log_p.gather(1, t.targets[:, None]).abs() if "target" in have else torch.zeros_like(x.lse[:, None])
    reached = reached.clamp(max=1e6)
    rounding = eps * (2 + log_p.abs().clamp(max=1e6) + reached / 2)
    d_p = (r.p if normalised else r.alone) + p * rounding
    independent = a.abs()[:, None] * d_p
    if "smooth" in of:
        independent = independent + 8 * eps * (of["smooth"][:, None] * t.weights).abs()
    common = r.tiles + eps * reached
    scaled = a[:, None] * p * common + d_a[:, None] * p
    deviation, stretched = _normalised(x, r)
    spread, drift = a[:, None] * deviation, a[:, None] * stretched
    if "entropy" in of:
        h = of["entropy"][:, None]
        q = (log_p + have["entropy"].value[:, None]).abs()
        of_q = torch.where(p > 0, p * q, 0.0)
        independent = independent + h.abs() * (
            torch.where(d_p > 0, d_p * q.clamp(max=1e300), 0.0) + (p + r.p).clamp(max=1) * _own(r)
        )
        scaled = scaled + (h.abs() * have["entropy"].error[:, None]) * p + of_off["entropy"][:, None] * of_q
        scaled = scaled + h.abs() * of_q * common
        spread = spread + h * (torch.where(p > 0, deviation * q, 0.0) + deviation)
        drift = drift + h * (torch.where(p > 0, stretched * q, 0.0) + stretched)
    of_ones = torch.zeros_like(p)
    for index, name in of_targets:
        one = torch.zeros_like(p).scatter_(1, index[:, None], 1.0)
        of_ones = of_ones + of_off[name][:, None] * (p - one)
        independent = independent + 4 * eps * one * of[name].abs()[:, None]
        if name != "target":
            of_p = torch.where(r.linear, p * r.of_other_product(index[:, None], t), 0.0)
            independent = independent + one * a.abs()[:, None] * of_p
    alike = [of_ones, scaled, spread, drift]
    hit = torch.zeros_like(p)
    if "target" in have:
        hit.scatter_(1, t.targets[:, None], 1.0)
    of_p = torch.where(hit > 0, 0.0, a[:, None] * p)
    return Gradients(inner, of_p, independent, alike, largest, a.abs()[:, None] * d_p)


def _own(r: Rounding) -> Tensor:
    return torch.where(r.linear, r.usual, r.sigma)


def _normalised(x: Block, r: Rounding) -> tuple[Tensor, Tensor]:
    """p·(δ − mean δ): of errors that all have one sign, and of those that go with the logits themselves."""
    p, z = x.p, torch.where(torch.isfinite(x.z), x.z.detach(), 0.0)

    def away(y: Tensor) -> Tensor:
        return p * (y - (p * y).sum(1, keepdim=True))

    linear = r.linear * 1.0
    return away(r.most) * linear, 3 * r.eps * away(z) * linear


# A divergence from a teacher


def of_divergence(x: Block, of_teacher: Block, p: Program, size: Tensor, eps: float, gradients: bool) -> Found:
    """size: (n,), what multiplies each token's divergence."""
    own = [eps * (2 + torch.nan_to_num(y.log_p, neginf=0).abs().clamp(max=1e6)) for y in (x, of_teacher)]
    on_cpu = x.z.device.type == "cpu"  # where XLA adds term by term if a pass has several sums
    r, of_t = Rounding(x, eps, own[0], on_cpu), Rounding(of_teacher, eps, own[1], on_cpu)
    loss, s, t, log_s, log_t, ratio, inside = _divergence(x.z, of_teacher.z, p)
    of_s, of_z = torch.autograd.grad(loss.sum(), (x.z, of_teacher.z), retain_graph=True)
    s, t, log_s, log_t, ratio, inside, loss = (y.detach() for y in (s, t, log_s, log_t, ratio, inside, loss))
    both = torch.where(torch.isfinite(log_s) & torch.isfinite(log_t), r.sigma + of_t.sigma, 0.0)
    larger = torch.maximum(s + r.p, t + of_t.p).clamp(max=1)
    share = {"forward_kl": 1.0, "reverse_kl": 1.0, "jsd": p.beta * (1 - p.beta)}[p.divergence]
    second = share * (larger * both.clamp(max=1e150) ** 2).sum(1)
    far = (larger * both).sum(1) * min(1.0, 2 * (share if share < 0.25 else 1.0)) + loss.abs()
    linear = r.linear & of_t.linear
    error = r.of(of_s, torch.zeros_like(loss)) + of_t.of(of_z, torch.zeros_like(loss)) + second
    error = torch.where(linear[:, 0], error, far) + 4 * r.tiles * loss.abs()
    if eps < 2.0**-30:
        error = error + OF_TRUTH
    apart = torch.where(larger > 0, share * larger * (own[0] + own[1]), 0.0) if p.impl == "reference" else None
    if apart is not None:
        error = error + 3 * (apart**2).sum(1).sqrt() + 2 * share * max(r.tiles, of_t.tiles)
    results = {"loss": (loss, error)}
    if p.return_entropy:
        have = numbers(x, Rounding(x, eps, one_by_one=on_cpu), _NO_TOKENS, ("entropy",))["entropy"]
        results["entropy"] = have.value, have.error
    if not gradients:
        return Found(results)

    g = size[:, None]
    d_s, d_t = r.p, of_t.p
    tiles = max(r.tiles, of_t.tiles)
    if p.divergence == "forward_kl":
        independent = d_s + d_t
        scaled = tiles * (s + t)
        spread = [_normalised(x, r), _normalised(of_teacher, of_t)]
    else:
        mean = (s * torch.where(s > 0, ratio, 0.0)).sum(1, keepdim=True)
        away = torch.where(s > 0, (ratio - mean).abs(), 0.0)
        factor = (1 - p.beta) if p.divergence == "jsd" else 1.0
        usual = torch.where(linear, r.usual + of_t.usual, both)
        moved = (inside * torch.exp(torch.where(linear, 0.0, both).clamp(max=300))).clamp(max=1)
        d_ratio = moved * usual + 4 * eps * torch.where(s > 0, ratio.abs(), 0.0)
        independent = factor * (d_s * away + (s + d_s).clamp(max=1) * d_ratio)
        d_mean = (s * away * r.usual + s * d_ratio).sum(1, keepdim=True) + 4 * tiles * mean.abs()
        scaled = factor * (s * away * tiles + s * d_mean + s * inside * tiles)
        deviation = torch.where(linear, r.most + of_t.most, 0.0)
        deviation = deviation - (s * deviation).sum(1, keepdim=True)
        spread = [(factor * s * (away + inside) * deviation, torch.zeros_like(s))]
    alike = [g * y for pair in ([(scaled, torch.zeros_like(s)), *spread]) for y in pair if y.any()]
    of_p = torch.zeros_like(s)
    largest = torch.ones_like(loss) * size.abs() * torch.clamp(of_s.abs().amax(1), min=1.0)
    independent = g.abs() * (independent + 4 * eps * of_s.abs())
    return Found(results, Gradients(g * of_s, of_p, independent, alike, largest, of_p))


_NO_TOKENS = Tokens(torch.zeros(0, dtype=torch.int64), torch.zeros(0), False, torch.zeros(0), {})


def _divergence(z_s: Tensor, z_t: Tensor, p: Program) -> tuple[Tensor, ...]:
    """The divergence, s, t, their logarithms, the logarithm in the derivative, and its own derivative in log(s / t)."""
    log_s, log_t = (torch.log_softmax(z, 1) for z in (z_s, z_t))
    s, t = log_s.exp(), log_t.exp()
    none = (s == 0) & (t == 0)
    gap = torch.where(none, 0.0, torch.where(none, 0.0, log_t) - torch.where(none, 0.0, log_s))  # log(t / s)
    if p.divergence == "forward_kl":
        return _sum(t, gap), s, t, log_s, log_t, -gap, torch.ones_like(s)
    if p.divergence == "reverse_kl":
        return _sum(s, -gap), s, t, log_s, log_t, -gap, torch.ones_like(s)
    # log(s / m) = −log(1 + β·(t/s − 1)), log(t / m) = −log(1 + (1 − β)·(s/t − 1))
    beta, rest = p.beta, 1 - p.beta
    of_s, of_t = -_log_mixed(beta, rest, gap), -_log_mixed(rest, beta, -gap)
    inside = 1 / (1 + rest / beta * torch.exp((-gap.detach()).clamp(max=600)))
    return beta * _sum(t, of_t) + rest * _sum(s, of_s), s, t, log_s, log_t, of_s, inside


def _sum(p: Tensor, x: Tensor) -> Tensor:
    there = p > 0
    return torch.where(there, p * torch.where(there, x, 0.0), 0.0).sum(1)


def _log_mixed(share: float, rest: float, gap: Tensor) -> Tensor:
    """log(rest + share·exp(gap)) of shares that add up to 1. exp(gap) may be too large for float64.

    Where gap is low, expm1's derivative has lost what is left of it.
    """
    low, middle, high = (gap.clamp(*ends) for ends in ((-700, -1), (-1, 300), (300, None)))
    of_low = torch.log(rest + share * torch.exp(low)) if share > 0.5 else torch.log1p(share * (torch.exp(low) - 1))
    of_middle = torch.log1p(share * torch.expm1(middle))
    return torch.where(gap < -1, of_low, torch.where(gap < 300, of_middle, high + math.log(share)))
