"""What a number of bytes buys: how much of the vocabulary is saved by the forward pass, and how large groups are.

The budget bounds what a call holds beyond its inputs, its results and O(N) numbers, saved or temporary. A backward pass
always holds an (N, D) float32 sum for de, some numbers a token, XLA's workspace and a group of at least FEWEST_COLUMNS;
a smaller budget gets that. The next GROUP_BYTES make groups larger, each of which costs about 0.15 ms besides its work.
All beyond saves exponentials, 2·N bytes a column, each of which spares the backward pass one logit of each token. Where
no dz of them is formed either, the fewer columns are left the smaller are their groups, in favour of what is saved.
With `whole_bytes`, all are saved if V is a multiple of ALIGNMENT, and the gradient is two matmuls.
"""

import math

import jax.numpy as jnp

from cce_kernels.config import TileConfig, target_of
from cce_kernels.logits import Head
from cce_kernels.saved import ALIGNMENT
from cce_kernels.tiles import cdiv
from cce_kernels.windows import FEWEST_COLUMNS, Groups, vocabulary_groups

WORKSPACE = 32 * 2**20  # of XLA's matmuls
GROUP_BYTES = 256 * 2**20
GROUP_WORTH = 48 * 2**20  # of exponentials: what a group costs, see _for_groups
GROUP_COST = 4.0  # reading and writing de's accumulator, copies of c_g and dc_g, launches
SAVED_MULTIPLE = 256  # columns: whole tiles
LEAST_PART = 1 / 32  # of the vocabulary: less is not worth its launches
LEAST_SOFTCAP = 2.0  # below it 1 − (z/κ)² from a rounded exponential is off by more than that rounding
LARGEST_SOFTCAP = 36.0  # above it exp(z − ρ), at least exp(−2κ)/V, may underflow, and with it 1 − (z/κ)²


def linear(head: Head, with_sum: bool) -> bool:
    """Whether dz is linear in p, so that it need not be formed."""
    return head.softcap is None and not with_sum


def whole_bytes(tokens: int, width: int, vocabulary: int) -> int:
    """What saving everything takes: the exponentials, de before it is rounded, the scaled e, and two workspaces."""
    return 2 * tokens * vocabulary + 2 * tokens * width + _always(tokens, width) + WORKSPACE


def saved_columns(
    tokens: int, width: int, vocabulary: int, dtype, head: Head, with_sum: bool, memory_budget: int
) -> int:
    """How many columns' exponentials the forward pass is to save for the backward pass."""
    if jnp.dtype(dtype) != jnp.bfloat16:  # float16 lacks the range, and float32 is asked for where accuracy counts
        return 0
    if head.softcap is not None and not LEAST_SOFTCAP <= head.softcap <= LARGEST_SOFTCAP:
        return 0
    direct = linear(head, with_sum)
    whole = direct and vocabulary % ALIGNMENT == 0
    if whole and memory_budget >= whole_bytes(tokens, width, vocabulary):
        return vocabulary
    left = memory_budget - _always(tokens, width)
    left -= _for_groups(tokens, width, 2 * tokens * vocabulary - left if direct else None)
    most = (vocabulary - whole) // SAVED_MULTIPLE * SAVED_MULTIPLE  # less than all where that takes whole_bytes
    columns = min(left // (2 * tokens * SAVED_MULTIPLE) * SAVED_MULTIPLE, most)
    return columns if columns > LEAST_PART * vocabulary else 0


def _for_groups(tokens: int, width: int, missing: int | None) -> int:
    """The bytes of a group of columns; missing: what all exponentials lack of the budget, None if they need groups too.

    With B bytes missing and G for a group, exponentials of B + G bytes are computed again, in (B + G)/G groups. If a
    group costs as much as to compute W bytes of them, the sum B + G + W·(B + G)/G is least at G = √(B·W). The scaled e,
    with which what is saved gives dc, must fit too, before there is a group.
    """
    fewest = 2 * FEWEST_COLUMNS * (tokens + 2 * width)
    if missing is None:
        return max(fewest, GROUP_BYTES)
    return max(fewest, 2 * tokens * width, min(math.isqrt(max(missing, 0) * GROUP_WORTH), GROUP_BYTES))


def backward_groups(
    tokens: int, width: int, vocabulary: int, dtype, saved: int,
    *, memory_budget: int, direct: bool, copies: bool, tiles: TileConfig, interpret: bool,
) -> list[tuple[Groups, bool]]:  # fmt: skip
    """The groups that dz is formed of, and whether their exponentials, of the first `saved` columns, were saved.

    direct: no dz is formed of those; copies: whether the matmuls copy a group of c and of dc.
    """
    itemsize = jnp.dtype(dtype).itemsize
    left = memory_budget - _always(tokens, width) - 2 * tokens * saved
    row_blocks, multiprocessors = cdiv(tokens, tiles.rows), target_of(dtype, width, interpret)[0].multiprocessors

    def waves(columns: int) -> float:  # in tiles: the dz kernel's waves of programs, and what each group costs besides
        return cdiv(row_blocks * cdiv(columns, tiles.columns), multiprocessors) + GROUP_COST

    def part(first: int, columns: int) -> Groups:
        groups = vocabulary_groups(columns, left, itemsize * (tokens + 2 * width * copies), waves)
        size = min(groups.columns, 3 * tiles.columns) if interpret else groups.columns
        return Groups(columns, size, first)

    parts = [] if direct else [(part(0, saved), True)]
    parts.append((part(saved, vocabulary - saved), False))
    return [(groups, from_saved) for groups, from_saved in parts if groups.vocabulary]


def _always(tokens: int, width: int) -> int:
    return 4 * tokens * width + 256 * tokens + WORKSPACE
