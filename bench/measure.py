"""Timing of single calls in two regimes, because a GPU at its power limit is another machine than a cool one."""

import time

import numpy as np

from bench.calls import Call

WARM, HEATING = 4, 0.3  # calls and seconds of a burst that are not counted: short calls heat a GPU no faster
BURST = 4  # calls of one of those that take turns, the first not counted
LEAST, PATIENCE = 3, 1.5  # a slow call gets this many samples, and no more once it has taken so many seconds
REGIMES = {
    "steady": f"a method's calls back to back, those of the first {HEATING} s of a burst, {WARM} at least, not counted",
    "spaced": "a method's calls with 30 ms idle before each: the GPU at its highest clock",
}


def milliseconds(call: Call) -> float:
    """Wall time of one call, from launch until its results are there; what prepares it is not counted."""
    arguments = call.prepare()
    call.wait(arguments)
    start = time.perf_counter()
    call.wait(call.run(*arguments))
    return (time.perf_counter() - start) * 1e3


def _samples(call: Call, count: int, pause: float, seconds: float = 0) -> list[float]:
    """So many, and more until so many seconds have passed."""
    samples, start = [], time.perf_counter()

    def enough() -> bool:
        passed = time.perf_counter() - start
        return passed >= seconds and (len(samples) >= count or (len(samples) >= LEAST and passed >= PATIENCE))

    while not enough():
        time.sleep(pause)
        samples.append(milliseconds(call))
    return samples


def steady(call: Call, rounds: int) -> float:
    """Median milliseconds of the call among others of its own kind, as in a loop that does nothing else."""
    _samples(call, WARM, 0, HEATING)
    return float(np.median(_samples(call, rounds, 0)))


def in_turns(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds of calls that are compared: bursts take turns, so that the GPU is as hot for each of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        _samples(call, WARM, 0, HEATING)
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += _samples(call, BURST, 0)[1:]
    return {name: float(np.median(x)) for name, x in times.items()}


def spaced(call: Call, rounds: int) -> float:
    """Median milliseconds of the call on a cool GPU."""
    return float(np.median(_samples(call, rounds, 0.03)))


def times(call: Call, rounds: int) -> dict[str, float]:
    """Medians by regime, in milliseconds."""
    return {"steady": steady(call, rounds), "spaced": spaced(call, rounds)}
