"""The predicted time of each way to the gradients, and the chunks in which the forward pass forms them fastest.

Times are relative to XLA's matmuls of the logits and of the gradients that are wanted, which every way has. A way adds:

- each chunk reads and writes the whole dc; each window of the vocabulary reads and writes the sum for de
- a chunk and a window launch small kernels
- a logit costs more than its matmul: its exponential, and its place in memory

Measured on an H200 with bfloat16, trained-like data, relative to XLA's matmuls: 8192×2304×256000 in 16, 8 and 4 chunks
1.213, 1.071 and 1.019; 8192×4096×128256 in 8, 4 and 2 chunks 1.082, 1.027 and 1.002; 32768×768×128256 in 32, 15 and 8
chunks 1.217, 1.133 and 1.096; all saved 0.983, 0.973 and 1.033; computed again 1.36, 1.34 and 1.49. Each
prediction is within 0.06 of these.
On two cores of a CPU with float32, 2048×256×32000 in 32, 8, 4, 2 chunks and one: 1.34, 1.07, 0.99, 1.01 and 1.12;
computed again 1.32.
"""

import math

from cce_kernels.engines.xla import XLA
from cce_kernels.plan import budget
from cce_kernels.plan.plan import Chunks
from cce_kernels.plan.setting import Setting
from cce_kernels.tokens import gathered_rows

KEPT = 64 * 2**20  # bytes of a chunk's logits that a process does not give back to the operating system
SMALLER_PARTS = 0.09  # of three matmuls: what logits of 256 tokens at a time cost over 512 beside a teacher


def saved(x: Setting) -> float:
    return _relative(x, x.request.tokens, x.request.wants.e + x.request.wants.c, 0.0)


def recomputed(x: Setting, windows: int) -> float:
    """windows: how many of the vocabulary."""
    request, cost = x.request, x.costs
    logits = (2.0 * request.width * cost.logits + cost.logit) * request.tokens * request.vocabulary
    of_window = 8.0 * request.tokens * request.width * cost.byte * request.wants.e + cost.launches
    return _relative(x, request.tokens, request.wants.e + request.wants.c, logits + windows * of_window)


def in_forward(x: Setting, chunks: Chunks) -> float:
    request, cost, wants = x.request, x.costs, x.request.wants
    of_c = request.vocabulary * request.width
    in_windows = not x.stores and (x.gpu is None or request.dc_itemsize < request.sum_itemsize)
    moved = 2 * request.dc_itemsize + 16 * in_windows  # bytes of an element of dc: XLA holds a window in float32
    more = chunks.count * (moved * cost.byte * wants.c * of_c + cost.launches)
    more += cost.new * max(request.sum_itemsize * chunks.size * request.vocabulary - KEPT, 0)
    if wants.c and not request.sums_dc_in_16_bits:  # dc begins as zeros, and is multiplied by the factor
        more += 3 * request.dc_itemsize * cost.byte * of_c
    computed = request.tokens if x.stores else chunks.rows  # kernels stop at the last token
    rows = -(-computed // cost.multiple) * cost.multiple
    de_by_xla = x.stores and x.de_of_chunk(chunks.size).engine is XLA
    products = wants.c * cost.products + wants.e * (1.0 if de_by_xla else cost.products)
    return _relative(x, rows, products, more) + SMALLER_PARTS * (0 < x.most_logits < budget.MOST_LOGITS[0])


def _relative(x: Setting, rows: int, gradients: float, more: float) -> float:
    """The time of the matmuls of so many rows, of the exponentials, and more operations, over XLA's matmuls.

    gradients: the matmuls for de and dc, each as many times as long as XLA's.
    """
    request, cost, of_matmul = x.request, x.costs, 2.0 * x.request.vocabulary * x.request.width
    time = rows * of_matmul * (cost.logits + gradients) + cost.logit * request.tokens * request.vocabulary + more
    return time / (max(request.tokens, 1) * of_matmul * (1 + request.wants.e + request.wants.c))


def fastest_chunks(x: Setting) -> Chunks | None:
    """The chunks within the budget that take the least time, about equal; None if no chunk is within the budget."""
    tokens, most, multiple = max(gathered_rows(x.request.tokens), 1), x.request.memory_budget, smallest_chunks(x).size
    found, least, largest = None, math.inf, most // budget.of_token(x, tokens)
    for count in range(-(-tokens // max(largest, 1)), -(-tokens // multiple) + 1):
        chunks = _chunks(x, -(-tokens // (count * multiple)) * multiple)
        if chunks.size > largest or budget.in_forward(x, chunks) > most:
            continue
        if (time := in_forward(x, chunks)) >= least:
            break
        found, least = chunks, time
    return found


def smallest_chunks(x: Setting) -> Chunks:
    """Chunks have a multiple of so many tokens, so that their parts are equal."""
    return _chunks(x, max(x.costs.multiple, x.most_logits))


def _chunks(x: Setting, size: int) -> Chunks:
    tokens = max(gathered_rows(x.request.tokens), 1)
    return Chunks(-(-tokens // min(size, tokens)), min(size, tokens))
