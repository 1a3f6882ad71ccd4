"""In which chunks of tokens the forward pass is to form the gradients, and how long each way to the gradients takes.

There are three ways: the backward pass computes the logits again; the forward pass forms the gradients
(cce_kernels/in_forward.py); the forward pass saves the exponentials of all tokens. All three have the matmuls of the
logits and of the gradients that are wanted. Predicted is what a way adds to these:

- each chunk reads and writes the whole dc; each group of the vocabulary reads and writes the sum for de
- a chunk and a group launch small kernels
- a logit costs more than its matmul: its exponential, and its place in memory

Measured on an H200 with bfloat16, trained-like data, relative to XLA's matmuls: 8192×2304×256000 in 16, 8 and 4 chunks
1.213, 1.071 and 1.019; 8192×4096×128256 in 8, 4 and 2 chunks 1.082, 1.027 and 1.002; 32768×768×128256 in 32, 15 and 8
chunks 1.217, 1.133 and 1.096; all saved 0.983, 0.973 and 1.033; computed again 1.36, 1.34 and 1.49. Each
prediction is within 0.06 of these.
On two cores of a CPU with float32, 2048×256×32000 in 32, 8, 4, 2 chunks and one: 1.34, 1.07, 0.99, 1.01 and 1.12;
computed again 1.32.
"""

import math
from typing import NamedTuple

from cce_kernels.block_floats import block_of
from cce_kernels.call import Call
from cce_kernels.head import is_highest
from cce_kernels.plan.budget import Bytes
from cce_kernels.plan.plan import Chunks, Times
from cce_kernels.tokens import gathered_rows


class Costs(NamedTuple):
    """The times of an engine's matmuls over XLA's, and of what a way adds, in floating-point operations of a matmul."""

    logits: float  # the matmul of the logits, over XLA's
    products: float  # the engine's own matmuls for de and dc of a chunk, over XLA's
    byte: float  # read or written where a matmul runs at the same time
    logit: float  # each time that it is computed
    launches: float  # the small kernels of a chunk or a group
    new: float  # a byte of a chunk's logits beyond KEPT: the operating system clears pages that a process gave back
    multiple: int  # tokens of a chunk: the rows of a tile of the kernels


KEPT = 64 * 2**20  # bytes
BY_HOPPER = Costs(1.0, 1.0, byte=170.0, logit=150.0, launches=2.5e10, new=0.0, multiple=256)
BY_TRITON = BY_HOPPER._replace(logits=1.08, products=1.15)
# A float32 matmul takes as long as 3 (TF32) or 15 ("highest") in bfloat16. XLA moves 24 bytes for each logit.
IN_TF32 = Costs(1.0, 1.0, byte=60.0, logit=1440.0, launches=8e9, new=0.0, multiple=32)
IN_FLOAT32 = Costs(1.0, 1.0, byte=12.0, logit=290.0, launches=1.6e9, new=0.0, multiple=32)
ON_CPU = Costs(1.0, 1.0, byte=6.0, logit=100.0, launches=1e7, new=42.0, multiple=32)


def costs(count: Bytes) -> Costs:
    if count.gpu is None:
        return ON_CPU
    if count.call.dtype == "float32":
        return IN_FLOAT32 if is_highest(count.call.head.precision) else IN_TF32
    return BY_HOPPER if count.engine.multiplies_fastest else BY_TRITON


def _multiple(count: Bytes) -> int:
    """Chunks have a multiple of so many tokens, so that their parts are equal."""
    return max(costs(count).multiple, count.most_logits)


def fastest_chunks(count: Bytes, last: int | None) -> Chunks | None:
    """The chunks within the budget that take the least time, about equal; None if no chunk is within the budget.

    last: the number of tokens of the last chunk, if the plan for another platform has decided it. Where then no chunk
    is within the budget, the smallest are taken.
    """
    multiple = _multiple(count)
    rest = max(gathered_rows(count.call.tokens) - (last or 0), 1)
    fits = _most_tokens(count, last, rest)
    if not fits and last is None:
        return None
    most, found, least = fits or min(multiple, rest), None, math.inf
    for number in range(-(-rest // most), rest + 1):
        chunks = _of_size(count, min(-(-rest // (number * multiple)) * multiple, most), last)
        if fits and count.of_chunks(chunks) > count.call.memory_budget:  # a smaller last chunk can take more
            continue
        if (time := in_forward(count, chunks)) >= least:
            break
        found, least = chunks, time
    return found


def least_chunks(count: Bytes) -> Chunks:
    """The smallest chunks, whatever the budget."""
    return _of_size(count, min(_multiple(count), max(gathered_rows(count.call.tokens), 1)), None)


def _most_tokens(count: Bytes, last: int | None, rest: int) -> int:
    """The most of these tokens with which a chunk is within the budget; 0 if it is with none."""
    multiple, budget = _multiple(count), count.call.memory_budget
    begin = min(budget // count.of_a_token(rest), rest - 1) // multiple * multiple
    sizes = rest, *range(begin, 0, -multiple)
    return next((size for size in sizes if count.of_chunks(_of_size(count, size, last)) <= budget), 0)


def _of_size(count: Bytes, size: int, last: int | None) -> Chunks:
    call, tokens = count.call, gathered_rows(count.call.tokens)
    if last is None and not sums_in_16_bits(call):
        last = 0
    elif last is None:  # kernels that stop at the last token take as many rows as in the other chunks
        last = size if count.stores and tokens > size else (tokens - 1) % size + 1
    whole = -(-(tokens - last) // size)
    return Chunks(whole, size if whole else 0, last, block_of(call.width))


def sums_in_16_bits(call: Call) -> bool:
    """Whether dc is summed in block floating point; the backward pass then adds the last chunk's part."""
    return call.wants.c and call.dc_itemsize == 2


def predicted(count: Bytes, groups: int, chunks: Chunks | None, all_saved: bool) -> Times:
    """The predicted times. groups: of the vocabulary, where the logits are computed again.

    chunks, all_saved: None and False for what the budget forbids.
    """
    return Times(
        recomputed(count, groups),
        math.inf if chunks is None else in_forward(count, chunks),
        _relative(count, 0.0) if all_saved else math.inf,
    )


def recomputed(count: Bytes, groups: int) -> float:
    call, cost = count.call, costs(count)
    logits = call.tokens * call.vocabulary
    of_group = 8.0 * call.tokens * call.width * cost.byte * call.wants.e + cost.launches
    return _relative(count, (2.0 * call.width * cost.logits + cost.logit) * logits + groups * of_group)


def in_forward(count: Bytes, chunks: Chunks) -> float:
    call, cost = count.call, costs(count)
    in_groups = not count.stores and (count.gpu is None or call.dc_itemsize < call.sum_itemsize)
    moved = 2 * call.dc_itemsize + 16 * in_groups  # bytes, for an element of dc: XLA holds a float32 part of a group
    of_chunk = moved * cost.byte * call.wants.c * call.vocabulary * call.width + cost.launches
    number, largest = chunks.whole + (chunks.last > 0), max(chunks.size, chunks.last)
    new = cost.new * max(call.sum_itemsize * largest * call.vocabulary - KEPT, 0)
    if call.wants.c and not chunks.last:  # dc begins as zeros, and the factor multiplies it elementwise
        new += 3 * call.dc_itemsize * cost.byte * call.vocabulary * call.width
    return _relative(count, number * of_chunk + new, chunks)


def _relative(count: Bytes, more: float, chunks: Chunks | None = None) -> float:
    """The time of the matmuls, the logits and what a way adds, over that of XLA's matmuls."""
    call, cost = count.call, costs(count)
    rows, of_gradients = call.tokens, float(call.wants.e + call.wants.c)
    if chunks is not None:
        in_last = min(chunks.last, max(rows - chunks.whole * chunks.size, 0))
        whole, last = (-(-n // cost.multiple) * cost.multiple for n in (chunks.size, in_last))
        rows = chunks.whole * whole + last
        de_by_xla = count.de_by_xla(max(chunks.size, chunks.last))
        of_gradients += (cost.products - 1) * (call.wants.c + (call.wants.e and not de_by_xla))
    of_matmul = 2.0 * call.vocabulary * call.width
    time = rows * of_matmul * (cost.logits + of_gradients) + cost.logit * call.tokens * call.vocabulary + more
    return time / (max(call.tokens, 1) * of_matmul * (1 + call.wants.e + call.wants.c))
