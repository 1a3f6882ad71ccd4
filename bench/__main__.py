"""Print time, memory and error of each method, and write them as JSON and CSV. See --help."""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import truth as float64
from bench.data import DATA, SHAPES, Shape
from bench.measure import REGIMES, spaced, steady
from bench.methods import FLOOR_OF, METHODS, floor, kinds

QUICK = Shape(512, 64, 8192)


def parse_shape(text: str) -> Shape:
    if text in SHAPES:
        return SHAPES[text]
    tokens, width, vocabulary = (int(n) for n in text.split("x"))
    return Shape(tokens, width, vocabulary)


def environment() -> dict[str, Any]:
    """Where the figures come from. CCE_GIT_TREE names the code where there is no git checkout."""
    tree = os.environ.get("CCE_GIT_TREE")
    if not tree:
        git = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], capture_output=True, text=True)
        tree = git.stdout.strip() or "unknown"
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "git_tree": tree,
        "precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
        "regimes": REGIMES,
    }


def measure(shape: Shape, data: str, dtype: str, names: list[str], rounds: int, progress: Progress) -> list[dict]:
    """One row a method and kind: checked against float64 first, then timed."""
    title = f"{shape.tokens}x{shape.width}x{shape.vocabulary} {dtype} {data}"
    task = progress.add_task(title, total=None)
    e, c, targets = DATA[data](shape, jnp.dtype(dtype))
    exact = float64.mean_loss(e, c, targets)
    rounding = {"de": float64.rounding_error(exact.de, e.dtype), "dc": float64.rounding_error(exact.dc, c.dtype)}
    rows, calls = [], {}
    for name in names:
        compiled = kinds(METHODS[name], e, c, targets)
        loss, (de, dc) = compiled["loss-fw-bw"].run(e, c, targets)
        errors = {
            "loss_error": abs(float(loss) - exact.loss),
            "de_error": float64.relative_error(de, exact.de),
            "dc_error": float64.relative_error(dc, exact.dc),
        }
        del de, dc
        for kind, call in compiled.items():
            calls[f"{name}: {kind}"] = call
            rows.append(
                {"shape": list(shape), "dtype": dtype, "test_data": data, "method": name, "kind": kind,
                 "scratch_mib": call.scratch / 2**20, "op_mem_mb": (call.scratch + call.output) / 2**20,
                 "rounding_de": rounding["de"], "rounding_dc": rounding["dc"], **errors}
            )  # fmt: skip
    matmuls = floor(e, c)
    everything = {**matmuls, **calls}
    progress.update(task, total=len(everything) + rounds)
    for regime, time_all in (("steady", steady), ("spaced", spaced)):
        times = time_all(everything, rounds, lambda: progress.advance(task))
        for row in rows:
            least = sum(times[m] for m in FLOOR_OF[row["kind"]])
            row[f"runtime_ms_{regime}"] = times[f"{row['method']}: {row['kind']}"]
            row[f"floor_ms_{regime}"] = least
            row[f"ratio_{regime}"] = row[f"runtime_ms_{regime}"] / least
    return rows


def table(rows: list[dict]) -> Table:
    first = rows[0]
    printed = Table(
        "method", "kind", "steady ms", "/ floor", "spaced ms", "/ floor ", "op_mem_mb", "scratch", "de err", "dc err",
        title=f"{'x'.join(map(str, first['shape']))} {first['dtype']} {first['test_data']}",
        caption="err: of the gradient against float64, over that of merely rounding the true gradient to its type",
    )  # fmt: skip
    for r in rows:
        printed.add_row(
            r["method"],
            r["kind"],
            *(f"{r[f'{what}_{regime}']:.3f}" for regime in REGIMES for what in ("runtime_ms", "ratio")),
            f"{r['op_mem_mb']:.0f}",
            f"{r['scratch_mib']:.1f}",
            *(f"{r[f'{x}_error'] / r[f'rounding_{x}']:.2f}" for x in ("de", "dc")),
        )
    return printed


def write(out: Path, rows: list[dict]) -> None:
    out.with_suffix(".json").write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")
    pd.DataFrame(rows).to_csv(out.with_suffix(".csv"), index=False)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    parser.add_argument(
        "--shape", type=parse_shape, nargs="+", default=[SHAPES["gemma2-2b"], SHAPES["llama3-8b"]],
        help=f"NxDxV (tokens, width, vocabulary) or one of {', '.join(SHAPES)}",
    )  # fmt: skip
    parser.add_argument("--data", choices=DATA, nargs="+", default=list(DATA))
    parser.add_argument("--method", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--precision", help="jax_default_matmul_precision of everything measured, for float32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one small shape, on any machine, in a minute")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="written: OUT.json and OUT.csv")
    asked = parser.parse_args()
    if asked.precision:
        jax.config.update("jax_default_matmul_precision", asked.precision)
    shapes = [QUICK] if asked.quick else asked.shape
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows = []
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with Progress(console=console, disable=not sys.stdout.isatty()) as progress:
        for shape in shapes:
            for data in asked.data:
                measured = measure(shape, data, asked.dtype, asked.method, asked.rounds, progress)
                progress.console.print(table(measured))
                rows += measured
                write(asked.out, rows)  # each time: what is measured is kept, whatever becomes of the rest
    console.print(f"wrote {asked.out.with_suffix('.json')} and {asked.out.with_suffix('.csv')}")


if __name__ == "__main__":
    main()
