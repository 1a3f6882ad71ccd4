"""The truth of a drawn call in float64, and beside it how far rounding may move each result.

The truth is the definition (the contract in cce_jax/api.py and the derivation in cce_jax/core.py), over the kept tokens
alone, in blocks of tokens, so that N·V float64 numbers need not fit at once. It needs NumPy, or PyTorch on a GPU.

Rounding is followed beside it, from the inputs to each result, with two unit errors:

    u, the type's     half the distance of its numbers near 1: 2⁻⁸, 2⁻¹¹ or 2⁻²⁴
    ε, float32's      2⁻²³, of everything before dz is rounded to the type

Errors of float32, written δ. A product of D terms is summed in float32, so its error goes with what the terms may
reach, ‖e_i‖·‖c_v‖, and with the sum itself, which a tensor core truncates D/16 times on its way, by ε at most:

    δz_iv   = ε·|∂z/∂y|·(|scale|·(‖e_i‖·‖c_v‖ + |b_v|) + (2 + D/32)·|y_iv|) + 2ε·|z_iv|
    δlse_i  = Σ_v p_iv·δz_iv + ε·(2·|lse_i| + 4 + √V/32)          (the sum over V goes in tiles, one after the other)
    δp_iv   = p_iv·(δz_iv + δlse_i + ε·(|z_iv| + |lse_i| + 4))    (the exponential's argument is rounded too)
    δdz_iv  = |scale·∂z/∂y|·(|a_i|·δp_iv + δa_i·p_iv + 8ε·|t̂_i|·[v = t_i] + 8ε·|s_i·w_v|) + 4ε·|dz_iv|
              + |a_i·p_iv + …|·δ(∂z/∂y)

A confident token has p − 1 near 0 and δdz ≈ |a|·δp all the same: what float32 resolves at that size of logit.

Errors of the type. An element of dz is rounded, by u·|dz| at most. float16's dz is scaled so that its largest cotangent
is 2¹⁴, and float16 resolves 2⁻²⁵ of it: half of that, 2⁻³⁹ of the largest, is added. Exponentials saved in bfloat16
add u·|a·p| (but at the target, whose element is replaced by dz's own); the scaled e, which dc is then summed from,
another u·|dz|; and a softcap κ takes z from them: u·2|z|/κ² of |a·p + …|.

These errors are independent of each other where the logits of a token are many roundings apart. Where all of them lie
within one step of the type, 2u, all exponentials are rounded to the same number: what is lost is the part of dz that
goes with z, a·p·(z − mean z), of one sign with e_i·c_v. It is added as the errors of one sign are.

Nor are they where many tokens have the same dz, as confident ones do: all are rounded to the same number. So
Σ_i (dz_iv rounded − dz_iv)·e_i is computed, and what it has beyond independent errors is added: all of it for a float32
c beside a 16-bit e, as dc is not rounded itself.

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

from tests.cases import Inputs
from tests.search.calls import Program
from tests.search.logits import EPS, Logits

FLOAT16_QUANTUM = 2.0**-39
TINY = 2.0**-124  # float32 has no normal numbers below a quarter of it, and GPUs and XLA may take those for 0


@dataclass
class Rows:
    """A gradient, (rows, ...), and for each row the squares of the norms that its bound is made of."""

    value: Any  # of the truth, an array of `xp`
    rounded: np.ndarray  # Σ of the squares of the type's errors of dz, in units of u², times what they multiply
    float32: np.ndarray  # the same of δdz, independent of each other
    alike: np.ndarray  # the square of what δdz adds up to where all have one sign, and the type's errors that do
    summed: np.ndarray  # Σ dz²·‖·‖², of whose partial sums float32 rounds each
    left_out: np.ndarray  # the square of what the products may leave out of the row
    of_any_rows: float = np.inf  # what they may leave out of any rows together


@dataclass
class Truth:
    """loss and lse with the error that each element may have; gradients, of (N, D), (V, D) and (V,); dtoken_weight."""

    loss: tuple[np.ndarray, np.ndarray]
    lse: tuple[np.ndarray, np.ndarray]
    rows: dict[str, Rows]
    token_weight: tuple[np.ndarray, np.ndarray] | None
    kept: np.ndarray  # (leading) bool: whether a token's embedding reaches a gradient


def _numbers(head: Logits) -> dict[str, np.ndarray]:
    """lse, target and sum of each kept token, and their errors."""
    xp, vocabulary = head.xp, head.program.vocabulary
    found: dict[str, list] = {name: [] for name in ("lse", "target", "sum", "d_lse", "d_target", "d_sum", "size")}
    tiles = EPS * (4 + np.sqrt(vocabulary) / 32)
    for rows in head.blocks():
        z, _, error = head.logits(rows)
        peak = xp.amax(z, 1)
        p = xp.exp(z - peak[:, None])
        total = p.sum(1)
        lse = peak + xp.log(total)
        weighted = head.weights * z
        size = xp.abs(weighted).sum(1)
        found["lse"].append(head.get(lse))
        found["d_lse"].append(head.get((p * error).sum(1) / total + 2 * EPS * xp.abs(lse) + tiles))
        found["target"].append(head.at_targets(z, rows))
        found["d_target"].append(head.at_targets(error, rows))
        found["sum"].append(head.get(weighted.sum(1)))
        found["d_sum"].append(head.get((xp.abs(head.weights) * error).sum(1) + tiles * size))
        found["size"].append(head.get(size))
    return {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in found.items()}


def truth(given: Inputs, program: Program, xp: Any = np, device: str = "cpu") -> Truth:
    """The truth of a call; given.c is (V, D) whatever the layout."""
    shift, vocabulary, eps = program.shift, program.vocabulary, program.label_smoothing
    leading = given.targets.shape
    result = (*leading[:-1], leading[-1] - shift) if shift else leading
    before, after = ((..., slice(None, -shift)), (..., slice(shift, None))) if shift else ((...,), (...,))
    places = np.arange(given.targets.size).reshape(leading)
    of_e, of_target = places[before].reshape(-1), places[after].reshape(-1)
    targets = given.targets.reshape(-1)[of_target].astype(np.int64)
    kept = targets != program.ignore_index
    of_e, of_target, targets = of_e[kept], of_target[kept], targets[kept]

    flat = given.e.reshape(-1, program.width)
    head = Logits(given, flat[of_e], targets, program, xp, device)
    x = _numbers(head)
    lse, d_lse = x["lse"], x["d_lse"]
    target = np.where(head.valid, x["target"], 0)
    weights = head.get(head.weights)
    whole, of_class = np.sum(weights), weights[head.targets]
    weight = given.optional.get("token_weight")
    m = np.ones(targets.size) if weight is None else np.float64(weight.reshape(-1)[of_target])
    poison = np.where(head.valid, 1.0, np.nan)

    smooth, z_loss = eps / vocabulary, program.z_loss
    each = (1 - eps) * of_class * (lse - target) + smooth * (whole * lse - x["sum"]) + z_loss * lse**2
    size = (1 - eps) * of_class * (np.abs(lse) + np.abs(target)) + smooth * (whole * np.abs(lse) + x["size"])
    size = size + z_loss * lse**2
    d_each = (1 - eps) * of_class * (d_lse + x["d_target"]) + smooth * (whole * d_lse + x["d_sum"])
    d_each = d_each + 2 * z_loss * np.abs(lse) * d_lse + 4 * EPS * size
    each = each * poison
    total, d_total = m * each, m * d_each + EPS * m * np.abs(each)

    many = EPS * (8 + np.log2(1 + targets.size))
    items = float(np.sum(m * of_class)) if program.num_items is None else program.num_items
    unit = {"none": 1.0, "sum": 1.0, "mean": 0.0 if items == 0 else 1 / items}[program.reduction]
    value = unit * np.sum(total)
    d_value = abs(unit) * np.sum(d_total + many * np.abs(total))
    if program.reduction == "mean" and items == 0:
        value = d_value = 0.0
    loss = (
        _placed(total, d_total, kept, result) if program.reduction == "none" else (np.array(value), np.array(d_value))
    )

    of_loss = np.float64(given.of_loss)
    g = unit * (of_loss.reshape(-1)[kept] if program.reduction == "none" else np.full(targets.size, float(of_loss)))
    of_lse = np.float64(given.of_lse).reshape(-1)[kept]
    if program.objective == "lse":
        g, poison = np.zeros_like(g), np.ones_like(poison)
    if program.objective == "loss":
        of_lse = np.zeros_like(of_lse)
    factor = (1 - eps) * of_class + smooth * whole
    a = g * m * poison * (factor + 2 * z_loss * lse) + of_lse
    d_a = many * (np.abs(g * m) * (factor + 2 * z_loss * np.abs(lse)) + np.abs(of_lse))
    d_a = d_a + 2 * z_loss * np.abs(g * m) * d_lse
    cotangents = {
        "a": a,
        "d_a": d_a,
        "t": -g * m * poison * (1 - eps) * of_class * head.valid,
        "s": -g * m * poison * smooth,
    }
    rows = _gradients(head, cotangents, lse, d_lse, of_e, flat.shape[0]) if program.wanted else {}

    dweight = None
    if "token_weight" in program.wanted:
        dm, d_dm = g * each, np.abs(g) * (d_each + many * np.abs(each))
        if program.reduction == "mean" and program.num_items is None:
            share = g * of_class
            dm, d_dm = dm - share * value, d_dm + np.abs(share) * (d_value + many * abs(value))
        values, allowed = np.zeros(given.targets.size), np.zeros(given.targets.size)
        values[of_target], allowed[of_target] = dm, d_dm
        dweight = values.reshape(leading), allowed.reshape(leading)
    reached = np.zeros(given.targets.size, bool)
    reached[of_e] = True
    return Truth(loss, _placed(lse, d_lse, kept, result), rows, dweight, reached.reshape(leading))


def _placed(value: np.ndarray, error: np.ndarray, kept: np.ndarray, shape: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of kept tokens among zeros."""
    found = np.zeros((2, kept.size))
    found[:, kept] = value, error
    return found[0].reshape(shape), found[1].reshape(shape)


def _gradients(
    head: Logits, cotangents: dict[str, np.ndarray], lse: np.ndarray, d_lse: np.ndarray, places: np.ndarray, tokens: int
) -> dict[str, Rows]:
    xp, program = head.xp, head.program
    vocabulary, width, kappa = program.vocabulary, program.width, program.softcap
    a, d_a, t, s, lse, d_lse = (head.put(x) for x in (*cotangents.values(), lse, d_lse))
    largest = (np.abs(cotangents["a"]) + np.abs(cotangents["t"]), np.abs(cotangents["s"]))
    largest = abs(head.scale) * (largest[0] + largest[1] * float(np.max(head.get(xp.abs(head.weights)))))
    largest = np.max(np.where(np.isfinite(largest), largest, 0.0), initial=0.0)
    quantum = FLOAT16_QUANTUM * largest if program.dtype == "float16" else 0.0
    unit = roundoff(program.dtype)
    e_squares, c_squares = head.norms[0] ** 2, head.norms[1] ** 2
    tolerance = program.gradient_tolerance if program.may_leave_out else 0.0
    ones = xp.ones_like(c_squares)

    def zeros(*shape: int) -> Any:
        return head.put(np.zeros(shape))

    of_e: dict[str, list] = {name: [] for name in ("value", "rounded", "float32", "alike", "summed", "left_out")}
    dc, dc_alike, dc_flat, dc_lost = (zeros(vocabulary, width) for _ in range(4))
    db, db_alike, dc_left_out, of_any_rows = zeros(vocabulary), zeros(vocabulary), zeros(vocabulary), 0.0
    of_c, of_b = ({name: zeros(vocabulary) for name in ("rounded", "float32", "summed")} for _ in range(2))
    for rows in head.blocks():
        z, slope, error = head.logits(rows)
        columns = xp.arange(vocabulary) if xp is np else xp.arange(vocabulary, device=head.device)
        own = head.targets[rows] if xp is np else xp.tensor(head.targets[rows], device=head.device)
        is_target = columns == own[:, None]
        A, T, S, L = (x[rows][:, None] for x in (a, t, s, lse))
        p = xp.exp(z - L)
        inner = A * p + xp.where(is_target, T, 0.0) + S * head.weights
        dz = head.scale * slope * inner
        d_p = p * (error + d_lse[rows][:, None] + EPS * (xp.abs(z) + xp.abs(L) + 4)) + TINY
        wrong = xp.abs(A) * d_p + d_a[rows][:, None] * p + 8 * EPS * xp.abs(S * head.weights)
        wrong = wrong + 8 * EPS * xp.where(is_target, xp.abs(T), 0.0)
        d_dz = abs(head.scale) * slope * wrong + 4 * EPS * xp.abs(dz) + TINY
        if kappa is not None:
            d_slope = 2 * xp.abs(z) / kappa**2 * error + 4 * EPS
            d_dz = d_dz + abs(head.scale) * xp.abs(inner) * d_slope
        square = dz * dz
        rounded = square + (quantum / unit) ** 2
        rounded_c = rounded
        if program.may_save:
            of_p = xp.where(is_target, 0.0, head.scale * slope * A * p)
            rounded = rounded + of_p * of_p
            rounded_c = rounded + square
        signed, d_square = d_dz * xp.sign(A), d_dz * d_dz
        of_e["value"].append(dz @ head.c)
        flat = _flat(z, xp.where(is_target, 0.0, head.scale * slope * A * p), unit, xp)
        of_e["alike"].append((_norms(signed @ head.c) + _norms(flat @ head.c)) ** 2)
        for name, squares in (("rounded", rounded), ("float32", d_square), ("summed", square)):
            of_e[name].append(squares @ c_squares)
        of_others = xp.abs(xp.where(is_target, 0.0, head.scale * slope * A * p))
        most = tolerance * (of_others + abs(head.scale) * slope * xp.abs(A) * d_p).sum(1)
        of_e["left_out"].append((most * head.norms[1].max()) ** 2)
        dc_left_out += head.norms[0][rows] @ xp.minimum(of_others, most[:, None])
        of_any_rows += float((head.norms[0][rows] * most).sum())
        own_squares = e_squares[rows]
        dc += dz.T @ head.e[rows]
        dc_alike += signed.T @ head.e[rows]
        dc_flat += flat.T @ head.e[rows]
        if program.dtype != "float32":
            dc_lost += _lost(dz, unit, largest if program.dtype == "float16" else 1.0, xp).T @ head.e[rows]
        db += dz.sum(0)
        db_alike += d_dz.sum(0)
        for name, squares in (("rounded", rounded_c), ("float32", d_square), ("summed", square)):
            of_c[name] += squares.T @ own_squares
            of_b[name] += squares.sum(0)

    placed = zeros(tokens, width)
    numbers = {name: np.zeros(tokens) for name in of_e if name != "value"}
    if of_e["value"]:
        index = places if xp is np else xp.tensor(places, device=head.device)
        placed[index] = xp.concatenate(of_e["value"])
        for name, x in numbers.items():
            x[places] = head.get(xp.concatenate(of_e[name]))

    def of_columns(value: Any, alike: Any, others: dict[str, Any], left_out: Any, of_any_rows: float = 0.0) -> Rows:
        arrays = {name: head.get(x) for name, x in (others | {"alike": alike, "left_out": left_out}).items()}
        return Rows(value, **arrays, of_any_rows=of_any_rows)

    lost = _norms(dc_lost)
    if not program.mixed:
        lost = xp.clip(lost - unit * of_c["rounded"] ** 0.5, 0.0, None)
    found = {
        "e": Rows(placed, **numbers),
        "c": of_columns(dc, (_norms(dc_alike) + _norms(dc_flat) + lost) ** 2, of_c, dc_left_out**2, float(of_any_rows)),
        "bias": of_columns((db * ones)[:, None], db_alike**2, of_b, zeros(vocabulary)),
    }
    return {name: x for name, x in found.items() if name in program.wanted}


def _flat(z: Any, of_p: Any, unit: float, xp: Any) -> Any:
    """What of_p loses of z in each row whose logits lie within one step of the type; 0 in other rows."""
    away = z - z.mean(1)[:, None]
    within = xp.sqrt((away**2).mean(1)) < 2 * unit
    return xp.where(within[:, None], of_p * away, 0.0)


def _lost(dz: Any, unit: float, scale: float, xp: Any) -> Any:
    """What rounding loses of dz, which is rounded in units of scale."""
    finite = xp.where(xp.isfinite(dz), dz, 0.0)
    mantissa, exponent = xp.frexp(finite / (scale or 1.0))
    return (scale or 1.0) * xp.ldexp(xp.round(mantissa / unit) * unit, exponent) - finite


def _norms(x: Any) -> Any:
    return ((x**2).sum(1)) ** 0.5


def roundoff(dtype: str) -> float:
    """u: half the distance of the type's numbers near 1."""
    return float(ml_dtypes.finfo(dtype).eps) / 2
