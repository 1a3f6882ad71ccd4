"""How the vocabulary is cut into windows of columns that are computed one after another. Imports no framework."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

FEWEST_COLUMNS = 1024


class Window(NamedTuple):
    """The columns of one window. Its fields are integers, or traced numbers that only the device knows."""

    number: Any  # of the window
    start: Any  # the first column that is computed
    owned: Any  # the first column that counts: columns before it belong to the neighbour


ALL_COLUMNS = Window(*[np.int32(0)] * 3)  # the one window that is the whole vocabulary


# window -> dz of the window, (N, V_g), and the column sums of dz, (V_g,), or None if dbias is not wanted
FormDz = Callable[[Window], tuple[Any, Any]]


@dataclass(frozen=True)
class Windows:
    """`count` windows of `columns` columns that cover `vocabulary` columns.

    Where `columns` does not divide `vocabulary`, the last window still has `columns` columns and ends with the
    vocabulary, so that it overlaps its neighbour. It is visited first and counts only the columns that it owns. Its
    neighbour then overwrites the columns that both cover.
    With `beyond` the last window does not overlap: it reaches beyond the end of the vocabulary.
    """

    vocabulary: int
    columns: int
    beyond: bool = False

    @classmethod
    def whole(cls, vocabulary: int, beyond: bool = False) -> "Windows":
        """One window of all columns."""
        return cls(vocabulary, vocabulary, beyond)

    @property
    def count(self) -> int:
        return -(-self.vocabulary // self.columns)

    @property
    def overlap(self) -> int:
        return 0 if self.beyond else self.count * self.columns - self.vocabulary

    @property
    def last(self) -> int:
        """How many columns the last window computes."""
        return self.vocabulary - (self.count - 1) * self.columns if self.beyond else self.columns

    def window(self, i) -> Window:
        """The i-th window to visit; i: an integer or a traced integer."""
        k = (i - 1) % self.count
        owned = k * self.columns
        return Window(i, owned - (k == self.count - 1) * self.overlap, owned)


Cost = Callable[[Windows, int], float]


def vocabulary_windows(
    vocabulary: int, budget: int, column_bytes: int, cost: Cost | None = None, multiple: int = 128, beyond: bool = False
) -> Windows:
    """The cheapest windows that fit: column_bytes · columns ≤ budget. Windows of up to 1024 columns are always allowed.

    cost(windows, columns): the relative time of one window of so many columns; by default, the number of columns. If
    several choices cost the same, the result has the fewest windows, and of these the smallest.
    """
    most = max(budget // max(column_bytes, 1), FEWEST_COLUMNS)
    if vocabulary <= most:
        return Windows(vocabulary, vocabulary, beyond)

    def total(windows: Windows) -> float:
        if cost is None:
            return (windows.count - 1) * windows.columns + windows.last
        return (windows.count - 1) * cost(windows, windows.columns) + cost(windows, windows.last)

    sizes = range(min(FEWEST_COLUMNS, most), most + 1, multiple)
    return min(
        (Windows(vocabulary, size, beyond) for size in sizes), key=lambda windows: (total(windows), windows.count)
    )
