"""The order in which programs visit the tiles of a matrix, and the number of runs that the vocabulary is cut into.

A run is a range of consecutive tiles of columns that one program walks through.
"""

import jax.numpy as jnp

SCRATCH_BYTES = 3 * 2**20  # the most that partial statistics may take
FEW_BLOCKS = 0.03  # of the launches, assumed: those whose kept tokens fill only two row blocks
SHARED_BYTES = 20 * 2**20  # the rows of e that programs running at the same time read: a third of an H200's L2


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def row_group(width: int, itemsize: int, rows: int, most: int = 32) -> int:
    """How many row blocks are computed for all columns before the next row blocks: their e fits in SHARED_BYTES."""
    return max(1, min(most, SHARED_BYTES // (rows * width * itemsize)))


def grouped_order(program, row_blocks, column_blocks, row_group: int):
    """(row block, column block) of a program, such that neighbouring programs share rows of e or of c in L2."""
    group, offset = program // (row_group * column_blocks), program % (row_group * column_blocks)
    first = group * row_group
    height = jnp.minimum(row_blocks - first, row_group)
    return first + offset % height, offset // height


def vocabulary_splits(row_blocks: int, column_tiles: int, tokens: int, multiprocessors: int) -> int:
    """The number of runs of the vocabulary with which programs fill the GPU's multiprocessors most evenly.

    A multiprocessor runs one program at a time. So a launch takes (programs / multiprocessors, rounded up) times the
    tiles of one program, and about a third of a tile more to start and end each program.
    Where many tokens are ignored, the last chunk with a kept token may have few of them. With runs for exactly one
    program on each multiprocessor, two row blocks would take as long as all.
    """
    most = min(column_tiles, max(1, SCRATCH_BYTES // (4 * max(tokens, 1))), 1024)

    def time(blocks: int, splits: int) -> float:
        return cdiv(blocks * splits, multiprocessors) * (column_tiles / splits + 0.3)

    return min(range(1, most + 1), key=lambda s: time(row_blocks, s) + FEW_BLOCKS * time(min(row_blocks, 2), s))
