"""Names beside points, moved until they cover neither each other nor the points, as far as there is room."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

LINE, GAP, MARKER = 12, 7, 5  # points: from one label's line to the next, from point to label, and a point's radius
# Where a label starts, in points from its own, right (1) or left (-1) of it or across (0): near ones first.
PLACES = sorted(
    [(side * (GAP + out), up * LINE, side) for side, out, up in product((1, -1), (0, 15, 40), range(-9, 10))]
    + [(0, up * LINE, 0) for up in (-3, -2, -1, 1, 2, 3)],
    key=lambda at: (at[0] / 2) ** 2 + at[1] ** 2 + 30 * (at[2] == 0),
)
FAR = 15  # points, from which on a line leads from the label to its point


def place(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    labels: Mapping[str, str],
    color: Callable[[str], str],
    lines: Sequence[Sequence[tuple[float, float]]] = (),
) -> None:
    """Write labels, by the name of their point, in their order: the first get the best places. Lines stay free too."""
    figure = axes.figure
    canvas = FigureCanvasAgg(figure)  # type: ignore[arg-type]
    canvas.draw()
    pixels = figure.dpi / 72
    inside, radius = axes.get_window_extent(), MARKER * pixels
    at = {name: axes.transData.transform(point) for name, point in points.items()}
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in at.values()]
    for start, end in (ends for line in lines for ends in pairwise(axes.transData.transform(line))):
        along = [start + part * (end - start) for part in np.linspace(0, 1, 40)]
        taken += [Bbox.from_bounds(x - pixels, y - pixels, 2 * pixels, 2 * pixels) for x, y in along]
    for name, text in labels.items():
        label = axes.annotate(text, points[name], xytext=(0, 0), textcoords="offset points", va="center", fontsize=10.5,
                              color=color(name), weight="bold" if name.startswith("cce_") else None,
                              path_effects=[withStroke(linewidth=2.5, foreground="white")])  # fmt: skip
        size = label.get_window_extent(canvas.get_renderer())

        def box(place: tuple[float, float, int], size: Bbox = size, name: str = name) -> Bbox:
            x, y, side = place
            left = at[name][0] + x * pixels - size.width * (1 - side) / 2
            low = at[name][1] + y * pixels - size.height / 2
            return Bbox.from_bounds(left, low, size.width, size.height)

        def cost(place: tuple[float, float, int], box: Callable = box) -> float:
            there = box(place)
            outside = there.width * there.height - _overlap(there, inside)
            return 4 * outside + sum(_overlap(there, other) for other in taken)

        best = min(PLACES, key=cost)  # the nearest of those that cover least
        label.set(position=best[:2], ha={1: "left", -1: "right", 0: "center"}[best[2]])
        if max(abs(best[0]), abs(best[1])) > FAR:
            leader = {"arrowstyle": "-", "color": color(name), "linewidth": 0.5, "shrinkB": 4}
            axes.annotate("", points[name], xytext=best[:2], textcoords="offset points", zorder=1, arrowprops=leader)
        taken.append(box(best))


def _overlap(a: Bbox, b: Bbox) -> float:
    """Square pixels that both cover."""
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(width, 0) * max(height, 0)
