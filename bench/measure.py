"""Timing that compares: every call in turn, round after round, so that clocks and heat treat all alike."""

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from bench.methods import Compiled


def milliseconds(call: Compiled) -> float:
    """Wall time of one call, from launch until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call.run(*call.arguments))
    return (time.perf_counter() - start) * 1e3


def medians(
    calls: Mapping[str, Compiled], *, rounds: int, pause: float, tick: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median milliseconds of each call over the rounds, after one round to warm up.

    pause: idle seconds before each call. At 0 the GPU soon runs at its power limit, as it does in training; with a
    pause of a few calls' length it runs at its highest clock.
    """
    times = {name: [] for name in calls}
    for counted in [False] + [True] * rounds:
        for name, call in calls.items():
            time.sleep(pause)
            elapsed = milliseconds(call)
            tick()
            if counted:
                times[name].append(elapsed)
    return {name: float(np.median(samples)) for name, samples in times.items()}
