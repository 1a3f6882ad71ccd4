"""The largest batch of a training step that fits into so much memory."""

import time
from dataclasses import replace

import numpy as np

from bench.memory import release
from bench.report import Row
from bench.training.jobs import Job
from bench.training.run import InTorch
from examples.lm.settings import Settings

FIRST = 128  # sequences of the first batch that is tried
FINEST = 8  # sequences to which the result is right
TIMED = 6  # steps


def largest(job: Job, settings: Settings, limit_gib: float, most: int) -> Row:
    """Doubles the batch while it fits, up to `most` sequences, then tries sizes between the last two.

    It fits if the peak of what both frameworks' pools have given out is at most limit_gib.
    """
    random = np.random.default_rng(0)
    training, tried = InTorch(job, replace(settings, batch=FIRST), settings.vocabulary), {}

    def batch(sequences: int) -> np.ndarray:
        return random.integers(0, settings.vocabulary, (1, sequences, settings.context), np.int32)

    def fits(sequences: int) -> bool:
        training.trainer.optimizer.zero_grad()
        release()
        training.memory.restart()
        try:
            for _ in range(2):  # the first step makes the optimizer's state
                training.trainer.step(batch(sequences))
            training.wait()
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            tried[sequences] = None
            return False
        tried[sequences] = training.memory.gib()
        return not (tried[sequences] or 0) > limit_gib

    fitting, not_fitting = 0, FIRST
    while not_fitting <= most and fits(not_fitting):
        fitting, not_fitting = not_fitting, 2 * not_fitting
    while not_fitting <= most and not_fitting - fitting > FINEST:
        middle = _between(fitting, not_fitting, tried, limit_gib)
        fitting, not_fitting = (middle, not_fitting) if fits(middle) else (fitting, middle)
    found: Row = {"limit_gib": limit_gib, "sequences": fitting, "tokens": fitting * settings.context}
    if fitting:
        release()
        training.trainer.step(batch(fitting))
        training.wait()
        since = time.perf_counter()
        for _ in range(TIMED):
            training.trainer.step(batch(fitting))
        training.wait()
        found["tokens_per_second"] = TIMED * found["tokens"] / (time.perf_counter() - since)
    return {**found, "tried_gib": tried}


def _between(fitting: int, not_fitting: int, tried: dict[int, float | None], limit_gib: float) -> int:
    """The size to try next: where the peak reaches the limit if it grows evenly with the batch."""
    low, high = tried.get(fitting), tried[not_fitting]
    guess = (fitting + not_fitting) / 2
    if low and high:
        guess = fitting + (limit_gib - low) / (high - low) * (not_fitting - fitting)
    return min(max(int(guess) // FINEST * FINEST, fitting + FINEST), not_fitting - FINEST)
