"""The truth of a drawn call in float64, and beside it how far rounding may move each result.

The truth is the definition (the contract in cce_jax/api.py and in the other functions' docstrings) from full logits,
over the kept tokens alone, in blocks of tokens, so that N·V float64 numbers need not fit at once. PyTorch
differentiates it, with the logits as a leaf: what no derivative is written for here are all functions of a token's
logits. The sums over tokens, dz·c, dzᵀ·e and Σ dz, are formed here.

Rounding is followed beside it, from the inputs to each result, with two unit errors:

    u, the type's     half the distance of its numbers near 1: 2⁻⁸, 2⁻¹¹, 2⁻²⁴ or 2⁻⁵³
    ε, float32's      2⁻²³, of everything before dz is rounded to the type (of float64 2⁻⁴⁴, which the truth is worth)

**Logits.** A product of D terms is summed in float32, so its error goes with what the terms may reach, ‖e_i‖·‖c_v‖, and
with the sum itself, which a tensor core truncates D/32 times on its way (D/16 in float16), by ε at most. With
y = e·c + b the raw product and z the logit after scale, softcap and temperature,

    δz_iv   = ε·|∂z/∂y|·(‖e_i‖·‖c_v‖ + |b_v| + 2|y_iv| + D/32·|e_i·c_v|) + 2ε·|z_iv|                at most
    υz_iv   = ε·|∂z/∂y|·(½(‖e_i‖·‖c_v‖ + |b_v|) + |y_iv| + ½√(D/32)·|e_i·c_v|) + ε·|z_iv|           usually

(with a temperature 3ε·|z_iv|; with √D/6 for ½√(D/32) in float32, whose products are added one by one). υ is the part
that is independent from logit to logit. What truncation and rounded factors do is not: it has one sign (δz), or goes
with the logits themselves (3ε·z).

**Numbers of a token.** They are log p of the target and of ids, lse, the entropy and Σ_v w_v·(lse − z_v). With g_v the
derivatives of a number n in the logits (by autodiff) the three kinds of errors give

    δn = 3·√(Σ_v (g_v·υz_v)²) + |Σ_v g_v·δz_v| + 3ε·|Σ_v g_v·z_v| + ρ_n          with Σ_v |g_v|·δz_v at most before ρ_n

The g_v of all but lse sum to 0: an error that all logits of a token have costs nothing, as with full logits, whose
softmax is normalised. So what is common to all logits, however large it is, adds only its share of υ. ρ is the rounding
of the number itself: with τ = ε·(4 + √V/32), as the sum over V goes in tiles, one after the other,

    ρ(log p) = τ + ε·|log p|     ρ(lse) = τ + 2ε·|lse|     ρ(Σ w·(lse − z)) = 2τ·Σ w·(|log p| + δz)
    ρ(H) = 2τ·(1 + H) + 4ε·min(|log p_t|, 30)

H is a difference of numbers relative to the target's logit, without targets that of column 0: of a logarithm, which
loses ε, and of a quotient, which loses 2ε, and ε in its numerator.

The logits of ids, and in kernels that of the target, are not the products that are summed: their log p is off by p·δz
more, up to the rounding of the logit itself where p is about 1. The ids' are moved by what lse has lost in tensor cores
(cce_kernels/given_ids.py), as the target's logit tells it: off by 3·(υz_id + υz_t) + |r·k_t − Σ_v p_v·k_v|, where r is
lse/z_t but at most 1, and k = ε·|∂z/∂y|·D/32·e·c. Where they are not moved, by δz_id + Σ_v p_v·δz_v.

Where a δz of a token is above 0.05 (small temperatures) there are no derivatives: log p_v may be off by
σ_v = δz_v + log Σ_u p_u·exp(δz_u), p_v by p_v·(exp σ_v − 1) and no more than 1, and n by what these give. The p_v of a
gradient may be more than 1 there, and infinite: the exponential of a logit that one kernel computes again may be any
multiple of what another kernel has summed (but in "reference").

**Results.** A result is a function of the numbers: the loss, or what fn returns. It may be off by the most that it
changes where each number moves by its error, one after the other, both ways, plus 2ε of itself. The same of its
derivatives α_n in the numbers gives δα_n: so a kink of fn, or a factor such as (1 − p)², needs no rule of its own.

**dz.** ∂/∂z = Σ_n α_n·g^n, whose part in p is a·p_v. Its elements have independent errors

    |a|·(p_v·υz_v + ε·p_v·(2 + |log p_v| + |log p_t|/2)) + 4ε·|α_t|·[v = t] + 8ε·|α_s·w_v|
    and of the entropy, whose g_v is −p_v·q_v, q_v = log p_v + H:   |α_H|·(δp_v·|q_v| + p_v·υz_v)

and errors that the elements of a token have in common, each a vector over v:

    p_v·(|a|·(τ + ε·|log p_t|) + δa)        the sum of the exponentials, and the number that is carried: lse − z_t
    δα_t·(p_v − [v = t])                    the cotangents' errors
    a·p_v·(δz_v − Σ_u p_u·δz_u)             errors of one sign, normalised
    a·p_v·3ε·(z_v − Σ_u p_u·z_u)            those that go with the logits, normalised

dz is that times ∂z/∂y, which a softcap κ makes inexact by 2|z|/κ²·δz + 4ε, and 4ε of itself. Numbers below 2⁻¹²⁴ may
be taken for 0, in each of three places: p_v, which adds 2⁻¹²⁴ to δp_v, ∂/∂z and dz.

**Divergences.** With s and t the two distributions and r = log(s / t), log p is rounded, by ε·(2 + |log p|): a part of
υz. As the terms p·log(p/q) − p + q are never negative, their sum L loses 4τ·L, of which τ is ε·(4 + √V/3) on a CPU,
which adds and rounds term by term; it has the errors that its derivatives in both sides' logits give (by autodiff), and
Σ max(s, t)·(σ_s + σ_t)² (of a jsd β(1 − β) times that) where s and t are about equal and these derivatives 0. The truth
is off by 2⁻⁵⁰ itself, which counts in float64.
"reference" sums the textbook's terms, which may be negative: it is off by ε·(2 + |log p|)·max(s, t) of both in each (of
a jsd β(1 − β) times that). The elements of the derivative, ∂L/∂z_v, are off by

    forward_kl    δs + δt
    reverse_kl    δs·|r − K| + s·(υ_s + υ_t + 4ε·|r|) + s·δK
    jsd           (1 − β)·(the same, with log(s/m) for r, its mean for K, and φ = βt/m times υ_s + υ_t)

**Errors of the type.** An element of dz is rounded, by u·|dz| at most. float16's dz is scaled so that its largest
cotangent is 2¹⁴, and float16 resolves 2⁻²⁵ of it: half of that, 2⁻³⁹ of the largest, is added. Exponentials saved in
bfloat16 add u·|a·p| (but at the target, whose element is replaced by dz's own); the scaled e, which dc is then summed
from, another u·|dz|. What multiplies them is at least 2⁻⁷⁰ of the target's cotangent (cce_kernels/exponentials.py),
which a shard sees whose own exponentials are relative to a logit far below the target's: 2⁻⁷⁰ of the token's largest
cotangent is added.

These errors are independent of each other where the logits of a token are many roundings apart. Where all of them lie
within one step of the type, 2u, all exponentials are rounded to the same number: what is lost is the part of dz that
goes with z, a·p·(z − mean z), of one sign with e_i·c_v. It is added as the errors of one sign are.

Nor are they where many tokens have the same dz, as confident ones do: all are rounded to the same number. So
Σ_i (dz_iv rounded − dz_iv)·e_i is computed, and what it has beyond independent errors is added: all of it for a float32
c beside a 16-bit e, as dc is not rounded itself. The same of Σ_v (dz_iv rounded − dz_iv)·c_v: rows of c may be alike.
Saved exponentials of equal tokens, at least MANY_ALIKE with the same row of e, target and temperature, are rounded to
the same number too: u·|Σ_i a_i·p_iv|·‖e_i‖ over them is added to the squares.

With a gradient_tolerance τ the products may leave out columns L of token i, never the target's, whose part of dz is

    Σ_v∈L |dz_iv|  ≤  ℓ_i = τ·|scale|·(|a_i|·Σ_v≠t_i p_iv·|∂z/∂y| + Σ_v |a_i|·δp_iv·|∂z/∂y|)

(cce_kernels/block_sparse.py; the second sum is what float32 makes of the first). So de_i may lack ℓ_i·max_v ‖c_v‖, and
dc_v Σ_i min(|dz_iv|, ℓ_i)·‖e_i‖ over tokens of another target. Any rows of dc together may lack Σ_i ℓ_i·‖e_i‖ at most,
as the columns of a token share its ℓ_i. loss, lse and dbias are exact.

tests/search/bounds.py turns all of it into what a gradient may be off by.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tests.search.calls import CROSS_ENTROPY, DIVERGENCE, LOG_PROBS, Program
from tests.search.data import Given
from tests.search.logits import Block, Head, Logits
from tests.search.terms import TINY, Found, Gradients, Tokens, of_divergence, of_numbers

FLOAT16_QUANTUM, SMALLEST = 2.0**-39, 2.0**-70
MANY_ALIKE = 8  # equal tokens, of which the roundings are counted as one
Pair = tuple[np.ndarray, np.ndarray]


@dataclass
class Rows:
    """A gradient, (rows, ...), and for each row the squares of the norms that its bound is made of."""

    value: Tensor  # of the truth
    rounded: np.ndarray  # Σ of the squares of the type's errors of dz, in units of u², times what they multiply
    float32: np.ndarray  # the same of dz's errors of float32 that are independent of each other
    alike: np.ndarray  # the square of what the other errors add up to
    summed: np.ndarray  # Σ dz²·‖·‖², of whose partial sums float32 rounds each
    left_out: np.ndarray  # the square of what the products may leave out of the row
    of_any_rows: float = np.inf  # what they may leave out of any rows together


@dataclass
class Truth:
    """Results, each with the error that its elements may have; gradients, of (N, D), (V, D) and (V,); dtoken_weight.

    Of predicted and top_ids the value is how far the logits of the ids that were found are below the largest ones.
    """

    results: dict[str, Pair]
    rows: dict[str, Rows]
    token_weight: Pair | None
    kept: np.ndarray  # (leading) bool: whether a token's embedding reaches a gradient


def truth(given: Given, program: Program, device: str = "cpu", found: dict[str, np.ndarray] | None = None) -> Truth:
    """The truth of a call. found: the results, of which predicted and top_ids are looked at."""
    return _Call(given, program, device, found or {}).truth()


class _Call:
    """A call's kept tokens."""

    def __init__(self, given: Given, p: Program, device: str, found: dict[str, np.ndarray]):
        self.given, self.p, self.device, self.found = given, p, device, found
        leading, shift = p.leading, p.shift
        before, after = ((..., slice(None, -shift)), (..., slice(shift, None))) if shift else ((...,), (...,))
        places = np.arange(p.tokens).reshape(leading)
        of_e, of_target = places[before].reshape(-1), places[after].reshape(-1)
        targets = given.targets.reshape(-1)[of_target]
        if p.function == DIVERGENCE:
            weight = given.optional.get("token_weight")
            kept = np.ones(of_e.size, bool) if weight is None else weight.reshape(-1) != 0
        elif p.function == LOG_PROBS and not p.targets:
            kept = np.ones(of_e.size, bool)
        else:
            kept = targets != p.ignore_index
        self.kept, self.of_e, self.of_target = kept, of_e[kept], of_target[kept]
        targets = targets[kept]
        self.valid = np.array([p.targets and 0 <= int(x) < p.vocabulary for x in targets], bool)
        self.targets = np.where(self.valid, targets, 0).astype(np.int64)
        temperature = None if given.temperature is None else given.temperature.reshape(-1)[self.of_e]
        e = given.e.reshape(-1, p.width)[self.of_e]
        self.logits = Logits(e, given.c, given.optional.get("bias"), Head.of(p), temperature, device)
        self.teacher = None
        if p.function == DIVERGENCE:
            e, c, bias = (given.teacher.get(name) for name in ("e", "c", "bias"))
            e = e.reshape(-1, p.teacher_width)[self.of_e]  # type: ignore[union-attr]
            self.teacher = Logits(e, c, bias, Head.of_teacher(p), temperature, device)  # type: ignore[arg-type]
        weights = given.optional.get("class_weight")
        self.weights = np.ones(p.vocabulary) if weights is None else np.float64(weights)
        self.eps = self.logits.head.eps

    def put(self, x: Any) -> Tensor:
        return torch.as_tensor(np.asarray(x), device=self.device)

    def _kept(self, x: np.ndarray) -> np.ndarray:
        """Of an array of the shape of targets after the shift, with more axes or none, the kept tokens."""
        return x.reshape(self.kept.size, *x.shape[len(self.p.predicting) :])[self.kept]

    def truth(self) -> Truth:
        p, given = self.p, self.given
        weight = given.optional.get("token_weight")
        m = np.ones(self.targets.size) if weight is None else np.float64(weight.reshape(-1)[self.of_target])
        counted = m * self.weights[self.targets] if p.function == CROSS_ENTROPY else m
        items = float(np.sum(counted)) if p.num_items is None else p.num_items
        unit = {"none": 1.0, "sum": 1.0, "mean": 0.0 if items == 0 else 1 / items}[p.reduction]
        cotangents = {name: np.float64(x) for name, x in given.cotangents.items()}
        of_tokens, g = {}, np.zeros(m.size)
        for name, x in cotangents.items():
            if name != "loss":
                of_tokens[name] = self._kept(x)
                continue
            g = unit * (self._kept(x) if p.reduction == "none" else np.full(m.size, float(x)))
            of_tokens[name] = g * m
        wants = p.differentiates and bool(of_tokens)
        sums = _Sums(self) if wants else None
        parts: dict[str, list[Pair]] = {}
        for rows in self.logits.blocks():
            x = self.logits.of(rows)
            of_block = self._found(x, rows, of_tokens, wants)
            for name, (value, error) in of_block.results.items():
                parts.setdefault(name, []).append((value.cpu().numpy(), error.cpu().numpy()))
            if sums is not None and of_block.gradients is not None:
                sums.add(rows, x, of_block.gradients)
        each = {name: tuple(np.concatenate(y) for y in zip(*pairs, strict=True)) for name, pairs in parts.items()}
        results, dweight = self._results(each, m, g, unit, items)
        reached = np.zeros(p.tokens, bool)
        reached[self.of_e] = True
        return Truth(results, {} if sums is None else sums.rows(), dweight, reached.reshape(p.leading))

    def _found(self, x: Block, rows: slice, cotangents: dict[str, np.ndarray], wants: bool) -> Found:
        p, given = self.p, self.given
        if self.teacher is not None:
            size = self.put(cotangents["loss"][rows] if "loss" in cotangents else np.zeros(x.z.shape[0]))
            return of_divergence(x, self.teacher.of(rows), p, size, self.eps, wants)
        of = {name: self.put(y[rows]) for name, y in cotangents.items()} if wants else {}
        ids = None
        if given.ids is not None:
            flat = given.ids.reshape(-1, p.ids)[self.of_e[rows]]
            inside = (flat >= 0) & (flat < p.vocabulary)
            ids = self.put(np.where(inside, np.where(inside, flat, 0).astype(np.int64), -1))
            if "id_log_probs" in of:
                together = of.pop("id_log_probs") * (ids >= 0)
                of |= {f"id {k}": together[:, k] for k in range(p.ids)}
        arguments = tuple(self.put(np.float64(self._kept(y)[rows])) for y in given.arguments)
        targets, valid = self.put(self.targets[rows]), self.put(self.valid[rows])
        moved = p.softcap is None and not p.split
        t = Tokens(targets, valid, p.targets, self.put(self.weights), of, ids, moved, arguments)
        found = of_numbers(x, p, t, self.eps, wants)
        self._select(x, rows, found)
        return found

    def _select(self, x: Block, rows: slice, found: Found) -> None:
        """The largest logits, their mean, and how good the ids are that were found."""
        p, z = self.p, x.z.detach()
        tiles = self.eps * (4 + p.vocabulary**0.5 / 32)
        if p.top_k or p.predicted:
            top = torch.topk(z, max(p.top_k, 1), dim=1)
            off = x.most.gather(1, top.indices)
            for name in ("predicted", "top_ids"):
                if name not in self.found:
                    continue
                ids = self.found[name].reshape(self.kept.size, -1)[self.kept][rows].astype(np.int64)
                ids = self.put(ids).clamp(0, p.vocabulary - 1)
                count = ids.shape[1]
                worse = top.values[:, :count] - z.gather(1, ids)
                allowed = off[:, :count] + x.most.gather(1, ids)
                if name == "predicted":
                    worse, allowed = worse[:, 0], allowed[:, 0]
                found.results[name] = worse, allowed
            if p.top_k:
                value = top.values - x.lse[:, None]
                mass = torch.logsumexp(x.log_p + x.most, 1).clamp(min=0)[:, None]
                found.results["top_log_probs"] = value, off + mass + tiles + self.eps * value.abs()
        if p.mean_logit:
            found.results["mean_logit"] = z.mean(1), x.most.mean(1) + tiles * z.abs().mean(1)

    def _results(
        self, each: dict[str, Pair], m: np.ndarray, g: np.ndarray, unit: float, items: float
    ) -> tuple[dict[str, Pair], Pair | None]:
        """The results in their shapes, and the gradient of token_weight."""
        p, shape = self.p, self.p.predicting
        results = {}
        for name in p.results:
            if name == "loss":
                continue
            none = np.zeros((0, *_more(p, name)))
            results[name] = _placed(*each.get(name, (none, none)), self.kept, shape)
        if "loss" not in p.results:
            return results, None
        of_each, d_each = each.get("loss", (np.zeros(0), np.zeros(0)))
        total, d_total = m * of_each, m * d_each + self.eps * m * np.abs(of_each)
        many = self.eps * (8 + np.log2(1 + m.size))
        value = unit * np.sum(total)
        # The errors of many tokens are hardly all of one sign, but those of tokens that are alike are.
        d_value = abs(unit) * np.sum(d_total + many * np.abs(total))
        if p.reduction == "mean" and items == 0:
            value = d_value = 0.0
        whole = p.reduction != "none"
        results["loss"] = (np.array(value), np.array(d_value)) if whole else _placed(total, d_total, self.kept, shape)
        if "token_weight" not in p.wanted or not p.differentiates:
            return results, None
        dm, d_dm = g * of_each, np.abs(g) * (d_each + max(many, 2.0**-23) * np.abs(of_each))  # it is float32
        if p.reduction == "mean" and p.num_items is None:
            share = g * self.weights[self.targets]
            dm, d_dm = dm - share * value, d_dm + np.abs(share) * (d_value + max(many, 2.0**-23) * abs(value))
        values, allowed = np.zeros(p.tokens), np.zeros(p.tokens)
        values[self.of_target], allowed[self.of_target] = dm, d_dm
        return results, (values.reshape(p.leading), allowed.reshape(p.leading))


def _more(p: Program, name: str) -> tuple[int, ...]:
    """The axes of a result after those of the tokens."""
    return {"id_log_probs": (p.ids,), "top_ids": (p.top_k,), "top_log_probs": (p.top_k,)}.get(name, ())


def _placed(value: np.ndarray, error: np.ndarray, kept: np.ndarray, shape: tuple) -> Pair:
    """Numbers of kept tokens among zeros."""
    found = np.zeros((2, kept.size, *value.shape[1:]))
    found[:, kept] = value, error
    return tuple(x.reshape((*shape, *value.shape[1:])) for x in found)  # type: ignore[return-value]


class _Alike:
    """Tokens that have the same logits and the same target, and sums over them."""

    def __init__(self, of: _Call):
        target = np.where(of.valid, of.targets, -1).astype(np.float64)
        parts = [of.logits.e.cpu().numpy(), target[:, None]]
        if of.logits.temperature is not None:
            parts.append(of.logits.temperature.cpu().numpy()[:, None])
        rows = np.concatenate(parts, axis=1)
        _, first, group, count = np.unique(rows, axis=0, return_index=True, return_inverse=True, return_counts=True)
        many = np.flatnonzero(count >= MANY_ALIKE)
        number = np.full(count.size, -1)
        number[many] = np.arange(many.size)
        self.group = of.put(number[group.reshape(-1)])
        self.e_squares = of.logits.norms[0][of.put(first[many])] ** 2
        self.sums = torch.zeros(many.size, of.p.vocabulary, dtype=torch.float64, device=of.device)

    def add(self, rows: slice, x: Tensor) -> None:
        group = self.group[rows]
        self.sums.index_add_(0, group[group >= 0], torch.nan_to_num(x[group >= 0]))


class _Sums:
    """The gradients, summed block by block."""

    def __init__(self, of: _Call):
        self.of, p = of, of.p
        x = of.logits
        self.unit, self.c_squares = roundoff(p.dtype), x.norms[1] ** 2
        self.tolerance = p.gradient_tolerance if p.may_leave_out else 0.0

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=of.device)

        v, d = p.vocabulary, p.width
        self.of_e = {name: zeros(p.tokens) for name in ("rounded", "float32", "alike", "summed", "left_out")}
        self.de, self.dc, self.dc_lost, self.dc_flat = zeros(p.tokens, d), zeros(v, d), zeros(v, d), zeros(v, d)
        self.dc_alike: list[Tensor] = []
        self.db, self.db_alike, self.dc_left_out, self.of_any_rows = zeros(v), zeros(v), zeros(v), 0.0
        self.of_c = {name: zeros(v) for name in ("rounded", "float32", "summed")}
        self.of_b = {name: zeros(v) for name in ("rounded", "float32", "summed")}
        self.alike = _Alike(of) if p.may_save else None

    def add(self, rows: slice, x: Block, found: Gradients) -> None:
        p, logits, eps, unit = self.of.p, self.of.logits, self.of.eps, self.unit
        size = x.slope.abs()
        dz = torch.where(x.slope == 0, 0.0, found.inner * x.slope)
        dz = torch.where(found.inner.isnan(), torch.nan, dz)
        d_dz = size * found.independent + 4 * eps * dz.abs() + TINY * (1 + size)
        kappa = logits.head.softcap
        heat = logits.head.temperature if logits.temperature is None else logits.temperature[rows][:, None]
        if kappa is not None:
            z = x.z.detach() * heat
            error = 2 * z.abs() / kappa**2 * x.most * heat + 4 * eps
            d_dz = d_dz + abs(logits.head.scale) / heat * found.inner.abs() * error
        alike = [torch.nan_to_num(y * size) for y in found.alike]
        reach = abs(logits.head.scale) / heat
        per_token = found.largest * (reach[:, 0] if isinstance(reach, Tensor) else reach)
        largest = float(torch.where(per_token.isfinite(), per_token, 0.0).amax()) if per_token.numel() else 0.0
        quantum = FLOAT16_QUANTUM * largest if p.dtype == "float16" else 0.0
        square = dz * dz
        rounded = square + (quantum / unit) ** 2
        rounded_c = rounded
        of_p = found.of_p * x.slope
        if p.may_save:
            rounded = rounded + of_p * of_p
            rounded_c = rounded + square
            assert self.alike is not None
            self.alike.add(rows, of_p)
            d_dz = d_dz + SMALLEST * per_token[:, None]
        e, c = logits.e[rows], logits.c
        places = self.of.put(self.of.of_e[rows])
        e_squares = logits.norms[0][rows] ** 2
        flat = _flat(x.z.detach(), of_p, unit)
        lost = _lost(dz, unit, largest if p.dtype == "float16" else 1.0) if p.dtype != "float32" else None
        # de
        self.de[places] = dz @ c
        of_alike = sum((_norms(y @ c) for y in alike), _norms(flat @ c))
        if lost is not None:
            beyond = _norms(lost @ c) - unit * (rounded @ self.c_squares).sqrt()
            of_alike = of_alike + beyond.nan_to_num().clamp(min=0)
        self.of_e["alike"][places] = of_alike**2
        for name, squares in (("rounded", rounded), ("float32", d_dz * d_dz), ("summed", square)):
            self.of_e[name][places] = squares @ self.c_squares
        of_others = of_p.abs()
        most = self.tolerance * (of_others + size * found.of_others).sum(1)
        self.of_e["left_out"][places] = (most * logits.norms[1].max()) ** 2
        # dc and dbias
        self.dc_left_out += logits.norms[0][rows] @ torch.minimum(of_others, most[:, None])
        self.of_any_rows += float((logits.norms[0][rows] * most).sum())
        self.dc += dz.T @ e
        while len(self.dc_alike) < len(alike):
            self.dc_alike.append(torch.zeros_like(self.dc))
        for total, y in zip(self.dc_alike, alike, strict=False):
            total += y.T @ e
        self.dc_flat += flat.T @ e
        if lost is not None:
            self.dc_lost += lost.T @ e
        self.db += dz.sum(0)
        self.db_alike += sum((y.abs().sum(0) for y in alike), torch.zeros_like(self.db))
        for name, squares in (("rounded", rounded_c), ("float32", d_dz * d_dz), ("summed", square)):
            self.of_c[name] += squares.T @ e_squares
            self.of_b[name] += squares.sum(0)

    def rows(self) -> dict[str, Rows]:
        p = self.of.p

        def made(value: Tensor, others: dict[str, Tensor], of_any_rows: float = np.inf) -> Rows:
            return Rows(value, **{k: x.cpu().numpy() for k, x in others.items()}, of_any_rows=of_any_rows)

        if self.alike is not None:
            squares = self.alike.sums**2
            self.of_c["rounded"] += squares.T @ self.alike.e_squares
            self.of_b["rounded"] += squares.sum(0)
        lost = _norms(self.dc_lost)
        if not p.mixed:
            lost = (lost - self.unit * self.of_c["rounded"].sqrt()).nan_to_num().clamp(min=0)
        alike = sum((_norms(y) for y in self.dc_alike), _norms(self.dc_flat) + lost) ** 2
        of_c = self.of_c | {"alike": alike, "left_out": self.dc_left_out**2}
        of_b = self.of_b | {"alike": self.db_alike**2, "left_out": torch.zeros_like(self.db)}
        found = {
            "e": made(self.de, self.of_e),
            "c": made(self.dc, of_c, self.of_any_rows),
            "bias": made(self.db[:, None], of_b, 0.0),
        }
        return {name: x for name, x in found.items() if name in p.wanted}


def _flat(z: Tensor, of_p: Tensor, unit: float) -> Tensor:
    """What of_p loses of z in each row whose logits lie within one step of the type; 0 in other rows."""
    z = torch.where(z.isfinite(), z, 0.0)
    away = z - z.mean(1, keepdim=True)
    within = (away**2).mean(1).sqrt() < 2 * unit
    return torch.where(within[:, None], of_p * away, 0.0)


def _lost(dz: Tensor, unit: float, scale: float) -> Tensor:
    """What rounding loses of dz, which is rounded in units of scale."""
    finite = torch.where(dz.isfinite(), dz, 0.0)
    mantissa, exponent = torch.frexp(finite / (scale or 1.0))
    return (scale or 1.0) * torch.ldexp(torch.round(mantissa / unit) * unit, exponent) - finite


def _norms(x: Tensor) -> Tensor:
    return x.norm(dim=1)


def roundoff(dtype: str) -> float:
    """u: half the distance of the type's numbers near 1."""
    return float(ml_dtypes.finfo(dtype).eps) / 2
