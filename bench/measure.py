"""Timing of single calls: on a GPU as hot as it gets in a loop that does nothing else."""

import time

import numpy as np

from bench.calls import Call

WARM, HEATING = 4, 0.3  # calls and seconds of a burst that are not counted: short calls heat a GPU no faster
BURST = 4  # calls of a turn; where the host waits for each of them, the first is not counted
LEAST, PATIENCE = 3, 1.5  # a slow call gets this many samples, and no more once it has taken so many seconds


def milliseconds(call: Call) -> float:
    """Wall time of one call, from launch until its results are there."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _samples(call: Call, count: int, seconds: float = 0) -> list[float]:
    """So many, and more until so many seconds have passed."""
    samples, start = [], time.perf_counter()

    def enough() -> bool:
        passed = time.perf_counter() - start
        return passed >= seconds and (len(samples) >= count or (len(samples) >= LEAST and passed >= PATIENCE))

    while not enough():
        samples.append(milliseconds(call))
    return samples


def steady(call: Call, rounds: int) -> float:
    """Median milliseconds of the call among others of its own kind, as in a loop that does nothing else."""
    _samples(call, WARM, HEATING)
    return float(np.median(_samples(call, rounds)))


def _queued(call: Call) -> float:
    """Milliseconds of a call, of BURST calls that are started one after another. The host waits only for the last."""
    start, result = time.perf_counter(), None
    for _ in range(BURST):
        result = call.run()
    call.wait(result)
    return (time.perf_counter() - start) * 1e3 / BURST


def in_turns(calls: dict[str, Call], rounds: int, queued: bool = False) -> dict[str, float]:
    """Median milliseconds of calls that are compared: bursts take turns, so that the GPU is as hot for each of them.

    queued: whether the host waits only for the last call of a burst; else it waits for each.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        _samples(call, WARM, HEATING)
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += [_queued(call)] if queued else _samples(call, BURST)[1:]
    return {name: float(np.median(x)) for name, x in times.items()}
