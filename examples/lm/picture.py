"""Pictures of trainings."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display


def of_training(records: list[dict], title: str, out: Path) -> None:
    """The losses over the steps. records: rows with "step", and "loss" or "validation"."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, style in {"loss": "-", "validation": "o-"}.items():
        rows = [row for row in records if key in row]
        axes.plot([row["step"] for row in rows], [row[key] for row in rows], style, markersize=4, label=key)
    axes.set(xlabel="step", ylabel="nats per token", title=title)
    axes.legend()
    figure.savefig(out, dpi=150)


def of_comparison(curves: dict[str, np.ndarray], reference: np.ndarray, label: str, out: Path) -> None:
    """Curves over that of a reference, and their differences from it."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(reference, color="tab:blue", linewidth=6, alpha=0.4, label=label)
    for (name, curve), color, style in zip(curves.items(), ("black", "tab:orange", "tab:green"), "-:-", strict=False):
        losses.plot(curve, color=color, linestyle=style, label=name)
        differences.plot(curve - reference, color=color, linewidth=1)
    losses.set(ylabel="loss (nats per token)", title=f"The same training with linear cross-entropy and {label}")
    losses.legend()
    differences.set(xlabel="step", ylabel="difference (nats)")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
