"""What a number of bytes buys: of how many tokens the forward pass saves exponentials, and how large groups are.

The budget bounds what a call holds beyond its inputs, its results and O(N + V) numbers, saved or temporary. A backward
pass always holds an (N, D) float32 sum for de, some numbers a token, XLA's workspace and a group of at least
FEWEST_COLUMNS; a smaller budget gets that. The next GROUP_BYTES make groups larger, each of which costs about 0.15 ms
besides its work. All beyond saves exponentials, 2·V bytes a token, each of which spares the backward pass one logit.
Where no dz of them is formed either (cce_kernels/saved.py), the groups of the other tokens are small, and nothing is
copied for them; with `whole_bytes` there are no others, and the gradient is two matmuls. The kernels for Hopper take
nothing beside what is saved, so that there 2·N·V bytes are enough.
"""

import math
from functools import lru_cache, partial

import jax.numpy as jnp

from cce_kernels.config import DEPTH, HOPPER, PAIR_ROWS, TileConfig, target_of
from cce_kernels.groups import Wanted
from cce_kernels.logits import Head
from cce_kernels.saved import saved_shape
from cce_kernels.tiles import cdiv, gathered_rows
from cce_kernels.windows import FEWEST_COLUMNS, Groups, vocabulary_groups

WORKSPACE = 32 * 2**20  # of XLA's matmuls
GROUP_BYTES = 256 * 2**20
GROUP_WORTH = 8 * 2**20  # of exponentials: what one more group costs
SPLIT_BYTES = 17 * 2**20  # de of so few tokens that it is summed in several parts, at most
GROUP_COST = 4.0  # reading and writing de's accumulator, copies of c_g and dc_g, launches
HOPPER_EPILOGUE, HOPPER_GROUP = 3.0, 40.0  # what a tile of dz, and a group besides, cost, in steps of a matmul
SAVED_MULTIPLE = 64  # tokens: the depth that matmuls over them step by
LEAST_PART = 1 / 5  # of the tokens: with fewer saved, XLA's matmuls of all are the faster
LEAST_SOFTCAP = 2.0  # below it 1 − (z/κ)² from a rounded exponential is off by more than that rounding
LARGEST_SOFTCAP = 36.0  # above it exp(z − ρ), at least exp(−2κ)/V, may underflow, and with it 1 − (z/κ)²


def linear(head: Head, with_sum: bool) -> bool:
    """Whether dz is linear in p, so that it need not be formed."""
    return head.softcap is None and not with_sum


def whole_bytes(tokens: int, width: int, vocabulary: int, of_c: bool = True) -> int:
    """What saving everything takes at most; of_c: if the gradient of c is wanted."""
    ragged, tokens = ragged_bytes(tokens, width), gathered_rows(tokens)
    return ragged + _saved_bytes(tokens, vocabulary) + _beside_matmuls(tokens, tokens, width, vocabulary, of_c)


@lru_cache(maxsize=4096)
def saved_tokens(
    tokens: int, width: int, vocabulary: int, dtype, head: Head, with_sum: bool, wanted: Wanted, on_hopper: bool,
    memory_budget: int,
) -> int:  # fmt: skip
    """Of how many tokens the forward pass is to save the exponentials for the backward pass."""
    memory_budget, tokens = memory_budget - ragged_bytes(tokens, width), gathered_rows(tokens)
    if jnp.dtype(dtype) != jnp.bfloat16:  # float16 lacks the range, and float32 is asked for where accuracy counts
        return 0
    if head.softcap is not None and not LEAST_SOFTCAP <= head.softcap <= LARGEST_SOFTCAP:
        return 0
    direct = linear(head, with_sum)
    if not direct:
        whole = math.inf
    elif on_hopper:
        whole = _saved_bytes(tokens, vocabulary) + _beside_saved(tokens, tokens, width, wanted, on_hopper)
    else:
        whole = whole_bytes(tokens, width, vocabulary, wanted.c)
    if memory_budget >= whole:
        return tokens

    def fits(saved: int) -> bool:
        group = _wanted_group(tokens - saved, vocabulary) if direct else max(GROUP_BYTES, _least_group(tokens, width))
        beside = _beside_groups(tokens, saved, width, wanted, direct, on_hopper) + group
        if direct and not on_hopper:  # XLA's matmuls with what is saved come before the groups
            beside = max(beside, _beside_matmuls(tokens, saved, width, vocabulary, wanted.c))
        return _saved_bytes(saved, vocabulary) + beside <= memory_budget

    most = min((tokens - direct) // SAVED_MULTIPLE, memory_budget // _saved_bytes(SAVED_MULTIPLE, vocabulary))
    found = next((n * SAVED_MULTIPLE for n in range(most, 0, -1) if fits(n * SAVED_MULTIPLE)), 0)
    return found if found > LEAST_PART * tokens else 0


def group_of(
    part: int, *, tokens: int, saved: int, width: int, vocabulary: int, dtype, wanted: Wanted, memory_budget: int,
    direct: bool, copies: bool, on_hopper: bool, tiles: TileConfig, interpret: bool,
) -> Groups:  # fmt: skip
    """The groups that dz of `part` of the tokens is formed in; copies: whether the matmuls copy c_g, then dc_g."""
    left = memory_budget - _always(tokens, width) + on_hopper * WORKSPACE
    if saved:
        beside = _beside_groups(tokens, saved, width, wanted, direct, on_hopper)
        left = memory_budget - _saved_bytes(saved, vocabulary) - beside
    row_blocks, gpu = cdiv(part, tiles.rows), target_of(dtype, width, interpret)[0]
    if on_hopper:
        cost = partial(hopper_cost, part, tokens if saved and direct else part, width, gpu.multiprocessors // 2)
        return vocabulary_groups(vocabulary, left, 2 * part, cost, PAIR_ROWS, beyond=True)

    def waves(columns: int) -> float:  # in tiles: the dz kernel's waves of programs, and what each group costs besides
        return cdiv(row_blocks * cdiv(columns, tiles.columns), gpu.multiprocessors) + GROUP_COST

    groups = vocabulary_groups(vocabulary, left, jnp.dtype(dtype).itemsize * (part + width * copies), waves)
    return Groups(vocabulary, min(groups.columns, 3 * tiles.columns)) if interpret else groups


def hopper_cost(tokens: int, of_dc: int, width: int, units: int, columns: int) -> float:
    """What a group of so many columns costs the kernels for Hopper, in steps of a pair of multiprocessors.

    of_dc: the tokens that dc sums over, those that are saved with them.
    """
    pairs, of_columns = cdiv(tokens, PAIR_ROWS), cdiv(columns, PAIR_ROWS)
    dz = HOPPER.logits.waves(pairs, columns, units) * (width / DEPTH + HOPPER_EPILOGUE)
    de = min(tiles.cost(pairs, width, units) for tiles in HOPPER.de) * columns / DEPTH
    dc = min(tiles.cost(of_columns, width, units) for tiles in HOPPER.dc) * of_dc / DEPTH
    return dz + de + dc + HOPPER_GROUP


def ragged_bytes(tokens: int, width: int) -> int:
    """What gathering as many tokens takes: e's rows, where there is no place for them all in what de will be."""
    rows = gathered_rows(tokens)
    return 0 if rows == tokens else 2 * rows * width


def _wanted_group(tokens: int, vocabulary: int) -> int:
    """The bytes of a group of columns of the tokens that are not saved.

    With G bytes each, there are S/G groups, S = 2·V·tokens. If one costs as much as to compute W bytes of exponentials
    again, which a group of G bytes leaves no room for, the sum G + W·S/G is least at G = √(S·W).
    """
    wanted = math.isqrt(2 * vocabulary * tokens * GROUP_WORTH)
    return max(min(wanted, GROUP_BYTES), _least_group(tokens, 0))


def _least_group(tokens: int, width: int) -> int:
    return 2 * FEWEST_COLUMNS * (tokens + width)


def _always(tokens: int, width: int) -> int:
    return 4 * tokens * width + 256 * tokens + WORKSPACE


def _saved_bytes(tokens: int, vocabulary: int) -> int:
    return 2 * math.prod(saved_shape(tokens, vocabulary))


def _beside_matmuls(tokens: int, saved: int, width: int, vocabulary: int, of_c: bool) -> int:
    """What the matmuls with what is saved take beside it: first de in float32, which XLA puts where dc will lie if it
    fits there, and rounded; then the scaled e.
    """
    rounded = 2 * saved * width
    if of_c and 2 * saved <= vocabulary:
        return rounded + 256 * tokens + WORKSPACE
    return 4 * saved * width + max(rounded, WORKSPACE) + 256 * tokens


def _beside_saved(tokens: int, saved: int, width: int, wanted: Wanted, on_hopper: bool) -> int:
    """What of the saved tokens is there beside their exponentials and groups of the others: de, rounded.

    On Hopper GPUs the scaled e, which dc is summed over, lies where de will, if that is wanted.
    """
    if on_hopper:
        return 2 * tokens * width * (wanted.c and not wanted.e)
    return 2 * saved * width


def _beside_groups(tokens: int, saved: int, width: int, wanted: Wanted, direct: bool, on_hopper: bool) -> int:
    """What the groups of the tokens that are not saved take beside their dz: their e and de, and what the others do."""
    if not direct:
        return _always(tokens, width) + 4 * tokens * width
    others = tokens - saved
    of_others = 2 * others * width + max(4 * others * width, SPLIT_BYTES) + 256 * tokens
    return _beside_saved(tokens, saved, width, wanted, on_hopper) + of_others
