"""In which order programs visit the tiles of a matrix, and in how many runs the vocabulary is cut."""

import jax.numpy as jnp

SCRATCH_BYTES = 3 * 2**20  # of partial statistics, at most
SHARED_BYTES = 20 * 2**20  # of e that programs running side by side read: a third of an H200's L2


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def row_group(width: int, itemsize: int, rows: int, most: int = 32) -> int:
    """How many row blocks go through all columns before the next ones: those whose rows of e fit in SHARED_BYTES."""
    return max(1, min(most, SHARED_BYTES // (rows * width * itemsize)))


def grouped_order(program, row_blocks, column_blocks, row_group: int):
    """(row block, column block) of a program: neighbours share rows of e or columns of c in L2."""
    group, offset = program // (row_group * column_blocks), program % (row_group * column_blocks)
    first = group * row_group
    height = jnp.minimum(row_blocks - first, row_group)
    return first + offset % height, offset // height


def vocabulary_splits(row_blocks: int, column_tiles: int, tokens: int, multiprocessors: int) -> int:
    """Into how many runs to cut the vocabulary so that programs fill the GPU's multiprocessors evenly.

    One program runs on a multiprocessor at a time, so a launch takes (programs / multiprocessors, rounded up) times
    the tiles that a program walks, and each program costs about a third of a tile more to start and end.
    """
    most = min(column_tiles, max(1, SCRATCH_BYTES // (4 * max(tokens, 1))), 1024)
    return min(range(1, most + 1), key=lambda s: cdiv(row_blocks * s, multiprocessors) * (column_tiles / s + 0.3))
