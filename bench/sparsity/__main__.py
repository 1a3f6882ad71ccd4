"""What a backward pass must keep for a bounded error: `python -m bench.sparsity`. Writes OUT.json and OUT.png.

For each tolerance τ a rule (bench/sparsity/rules.py) leaves out blocks of the softmax so that no token loses more than
τ of its mass besides the target. Measured at the heads of `python -m bench`, and on the model of examples/lm at several
stages of its training, under four orders of the vocabulary; and cut_cross_entropy's filter on the same data. Without a
GPU: `python -m bench.sparsity --data example --model small`.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from bench import report
from bench.data import HEADS
from bench.sparsity import inputs, measure

TAUS = (2.0**-3, 2.0**-5, 2.0**-7, 2.0**-9)
EXAMPLE = "example"
ERRORS = ("de", "dc", "dc_rare", "dc_rare_p90", "dc_columns", "dc_columns_rare", "dc_columns_rare_p90")
DRAWN = {"pairs 1x256": ":", "union 16x256": "--", "kernels 16x256": "-"}


def cases(asked: argparse.Namespace) -> Iterator[inputs.Case]:
    model = inputs.MODELS[asked.model]
    for name in asked.data:
        if name == EXAMPLE:
            yield from inputs.of_example(model, asked.stages or model.stages, asked.folder)
        else:
            yield inputs.of_head(name)


def tables(rows: list[report.Row]) -> str:
    """The kept shares in percent, and the errors."""
    lines = [row | {name: 100 * share for name, share in row["kept"].items()} for row in rows]
    key, shares = {"data": "", "ids": "", "tau": ".4f"}, dict.fromkeys(rows[0]["kept"], ".1f")
    return "\n".join((report.table(lines, **key, **shares), report.table(lines, **key, **dict.fromkeys(ERRORS, ".1e"))))


def draw(rows: list[report.Row], path: Path) -> None:
    """Kept share against τ: a panel for each order of ids, a color for each data set."""
    panels = {ids: [x for x in rows if x["ids"] == ids] for ids in dict.fromkeys(x["ids"] for x in rows)}
    names = list(dict.fromkeys(x["data"] for x in rows))
    figure = Figure(figsize=(8, 3 * len(panels)), layout="constrained", dpi=100)
    all_axes = np.ravel(figure.subplots(len(panels), sharex=True))
    for axes, (ids, of) in zip(all_axes, panels.items(), strict=True):
        for number, name in enumerate(names):
            for drawn, style in DRAWN.items():
                found = [x for x in of if x["data"] == name]
                tau, kept = [x["tau"] for x in found], [100 * x["kept"][drawn] for x in found]
                axes.plot(tau, kept, style, color=f"C{number}", marker=".", label=f"{name}: {drawn}")
        axes.set(ylabel="kept, %", ylim=(0, 105))
        axes.set_xscale("log", base=2)
        axes.set_title(f"ids: {ids}", loc="left")
        axes.grid(color="#edf2f4")
    all_axes[0].legend(fontsize=7, frameon=False)
    all_axes[-1].set_xlabel("τ: the share of a token's mass besides the target that may be left out")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.sparsity", description=__doc__)
    parser.add_argument("--data", nargs="+", default=[*HEADS, EXAMPLE], help=f"heads, NxDxV, or {EXAMPLE!r}")
    parser.add_argument("--model", choices=inputs.MODELS, default="large", help=f"of {EXAMPLE!r} (%(default)s)")
    parser.add_argument("--stages", type=int, nargs="+", metavar="STEP", help="of its training; the last one ends it")
    parser.add_argument("--ids", nargs="+", choices=inputs.ORDERS, default=inputs.ORDERS)
    parser.add_argument("--tau", type=float, nargs="+", default=TAUS)
    parser.add_argument("--no-filter", dest="filter", action="store_false", help="without cut_cross_entropy")
    parser.add_argument("--rounds", type=int, default=6, help="of timing cut_cross_entropy")
    folder = Path(tempfile.gettempdir()) / "cce-training"
    parser.add_argument("--folder", type=Path, default=folder, help="for the text (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/sparsity"))
    asked = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the GPU
    rows: list[report.Row] = []
    of_filter: list[report.Row] = []
    for case in cases(asked):
        since, key, of_case = time.perf_counter(), {"data": case.name}, []
        for ids, order in inputs.orders(case, measure.CHUNK).items():
            if ids in asked.ids:
                given = inputs.ordered(case.given, order)
                of_case += [{**key, "ids": ids, **measure.of_case(given, tau)} for tau in asked.tau]
        rows += of_case
        if asked.filter:
            of_filter.append(key | measure.by_filter(case.given))
            try:
                if jax.default_backend() == "gpu":
                    of_filter += [key | x for x in measure.of_filter(case.given, asked.rounds)]
            except Exception as error:  # another package's: it costs its own row alone
                of_filter.append({**key, "failed": report.first_line(error)})
        report.write(asked.out, rows=rows, filter=of_filter)
        print(tables(of_case), f"{case.name}: {time.perf_counter() - since:.0f} s\n", sep="\n", flush=True)
    draw(rows, asked.out.with_suffix(".png"))
    if of_filter:
        numbers = {"kept": ".3f", "runtime_ms": ".1f"} | dict.fromkeys(ERRORS[:4], ".1e")
        print(report.table(of_filter, data="", what="", **numbers, failed=""))


if __name__ == "__main__":
    main()
