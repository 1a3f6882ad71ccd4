"""Timing of single calls in two regimes, because a GPU at its power limit is another machine than a cool one."""

import time

import numpy as np

from bench.calls import Call

WARM = 4  # calls of a burst that are not counted
LEAST, PATIENCE = 3, 1.5  # a slow call gets this many samples, and no more once it has taken so many seconds
REGIMES = {
    "steady": f"a method's calls back to back, the first {WARM} of a burst not counted",
    "spaced": "a method's calls with 30 ms idle before each: the GPU at its highest clock",
}


def milliseconds(call: Call) -> float:
    """Wall time of one call, from launch until its results are there; what prepares it is not counted."""
    arguments = call.prepare()
    call.wait(arguments)
    start = time.perf_counter()
    call.wait(call.run(*arguments))
    return (time.perf_counter() - start) * 1e3


def _samples(call: Call, count: int, pause: float) -> list[float]:
    samples, start = [], time.perf_counter()
    while len(samples) < count and (len(samples) < LEAST or time.perf_counter() - start < PATIENCE):
        time.sleep(pause)
        samples.append(milliseconds(call))
    return samples


def steady(call: Call, rounds: int) -> float:
    """Median milliseconds of the call among others of its own kind, as in a loop that does nothing else."""
    _samples(call, WARM, 0)
    return float(np.median(_samples(call, rounds, 0)))


def spaced(call: Call, rounds: int) -> float:
    """Median milliseconds of the call on a cool GPU."""
    return float(np.median(_samples(call, rounds, 0.03)))


def times(call: Call, rounds: int) -> dict[str, float]:
    """Medians by regime, in milliseconds."""
    return {"steady": steady(call, rounds), "spaced": spaced(call, rounds)}
