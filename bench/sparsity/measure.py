"""Kept shares and errors of one case, chunk by chunk.

An error is the norm of the left-out product over that of the whole one: the products of dz's left-out part, from
bfloat16 operands with float32 sums, so an error has itself a relative error of about 2⁻⁹. Rounding dz or a gradient to
bfloat16 adds to it in training, and is not part of it here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import peers
from bench import truth as float64
from bench.calls import arrays, step
from bench.data import Inputs
from bench.measure import steady
from bench.report import Row
from bench.sparsity import rules
from bench.sparsity.inputs import ordered
from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, MULTIPLE, PART

CHUNK = 1024  # tokens
SLACK = 1 + 1e-5  # of sums of float32
FILTER, FILTER_BLOCK = 2.0**-12, 128  # cut_cross_entropy's: eps of bfloat16 / 32; its blocks have equal sides


@jax.jit
def probabilities(e: jax.Array, c: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax with 0 at the targets, (n, V padded to blocks); its masses, (parts, n); the targets' own, (n,)."""
    z = jnp.einsum("nd,vd->nv", e, c, preferred_element_type=jnp.float32)
    p, rows = jax.nn.softmax(z, axis=1), jnp.arange(len(targets))
    rest = jnp.pad(p.at[rows, targets].set(0), ((0, 0), (0, -p.shape[1] % MULTIPLE)))
    return rest, rest.reshape(len(rest), -1, PART).sum(-1).T, p[rows, targets]


def _of_blocks(p: jax.Array, keep: jax.Array) -> jax.Array:
    """The part of p that is left out, in bfloat16. keep: (row blocks, column blocks)."""
    rows, columns = p.shape[0] // keep.shape[0], p.shape[1] // keep.shape[1]
    blocks = p.reshape(keep.shape[0], rows, keep.shape[1], columns)
    return jnp.where(keep[:, None, :, None], 0, blocks).reshape(p.shape).astype(jnp.bfloat16)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    dimensions = ((axis,), (0,)), ((), ())
    return jax.lax.dot_general(x, y.astype(x.dtype), dimensions, preferred_element_type=jnp.float32)


@jax.jit
def left_out(p: jax.Array, given: Inputs, of_de: jax.Array, of_dc: dict) -> tuple[jax.Array, dict]:
    """Of a chunk: the squares of de and of its left-out part; "whole" dc, and its left-out part by the names in of_dc.

    of_de, of_dc: the blocks that are kept for each, (row blocks, column blocks).
    """
    e, c, targets = given
    padded = jnp.pad(c, ((0, p.shape[1] - c.shape[0]), (0, 0)))
    whole = p.at[jnp.arange(len(targets)), targets].set(-p.sum(1)).astype(jnp.bfloat16)
    squares = jnp.stack([jnp.square(_product(x, padded, 1)).sum() for x in (whole, _of_blocks(p, of_de))])
    parts = {"whole": whole} | {name: _of_blocks(p, keep) for name, keep in of_dc.items()}
    return squares, {name: _product(x, e, 0)[: len(c)] for name, x in parts.items()}


@jax.jit
def _row_errors(part: jax.Array, whole: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    squares, of_whole = (jnp.square(x).sum(1) for x in (part, whole))
    return jnp.sqrt(squares.sum() / of_whole.sum()), jnp.sqrt(squares), jnp.sqrt(of_whole)


def digits(x: Any) -> float:
    return float(f"{float(x):.4g}")


def of_rows(part: jax.Array, whole: jax.Array, targets: jax.Array, name: str) -> Row:
    """The error of dc, and of its rows of tokens that are at most once a target: the median and the 90th percentile."""
    error, size, of_whole = map(np.asarray, _row_errors(part, whole))
    rare = (np.bincount(np.asarray(targets), minlength=len(whole)) <= 1) & (of_whole > 0)
    half, most = np.quantile(size[rare] / of_whole[rare], (0.5, 0.9))
    return {name: digits(error), f"{name}_rare": digits(half), f"{name}_rare_p90": digits(most)}


@jax.jit
def _filter(p: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether cut_cross_entropy keeps each block: any |dz| in it reaches FILTER."""
    large = (p >= FILTER).at[jnp.arange(len(targets)), targets].set(p.sum(1) >= FILTER)
    return large.reshape(len(p) // FILTER_BLOCK, FILTER_BLOCK, -1, FILTER_BLOCK).any((1, 3))


def measured(given: Inputs, decide: Callable[..., tuple[dict, jax.Array, dict]]) -> Row:
    """The kept shares and the errors of what `decide` keeps.

    decide: (targets of a chunk, *probabilities of it) -> blocks by name, those of de, and those of dc by name.
    """
    e, c, targets = given
    chunk = min(CHUNK, len(targets))
    assert len(targets) % chunk == chunk % MULTIPLE == 0, len(targets)
    squares, sums, kept = jnp.zeros(2), {}, []
    for i in range(0, len(targets), chunk):
        of_chunk = e[i : i + chunk], c, targets[i : i + chunk]
        p, masses, own = probabilities(*of_chunk)
        blocks, of_de, of_dc = decide(of_chunk[2], p, masses, own)
        kept.append({name: float(x.mean()) for name, x in blocks.items()})
        found, parts = left_out(p, of_chunk, of_de, of_dc)
        squares, sums = squares + found, jax.tree.map(jnp.add, sums, parts) if sums else parts
    row: Row = {"kept": {name: round(float(np.mean([x[name] for x in kept])), 5) for name in kept[0]}}
    row["de"] = digits(jnp.sqrt(squares[1] / squares[0]))
    whole = sums.pop("whole")
    for name, part in sums.items():
        row |= of_rows(part, whole, targets, name)
    return row


def of_case(given: Inputs, tau: float) -> Row:
    """All rules, and the errors of the rule "kernels": dc_columns with the bound on columns too.

    Raises AssertionError where a rule leaves out more than its bound allows.
    """

    def decide(targets: jax.Array, p: jax.Array, masses: jax.Array, own: jax.Array) -> tuple[dict, jax.Array, dict]:
        found = rules.decide(masses, targets, own, tau)
        used = {name: float(x) for name, x in found.used.items()}
        assert max(used.values()) <= SLACK, used
        de, dc = (found.blocks[rules.named("kernels", x)] for x in (DE_BLOCK, DC_BLOCK))
        columns = rules.keep_columns(dc, masses, tau)
        return found.blocks | {rules.named("columns", DC_BLOCK): columns}, de, {"dc": dc, "dc_columns": columns}

    return {"tau": tau, **measured(given, decide)}


def by_filter(given: Inputs) -> Row:
    """What cut_cross_entropy's filter keeps, and the errors of what it leaves out, besides targets of |dz| < FILTER.

    It orders the vocabulary by the mean logit, smallest first, over all tokens of the call.
    """

    def decide(targets: jax.Array, p: jax.Array, *_: jax.Array) -> tuple[dict, jax.Array, dict]:
        keep = _filter(p, targets)
        return {"filter 128x128": keep}, keep, {"dc": keep}

    e, c, _ = given
    logits = _product(c, e.astype(jnp.float32).mean(0)[:, None].astype(c.dtype), 1)[:, 0]
    row = measured(ordered(given, jnp.argsort(logits)), decide)
    return {"what": "by its rule", **row, "kept": row["kept"]["filter 128x128"]}


def of_filter(given: Inputs, rounds: int) -> list[Row]:
    """cut_cross_entropy, with its filter and without: time, and errors against float64. Needs a GPU."""
    e, c, targets = given
    truth, rows = float64.mean_loss(e, c, targets), []
    with jax.enable_x64(True):
        whole_de, whole_dc = (jnp.asarray(x).astype(jnp.float32) for x in (truth.de, truth.dc))
    for exact in (False, True):
        call = step("torch", peers.cut_cross_entropy(exact), e, c, targets)
        de, dc = arrays(*call()[1])
        error, *_ = _row_errors(de - whole_de, whole_de)
        row: Row = {
            "what": "exact" if exact else "filter",
            "de": float(error),
            **of_rows(dc - whole_dc, whole_dc, targets, "dc"),
        }
        rows.append(row | {"runtime_ms": steady(call, rounds)})
    return rows
