"""What the trainings show: how far each is from the reference of its seed, and how far references are apart."""

from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display

from bench import report
from bench.report import Row
from bench.training.jobs import REFERENCE, REFERENCES, Job

LEAST = 1e-7  # nats: where the logarithmic axis of differences begins


def job_of(row: Row) -> Job:
    return Job(row["kind"], row["loss"], row["seed"], row["variant"], row["package"])


def reference_of(row: Row, rows: list[Row]) -> Row | None:
    """The training with float32 logits of the same package and seed."""
    for other in rows:
        same = (other["package"], other["seed"], other["variant"]) == (row["package"], row["seed"], "")
        if same and other["loss"] == REFERENCES[row["package"]]:
            return other
    return None


def distance(row: Row, other: Row, folder: Path) -> float:
    """Between the final weights of two trainings, relative to how far the second one moved its weights."""
    return _distance(job_of(row).file, job_of(other).file, folder)


@cache
def _distance(name: str, other: str, folder: Path) -> float:
    end, other_end, start = (np.load(folder / f"{x}.npy") for x in (name, other, f"{other}-start"))
    apart, moved = (np.subtract(x, other_end, dtype=np.float64) for x in (end, start))
    return float(np.linalg.norm(apart) / np.linalg.norm(moved))


def last(row: Row) -> float:
    return list(row["validation"].values())[-1]


def compare(rows: list[Row], folder: Path) -> None:
    """Adds to each training what separates it from its reference: the key "from_reference"."""
    for row in rows:
        reference = reference_of(row, rows)
        if reference is None or reference is row:
            continue
        difference = np.abs(np.subtract(row["curve"], reference["curve"]))
        row["from_reference"] = {
            "validation_difference": last(row) - last(reference),
            "largest_curve_difference": float(difference.max()),
            "distance_of_weights": distance(row, reference, folder),
        }


def spread(rows: list[Row], folder: Path) -> Row | None:
    """How far the references of different seeds are apart."""
    references = [row for row in rows if row["loss"] == REFERENCE and not row["variant"]]
    if len(references) < 2:
        return None
    curves, validations = np.array([row["curve"] for row in references]), [last(row) for row in references]
    return {
        "seeds": len(references),
        "validation": max(validations) - min(validations),
        "largest_curve_difference": float(np.ptp(curves, axis=0).max()),
        "distance_of_weights": distance(references[1], references[0], folder),
    }


def table(rows: list[Row]) -> str:
    """Δ: the largest difference of the curves; weights: the distance of the final ones; both from the reference's."""
    shown = []
    for row in rows:
        apart = row.get("from_reference", {})
        found = {"training": row["label"], "validation": last(row), "- reference": apart.get("validation_difference")}
        found |= {"Δ": apart.get("largest_curve_difference"), "weights": apart.get("distance_of_weights")}
        shown.append(found | {"tokens/s": row["tokens_per_second"], "GiB": row["peak_gib"]})
    columns = {"training": "", "validation": ".5f", "- reference": ".5f", "Δ": ".5f", "weights": ".4f"}
    return report.table(shown, **columns, **{"tokens/s": ",.0f", "GiB": ".2f"})


def plot(rows: list[Row], steps: int, out: Path) -> None:
    """Curves; their differences from the reference of the same seed, and the spread of seeds; weights."""
    # In a picture 400 pixels wide, letters of 9 points have the height of 10 pixels.
    figure = Figure(figsize=(5, 8.5), layout="constrained", dpi=170)
    # Two parts, each with the margin that its own names need.
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[7, 3.2])[:, 0]
    curves, differences = above.subplots(2, 1, height_ratios=[3, 4])
    weights = below.subplots()
    names = list(dict.fromkeys(row["loss"] for row in rows))
    color = {name: f"C{i}" for i, name in enumerate(names)}
    labelled: set[str] = set()
    points = len(rows[0]["curve"])
    at = (np.arange(points) + 0.5) * steps / points
    for row in rows:
        name, reference = " ".join([row["loss"], row["variant"]]).strip(), reference_of(row, rows)
        is_first = name not in labelled
        labelled.add(name)
        width, alpha = (5, 0.3) if reference is row else (1, 1)
        label = name if is_first and not row["variant"] else None
        curves.plot(at, row["curve"], color=color[row["loss"]], label=label, linewidth=width, alpha=alpha)
        if reference is not None and reference is not row:
            style = {"": "-", "nudged": "--", "repeated": ":"}[row["variant"]]
            difference = np.maximum(np.abs(np.subtract(row["curve"], reference["curve"])), LEAST)
            label = name if is_first else None
            differences.plot(at, difference, style, color=color[row["loss"]], label=label, linewidth=1)
    references = np.array([row["curve"] for row in rows if row["loss"] == REFERENCE and not row["variant"]])
    if len(references) > 1:
        seeds = np.maximum(np.ptp(references, axis=0), LEAST)
        differences.fill_between(at, LEAST, seeds, color="0.88", label="spread of the seeds of float32 logits")
    differences.set_yscale("log")
    differences.set_xlabel("step", fontsize=9)
    titles = "training loss, mean of 10 steps, nats per token", "difference from float32 logits of the same seed, nats"
    titles += ("distance of the final weights from those of\nfloat32 logits, over how far these moved",)
    for axes, title in zip((curves, differences, weights), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=9)
        axes.tick_params(labelsize=8.5)
    handles = dict(zip(*reversed(curves.get_legend_handles_labels()), strict=True))
    handles |= dict(zip(*reversed(differences.get_legend_handles_labels()), strict=True))
    above.legend(handles.values(), handles.keys(), loc="outside upper center", fontsize=8.5, ncols=2, frameon=False)
    compared = [row for row in rows if "from_reference" in row][::-1]
    lengths = [row["from_reference"]["distance_of_weights"] for row in compared]
    bars = weights.barh([row["label"] for row in compared], lengths, color=[color[row["loss"]] for row in compared])
    weights.bar_label(bars, fmt="%.2f", padding=3, fontsize=8.5)
    weights.margins(x=0.16)
    figure.savefig(out)
