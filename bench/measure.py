"""Timing of single calls in two regimes, because a GPU at its power limit is another machine than a cool one."""

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from bench.methods import Compiled

REGIMES = {
    "steady": "each method's calls back to back, the first four of a burst not counted, 0.3 s idle between bursts",
    "spaced": "methods in turn, round after round, 30 ms idle before each call: the GPU at its highest clock",
}
Tick = Callable[[], object]


def milliseconds(call: Compiled) -> float:
    """Wall time of one call, from launch until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call.run(*call.arguments))
    return (time.perf_counter() - start) * 1e3


def steady(calls: Mapping[str, Compiled], rounds: int, tick: Tick) -> dict[str, float]:
    """Median milliseconds of each call among others of its own kind, as in a loop that does nothing else."""
    times = {}
    for name, call in calls.items():
        samples = [milliseconds(call) for _ in range(rounds + 4)]
        times[name] = float(np.median(samples[4:]))
        time.sleep(0.3)
        tick()
    return times


def spaced(calls: Mapping[str, Compiled], rounds: int, tick: Tick) -> dict[str, float]:
    """Median milliseconds of each call, all of them taking turns on a cool GPU."""
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(0.03)
            times[name].append(milliseconds(call))
        tick()
    return {name: float(np.median(samples)) for name, samples in times.items()}
