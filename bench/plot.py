"""The pictures: `python -m bench.plot bench.json … --out bench.png` draws them again from what runs have written."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.data import SHAPES
from bench.labels import place

Row = dict[str, Any]
KIND = "loss-fw-bw"
OURS = {"cce_torch": "#d1495b", "cce_jax": "#00798c"}
OTHERS, FLOOR, INK = "#6c757d", "#2b2d42", "#2b2d42"
BUDGETS = ("", " half", " 2NV", " all")  # of a method of ours, in the order of their memory
RATIOS = [1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time against memory, a panel for each set of inputs, or for sweeps time against what grows.

    Without rows of KIND, or, but for sweeps, any that know their memory, there is no picture, nor an older one left.
    """
    path.unlink(missing_ok=True)
    rows = [row for row in rows if row["kind"] == KIND]
    if rows:
        (_sweeps if any(row.get("sweep") for row in rows) else _frontiers)(rows, path)


def _frontiers(rows: Sequence[Row], path: Path) -> None:
    panels: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["op_mem_mb"] is not None and np.isfinite(row["op_mem_mb"]) and row["op_mem_mb"] > 0:
            panels.setdefault((tuple(row["shape"]), row["test_data"]), []).append(row)
    if not panels:
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.8 * columns, 6.2 * lines + 0.5), layout="constrained", dpi=150)
    for axes, ((shape, data), found) in zip(np.ravel(figure.subplots(lines, columns)), panels.items(), strict=False):
        _frontier(axes, found)
        axes.set_title(_title(shape, data), fontsize=12, color=INK, loc="left")
    for unused in np.ravel(np.array(figure.axes))[len(panels) :]:
        unused.set_visible(False)
    figure.suptitle("Loss and both gradients: time and memory beyond the inputs", fontsize=15, color=INK)
    figure.supxlabel("peak memory, results included (MiB)", color=INK)
    figure.supylabel("time / floor", color=INK)
    figure.savefig(path)


def _title(shape: tuple[int, ...], data: str) -> str:
    names = [name for name, known in SHAPES.items() if tuple(known) == shape and "x" not in name]
    return "  ".join([*names, "×".join(map(str, shape)), data])


def _frontier(axes: Axes, rows: Sequence[Row]) -> None:
    points = {row["method"]: (row["op_mem_mb"], row["ratio"]) for row in rows}
    lines = {name: [points[name + budget] for budget in BUDGETS if name + budget in points] for name in OURS}
    lines = {name: line for name, line in lines.items() if line}
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), color=OURS[name], linewidth=2.2, alpha=0.5, zorder=3)
    for row in rows:
        color, ours = _color(row["method"]), row["method"].startswith("cce_")
        axes.plot(*points[row["method"]], "o", color=color, markersize=9 if ours else 7, zorder=4 if ours else 2,
                  markerfacecolor="white" if row["marked"] else color, markeredgewidth=1.5)  # fmt: skip
    axes.axhline(1, color=FLOOR, linewidth=1.5, linestyle=(0, (4, 3)), zorder=1)
    ratios, memory = (np.array([p[i] for p in points.values()]) for i in (1, 0))
    axes.set(xscale="log", yscale="log", ylim=(min(0.88, 0.9 * ratios.min()), 1.25 * ratios.max()),
             xlim=(memory.min() / 2, memory.max() * 2.5))  # fmt: skip
    _style(axes)
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.annotate("floor: three bare matmuls", (0.01, 1), xycoords=("axes fraction", "data"), xytext=(0, -3),
                  textcoords="offset points", ha="left", va="top", fontsize=8, color=FLOOR)  # fmt: skip
    if any(row["marked"] for row in rows):
        axes.annotate("hollow: gradient error beyond rounding's", (0.01, 0.01), xycoords="axes fraction", fontsize=8,
                      color=INK)  # fmt: skip
    labels = {name: _label(name) for name in sorted(points, key=lambda name: (not name.startswith("cce_"), name))}
    first = next((name for name in OURS if name in labels), None)
    for name in OURS:  # both run the same kernels: their budgets lie on each other, and one label does
        for budget in BUDGETS[1:]:
            text = _label(budget).lstrip(", ") if name == first else ""
            labels = {known: text if known == name + budget else label for known, label in labels.items()}
    place(axes, points, {name: label for name, label in labels.items() if label}, _color, list(lines.values()))


def _label(name: str) -> str:
    return name.replace(" half", ", N·V bytes").replace(" 2NV", ", 2·N·V bytes").replace(" all", ", all saved")


def _color(name: str) -> str:
    return next((color for ours, color in OURS.items() if name.startswith(ours)), OTHERS)


def _style(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(10, subs=()))
    low, high = axes.get_ylim()
    axes.set_yticks([r for r in RATIOS if low <= r <= high], labels=[f"{r:g}" for r in RATIOS if low <= r <= high])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_tick_params(which="minor", length=0)
    axes.grid(color="#edf2f4", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


def _sweeps(rows: Sequence[Row], path: Path) -> None:
    letters = list(dict.fromkeys(row["sweep"] for row in rows if row.get("sweep")))
    figure = Figure(figsize=(5.2 * len(letters), 4.8), layout="constrained", dpi=150)
    for axes, letter in zip(np.ravel(figure.subplots(1, len(letters), sharey=True)), letters, strict=True):
        curves: dict[str, dict[int, float]] = {}
        for row in rows:
            if row.get("sweep") == letter:
                curves.setdefault(row["method"], {})[row["shape"]["NDV".index(letter)]] = row["ratio"]
        greys = iter(np.linspace(0.35, 0.75, max(len(curves), 2)))
        for name, curve in curves.items():
            own = next((color for ours, color in OURS.items() if name.startswith(ours)), None)
            axes.plot(list(curve), list(curve.values()), marker="o", label=_label(name), linewidth=2.4 if own else 1.4,
                      color=own or str(next(greys)), linestyle="--" if own and " " in name else "-")  # fmt: skip
        axes.axhline(1, color=FLOOR, linewidth=1.5, linestyle=(0, (4, 3)))
        axes.set(xscale="log", yscale="log", xlabel={"N": "N tokens", "V": "V vocabulary", "D": "D width"}[letter])
        ticks = sorted({x for curve in curves.values() for x in curve})
        axes.set_xticks(ticks, labels=[f"{x // 1024}k" if x >= 1024 else str(x) for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        _style(axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle("Loss and both gradients: time / floor as one dimension grows", fontsize=14, color=INK)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.plot", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    draw([row for path in asked.results for row in json.loads(path.read_text())["rows"]], asked.out)


if __name__ == "__main__":
    main()
