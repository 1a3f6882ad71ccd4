"""The chart of the README: `python -m bench.front bench.json --out front.png` draws the first shape of bench.json."""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display

from bench.plot import KIND, OTHERS, OURS, label

METHODS = ("cce_jax", "cce_jax all", "torch.compile", "Liger", "cut_cross_entropy exact")


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.front", description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("front.png"))
    asked = parser.parse_args()
    rows = json.loads(asked.json.read_text())["rows"]
    found = {row["method"]: row for row in rows if row["kind"] == KIND and row["shape"] == rows[0]["shape"]}
    names = [name for name in METHODS if name in found][::-1]
    colors = [OURS["cce_jax"] if name.startswith("cce_") else OTHERS for name in names]
    figure = Figure(figsize=(9, 2.6), layout="constrained", dpi=150)
    for axes, key, scale, title in zip(
        figure.subplots(1, 2, sharey=True), ("runtime_ms", "op_mem_mb"), (1, 1 / 1024),
        ("time of loss and gradients, ms", "memory, GiB: 1.1 are the gradients"), strict=True,
    ):  # fmt: skip
        bars = axes.barh([label(name) for name in names], [found[name][key] * scale for name in names], color=colors)
        axes.bar_label(bars, fmt="%.0f" if scale == 1 else "%.1f", padding=3, fontsize=11)
        axes.set_title(title, fontsize=11, loc="left")
        axes.tick_params(labelsize=11)
        axes.margins(x=0.12)
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    figure.savefig(asked.out)


if __name__ == "__main__":
    main()
