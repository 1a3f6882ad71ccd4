"""The picture of time against memory: `python -m bench.plot bench.json … --out bench.png` draws what runs have written.

Where several files have the same method at the same shape, the first of these files counts.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.report import Row
from bench.run import gradients


class Look(NamedTuple):
    """What the methods of a package are called in the legend, and how they look."""

    label: str
    color: str
    marker: str


# By what the names of a package's methods begin with.
PACKAGES = {
    "cce_jax": Look("cce_jax", "#00798c", "o"),
    "cce_torch": Look("cce_torch", "#d1495b", "o"),
    "Liger": Look("Liger", "#e09f3e", "s"),
    "quack": Look("quack", "#6a4c93", "^"),
    "torch.compile": Look("full logits, torch.compile", "#2b2d42", "D"),
    "PyTorch eager": Look("full logits, PyTorch eager", "#6c757d", "D"),
    "full logits": Look("full logits, XLA", "#adb5bd", "D"),
    "F.linear_cross_entropy": Look("F.linear_cross_entropy", "#bc4749", ">"),
    "gist": Look("recipe of chunks", "#8d99ae", "p"),
    "cut_cross_entropy": Look("cut_cross_entropy", "#588157", "v"),
    "tokamax": Look("tokamax", "#a98467", "<"),
}
WIDTH = 5.0  # inches: in a picture 400 pixels wide, letters of 9 points have the height of 10 pixels
LEAST = 1.0  # MiB, where a method holds less
ALIKE = 1.01  # of two points whose memory differs by a smaller factor, the line has the faster one alone
TICKS = [round(factor * 10.0**power, 9) for power in range(-3, 5) for factor in (1, 1.5, 2, 3, 4, 5, 6, 7, 8)]
Point = tuple[float, float]


def draw(rows: Sequence[Row], device: str, path: Path) -> None:
    """A panel for each set of inputs. Without rows that know their memory there is no picture, nor an old one left."""
    path.unlink(missing_ok=True)
    panels: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["op_mem_mb"]:
            panels.setdefault((*row["shape"], row["dtype"], row["test_data"]), {}).setdefault(row["method"], row)
    if not panels:
        return
    # One below the other, so that a page as narrow as a column of text shows letters of its own size.
    figure = Figure(figsize=(WIDTH, 1.0 + 2.9 * len(panels)), layout="constrained", dpi=170)
    handles: dict[str, Any] = {}
    for axes, (inputs, found) in zip(np.ravel(figure.subplots(len(panels))), panels.items(), strict=True):
        tokens, width, vocabulary, dtype, data = inputs
        title = f"{device}, {dtype}" + f", {data} data" * (data != "trained")
        title += f"\n{tokens:,} tokens, width {width:,}, vocabulary {vocabulary:,}"
        axes.set_title(title, loc="left", fontsize=9)
        _panel(axes, list(found.values()))
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    title = "hollow: an error beyond rounding's" if any(row["marked"] for row in rows) else None
    how = {"fontsize": 8.5, "ncols": 2, "frameon": False, "title": title, "title_fontsize": 8.5}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", **how)
    figure.savefig(path)


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    places = points(rows)
    for package, look in PACKAGES.items():
        of = {row["method"]: row for row in rows if row["method"].startswith(package)}
        if not of:
            continue
        ours = package.startswith("cce")
        style: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 7.5 if ours else 6.5}
        line = front([places[x] for x in of])
        axes.plot(*zip(*line, strict=True), **style, linewidth=2.4 if ours else 1.2, label=look.label, zorder=2 + ours)
        for name, row in of.items():
            filled = "white" if row["marked"] else look.color
            axes.plot(*places[name], **style, markerfacecolor=filled, markeredgecolor="white", zorder=4 + ours)
        if package == "cce_jax":
            _name_settings(axes, {name.removeprefix(package).strip() or "default": places[name] for name in of})
    floor, dark = rows[0]["floor_ms"], "#2b2d42"
    axes.axhline(floor, color=dark, linewidth=1.2, linestyle=(0, (4, 3)), label="three matrix products, by XLA")
    held, times = (np.array(numbers) for numbers in zip(*places.values(), strict=True))
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(held.min() / 1.5, held.max() * 1.7),
        ylim=(0.8 * min(floor, times.min()), 1.1 * times.max()),
    )
    axes.set_xlabel("memory besides inputs and gradients, MiB", fontsize=9)
    axes.set_ylabel("loss and gradients, ms", fontsize=9)
    low, high = axes.get_ylim()
    axes.set_yticks(shown := [y for y in TICKS if low <= y <= high], labels=[f"{y:g}" for y in shown])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8.5)
    axes.grid(color="#e5e9ec", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def _name_settings(axes: Axes, settings: dict[str, Point]) -> None:
    """The memory_budget of the least point, of the default and of "all"; the others lie between them."""
    for name, (across, side) in {"300 MiB": (-4, "right"), "default": (0, "center"), "all": (0, "center")}.items():
        if name in settings:
            label = axes.annotate(name, settings[name], (across, -9), textcoords="offset points", zorder=6)
            label.set(fontsize=8.5, color=PACKAGES["cce_jax"].color, weight="bold", ha=side, va="top")
            label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


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
    parser.add_argument("--package", choices=PACKAGES, nargs="+", default=list(PACKAGES), help="these alone")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = [json.loads(path.read_text()) for path in asked.results]
    rows = [row for of in found for row in of["rows"] if row["method"].startswith(tuple(asked.package))]
    rows = [row for row in rows if not asked.first or row["shape"] == rows[0]["shape"]]
    draw(rows, ", ".join(dict.fromkeys(of["device"] for of in found)), asked.out)


if __name__ == "__main__":
    main()
