"""Where the time goes: `python -m bench.profile`, on an NVIDIA GPU. Prints and writes as JSON.

Device time of each kernel of a forward and backward, and the longest time in it that the GPU idles, from JAX's
profiler, which sees PyTorch's calls too. Of a loop in a CUDA graph the profiler shows one iteration: what it says of
the others is idle time.
"""

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

from bench import report
from bench.calls import floor, step
from bench.data import HEADS, SHAPES, Shape, trained
from bench.methods import METHODS
from cce_kernels.device import local_gpu
from cce_torch.on_jax import jax_devices

CALLS = 4
PAUSE = 0.03  # seconds of idling before each call
WARM = 4
LEAST = 0.02  # ms of a kernel that is printed


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


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.profile", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=[SHAPES[x] for x in HEADS])
    parser.add_argument("--method", choices=METHODS, nargs="+", default=["cce_jax", "cce_jax all", "cce_torch"])
    parser.add_argument("--out", type=Path, default=Path("out/profile.json"))
    asked = parser.parse_args()
    jax_devices.start()  # before JAX's backend, which would leave PyTorch too little memory
    if local_gpu() is None:
        parser.error("there is no GPU to profile")
    rows = []
    for shape in asked.shape:
        inputs = trained(shape)
        calls = {name: step(METHODS[name].framework, METHODS[name].load(), *inputs) for name in asked.method}
        for name, call in (floor(*inputs[:2]) | calls).items():
            events = recorded(call)
            idling, of = max(idle(events), default=0.0), kernels(events)
            rows.append({"shape": list(shape), "method": name, "idle_ms": idling, "kernels": of})
            report.write(asked.out, calls=CALLS, rows=rows)
            shown = [{"kernel": kernel[:80], **x} for kernel, x in of.items() if x["ms"] >= LEAST]
            print(f"\n{report.size(shape)} {name}: idle {idling:.3f} ms")
            print(report.table(shown, ms=".3f", launches="g", kernel=""))


if __name__ == "__main__":
    main()
