"""The picture of time against memory: `python -m bench.plot bench.json … --out bench.png` draws what runs have written.

Where several files have the same method at the same shape, the first of these files counts.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.report import Row, size
from bench.run import gradients

# Of each package, what its methods' names begin with: its color, and what a point's label says of its settings.
PACKAGES = {
    "cce_jax": ("#00798c", "memory_budget"),
    "cce_torch": ("#d1495b", "the same"),
    "Liger": ("#e09f3e", "chunk_mem_const, 1 by default"),
    "quack": ("#6a4c93", "tokens in a chunk, 4096 by default"),
    "torch.compile": ("#2b2d42", "full logits"),
    "gist": ("#8d99ae", "chunks of tokens, torch.compile"),
    "cut_cross_entropy": ("#588157", ""),
    "tokamax": ("#a98467", ""),
    "full": ("#6c757d", "logits"),
}
DEFAULTS = {"cce_jax": "default", "Liger": "1", "quack": "4096"}
LEAST = 1.0  # MiB, where a method holds less
ALIKE = 1.01  # of two points whose memory differs by a smaller factor, the line has the faster one alone
TICKS = [round(factor * 10.0**power, 9) for power in range(-3, 5) for factor in (1, 1.5, 2, 3, 4, 5, 6, 7, 8)]
Point = tuple[float, float]


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each set of inputs. Without rows that know their memory there is no picture, nor an old one left."""
    path.unlink(missing_ok=True)
    panels: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["op_mem_mb"]:
            panels.setdefault((size(row["shape"]), row["test_data"]), {}).setdefault(row["method"], row)
    if not panels:
        return
    # One below the other, so that a page as narrow as a column of text shows letters of its own size.
    figure = Figure(figsize=(9, 4.3 * len(panels)), layout="constrained", dpi=150)
    for axes, ((shape, data), found) in zip(np.ravel(figure.subplots(len(panels))), panels.items(), strict=True):
        _panel(axes, list(found.values()))
        axes.set_title(f"tokens × width × vocabulary: {shape}" + f", {data} data" * (data != "trained"), loc="left")
    figure.savefig(path)


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    places = points(rows)
    for package, (color, settings) in PACKAGES.items():
        of = {row["method"]: row for row in rows if row["method"].startswith(package)}
        if not of:
            continue
        ours = package.startswith("cce")
        label = f"{package} ({settings})" if settings else package
        line = front([places[x] for x in of])
        style: dict[str, Any] = {"color": color, "marker": "o"}
        axes.plot(*zip(*line, strict=True), **style, linewidth=2.4 if ours else 1.2, alpha=0.6, label=label, zorder=2)
        for name, row in of.items():
            axes.plot(*places[name], **style, markerfacecolor="white" if row["marked"] else color, zorder=4)
            setting = name.removeprefix(package).strip() or DEFAULTS.get(package, "")
            at, side = ((0, -11 if ours else 5), "center") if places[name] in line else ((6, -3), "left")
            text: dict[str, Any] = {"fontsize": 8, "color": color, "weight": "bold" if ours else None, "ha": side}
            axes.annotate(setting, places[name], at, textcoords="offset points", **text)
    floor = rows[0]["floor_ms"]
    axes.axhline(floor, color="#2b2d42", linewidth=1.2, linestyle=(0, (4, 3)), label="three matrix products alone")
    held, times = (np.array(numbers) for numbers in zip(*places.values(), strict=True))
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(held.min() / 1.5, held.max() * 1.5),
        ylim=(0.85 * min(floor, times.min()), 1.1 * times.max()),
        xlabel="peak memory besides inputs and gradients, MiB",
        ylabel="time of loss and gradients, ms",
    )
    low, high = axes.get_ylim()
    axes.set_yticks(shown := [y for y in TICKS if low <= y <= high], labels=[f"{y:g}" for y in shown])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#edf2f4", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    hollow = "hollow: an error beyond rounding's" if any(row["marked"] for row in rows) else None
    axes.legend(fontsize=8, frameon=False, title=hollow, title_fontsize=8)


def points(rows: Sequence[Row]) -> dict[str, Point]:
    """MiB besides the gradients and milliseconds of each method."""
    return {row["method"]: (max(row["op_mem_mb"] - gradients(row), LEAST), row["runtime_ms"]) for row in rows}


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other of these beats in both memory and time, by memory."""
    best, kept = np.inf, []
    for held, time in sorted(points):
        if time < best:
            if kept and held < ALIKE * kept[-1][0]:
                kept.pop()
            kept.append((held, time))
            best = time
    return kept


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.plot", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--first", action="store_true", help="the first shape alone, as in the README")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = [row for path in asked.results for row in json.loads(path.read_text())["rows"]]
    draw([row for row in rows if not asked.first or row["shape"] == rows[0]["shape"]], asked.out)


if __name__ == "__main__":
    main()
