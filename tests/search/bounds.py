"""Whether a result is as close to the truth as rounding allows: the bounds of the random search.

tests/search/truth.py follows the errors of single numbers. A gradient is a sum of dz times rows x of c or e, and of a
block of BLOCK of its rows (tokens of de, columns of the vocabulary of dc and dbias) this is what may be off:

    slack · √(u²·(Σ (δ dz / u)²·‖x‖²  +  r·‖truth‖²))     roundings to the type, of dz and of the result, each
                                                           independent of the others
  + F · (slack·√(Σ δdz²·‖x‖²) + Σ ‖Σ ±δdz·x‖)               float32's errors: independent, and each kind that is not
  + ε·√(n·Σ dz²·‖x‖²) + ε·‖truth‖                          each of the n additions of the sum
  + what the products may leave out of dz                  of calls with a gradient_tolerance
  + the least number that the type holds, once an element

u is the most that a rounding costs; on average it is u/√3 at most. So with slack 1 a block that sums many roundings
stays below 0.6 of the bound, and a gradient that is off by 1 % fails it, even in bfloat16. Few may all be large:

    slack = 1 + 2/√(rows that count)         rows that count = (Σ r²)² / Σ r⁴,  r² a row's share of the square above

which is 3 for a single row, where up to 9 roundings may fall together. r = 1, but 0 for the gradients of a float32 c
and bias beside a 16-bit e, which are not rounded. loss, lse and dtoken_weight are float32, and each element has its own
bound, F·δ.

F = 2: δ counts each operation once, as the largest part of what it may cost; the interpreter, XLA and Hopper's tensor
cores each sum in an order of their own.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from tests.search.calls import Program
from tests.search.truth import TINY, Rows, Truth, roundoff

BLOCK = 64  # rows
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
FLOAT16_OVERFLOWS = 65520.0  # the least number that float16 rounds to inf
F = 2.0


@dataclass(frozen=True)
class Check:
    """The worst part of a result: its error over what is allowed, and in words."""

    name: str
    ratio: float
    words: str


def checks(found: dict[str, np.ndarray], truth: Truth, program: Program) -> list[Check]:
    """One for each result; it passes where its ratio is at most 1.

    found: results by their names, and the gradients by the names of what they are of; that of c is (V, D).
    """
    gradients = program.wanted if program.differentiates else ()
    missing = {*program.results, *gradients} ^ set(found)
    assert not missing, f"results that are missing, or that nobody asked for: {missing}"
    made = []
    for name, of in truth.results.items():
        of_ids = name in ("predicted", "top_ids")
        made.append(_ids(name, found[name], *of, program) if of_ids else _elements(name, found[name], *of, program))
    if truth.token_weight is not None:
        made.append(_elements("token_weight", found["token_weight"], *truth.token_weight, program))
    for name, rows in truth.rows.items():
        kept = truth.kept.reshape(-1) if name == "e" else None
        made.append(_rows(name, found[name], rows, program, kept))
    not_compared = set(found) - {x.name for x in made}
    assert not not_compared, f"results that are not compared: {not_compared}"
    return made


def _ratio(error: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """error / allowed, 0 where both are 0; NaN counts as infinite."""
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.where(error == 0, 0.0, error / allowed), nan=np.inf, posinf=np.inf)


def _elements(name: str, found: np.ndarray, want: np.ndarray, error: np.ndarray, program: Program) -> Check:
    wide = "float64" if program.dtype == "float64" else "float32"
    if name != "token_weight" and found.dtype.name != wide:
        return Check(name, np.inf, f"{name} is {found.dtype}, not {wide}")
    found = np.asarray(found, np.float64)
    if found.shape != want.shape:
        return Check(name, np.inf, f"{name} has shape {found.shape}, not {want.shape}")
    if not want.size:
        return Check(name, 0.0, "nothing to compare")
    if name in ("log_probs", "id_log_probs", "top_log_probs") and np.any(found > 0):
        return Check(name, np.inf, f"{name} above 0: {np.nanmax(found)}")
    with np.errstate(invalid="ignore"):
        beyond = (np.abs(want) > LARGEST_FLOAT32 / 4) & (np.abs(found) > LARGEST_FLOAT32 / 8)  # in float32 inf
        both = (np.isnan(found) & np.isnan(want)) | (beyond & (np.sign(found) == np.sign(want))) | (found == want)
        off = np.where(both, 0.0, np.abs(found - want))
    allowed = np.minimum(F * np.nan_to_num(error, posinf=1e300), 1e300) + TINY
    ratios = np.atleast_1d(_ratio(off, allowed))
    at = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    pairs = [np.atleast_1d(x)[at] for x in (found, want, allowed)]
    return Check(name, float(ratios[at]), "{}[{}] = {:.9g}, not {:.9g} ± {:.2g}".format(name, at, *pairs))


def _ids(name: str, found: np.ndarray, worse: np.ndarray, allowed: np.ndarray, program: Program) -> Check:
    """worse: how far the logits of the ids are below the largest ones."""
    wide = "int32" if program.package == "jax" else "int64"
    if found.shape != worse.shape or found.dtype != wide:
        return Check(name, np.inf, f"{name} is {found.dtype} {found.shape}, not {wide} {worse.shape}")
    if np.any((found < 0) | (found >= program.vocabulary)):
        return Check(name, np.inf, f"{name} outside of the vocabulary: {found.min()} to {found.max()}")
    ratios = _ratio(np.abs(worse), F * allowed)
    if name == "top_ids" and np.any((np.diff(np.sort(found)) == 0).any(-1) & (allowed > 0).any(-1)):
        return Check(name, np.inf, f"{name}: an id twice")
    worst = float(np.max(ratios, initial=0.0))
    return Check(name, worst, f"{name}: an id whose logit is {worst:.2g} times the error below another")


def _rows(name: str, found: np.ndarray, of: Rows, program: Program, kept: np.ndarray | None) -> Check:
    want = of.value
    found = np.asarray(found).reshape(-1, found.shape[-1]) if name in ("e", "c") else np.asarray(found)[:, None]
    if tuple(found.shape) != tuple(want.shape):
        return Check(name, np.inf, f"the gradient of {name} has shape {found.shape}, not {tuple(want.shape)}")
    dtype = program.type_of(name)
    if found.dtype.name != dtype:
        return Check(name, np.inf, f"the gradient of {name} is {found.dtype}, not {dtype}")
    if kept is not None and np.any(np.float32(found[~kept]) != 0):
        return Check(name, np.inf, f"the gradient of {name} is not 0 for an ignored token")
    off, size, finite = _squares(found, want)
    if not want.shape[0]:
        return Check(name, 0.0, "nothing to compare")

    unit, elements = roundoff(program.dtype), want.shape[1]
    eps = 2.0**-44 if program.dtype == "float64" else 2.0**-23
    least = float(ml_dtypes.finfo(program.dtype).tiny if program.dtype != "float16" else 2.0**-24) ** 2 * elements
    terms = program.vocabulary if name == "e" else program.tokens
    of_result = size if dtype == program.dtype else np.zeros_like(size)  # else the gradient is not rounded to e's type
    rounded = np.where(finite, unit**2 * (np.nan_to_num(of.rounded) + of_result) + least, 0.0)
    others = of.float32, of.alike, of.summed, of.left_out
    float32, alike, summed, left_out = (np.where(finite, np.nan_to_num(x), 0.0) for x in others)
    starts = np.arange(0, off.size, BLOCK)

    def blocks(x: np.ndarray) -> np.ndarray:
        """Sums of blocks of rows, and after them that of all rows."""
        return np.append(np.add.reduceat(x, starts), np.sum(x))

    largest = np.max(rounded) or 1.0  # so that no square underflows
    fourth = blocks((rounded / largest) ** 2)
    count = np.where(fourth > 0, blocks(rounded / largest) ** 2 / np.where(fourth > 0, fourth, 1.0), 1.0)
    few = 1 + 2 / np.sqrt(np.maximum(count, 1.0))
    allowed = few * np.sqrt(blocks(rounded))
    allowed = allowed + F * (few * np.sqrt(blocks(float32)) + np.sqrt(blocks(alike)))
    allowed = allowed + eps * (np.sqrt(terms * blocks(summed)) + np.sqrt(blocks(size)))
    allowed = allowed + np.fmin(np.sqrt(blocks(left_out)), of.of_any_rows)
    errors = np.where(allowed > LARGEST_FLOAT32, 0.0, np.sqrt(blocks(off)))  # any number, infinite ones too
    ratios = _ratio(errors, allowed)
    at = int(np.argmax(ratios))
    where = "all rows" if at == starts.size else f"rows {at * BLOCK} to {min(at * BLOCK + BLOCK, off.size) - 1}"
    norm = float(np.sqrt(blocks(size)[at]))
    return Check(
        name,
        float(ratios[at]),
        f"the gradient of {name}, {where}: off by {errors[at]:.4g}, allowed {allowed[at]:.4g}, norm {norm:.4g}",
    )


def distance(found: np.ndarray, want: np.ndarray) -> float:
    """The norm of their difference; what float16 cannot hold is as in a gradient."""
    off, _, _ = _squares(found.reshape(1, -1), torch.tensor(want.reshape(1, -1)))
    return float(np.sqrt(off.sum()))


def _squares(found: np.ndarray, want: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row the squares of its error and of its norm, and whether the truth is a number there.

    An error is infinite where only one of both is NaN. In float16 it is 0 where the type cannot hold what both are
    beyond. inf stands for the least number that overflows, and NaN for the difference of two.
    """
    parts: list[np.ndarray] = []
    rows = max(1, 2**24 // max(want.shape[1], 1))
    for i in range(0, want.shape[0], rows):
        part, true = found[i : i + rows], want[i : i + rows]
        part = part if part.dtype == np.float64 else part.astype(np.float32)
        here = torch.tensor(part, device=want.device).double()
        off = here - true
        if found.dtype == np.float16:
            off = torch.where(here.isinf(), here.sign() * FLOAT16_OVERFLOWS - true, off)
            off = torch.where(here.isnan() & (true.abs() > 6e4), 0.0, off)
            off = torch.where((true.abs() > 6e4) & (here.abs() > 6e4) & (here.sign() == true.sign()), 0.0, off)
            off = torch.where(here.isnan() & ~true.isnan(), 2 * FLOAT16_OVERFLOWS, off)
        off = torch.where(here.isnan() & true.isnan(), 0.0, off)
        off = torch.where(off.isnan(), torch.inf, off)
        size = torch.where(true.isnan(), 0.0, true)
        three = (off**2).sum(1), (size**2).sum(1), 1.0 * ~true.isnan().any(1)
        parts.append(np.stack([x.cpu().numpy() for x in three]))
    off, size, finite = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0))
    return off, size, finite > 0
