"""How every framework visits the vocabulary, a group of columns at a time: which groups, and the size of a float16 dz.

Imports no framework.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

COLUMN_MULTIPLE = 128
FEWEST_COLUMNS = 1024
FLOAT16_LARGEST = 2.0**14  # what the largest cotangent becomes in float16, which holds 28 binary orders below it


class Window(NamedTuple):
    """A group of columns, by integers or by numbers that the device alone knows."""

    number: Any  # of the group
    start: Any  # its first column
    owned: Any  # the first that it counts


@dataclass(frozen=True)
class Groups:
    """`count` windows of `columns` columns that cover `vocabulary` columns.

    The last window ends where they end, so it overlaps its neighbour where columns do not divide it; it is
    visited first, counts only the columns that are its own, and its neighbour then overwrites the rest, or adds to 0.
    Or, `beyond`, it goes on beyond them.
    """

    vocabulary: int
    columns: int
    beyond: bool = False

    @property
    def count(self) -> int:
        return -(-self.vocabulary // self.columns)

    @property
    def overlap(self) -> int:
        return 0 if self.beyond else self.count * self.columns - self.vocabulary

    @property
    def last(self) -> int:
        """How many columns the last one computes."""
        return self.vocabulary - (self.count - 1) * self.columns if self.beyond else self.columns

    def window(self, i) -> Window:
        """The i-th window; i: an integer or a traced one."""
        k = (i - 1) % self.count
        owned = k * self.columns
        return Window(i, owned - (k == self.count - 1) * self.overlap, owned)


def vocabulary_groups(
    vocabulary: int, budget: int, column_bytes: int, cost: Callable[["Groups", int], float] | None = None,
    multiple: int = COLUMN_MULTIPLE, beyond: bool = False,
) -> Groups:  # fmt: skip
    """The groups that cost least of those whose columns fit: column_bytes · V_g ≤ budget, but 1024 columns always do.

    cost(groups, columns): the relative time of one group of so many columns, by default their number. Of groups that
    cost the same, the fewest and smallest.
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
