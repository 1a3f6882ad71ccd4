"""How the vocabulary is cut into groups of columns that are computed one after another. Imports no framework."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

FEWEST_COLUMNS = 1024


class Window(NamedTuple):
    """The columns of one group. Its fields are integers, or traced numbers that only the device knows."""

    number: Any  # of the group
    start: Any  # the first column that is computed
    owned: Any  # the first column that counts: columns before it belong to the neighbour


@dataclass(frozen=True)
class Groups:
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
    def whole(cls, vocabulary: int, beyond: bool = False) -> "Groups":
        """One group of all columns."""
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


Cost = Callable[[Groups, int], float]


def vocabulary_groups(
    vocabulary: int, budget: int, column_bytes: int, cost: Cost | None = None, multiple: int = 128, beyond: bool = False
) -> Groups:
    """The cheapest groups that fit: column_bytes · columns ≤ budget. Groups of up to 1024 columns are always allowed.

    cost(groups, columns): the relative time of one group of so many columns; by default, the number of columns. If
    several choices cost the same, the result has the fewest groups, and of these the smallest.
    """
    most = max(budget // max(column_bytes, 1), FEWEST_COLUMNS)
    if vocabulary <= most:
        return Groups(vocabulary, vocabulary, beyond)

    def total(groups: Groups) -> float:
        if cost is None:
            return (groups.count - 1) * groups.columns + groups.last
        return (groups.count - 1) * cost(groups, groups.columns) + cost(groups, groups.last)

    sizes = range(min(FEWEST_COLUMNS, most), most + 1, multiple)
    return min((Groups(vocabulary, size, beyond) for size in sizes), key=lambda groups: (total(groups), groups.count))
