"""Time candidate tile configurations of each kernel on this machine's GPU, and print and keep what was found.

    statistics   the forward pass              dz         dz of all groups of the vocabulary, from logits
    de, dc       one product of all groups     saved dz   dz of all groups, from saved exponentials
    ..., Hopper  the kernels for Hopper, on it alone; their groups are those of a call that these serve;
                 saved de     of all, from saved exponentials

Ratios are to the bare matmul of the same size in the same run. What is found goes by hand into triton/tiles.py and
hopper/tiles.py in cce_kernels/engines: nothing is tuned at run time. Where Triton is installed, candidates that would
spill registers on this GPU are not run.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.__main__ import parse_shape
from bench.calls import Call, compiled, floor
from bench.data import SHAPES, Shape
from bench.measure import steady
from bench.report import environment
from bench.roles import MATMUL, ROLES, Candidate, Given, buffer, candidates, program, shipped, spilled
from bench.run import first_line
from cce_kernels.device import INTERPRETER, Gpu, local_gpu
from cce_kernels.engines.hopper.tiles import PairTiles

QUICK = Shape(48, 16, 96)
Row = dict[str, Any]


def measure(
    shape: Shape, dtype, roles: Sequence[str], rounds: int, gpu: Gpu, tick: Callable[[str], object],
    lost: dict[tuple[str, Candidate], int],
) -> list[Row]:  # fmt: skip
    """A row a candidate: ms and its ratio to the bare matmul, or why it has none.

    lost: the bytes that a candidate spills; looked up, and noted where missing, so that one shape tells for all.
    """
    given = Given.of(shape, dtype, gpu)
    bare = floor(given.inputs.e, given.inputs.c)
    floors = [{name: steady(call, rounds) for name, call in bare.items()}]
    rows = []
    for role in roles:
        for row in _role(role, given, rounds, gpu, lost):
            tick(f"{role} {row['tiles']}")
            rows.append({"shape": list(shape), "dtype": jnp.dtype(dtype).name, **row})
    floors.append({name: steady(call, rounds) for name, call in bare.items()})  # of the clocks of all of the run
    for row in rows:
        if row["ms"] is not None:
            row["matmul_ms"] = float(np.mean([found[MATMUL[row["role"]]] for found in floors]))
            row["ratio"] = row["ms"] / row["matmul_ms"]
    return rows


def _role(role: str, given: Given, rounds: int, gpu: Gpu, lost: dict) -> Iterator[Row]:
    listed = candidates(role, given.shape, given.inputs.e.dtype, gpu)
    if not listed:
        return
    chosen, read = shipped(role, given, gpu), buffer(role, given, gpu)
    if chosen not in listed:
        listed = [chosen, *listed]
    made = {tiles: program(role, given, read, tiles, gpu) for tiles in listed}
    for tiles in listed:
        if (role, tiles) not in lost:
            lost[role, tiles] = spilled(*made[tiles], gpu)
    worth = [tiles for tiles in listed if tiles == chosen or not lost[role, tiles]]
    with ThreadPoolExecutor() as pool:  # most of what a sweep waits for is XLA
        calls = {tiles: pool.submit(compiled, made[tiles][0], *made[tiles][1]) for tiles in worth}
    for tiles in listed:
        row: Row = {"role": role, "tiles": label(tiles), "shipped": tiles == chosen, "ms": None,
                    "spilled": lost[role, tiles]}  # fmt: skip
        if tiles in worth:
            row |= _timed(calls[tiles], rounds)
        yield row


def _timed(call: Future[Call], rounds: int) -> Row:
    """ms, or why there is none."""
    try:
        return {"ms": steady(call.result(), rounds)}
    except Exception as error:
        return {"failed": first_line(error)[:120]}


def label(tiles: Candidate) -> str:
    if isinstance(tiles, PairTiles):
        return f"{tiles.columns} s{tiles.stages} w{tiles.slots} lead {tiles.lead}"
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
    gpu = local_gpu() or INTERPRETER
    console = Console(width=None if sys.stdout.isatty() else 120)
    out = asked.out.with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    lost: dict[tuple[str, Candidate], int] = {}
    with Progress(console=console, disable=not sys.stdout.isatty()) as progress:
        each = (candidates(role, shape, asked.dtype, gpu) for shape in asked.shape for role in asked.role)
        task = progress.add_task("", total=sum(map(len, each)))
        for shape in asked.shape:
            found = measure(shape, asked.dtype, asked.role, asked.rounds, gpu,
                            lambda what: progress.update(task, advance=1, description=what), lost)  # fmt: skip
            rows += found
            if found:
                progress.console.print(table(found))
            kept = {**environment(), "rows": rows}
            out.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    main()
