"""Time candidate tile configurations of each kernel on this machine's GPU, and print and keep what was found.

    statistics   the forward pass              dz         dz of all groups of the vocabulary, from logits
    de, dc       one product of all groups     saved dz   dz of all groups, from saved exponentials

Ratios are to the bare matmul of the same size in the same run. What is found goes by hand into
cce_kernels/config.py: nothing is tuned at run time. Where Triton is installed, candidates that would spill registers on
this GPU are not run.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.__main__ import parse_shape
from bench.calls_jax import Compiled, floor
from bench.data import SHAPES, Shape, trained
from bench.measure import steady
from bench.report import environment
from cce_kernels import backward, forward
from cce_kernels.budget import backward_groups
from cce_kernels.config import H200, INTERPRETER, TileConfig, Tiles, local_gpu, tile_config
from cce_kernels.contract import MEMORY_BUDGET
from cce_kernels.groups import Wanted, over_groups
from cce_kernels.logits import Head
from cce_kernels.products import kernel_products
from cce_kernels.saved import DZ_TILES, dz_of_saved
from cce_kernels.windows import Groups

SIXTEEN_BIT = [
    TileConfig(*sizes)
    for sizes in (
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 128, 8, 2), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (64, 256, 64, 4, 3),
    )
]  # fmt: skip
FLOAT32 = [
    TileConfig(*sizes)
    for sizes in (
        (128, 128, 32, 8, 3), (128, 128, 32, 8, 4), (128, 128, 32, 4, 3), (128, 256, 32, 8, 3), (64, 128, 32, 4, 3),
        (64, 64, 32, 8, 3),
    )
]  # fmt: skip
SAVED = [TileConfig(rows, columns, 16, warps, 1)
         for rows, columns, warps in itertools.product((16, 32), (256, 512, 1024), (4, 8))]  # fmt: skip
TINY = [INTERPRETER, TileConfig(32, 32, 16, 4, 1)]
MATMUL = {"statistics": "z = e·cᵀ", "dz": "z = e·cᵀ", "de": "de = dz·c", "dc": "dc = dzᵀ·e", "saved dz": "z = e·cᵀ"}
ROLES = tuple(MATMUL)
QUICK = Shape(48, 16, 96)
Row = dict[str, Any]
Program = Callable[..., Any]


class Given(NamedTuple):
    """What the kernels are run on."""

    e: jax.Array
    c: jax.Array
    targets: jax.Array
    lse: jax.Array
    cotangents: jax.Array
    kept: jax.Array  # (1,), how many tokens are kept: all

    @classmethod
    def of(cls, shape: Shape, dtype, interpret: bool) -> "Given":
        e, c, targets = trained(shape, dtype)
        options: dict[str, Any] = {"head": Head(), "with_sum": False, "interpret": interpret}
        lse, *_ = jax.jit(lambda e, c, t: forward.statistics(e, c, None, t, None, **options))(e, c, targets)
        share = jnp.full(shape.tokens, 1 / shape.tokens)
        count = jnp.full(1, shape.tokens, jnp.int32)
        return cls(e, c, targets, lse, jnp.stack([share, -share]), count)


def candidates(role: str, dtype, interpret: bool) -> list[TileConfig]:
    """saved dz is of bfloat16 alone."""
    if role == "saved dz":
        return [] if jnp.dtype(dtype) != jnp.bfloat16 else TINY if interpret else SAVED
    return TINY if interpret else FLOAT32 if jnp.dtype(dtype).itemsize == 4 else SIXTEEN_BIT


def shipped(role: str, given: Given, interpret: bool) -> TileConfig:
    if interpret:
        return INTERPRETER
    if role == "saved dz":
        return DZ_TILES
    return getattr(tile_config(given.e.dtype, given.e.shape[1], local_gpu() or H200), role)


def groups_of(given: Given, tiles: TileConfig, interpret: bool) -> Groups:
    """The groups of a backward pass with the default budget, which saves nothing."""
    (tokens, width), vocabulary = given.e.shape, given.c.shape[0]
    ((groups, _),) = backward_groups(tokens, width, vocabulary, given.e.dtype, 0, memory_budget=MEMORY_BUDGET,
                                     copies=True, tiles=tiles, interpret=interpret)  # fmt: skip
    return groups


def buffer(role: str, given: Given, interpret: bool) -> jax.Array | None:
    """What the role's kernels read besides what is given: dz of a group, or the exponentials of all."""
    tokens, vocabulary = given.e.shape[0], given.c.shape[0]
    if role == "saved dz":
        return jnp.ones((tokens, vocabulary), given.e.dtype)
    if role in ("de", "dc"):
        groups = groups_of(given, shipped("dz", given, interpret), interpret)
        return jax.random.normal(jax.random.key(0), (tokens, groups.columns), given.e.dtype) / tokens
    return None


def program(
    role: str, given: Given, read: jax.Array | None, tiles: TileConfig, interpret: bool
) -> tuple[Program, tuple]:  # fmt: skip
    """A function that launches the role's kernels for all of the vocabulary, and its arguments; read: its buffer."""
    head, (e, c, targets, lse, cotangents, kept) = Head(), given
    if role == "statistics":

        def statistics(e, c, targets):
            return forward.statistics(e, c, None, targets, None, head=head, with_sum=False, interpret=interpret,
                                      tiles=tiles)[:2]  # fmt: skip

        return statistics, (e, c, targets)

    groups = groups_of(given, tiles if role == "dz" else shipped("dz", given, interpret), interpret)
    options: dict[str, Any] = {"head": head, "groups": groups, "wanted": Wanted(True, True, False), "tiles": tiles,
                               "interpret": interpret}  # fmt: skip

    def over(form: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]]) -> jax.Array:
        """One number of each group's dz, so that every group is computed."""
        step = lambda total, window: total + form(window)[0][0, 0].astype(jnp.float32)  # noqa: E731
        return over_groups(step, jnp.float32(0), groups)

    def dz(e, c, lse, targets, cotangents):
        form = backward.dz_of_group
        return over(lambda window: form(e, c, None, lse, targets, cotangents, None, None, window, **options))

    def saved_dz(saved, lse, targets, cotangents):
        return over(lambda window: dz_of_saved(saved, lse, lse, targets, cotangents, None, window, **options))

    def product(e, c, dz, kept):
        products = kernel_products(e, c, head=head, unit=None, count=kept, tiles=Tiles.same(tiles),
                                   interpret=interpret)  # fmt: skip
        one = products.add_de if role == "de" else products.put_dc
        start = jnp.zeros(e.shape, jnp.float32) if role == "de" else jax.lax.empty(c.shape, c.dtype)
        return over_groups(lambda out, window: one(out, dz, window[0]), start, groups)

    return {
        "dz": (dz, (e, c, lse, targets, cotangents)),
        "de": (product, (e, c, read, kept)),
        "dc": (product, (e, c, read, kept)),
        "saved dz": (saved_dz, (read, lse, targets, cotangents)),
    }[role]


def spilled(function: Program, arguments: Sequence[jax.Array]) -> int:
    """Bytes of registers that the role's kernels spill on this GPU; 0 where nothing can tell."""
    gpu = local_gpu()
    if gpu is None:
        return 0
    try:
        from tests.lowering import kernels, resources

        found = kernels(function, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments))
        return max(resources(kernel, gpu.compute_capability).stack for kernel in found)
    except Exception:  # no Triton, or one that does not know this GPU or these tiles: XLA will say
        return 0


def measure(
    shape: Shape, dtype, roles: Sequence[str], rounds: int, interpret: bool, tick: Callable[[str], object],
    lost: dict[tuple[str, TileConfig], int],
) -> list[Row]:  # fmt: skip
    """A row a candidate: ms and its ratio to the bare matmul, or why it has none.

    lost: the bytes that a candidate spills; looked up, and noted where missing, so that one shape tells for all.
    """
    given = Given.of(shape, dtype, interpret)
    bare = floor(given.e, given.c)
    floors = [{name: steady(call, rounds) for name, call in bare.items()}]
    rows = []
    for role in roles:
        for row in _role(role, given, rounds, interpret, lost):
            tick(f"{role} {row['tiles']}")
            rows.append({"shape": list(shape), "dtype": jnp.dtype(dtype).name, **row})
    floors.append({name: steady(call, rounds) for name, call in bare.items()})  # of the clocks of all of the run
    for row in rows:
        if row["ms"] is not None:
            row["matmul_ms"] = float(np.mean([found[MATMUL[row["role"]]] for found in floors]))
            row["ratio"] = row["ms"] / row["matmul_ms"]
    return rows


def _role(role: str, given: Given, rounds: int, interpret: bool, lost: dict) -> Iterator[Row]:
    listed, chosen = candidates(role, given.e.dtype, interpret), shipped(role, given, interpret)
    if listed and chosen not in listed:
        listed = [chosen, *listed]
    read = buffer(role, given, interpret) if listed else None
    made = {tiles: program(role, given, read, tiles, interpret) for tiles in listed}
    for tiles in listed:
        if (role, tiles) not in lost:
            lost[role, tiles] = spilled(*made[tiles])
    worth = [tiles for tiles in listed if tiles == chosen or not lost[role, tiles]]
    with ThreadPoolExecutor() as pool:  # most of what a sweep waits for is XLA
        compiled = {tiles: pool.submit(Compiled.of, made[tiles][0], *made[tiles][1]) for tiles in worth}
    for tiles in listed:
        row: Row = {"role": role, "tiles": label(tiles), "shipped": tiles == chosen, "ms": None,
                    "spilled": lost[role, tiles]}  # fmt: skip
        if tiles in worth:
            try:
                row["ms"] = steady(compiled[tiles].result().call(), rounds)
            except Exception as error:
                text = str(error).strip().splitlines()
                row["failed"] = f"{type(error).__name__}: {text[0][:100] if text else ''}"
        yield row


def label(tiles: TileConfig) -> str:
    return f"{tiles.rows}x{tiles.columns}x{tiles.depth} w{tiles.warps} s{tiles.stages}"


def table(rows: Sequence[Row]) -> Table:
    """Of one shape, each role's fastest first."""
    title = f"{'×'.join(map(str, rows[0]['shape']))} {rows[0]['dtype']}"
    printed = Table("kernel", "tiles", "ms", "/ matmul", "", title=title, header_style="bold")
    for role, group in itertools.groupby(rows, key=lambda row: row["role"]):
        ordered = sorted(group, key=lambda row: np.inf if row["ms"] is None else row["ms"])
        for i, row in enumerate(ordered):
            numbers = ("", "") if row["ms"] is None else (f"{row['ms']:.3f}", f"{row['ratio']:.3f}")
            printed.add_row("" if i else role, row["tiles"], *numbers, note(row),
                            style="bold" if row["shipped"] else None, end_section=i == len(ordered) - 1)  # fmt: skip
    return printed


def note(row: Row) -> str:
    notes = {
        "shipped": row["shipped"],
        f"spills {row['spilled']} bytes": row["spilled"],
        row.get("failed", ""): "failed" in row,
    }
    return ", ".join(text for text, holds in notes.items() if holds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench.tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--shape", type=parse_shape, nargs="+", default=[SHAPES[x] for x in ("gemma2-2b", "llama3-8b", "gist")],
        help=f"NxDxV (tokens, width, vocabulary) or one of {', '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--role", choices=ROLES, nargs="+", default=list(ROLES), help="which kernels (all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each candidate (5)")
    parser.add_argument("--quick", action="store_true", help="one tiny shape; without a GPU, in Pallas' interpreter")
    parser.add_argument("--out", type=Path, default=Path("out/tune"), help="written: OUT.json")
    asked = parser.parse_args()
    if asked.quick:
        asked.shape, asked.rounds = [QUICK], 1
    elif local_gpu() is None:
        parser.error("measuring needs a GPU; --quick shows that the sweep runs")
    return asked


def main() -> None:
    asked = arguments()
    interpret = local_gpu() is None
    console = Console(width=None if sys.stdout.isatty() else 120)
    out = asked.out.with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    lost: dict[tuple[str, TileConfig], int] = {}
    with Progress(console=console, disable=not sys.stdout.isatty()) as progress:
        each = sum(len(candidates(role, asked.dtype, interpret)) for role in asked.role)
        task = progress.add_task("", total=each * len(asked.shape))
        for shape in asked.shape:
            found = measure(shape, asked.dtype, asked.role, asked.rounds, interpret,
                            lambda what: progress.update(task, advance=1, description=what), lost)  # fmt: skip
            rows += found
            if found:
                progress.console.print(table(found))
            kept = {**environment(), "rows": rows}
            out.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main()
