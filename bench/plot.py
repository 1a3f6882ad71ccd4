"""The pictures: `python -m bench.plot bench.json … --out bench.png` draws them again from what runs have written.

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

from bench.labels import place
from bench.losses_jax import SIZES
from bench.report import gradients

Row = dict[str, Any]
OURS = {"cce_torch": "#d1495b", "cce_jax": "#00798c"}
OTHERS, FLOOR, INK = "#6c757d", "#2b2d42", "#2b2d42"
BUDGETS = {  # what memory_budget is called, of a method of ours
    "": "default",
    **{f" {name}": name for name in SIZES},
    " 2NV": "as many bytes as bfloat16 logits",
    " all": 'memory_budget="all"',
}
SETTINGS = {  # of the others that have several, which a line joins
    "Liger": {
        "": "chunk_mem_const=1 (its default)",
        **{f" {x}": f"chunk_mem_const={x}" for x in (4, 16, 64)},
        " 16 float32": "chunk_mem_const=16, sums in float32",
        **{f" {x} CuTe": f"chunk_mem_const={x}, softmax in CuTe" for x in (4, 16)},
        " SM90": "function for Hopper",
    },
    "quack": {"": "chunks of 4096 tokens (its default)", " 1024": "chunks of 1024", " 2048": "chunks of 2048"},
}
NAMES = {  # where a picture and the documentation name a method otherwise than bench.methods does
    "cut_cross_entropy exact": "cut_cross_entropy, no filter",
    "torch.compile": "full logits, torch.compile",
    "gist": "chunks of tokens, torch.compile",
    "tokamax chunked": "tokamax, chunked",
}
LEAST = 1.0  # MiB, where a method holds less
RATIOS = [1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time against memory, a panel for each set of inputs, or for sweeps time against what grows.

    Without rows, or, but for sweeps, any that know their memory, there is no picture, nor an older one left.
    """
    path.unlink(missing_ok=True)
    if rows:
        (_sweeps if any(row.get("sweep") for row in rows) else _frontiers)(rows, path)


def _frontiers(rows: Sequence[Row], path: Path) -> None:
    panels: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["op_mem_mb"] is not None and np.isfinite(row["op_mem_mb"]) and row["op_mem_mb"] > 0:
            panels.setdefault((tuple(row["shape"]), row["test_data"]), {}).setdefault(row["method"], row)
    if not panels:
        return
    # One below the other, so that a page as narrow as a column of text shows letters of its own size.
    figure = Figure(figsize=(9, 4.3 * len(panels)), layout="constrained", dpi=150)
    for axes, ((shape, data), found) in zip(np.ravel(figure.subplots(len(panels))), panels.items(), strict=True):
        _frontier(axes, list(found.values()))
        title = "tokens × width × vocabulary: " + "×".join(map(str, shape))
        title += "" if data == "trained" else f", {data} data"
        axes.set_title(title, fontsize=13, color=INK, loc="left")
        axes.set_xlabel("peak memory besides inputs and gradients, MiB", fontsize=11, color=INK)
        axes.set_ylabel("time of loss and gradients, ms", fontsize=11, color=INK)
    figure.savefig(path)


def _frontier(axes: Axes, rows: Sequence[Row]) -> None:
    points = {row["method"]: (max(row["op_mem_mb"] - gradients(row), LEAST), row["runtime_ms"]) for row in rows}
    families = {**dict.fromkeys(OURS, BUDGETS), **SETTINGS}
    lines = {
        name: front([points[name + x] for x in settings if name + x in points]) for name, settings in families.items()
    }
    lines = {name: line for name, line in lines.items() if line}
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), color=_color(name), linewidth=2.2 if name in OURS else 1.2, alpha=0.5,
                  zorder=3 if name in OURS else 1)  # fmt: skip
    for row in rows:
        color, ours = _color(row["method"]), row["method"].startswith("cce_")
        axes.plot(*points[row["method"]], "o", color=color, markersize=9 if ours else 7, zorder=4 if ours else 2,
                  markerfacecolor="white" if row["marked"] else color, markeredgewidth=1.5)  # fmt: skip
    floor = rows[0]["floor_ms"]
    line = axes.axhline(floor, color=FLOOR, linewidth=1.5, linestyle=(0, (4, 3)), zorder=1)
    axes.legend([line], ["three matrix products alone"], loc="upper right", frameon=False, fontsize=11, labelcolor=INK)
    memory, times = (np.array(numbers) for numbers in zip(*points.values(), strict=True))
    axes.set(xscale="log", yscale="log", ylim=(0.8 * min(floor, times.min()), 1.25 * times.max()),
             xlim=(memory.min() / 1.5, memory.max() * 4))  # fmt: skip
    _style(axes, [round(factor * 10.0**power, 9) for power in range(-3, 5) for factor in (1, 1.5, 2, 3, 5, 7)])
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if any(row["marked"] for row in rows):
        axes.annotate("hollow: gradient error beyond rounding's", (0.01, 0.01), xycoords="axes fraction", fontsize=10,
                      color=INK)  # fmt: skip
    labels = {name: label(name) for name in sorted(points, key=lambda name: (not name.startswith("cce_"), name))}
    first, *others = [name for name in OURS if name in labels] or [""]
    for budget in list(BUDGETS)[1:]:  # both run the same kernels: their budgets lie on each other, and one label does
        for name in others:
            labels.pop(name + budget, None)
        if first + budget in labels:
            labels[first + budget] = BUDGETS[budget]
    place(axes, points, labels, _color, list(lines.values()))


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other of these beats in both memory and time, by memory."""
    best, kept = np.inf, []
    for memory, time in sorted(points):
        if time < best:
            kept.append((memory, time))
            best = time
    return kept


def label(method: str) -> str:
    """The method's name in a picture, as the documentation writes it."""
    for name, settings in {**dict.fromkeys(OURS, BUDGETS), **SETTINGS}.items():
        if method.startswith(name) and method.removeprefix(name) in settings:
            return f"{name}, {settings[method.removeprefix(name)]}"
    return NAMES.get(method, method)


def _color(name: str) -> str:
    return next((color for ours, color in OURS.items() if name.startswith(ours)), OTHERS)


def _style(axes: Axes, ticks: Sequence[float]) -> None:
    axes.yaxis.set_major_locator(LogLocator(10, subs=()))
    low, high = axes.get_ylim()
    axes.set_yticks([y for y in ticks if low <= y <= high], labels=[f"{y:g}" for y in ticks if low <= y <= high])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_tick_params(which="minor", length=0)
    axes.grid(color="#edf2f4", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=11)


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
            axes.plot(list(curve), list(curve.values()), marker="o", label=label(name), linewidth=2.4 if own else 1.4,
                      color=own or str(next(greys)), linestyle="--" if own and " " in name else "-")  # fmt: skip
        axes.axhline(1, color=FLOOR, linewidth=1.5, linestyle=(0, (4, 3)))
        axes.set(xscale="log", yscale="log", xlabel={"N": "N tokens", "V": "V vocabulary", "D": "D width"}[letter])
        ticks = sorted({x for curve in curves.values() for x in curve})
        axes.set_xticks(ticks, labels=[f"{x // 1024}k" if x >= 1024 else str(x) for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        _style(axes, RATIOS)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle("Loss and both gradients: time / floor as one dimension grows", fontsize=14, color=INK)
    figure.savefig(path)


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
