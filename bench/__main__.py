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
from bench.data import DATA, HEADS, QUICK, SHAPES, SWEEPS, Inputs, Shape, hidden
from bench.methods import METHODS
from bench.run import Results, measure

QUICK_SECONDS = 35.0  # for --quick to begin a method in; imports, the last method and the picture take their time too


def parse_shape(text: str) -> Shape:
    if text in SHAPES:
        return SHAPES[text]
    tokens, width, vocabulary = (int(n) for n in text.split("x"))
    return Shape(tokens, width, vocabulary)


class Job(NamedTuple):
    data: str
    shape: Shape | None  # None: that of the saved hidden states
    sweep: str | None
    methods: Sequence[str]


def jobs(asked: argparse.Namespace) -> list[Job]:
    if asked.sweep:
        names = asked.method or methods.SWEPT
        return [Job(asked.data[0], shape, letter, names) for letter in asked.sweep for shape in SWEEPS[letter]]
    few = {SHAPES[name] for name in SHAPES if name not in HEADS}
    found = []
    for shape in [QUICK] if asked.quick else asked.shape:
        default = methods.QUICK if asked.quick else methods.CLOSEST if shape in few else methods.ALL
        found += [Job(data, shape, None, asked.method or default) for data in asked.data if data != "hidden"]
    return found + [Job("hidden", None, None, asked.method or methods.ALL) for data in asked.data if data == "hidden"]


def inputs(job: Job, asked: argparse.Namespace) -> Inputs:
    dtype = jnp.dtype(asked.dtype)
    return DATA[job.data](job.shape, dtype) if job.shape else hidden(asked.hidden, dtype)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    parser.add_argument(
        "--shape", type=parse_shape, nargs="+", default=list(SHAPES.values()),
        help=f"NxDxV (tokens, width, vocabulary) or one of {', '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument("--sweep", choices=SWEEPS, nargs="+", help="grow N, V or D, one at a time, in place of --shape")
    parser.add_argument("--data", choices=[*DATA, "hidden"], nargs="+", default=["trained"])
    parser.add_argument("--hidden", type=Path, help="for --data hidden: what examples/train_lm.py --save-hidden wrote")
    parser.add_argument("--method", choices=METHODS, nargs="+", metavar="METHOD", help=f"of: {', '.join(METHODS)}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument(
        "--precision", choices=["high", "highest"],
        help="of float32 matmuls in both frameworks: TF32 or all of float32 (default: each framework's own)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each method (%(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no method is begun after so many at a shape")
    parser.add_argument("--quick", action="store_true", help="one small shape, on any machine, in a minute")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="written: OUT.json and OUT.png")
    asked = parser.parse_args()
    asked.seconds = min(asked.seconds, QUICK_SECONDS) if asked.quick else asked.seconds
    if "hidden" in asked.data and asked.hidden is None:
        parser.error("--data hidden needs --hidden FILE")
    return asked


def run(asked: argparse.Namespace, console: Console) -> Iterator[Results]:
    """The results so far, after each method."""
    rows, missing, failed = [], [], []
    with Progress(console=console, disable=not sys.stdout.isatty()) as progress:
        todo = jobs(asked)
        task = progress.add_task("", total=sum(2 + len(job.methods) for job in todo))

        def tick(what: str) -> None:
            progress.update(task, advance=1, description=what)

        for job in todo:
            found, until = Results([], [], []), time.monotonic() + asked.seconds
            for found in measure(inputs(job, asked), job.data, job.methods, asked.rounds, tick, until):
                for row in found.rows:
                    row["sweep"] = job.sweep
                yield Results(rows + found.rows, missing + found.missing, failed + found.failed)
            rows += found.rows
            missing += [x for x in found.missing if x not in missing]
            failed += found.failed
            if found.rows:
                progress.console.print(report.table(found.rows))


def main() -> None:
    # PyTorch needs memory beside JAX's pool, and after it XLA's full logits need much in one piece.
    jax.config.update("jax_pjrt_client_create_options", {"preallocate": False, "memory_fraction": 0.95})
    asked = arguments()
    if asked.precision:
        set_precision(asked.precision)
    console = Console(width=None if sys.stdout.isatty() else 170)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    results, written = None, [asked.out.with_suffix(x) for x in (".json", ".png")]
    for results in run(asked, console):
        report.write(asked.out, results)  # each time: what is measured is kept, whatever becomes of the rest
    if results:
        plot.draw(results.rows, written[-1])
    for line in report.absences(results) if results else ():
        console.print(line, style="yellow", markup=False)
    console.print(f"wrote {', '.join(str(path) for path in written if path.exists())}")


def set_precision(precision: Any) -> None:
    jax.config.update("jax_default_matmul_precision", precision)
    try:
        import torch
    except ImportError:
        return
    torch.set_float32_matmul_precision(precision)


if __name__ == "__main__":
    main()
