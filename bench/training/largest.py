"""The largest batch of a training step that fits into so much memory."""

import time
from dataclasses import replace

import numpy as np

from bench.fitting import searched
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

    fitting = searched(fits, tried, limit_gib, most, FIRST, FINEST)
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
