"""The largest batch that fits into so much memory, of any training in PyTorch."""

from collections.abc import Callable

import jax
import torch


class Memory:
    """The peak of both frameworks' pools since it was made.

    JAX's counter cannot be set back, so that of a process is taken. It counts if anything was allocated there: the
    scratch of our kernels, which the process keeps.
    """

    def __init__(self) -> None:
        self.on_gpu, self.device = torch.cuda.is_available(), jax.devices()[0]
        self.restart()

    def restart(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.allocations = self.device.memory_stats()["num_allocs"]

    def gib(self) -> float | None:
        """None on a CPU."""
        if not self.on_gpu:
            return None
        stats = self.device.memory_stats()
        in_jax = stats["peak_bytes_in_use"] if stats["num_allocs"] > self.allocations else 0
        return (torch.cuda.max_memory_allocated() + in_jax) / 2**30


def searched(
    fits: Callable[[int], bool], tried: dict[int, float | None], limit_gib: float, most: int, first: int, finest: int
) -> int:
    """The most sequences that fit, or `most`, right to `finest` sequences.

    It doubles the batch from `first` on while it fits, then tries sizes between the last two. tried: GiB by sequences,
    which `fits` adds; None: out of memory.
    """
    fitting, not_fitting = 0, first
    while not_fitting <= most and fits(not_fitting):
        fitting, not_fitting = not_fitting, 2 * not_fitting
    while not_fitting <= most and not_fitting - fitting > finest:
        middle = _between(fitting, not_fitting, tried, limit_gib, finest)
        fitting, not_fitting = (middle, not_fitting) if fits(middle) else (fitting, middle)
    return fitting


def _between(fitting: int, not_fitting: int, tried: dict[int, float | None], limit_gib: float, finest: int) -> int:
    """The size to try next: where the peak reaches the limit if it grows evenly with the batch."""
    low, high = tried.get(fitting), tried[not_fitting]
    guess = (fitting + not_fitting) / 2
    if low and high:
        guess = fitting + (limit_gib - low) / (high - low) * (not_fitting - fitting)
    return min(max(int(guess) // finest * finest, fitting + finest), not_fitting - finest)
