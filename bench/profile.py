"""Where the time goes: `python -m bench.profile`, on an NVIDIA GPU.

Device time of each kernel of a forward and backward, and the longest time in it that the GPU idles, from JAX's
profiler, which sees PyTorch's calls too. Prints and writes as JSON. Of a loop in a CUDA graph, such as that of
cce_torch over groups of the vocabulary, the profiler shows one iteration: what it says of the others is idle time.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData
from rich.console import Console
from rich.table import Table

from bench.calls import floor
from bench.data import SHAPES, Inputs, trained
from bench.ignored import call_of, ignoring
from bench.methods import BUDGETS
from bench.report import environment
from cce_kernels.device import local_gpu
from cce_torch import bridge

CALLS = 4
PAUSE = 0.03  # seconds of idling before each call
WARM = 4
IGNORED = (0.0, 0.75)


class Event(NamedTuple):
    """A kernel or a copy on the device; in ns."""

    name: str
    start: float
    end: float


def recorded(call: Callable[[], Any]) -> list[Event]:
    """What the device did in CALLS calls, each of which waits for its results."""
    for _ in range(WARM):
        call()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                time.sleep(PAUSE)
                call()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return list(_events(ProfileData.from_file(str(path))))


def _events(profile) -> Iterator[Event]:
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from (Event(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events)


def idle(events: Sequence[Event]) -> list[float]:
    """Milliseconds for which nothing ran, the shortest first, without the longest: the pauses between calls."""
    gaps, busy_until = [], np.inf
    for event in sorted(events, key=lambda event: event.start):
        if event.start > busy_until:
            gaps.append((event.start - busy_until) / 1e6)
        busy_until = event.end if np.isinf(busy_until) else max(busy_until, event.end)
    return sorted(gaps)[: 1 - CALLS]


def kernels(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Of each kernel, by name without what tells compilations apart: ms and launches a call; the longest first."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        name = re.sub(r"[._]+\d*$", "", event.name)
        of = found.setdefault(name, {"ms": 0.0, "launches": 0.0})
        of["ms"] += (event.end - event.start) / 1e6 / CALLS
        of["launches"] += 1 / CALLS
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def profiled(inputs: Inputs, packages: Sequence[str], budgets: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The bare matmuls, then a call of each package and budget with none and with most of the tokens ignored."""
    e, c, targets = inputs
    for name, matmul in floor(e, c).items():
        yield _row(name, "", 0.0, recorded(matmul))
    for memory in budgets:
        for package in packages:
            for share in IGNORED:
                call = call_of(package, memory, (e, c, ignoring(targets, share, runs=False)))
                yield _row(package, memory or "default", share, recorded(call))


def _row(method: str, budget: str, ignored: float, events: Sequence[Event]) -> dict[str, Any]:
    return {"method": method, "budget": budget, "ignored": ignored, "idle_ms": max(idle(events), default=0.0),
            "kernels": kernels(events)}  # fmt: skip


def table(row: dict[str, Any], least: float = 0.02) -> Table:
    """Kernels that take at least so many ms."""
    what = f"{row['shape']} {row['method']} {row['budget']}, {row['ignored']:.0%} ignored"
    printed = Table("ms", "launches", "kernel", title=f"{what}: idle {row['idle_ms']:.3f} ms")
    for name, of in row["kernels"].items():
        if of["ms"] >= least:
            printed.add_row(f"{of['ms']:.3f}", f"{of['launches']:g}", name[:80])
    return printed


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.profile", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["gemma2-2b", "llama3-8b"])
    parser.add_argument("--package", choices=["cce_jax", "cce_torch"], nargs="+", default=["cce_jax", "cce_torch"])
    parser.add_argument("--budget", choices=BUDGETS, nargs="+", default=["", "2NV", "all"])
    parser.add_argument("--out", type=Path, default=Path("out/profile.json"))
    asked = parser.parse_args()
    bridge.start()  # before JAX's backend, which would leave PyTorch too little memory
    if local_gpu() is None:
        parser.error("there is no GPU to profile")
    console, rows = Console(width=110), []
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for shape in asked.shape:
        for row in profiled(trained(SHAPES[shape]), asked.package, asked.budget):
            rows.append({"shape": shape, **row})
            console.print(table(rows[-1]))
            asked.out.write_text(json.dumps({**environment(), "calls": CALLS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
