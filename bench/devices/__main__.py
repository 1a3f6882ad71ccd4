"""Time the loss and its gradients on several GPUs: `python -m bench.devices`. Writes OUT.json and a picture, OUT.png.

See bench/devices/layouts.py for the layouts, and for the bare time to which times are related. cce_jax runs in one
process, cce_torch in one process a GPU, and so does torch's loss_parallel.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display
from matplotlib.lines import Line2D

from bench import report
from bench.data import HEADS, SHAPES, Shape
from bench.devices.layouts import LAYOUTS, MATMULS, collectives

TITLES = {"tokens": "tokens split", "vocabulary": "vocabulary split", "fsdp": "tokens split, classifier stored split"}
COLUMNS = {"package": "", "gpus": "", "layout": "", "method": "", "ms": ".2f", "ratio": ".3f", "held_mb": ".0f"}


def rows_of(processes: list[subprocess.Popen], seconds: float) -> list[report.Row]:
    """The rows that the first process prints. What another one prints is lost, and so is an error of it."""
    try:
        out, _ = processes[0].communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        processes[0].kill()
        out, _ = processes[0].communicate()
    for process in processes[1:]:
        try:
            process.wait(timeout=30 if processes[0].returncode == 0 else 1)
        except subprocess.TimeoutExpired:
            process.kill()
    if processes[0].returncode:
        print(f"{processes[0].args} ended with exit code {processes[0].returncode}")
    return [json.loads(line[4:]) for line in out.splitlines() if line.startswith("row ")]


def started(package: str, gpus: int, shape: Shape) -> list[subprocess.Popen]:
    """One process with all GPUs for JAX; for PyTorch one process a GPU, to which its own GPU is the only one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "WORLD_SIZE": str(gpus)}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(1 if package == "jax" else gpus):
        visible = ",".join(map(str, range(gpus))) if package == "jax" else str(rank)
        environment = os.environ | shared | {"CUDA_VISIBLE_DEVICES": visible, "RANK": str(rank)}
        command = [sys.executable, "-m", f"bench.devices.in_{package}", "x".join(map(str, shape))]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, stdout=out, text=True))
    return processes


def related(rows: list[report.Row]) -> list[report.Row]:
    """The rows of methods, each with the bare time of its layout and its ratio to it."""
    bare = {row["layout"]: row for row in rows if row["method"] == "bare"}
    found = []
    for row in rows:
        if row["method"] != "bare":
            parts = bare[row["layout"]]
            least = sum(parts[x] for x in (*MATMULS, *collectives(row["layout"], row["gpus"])))
            found.append({**row, "bare_ms": least, "ratio": row["ms"] / least})
    return found


def plot(rows: list[report.Row], device: str, path: Path) -> None:
    """Milliseconds against GPUs at the first shape: a panel for each layout. On one GPU all layouts are the same."""
    rows = [row for row in rows if row["shape"] == rows[0]["shape"]]
    layouts = [x for x in LAYOUTS if any(row["layout"] == x for row in rows)]
    figure = Figure(figsize=(5.0, 1.4 + 2.0 * len(layouts)), layout="constrained", dpi=170)
    panels = figure.subplots(len(layouts), 1, sharex=True, squeeze=False)[:, 0]
    drawn: dict[str, Line2D] = {}
    for panel, layout in zip(panels, layouts, strict=True):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["layout"] == (layout if row["gpus"] > 1 else "tokens"):
                lines.setdefault(f"{row['package']}, {row['method']}", {})[row["gpus"]] = row["ms"]
                lines.setdefault(f"{row['package']}, bare", {})[row["gpus"]] = row["bare_ms"]
        for label, line in lines.items():
            color = drawn[label].get_color() if label in drawn else f"C{len(drawn)}"
            style = ":" if "bare" in label else "o-"
            (drawn[label],) = panel.plot(*zip(*sorted(line.items()), strict=True), style, color=color)
        panel.set(xticks=sorted({row["gpus"] for row in rows}), ylim=(0, None))
        panel.set_title(TITLES[layout], loc="left", fontsize=9)
        panel.set_ylabel("ms", fontsize=9)
        panel.tick_params(labelsize=8.5)
    panels[-1].set_xlabel(f"GPUs: {device}; {report.size(rows[0]['shape'])}, bfloat16", fontsize=9)
    how = {"loc": "outside upper center", "fontsize": 8.5, "ncols": 2, "frameon": False}
    figure.legend(drawn.values(), drawn.keys(), title="loss and gradients", title_fontsize=9, **how)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.devices", description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=[SHAPES[x] for x in HEADS[:2]])
    parser.add_argument("--package", nargs="+", choices=("jax", "torch"), default=["jax", "torch"])
    parser.add_argument("--seconds", type=float, default=200, help="of each package, shape and number of GPUs, at most")
    parser.add_argument("--out", type=Path, default=Path("out/devices"))
    asked = parser.parse_args()
    rows: list[report.Row] = []
    bare: list[report.Row] = []
    for shape in asked.shape:
        for gpus, package in ((x, y) for x in asked.gpus for y in asked.package):
            found = rows_of(started(package, gpus, shape), asked.seconds)
            bare += [row for row in found if row["method"] == "bare"]
            rows += related(found)
            report.write(asked.out, rows=rows, bare=bare)
        print(
            f"\n{report.size(shape)}", report.table([x for x in rows if x["shape"] == list(shape)], **COLUMNS), sep="\n"
        )
    if rows:
        plot(rows, report.environment()["device"], asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
