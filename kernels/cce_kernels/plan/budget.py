"""The bytes that each way to the gradients holds, besides the inputs and results of a call.

The memory budget bounds these bytes, saved or temporary. A very small budget is exceeded by the least plan, that of a
budget of 0. Memory goes first to what a backward pass always holds: an (N, D) float32 sum for de, some numbers a token,
XLA's workspace and a window of FEWEST_COLUMNS columns. The rest makes windows larger and so fewer: each costs about
0.15 ms besides its work. A budget that holds the exponentials of all tokens, 2·V bytes each, saves these instead.
"""

import math

from cce_kernels.block_floats import steps_shape
from cce_kernels.block_sparse import PART
from cce_kernels.engines.engine import Engine
from cce_kernels.engines.xla import NUMBERS, WORKSPACE, XLA
from cce_kernels.plan.plan import Chunks
from cce_kernels.plan.setting import Setting
from cce_kernels.request import ITEMSIZE

WINDOW_BYTES = 256 * 2**20
ID_NUMBERS = 40  # bytes of a given id of a token, for its column and dz (cce_kernels/given_ids.py)
MOST_LOGITS = 512, 256  # tokens whose logits are held at a time beside a teacher, the fastest first
OF_TEACHER_ON_CPU = 6  # blocks of logits: those of the teacher, and what XLA's CPU compiler does not fuse
CHUNK_NUMBERS = 96  # bytes a token, for lse and the like, where the forward pass forms the gradients
SAVED_DZ_ROWS, DZ_ROWS = 16, 64  # the fewest rows of a tile of dz: each tile stores its column sums for dbias


def copy_of_e(x: Setting) -> int:
    """The copy of e with the kept tokens first, or with zeros for ignored tokens; 0 where it shares de's memory."""
    placed = x.engine.stops and x.rows == x.request.tokens
    return 0 if placed else x.request.itemsize * x.rows * x.request.width


def e_and_de(x: Setting) -> int:
    """`copy_of_e`, and the sum for de: 0 where it is de itself, a result. If e is frozen, the copy shares no memory."""
    request, size = x.request, x.rows * x.request.width
    if not request.wants.e:
        return request.itemsize * size
    is_result = not x.engine.stops and x.rows == request.tokens and request.itemsize == request.sum_itemsize
    return copy_of_e(x) + (0 if is_result else request.sum_itemsize * size)


def column(x: Setting, tokens: int, products: Engine, saved: bool = False) -> int:
    """One column of a window: dz of so many tokens, a copy of c_g or dc_g, partial sums of dbias.

    products: the engine that multiplies dz. saved: whether dz is formed from saved exponentials.
    """
    request = x.request
    dz = request.itemsize * tokens if saved else x.engine.dz_bytes(request, tokens, x.gpu)
    copy = 0 if products.stops else max(request.itemsize, request.dc_itemsize) * request.width
    sums = 4 * -(-tokens // (SAVED_DZ_ROWS if saved else DZ_ROWS)) * request.wants.bias
    return dz + copy + sums


def recomputed(x: Setting) -> int:
    """Where the backward pass computes the logits again: what it holds besides a window."""
    numbers = (NUMBERS + ID_NUMBERS * x.request.ids) * x.rows
    return e_and_de(x) + numbers + x.products.workspace


def saved(x: Setting) -> int:
    """Where the exponentials of all tokens are saved: these and what else is held, but for a window if dz is formed.

    Matmuls with the exponentials hold first de, in float32 and rounded, and then the scaled e. XLA puts the float32 de
    into the memory of dc if it fits.
    """
    request, in_float32 = x.request, 4 * x.rows * x.request.width
    always = 2 * x.rows * x.columns + NUMBERS * x.rows
    if request.forms_dz:
        return always + e_and_de(x) + in_float32 + WORKSPACE
    rounded = ITEMSIZE[request.de_dtype] * x.rows * request.width
    if request.wants.c and 2 * x.rows <= request.vocabulary:
        return always + copy_of_e(x) + rounded + WORKSPACE
    return always + copy_of_e(x) + in_float32 + max(rounded, WORKSPACE)


def of_token(x: Setting, size: int) -> int:
    """A token of a chunk of `size` tokens: its exponentials or logits, rows of e and de.

    Beside a teacher also its logits, and copies of a row of the teacher. Where a chunk stores dz, `in_forward` counts
    the logits of both, as they are held for a part of the chunk.
    """
    request, wide = x.request, x.request.sum_itemsize
    if not x.stores:
        blocks = 1 if x.gpu is not None else OF_TEACHER_ON_CPU
        of_teacher = wide * (blocks * x.columns + 4 * request.teacher_width) if request.teacher_width else 0
        return XLA.chunk_bytes(request, size, x.columns, x.gpu) + of_teacher
    masses = 6 * x.columns // PART * bool(request.gradient_tolerance)  # and sums and scores of them
    of_e = request.itemsize + max(request.itemsize, sum(of_de(x, size)))  # e, and scaled e
    stored = 2 * x.columns * (request.wanted is not None)  # an evaluation beside a teacher stores no dz
    return stored + masses + of_e * request.width + wide * request.teacher_width


def of_de(x: Setting, size: int) -> tuple[int, int]:
    """An element of de of a chunk that is stored: its partial sums in float32, and their sum."""
    if not x.request.wants.e:
        return 0, 0
    how = x.de_of_chunk(size)
    by_xla = how.engine is XLA
    parts = XLA.parts_of_de(x.request, size, x.request.vocabulary, x.gpu) if by_xla else how.splits
    return 4 * parts, ITEMSIZE[x.request.left_de_dtype]


def in_forward(x: Setting, chunks: Chunks) -> int:
    """Where the forward pass forms the gradients in these chunks: a chunk, the numbers of all tokens, and others."""
    request, size, wants = x.request, chunks.size, x.request.wants
    of_e, of_c = request.tokens * request.width, request.vocabulary * request.width
    held = size * of_token(x, size) + CHUNK_NUMBERS * chunks.rows
    if request.sums_dc_in_16_bits:  # the steps of dc
        held += 4 * math.prod(steps_shape(request.vocabulary, request.width))
    if wants.e and request.divides_de:  # the units of the rows of de
        held += 4 * math.prod(request.units_shape(request.tokens))
    if not request.one_factor:  # a de for any cotangents, which is no result yet
        held += request.itemsize * of_e
    if wants.bias:
        held += 12 * request.vocabulary
    if not x.stores:
        if wants.e and request.left_de_dtype != request.de_dtype:  # de cannot wait in the memory of the result
            held += ITEMSIZE[request.left_de_dtype] * of_e
        if XLA.pads_de(request, size, request.vocabulary, x.gpu):  # a copy of c
            held += request.itemsize * of_c
        return held + WORKSPACE * (x.gpu is not None)
    sums, itemsize = of_de(x, size)
    if wants.c and not request.sums_dc_in_16_bits:
        # XLA gives de of all tokens no memory of a result here. It may take that of the sums.
        held += request.width * max(itemsize * request.tokens - sums * size, 0)
    if wants.bias or (wants.e and x.de_of_chunk(size).engine is XLA):
        held += WORKSPACE
    if x.most_logits:  # the logits of both sides, in the memory that de takes later
        logits = 2 * request.sum_itemsize * x.columns * min(size, x.most_logits)
        held += max(logits - size * request.width * (sums + itemsize), 0)
    return held
