"""Time the loss and its gradients on several GPUs: `python -m bench.devices`. Writes OUT.json and a picture, OUT.png.

See bench/devices/layouts.py for the layouts, and for the bare time to which times are related. cce_jax runs in one
process, cce_torch in one process a GPU, beside torch's loss_parallel and, where the installed cut_cross_entropy has it,
its vocabulary parallelism.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.data import SHAPES
from bench.devices.layouts import LAYOUTS, collectives

MATMULS = ("z", "de", "dc")
SHOWN = {"default": "default", "2NV in all": "memory of the logits"}  # the budgets' names in the picture
TITLES = {"tokens": "tokens split", "vocabulary": "vocabulary split", "fsdp": "tokens split, classifier stored split"}
COLORS = {
    "cce_jax, default": "tab:blue", "cce_torch, default": "tab:red", "cce_jax, memory of the logits": "tab:cyan",
    "cce_torch, memory of the logits": "tab:orange", "matmuls and collectives alone, cce_jax": "tab:cyan",
    "matmuls and collectives alone, cce_torch": "tab:orange", "loss_parallel of torch": "tab:gray",
    "cut_cross_entropy": "tab:olive", "cut_cross_entropy, exact": "tab:green",
}  # fmt: skip


def rows_of(processes: list[subprocess.Popen], seconds: float) -> list[dict[str, Any]]:
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


def started(package: str, gpus: int, shape: str, flags: list[str]) -> list[subprocess.Popen]:
    """One process with all GPUs for JAX; for PyTorch one process a GPU, to which its own GPU is the only one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(1 if package == "jax" else gpus):
        visible = ",".join(map(str, range(gpus))) if package == "jax" else str(rank)
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": visible, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "RANK": str(rank),
            "WORLD_SIZE": str(gpus), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-m", f"bench.devices.in_{package}", shape, *flags]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env=environment, stdout=out, text=True))
    return processes


def related(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of methods, each with the bare time of its package and layout and its ratio to it."""
    of: dict[tuple, dict[str, Any]] = {}
    found = []
    for row in rows:
        key = row["package"], row["layout"]
        if row["method"] == "bare":
            of[key] = row
            continue
        parts = of[key]
        least = sum(parts[x] for x in MATMULS) + sum(parts[x] for x in collectives(row["layout"], row["gpus"]))
        found.append({**row, "bare_ms": least, "ratio": row["ms"] / least})
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds against GPUs at the first shape: a panel for each layout. On one GPU all layouts are the same."""
    from matplotlib.figure import Figure  # without pyplot it draws with the Agg backend, which needs no display

    shape = rows[0]["shape"]
    rows = [row for row in rows if row["shape"] == shape]
    layouts = [x for x in LAYOUTS if any(row["layout"] == x for row in rows)]
    counts = sorted({row["gpus"] for row in rows})
    figure = Figure(figsize=(3.2 * len(layouts) + 2.4, 3), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(layouts), sharey=True, squeeze=False)[0]
    for panel, layout in zip(panels, layouts, strict=True):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["layout"] == (layout if row["gpus"] > 1 else "tokens"):
                method = SHOWN.get(row["method"])
                label = f"{row['package']}, {method}" if method else row["method"]
                lines.setdefault(label, {})[row["gpus"]] = row["ms"]
                lines.setdefault(f"matmuls and collectives alone, {row['package']}", {})[row["gpus"]] = row["bare_ms"]
        for label in sorted(lines):
            style = {"linestyle": ":"} if "alone" in label else {"marker": "o"}
            panel.plot(*zip(*sorted(lines[label].items()), strict=True), label=label, color=COLORS[label], **style)
        panel.set_title(TITLES[layout], fontsize=10)
        panel.set_xlabel("GPUs")
        panel.set_xticks(counts)
        panel.set_xlim(counts[0] - 0.3, counts[-1] + 0.3)
        panel.set_ylim(0)
    panels[0].set_ylabel("loss and gradients, ms")
    named = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside right center", fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.devices", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shape", nargs="+", default=["gemma2-2b", "llama3-8b"], help="NxDxV, or a name of bench.data")
    parser.add_argument("--package", nargs="+", choices=("jax", "torch"), default=["jax", "torch"])
    parser.add_argument("--seconds", type=float, default=200, help="of each package, shape and number of GPUs, at most")
    parser.add_argument("--profile", action="store_true", help="also the device time of each kernel of cce_torch")
    parser.add_argument("--more", action="store_true", help="keep the rows of OUT.json, if they are of the same code")
    parser.add_argument("--out", type=Path, default=Path("out/devices"))
    asked = parser.parse_args()
    flags = ["--profile"] * asked.profile
    from bench.report import environment

    kept: dict[str, Any] = {**environment(), "rows": [], "bare": []}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    if asked.more:
        before = json.loads(asked.out.with_suffix(".json").read_text())
        if before["git_tree"] != kept["git_tree"]:
            parser.error(f"{asked.out}.json is of the tree {before['git_tree']}, not of {kept['git_tree']}")
        kept |= {key: before[key] for key in ("rows", "bare")}
    for name in asked.shape:
        shape = "x".join(map(str, SHAPES[name])) if name in SHAPES else name
        for gpus in asked.gpus:
            for package in asked.package:
                found = rows_of(started(package, gpus, shape, flags), asked.seconds)
                kept["bare"] += [row for row in found if row["method"] == "bare"]
                for row in related(found):
                    kept["rows"].append(row)
                    print("{package:10} {gpus} GPUs {layout:11} {method:24} {ms:8.2f} ms  {ratio:.3f} of the bare time"
                          "  {held_mb:8.0f} MiB  loss {loss:.6f}".format(**row), flush=True)  # fmt: skip
                asked.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
    if kept["rows"]:
        plot(kept["rows"], asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
