"""Print time, memory and error of each method, ours and others', and write them as JSON and a picture. See --help.

Every method is checked against float64 before it is timed. A call is the mean loss with both gradients. Times are
related to the floor, the three bare matmuls that a call cannot do without, timed in the same run. Packages that are not
installed are listed as missing. Without --shape and --method: every method at three heads, the fastest at four more.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress

from bench import methods, plot, report
from bench.data import DATA, HEADS, QUICK, SHAPES, Shape
from bench.methods import METHODS
from bench.run import Results, gradients, measure

QUICK_SECONDS = 35.0  # for --quick to begin a method in; imports, the last method and the picture take their time too
COLUMNS = {"method": "", "runtime_ms": ".3f", "ratio": ".3f", "op_mem_mb": ".1f", "besides": ".1f"}
COLUMNS |= {"loss_error": ".1e", "de_error": ".1e", "dc_error": ".1e", "wrong": ""}


class Job(NamedTuple):
    data: str
    shape: Shape
    methods: Sequence[str]


def jobs(asked: argparse.Namespace) -> list[Job]:
    few = {shape for name, shape in SHAPES.items() if name not in HEADS}
    found = []
    for shape in [QUICK] if asked.quick else asked.shape:
        default = methods.QUICK if asked.quick else methods.CLOSEST if shape in few else methods.ALL
        found += [Job(data, shape, asked.method or default) for data in asked.data]
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    names = ", ".join(SHAPES)
    parser.add_argument(
        "--shape", type=Shape.parse, nargs="+", default=list(SHAPES.values()), help=f"NxDxV, or {names}"
    )
    parser.add_argument("--data", choices=DATA, nargs="+", default=["trained"])
    parser.add_argument("--method", choices=METHODS, nargs="+", metavar="METHOD", help=f"of: {', '.join(METHODS)}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--precision", choices=["high", "highest"], help="of float32 matmuls: TF32, or all of float32")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each method (%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no method is begun after so many at a shape")
    parser.add_argument("--quick", action="store_true", help="one small shape, on any machine, in a minute")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="written: OUT.json and OUT.png")
    asked = parser.parse_args()
    asked.seconds = min(asked.seconds, QUICK_SECONDS) if asked.quick else asked.seconds
    return asked


def run(asked: argparse.Namespace) -> Iterator[Results]:
    """The results so far, after each method."""
    before, todo = Results([], [], []), jobs(asked)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=sum(3 + len(job.methods) for job in todo))
        for job in todo:
            until, found, after = time.monotonic() + asked.seconds, Results([], [], []), before
            inputs = DATA[job.data](job.shape, jnp.dtype(asked.dtype))
            for comes, found in measure(inputs, job.data, job.methods, asked.rounds, until):
                progress.update(task, advance=1, description=comes)
                after = Results(*(a + b for a, b in zip(before, found, strict=True)))
                yield after
            before = after
            if found.rows:
                print(f"\n{report.size(job.shape)} {job.data} data, {asked.dtype}", table(found.rows), sep="\n")


def table(rows: Sequence[report.Row]) -> str:
    """besides: MiB besides the gradients. Errors are relative to float64; wrong: beyond what rounding explains."""
    shown = [dict(row) for row in rows]
    for row in shown:
        row["besides"] = None if row["op_mem_mb"] is None else row["op_mem_mb"] - gradients(row)
        row["wrong"] = "!" if row["marked"] else ""
    return report.table(shown, **COLUMNS)


def absences(results: Results) -> list[str]:
    """A line for each method that has no row, and why."""
    lines = [f"missing: {x['method']} ({x['reason']})" for x in results.missing]
    lines += [f"failed: {x['method']} at {report.size(x['shape'])} ({x['reason']})" for x in results.failed]
    return list(dict.fromkeys(lines))


def main() -> None:
    # PyTorch needs memory besides JAX's pool, and after it XLA's full logits need much in one piece.
    jax.config.update("jax_pjrt_client_create_options", {"preallocate": False, "memory_fraction": 0.95})
    asked = arguments()
    if asked.precision:
        set_precision(asked.precision)
    results = Results([], [], [])
    for results in run(asked):  # what there is is kept, whatever becomes of the rest
        report.write(asked.out, precision=asked.precision, **results._asdict())
    plot.draw(results.rows, jax.devices()[0].device_kind, asked.out.with_suffix(".png"))
    print("", *absences(results), f"wrote {asked.out.with_suffix('.json')}", sep="\n")


def set_precision(precision: Any) -> None:
    jax.config.update("jax_default_matmul_precision", precision)
    try:
        import torch
    except ImportError:
        return
    torch.set_float32_matmul_precision(precision)


if __name__ == "__main__":
    main()
