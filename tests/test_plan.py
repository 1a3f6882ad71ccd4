"""What a plan promises, held to tens of thousands of calls drawn at random.

Each promise is a function of a Plan that raises if it is broken. It says again, from the rules of the kernels, what
must hold: nothing here asks the planner's own arithmetic.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax.plans import Core, plan_for
from cce_kernels.default_budget import default_budget
from cce_kernels.device import H200, INTERPRETER, Gpu
from cce_kernels.engines.engine import Multiplying
from cce_kernels.engines.hopper import HOPPER, tiles
from cce_kernels.engines.triton.tiles import TABLE
from cce_kernels.engines.xla import XLA, multiple
from cce_kernels.exponentials import saved_shape
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Wanted, WantedNumbers
from cce_kernels.plan import Plan, plan_of
from cce_kernels.plan.plan import Schedule, ScheduleName
from cce_kernels.request import ITEMSIZE, Request
from cce_kernels.windows import Windows
from tests.nightly import draws
from tests.plans import BOTH, request_of

CHUNKS, DRAWN = draws(2, 24), 2500
MIB = 2**20
SMALL = 300 * MIB
PAIR_ROWS = 256  # of a pair's tile on Hopper, whatever its columns
TMA_ROWS, TMA_BYTES = 8, 128  # of one tile that TMA copies
LIMIT = 2**31


pytestmark = pytest.mark.usefixtures("hopper_kernels_in_every_jax")


def up(x: int, of: int) -> int:
    return -(-x // of) * of


class Visits(NamedTuple):
    """The windows of a plan in the order in which they are visited: columns of the vocabulary, an array each."""

    start: np.ndarray  # the first that is computed
    owned: np.ndarray  # the first that is counted
    stop: np.ndarray  # after the last one that is computed and lies in the vocabulary

    @classmethod
    def of(cls, windows: Windows) -> "Visits":
        """By the numbers that kernels compute windows from."""
        _, start, owned = windows.window(np.arange(windows.count))
        return cls(start, owned, np.minimum(start + windows.columns, windows.vocabulary))


def backward_of(plan: Plan) -> Schedule | None:
    """The way to the gradients, if it is the backward pass that forms them."""
    return None if plan.in_forward is not None else plan.gradients


def products_of(how: Schedule) -> list[Multiplying]:
    return [how.products] if how.of_few is None else [how.products, how.of_few]


def all_windows(plan: Plan) -> Iterator[tuple[Windows, bool]]:
    """With whether an engine computes them that reads zeros beyond an array, and so may go beyond the vocabulary."""
    if plan.forward is not None and plan.forward.sums.engine is XLA:
        assert plan.forward.sums.windows is not None
        yield plan.forward.sums.windows, False
    if (how := backward_of(plan)) is not None:
        forms_beyond = how.dz is None or how.dz.engine is HOPPER or how.way == "saved"
        beyond = forms_beyond and all(x.engine is HOPPER for x in products_of(how))
        for windows in (*(x.windows for x in products_of(how)), None if how.dz is None else how.dz.windows):
            if windows is not None:
                yield windows, beyond


def windows_cover_each_column_once(plan: Plan) -> None:
    vocabulary = plan.request.vocabulary
    for windows, may_go_beyond in all_windows(plan):
        visits = Visits.of(windows)
        if may_go_beyond:  # dz is whole tiles of TMA
            vocabulary = -(-plan.request.vocabulary // tiles.TMA_COLUMNS) * tiles.TMA_COLUMNS
        assert windows.vocabulary in (plan.request.vocabulary, vocabulary)
        vocabulary = windows.vocabulary
        assert (visits.start >= 0).all()
        assert (visits.start <= visits.owned).all()
        order = np.argsort(visits.owned)
        first, stop = visits.owned[order], visits.stop[order]
        assert first[0] == 0
        assert stop[-1] == vocabulary
        assert (first[1:] == stop[:-1]).all(), "the columns that windows count lie side by side"
        if not may_go_beyond:
            assert (visits.start + windows.columns <= vocabulary).all(), "nothing there masks what lies beyond"
        else:
            assert (visits.start == visits.owned).all(), "nothing there leaves out columns of another window"


def dc_written(how: Multiplying, windows: Windows, vocab_axis: int) -> np.ndarray:
    """Of each visit the column of the vocabulary after the last that the tiles of dc write in the array."""
    visits = Visits.of(windows)
    if how.engine is not HOPPER:  # masked, or XLA's
        return visits.stop
    size = PAIR_ROWS if vocab_axis == 0 else how.dc.columns  # type: ignore[attr-defined]
    tiles_end = visits.start + -(-(visits.stop - visits.start) // size) * size
    return np.minimum(tiles_end, windows.vocabulary)  # TMA writes nothing beyond the array


def no_tile_of_dc_writes_over_another_window(plan: Plan) -> None:
    """But for columns of windows that are visited later, and write them again, by the one that is visited first."""
    if (way := backward_of(plan)) is None:
        return
    for how in products_of(way):
        visits, written = Visits.of(how.windows), dc_written(how, how.windows, plan.request.head.vocab_axis)
        assert (written == visits.stop).all()
        assert (visits.start[1:] == visits.owned[1:]).all()


def no_tile_of_de_writes_over_another_sum(plan: Plan) -> None:
    """Of several sums of a chunk, one below the other. On Hopper a tile that reaches into the next one adds zeros."""
    if plan.in_forward is None or (how := plan.in_forward.products) is None:
        return
    assert how.splits >= 1
    if how.splits > 1 and how.engine is HOPPER:
        chunks, columns = plan.in_forward.chunks, plan.request.vocabulary
        assert chunks.size % TMA_ROWS == 0  # what is multiplied ends with the chunk: below it TMA reads zeros
        steps = up(columns, 64 * how.splits) // 64  # of each sum: beyond the vocabulary it reads zeros
        assert columns + steps * 64 < 2**30, "the index that stands for beyond every array"


def all_rows_are_saved_or_none(plan: Plan) -> None:
    """Rows are a few more than the tokens only where they are gathered, or where XLA would pad them."""
    rows, tokens = plan.rows, plan.request.tokens
    if plan.engine is XLA and rows != tokens:
        fewest = min(1024, plan.request.vocabulary)
        assert tokens % rows_that_xla_needs(plan, fewest, tokens) > 0
        assert tokens < rows < tokens + rows_that_xla_needs(plan, fewest, rows)
    elif plan.request.wanted is None and plan.finds_ignored and rows < tokens:
        many = 32 if plan.gpu.interpreted else 256
        assert rows % many == 0
        room = min(16 * MIB, plan.request.memory_budget)
        assert rows == many or rows * plan.request.width * plan.request.itemsize <= room
    else:
        assert rows == tokens or (plan.finds_ignored and rows == up(tokens, 8))
    assert plan.saved in (0, rows)
    assert not plan.saved or plan.request.dtype == "bfloat16"
    if plan.request.wanted is None:
        assert plan.gradients is None
        assert plan.saved == 0
        return
    if (how := backward_of(plan)) is None:
        return
    whole = plan.saved > 0 and not plan.request.forms_dz
    assert (how.dz is None) == whole
    for x in products_of(how):
        if x.splits > 1:  # few tiles of de
            rows, columns = x.de.of_pair if x.engine is HOPPER else (x.de.rows, x.de.columns)
            units = plan.gpu.multiprocessors // (1 + (x.engine is HOPPER))  # which compute a tile each at a time
            assert x.splits * -(-plan.rows // rows) * -(-plan.request.width // columns) <= units
        assert how.dz is None or x.windows == how.dz.windows
        assert not whole or (x.windows.count == 1 and x.windows.columns == plan.request.vocabulary)


def rows_that_xla_needs(plan: Plan, columns: int, tokens: int) -> int:
    """A divisor of the number of tokens, lest XLA pads both operands of the matmul for dc of so many columns."""
    request = plan.request
    assert request.wanted is not None
    return multiple(columns, request.width, request.itemsize, plan.gpu) if request.wanted.c else 1


def xla_pads_no_sum_over_tokens(plan: Plan) -> None:
    """It would copy dz of a window, and e. Of engines that stop the plan takes their own matmuls instead."""
    if (how := backward_of(plan)) is not None and how.products.engine is XLA:
        assert plan.rows % rows_that_xla_needs(plan, how.products.windows.columns, plan.rows) == 0


class Array(NamedTuple):
    """A matrix that TMA copies or stores."""

    name: str
    rows: int
    columns: int
    itemsize: int = 2


def tma_arrays(plan: Plan) -> Iterator[Array]:
    request = plan.request
    width, vocabulary = request.width, request.vocabulary
    c = (vocabulary, width) if request.head.vocab_axis == 0 else (width, vocabulary)
    if plan.engine is HOPPER:
        yield Array("e", plan.rows, width)
        yield Array("c", *c)
        if plan.saved:
            yield Array("P", *saved_shape(plan.saved, vocabulary))
    if (how := backward_of(plan)) is None:
        return
    read = Array("dz", plan.rows, how.products.windows.columns)
    if how.dz is not None and how.dz.engine is HOPPER:
        yield from (Array("e", plan.rows, width), Array("c", *c), read)
    if any(x.engine is HOPPER for x in products_of(how)):
        yield from (Array("e", plan.rows, width), Array("c or dc", *c))
        yield Array("P", *saved_shape(plan.rows, vocabulary)) if how.dz is None else read
        yield Array("de", plan.rows, width, 4)


def what_tma_moves_is_aligned_and_wide(plan: Plan) -> None:
    """Whole tiles of 8 rows and 128 bytes, and more than one tile wide: beyond an array of one TMA writes over it."""
    for array in set(tma_arrays(plan)):
        assert array.rows > 0, array
        assert array.rows % TMA_ROWS == 0, array
        assert array.columns * array.itemsize % TMA_BYTES == 0, array
        assert array.columns * array.itemsize > TMA_BYTES, array
        assert array.columns % 64 == 0, f"sums over columns go in steps of 64: {array}"
    if plan.engine is HOPPER:
        assert not plan.request.with_bias
        assert not (plan.request.numbers.sum and plan.way == "recomputed")
        assert plan.request.itemsize == 2


def workspace(engine) -> int:
    return 32 * MIB if engine is XLA else 0


def of_xla(plan: Plan) -> int:
    """Bytes of an element of what XLA makes of logits: dz lies in their place where it has their type.

    On a CPU logits, exponentials and dz are there together. Copies of c_g and dc_g, and of e, are counted elsewhere.
    """
    wide = max(plan.request.itemsize, 4)
    return 3 * wide if plan.gpu is None else wide if plan.request.itemsize == wide else wide + plan.request.itemsize


def of_a_copy(request: Request) -> int:
    """Bytes of a column of c_g or dc_g."""
    return max(request.itemsize, 4 if request.wide_dc else 0) * request.width


def padded_dz(plan: Plan, tokens: int, columns: int) -> int:
    """The copy of dz that XLA makes of a whole odd vocabulary, where it splits the sum for de of few tokens."""
    request = plan.request
    assert request.wanted is not None
    if plan.engine is not XLA or not request.wanted.e:
        return 0
    needed = multiple(tokens, request.width, request.itemsize, plan.gpu)
    return request.itemsize * tokens * columns * (columns % needed > 0)


def window_bytes(plan: Plan) -> int:
    """dz of a window, what becomes of it, copies of c_g or dc_g, and what dbias is summed from."""
    request, how, rows = plan.request, backward_of(plan), plan.rows
    assert how is not None
    assert how.dz is not None
    of_form = of_xla(plan) * rows + request.itemsize * request.width  # c_g beside
    dz = of_form if how.dz.engine is XLA else request.itemsize * rows
    sums = 4 * -(-rows // (16 if plan.saved else 64)) if request.wanted is not None and request.wanted.bias else 0
    copied = of_a_copy(request) if how.products.engine is XLA else 0
    columns = how.products.windows.columns
    return columns * (dz + copied + sums) + padded_dz(plan, rows, columns)


def held(plan: Plan) -> int:
    """What the backward pass holds at most, array by array."""
    request, rows, how = plan.request, plan.rows, backward_of(plan)
    width, vocabulary, wanted = request.width, request.vocabulary, request.wanted
    assert how is not None
    assert wanted is not None
    numbers, exponentials = 256 * rows, 2 * plan.saved * up(vocabulary, 8)
    placed = rows == request.tokens and plan.engine is not XLA
    e = 0 if placed else request.itemsize * rows * width  # a copy that has no place in what will be de
    sum_of_de = wide = max(request.itemsize, 4) * rows * width
    if not wanted.e:
        sum_of_de = request.itemsize * rows * width * placed  # there is none, but the copy of e has no place then
    elif plan.engine is XLA and rows == request.tokens and request.itemsize >= 4:
        sum_of_de = 0  # it is the result
    if how.way == "recomputed":
        return e + sum_of_de + numbers + workspace(how.products.engine) + window_bytes(plan)
    if how.dz is not None:  # dz is formed of saved tokens too
        return e + exponentials + sum_of_de + wide + numbers + 32 * MIB + window_bytes(plan)
    if wanted.c and 2 * rows <= vocabulary:  # de in float32 lies where dc will
        return e + exponentials + 2 * rows * width + 32 * MIB + numbers
    return e + exponentials + 4 * rows * width + max(2 * rows * width, 32 * MIB) + numbers


def least(plan: Plan) -> int:
    """What any backward pass of this call holds: nothing saved, windows of 1024 columns."""
    request, rows = plan.request, plan.rows
    engine = plan.engine
    sums_by_xla = engine is XLA or request.sums_logits
    by_xla = engine is not HOPPER or sums_by_xla
    dz = of_xla(plan) * rows + request.itemsize * request.width if sums_by_xla else request.itemsize * rows
    sums = 4 * -(-rows // 64) if request.wanted is not None and request.wanted.bias else 0
    window = min(1024, request.vocabulary) * (dz + of_a_copy(request) * by_xla + sums)
    placed = rows == request.tokens and engine is not XLA  # in the memory of de
    e = 0 if placed else request.itemsize * rows * request.width
    window += padded_dz(plan, rows, min(1024, request.vocabulary))
    numbers = (256 + 40 * request.ids) * rows
    return e + max(request.itemsize, 4) * rows * request.width + numbers + 32 * MIB * by_xla + window


def in_chunks(plan: Plan) -> int:
    """What the forward pass holds where it forms the gradients: logits or exponentials of a chunk, and steps of dc."""
    request, how = plan.request, plan.in_forward
    assert how is not None
    assert request.wanted is not None
    chunks, tokens = how.chunks, how.chunks.size
    assert chunks.rows >= request.tokens > chunks.rows - tokens - 8, "no chunk is empty if all tokens are kept"
    block = how.dc.engine.columns_of_a_step(how.dc) if request.sums_dc_in_16_bits else 1
    steps = 4 * request.vocabulary * -(-request.width // block) * request.sums_dc_in_16_bits
    if plan.forward is None:
        return tokens * request.vocabulary * (request.sum_itemsize + request.itemsize) + steps
    assert how.products is not None
    sums = 4 * how.products.splits * tokens * request.width * request.wanted.e
    return 2 * tokens * request.vocabulary + 4 * tokens * request.width + sums + steps


def what_is_held_is_within_the_budget(plan: Plan) -> None:
    """Or it is the least plan; and the plan says how much it is."""
    budget, forward = plan.request.memory_budget, plan.forward
    if plan.in_forward is not None:
        assert in_chunks(plan) <= plan.held <= budget
        return
    if plan.gradients is not None:
        assert held(plan) <= plan.held <= max(budget, least(plan))
    assert forward is not None
    if forward.sums.engine is XLA:
        assert forward.sums.windows is not None
        request, columns = plan.request, forward.sums.windows.columns
        blocks = (of_xla(plan) * min(request.tokens, plan.rows) + request.itemsize * request.width) * columns
        assert blocks <= budget or columns <= 1024
        assert plan.gradients is None or blocks + 256 * request.tokens + workspace(XLA) <= plan.held
    else:
        splits = forward.sums.splits
        assert splits == 1 or 4 * splits * plan.rows <= 3 * MIB, "of partial sums"


def counts(plan: Plan) -> Iterator[tuple[str, int]]:
    """The largest numbers that kernels count in 32 bits: programs, tiles, steps, indices along one axis.

    (Where elements lie in an array Triton counts in 64 bits if it has more than 2³² bytes, TMA by one number an axis.)
    """
    request, how = plan.request, plan.forward
    width, vocabulary, gpu = request.width, request.vocabulary, plan.gpu
    yield "columns", vocabulary + PAIR_ROWS + 1
    if how is not None and how.sums.engine is not XLA:
        tile: Any = how.sums.tiles
        rows = PAIR_ROWS if how.sums.engine is HOPPER else tile.rows
        column_tiles = -(-vocabulary // tile.columns)
        yield "runs of the vocabulary", (how.sums.splits + 1) * column_tiles
        yield "programs of statistics", 2 * -(-plan.rows // rows) * how.sums.splits
        yield "steps of a program", column_tiles * (-(-width // 64) + 1)
    units = 1 if gpu is None else max(gpu.multiprocessors // 2, 1)
    if (way := backward_of(plan)) is None:
        return
    columns, tokens, dz = way.products.windows.columns, plan.rows, way.dz
    if dz is not None and dz.engine is not XLA:
        tile = dz.tiles
        rows = PAIR_ROWS if dz.engine is HOPPER else tile.rows
        number = -(-tokens // rows) * -(-columns // tile.columns)
        yield "tiles of dz", number + units
        if dz.engine is HOPPER:
            yield "steps of dz", -(-number // units) * (width // 64)
    for multiplying in products_of(way):
        de, dc = multiplying.de, multiplying.dc
        if multiplying.engine is XLA:
            continue
        rows_of_de = up(tokens, PAIR_ROWS if multiplying.engine is HOPPER else de.rows)  # type: ignore[attr-defined]
        yield "rows of the sum for de", rows_of_de
        yield "tiles of de", rows_of_de * -(-width // de.columns)  # type: ignore[attr-defined]
        of_dc = (columns, width) if request.head.vocab_axis == 0 else (width, columns)
        rows = PAIR_ROWS if multiplying.engine is HOPPER else dc.rows  # type: ignore[attr-defined]
        number = -(-of_dc[0] // rows) * -(-of_dc[1] // dc.columns)  # type: ignore[attr-defined]
        yield "tiles of dc", number + units
        if multiplying.engine is HOPPER:
            yield "steps of dc", -(-number // units) * -(-tokens // 64)


def nothing_counted_in_32_bits_is_larger(plan: Plan) -> None:
    for name, count in counts(plan):
        assert count < LIMIT, name


PROMISES: tuple[Callable[[Plan], None], ...] = (
    all_rows_are_saved_or_none,
    no_tile_of_de_writes_over_another_sum,
    xla_pads_no_sum_over_tokens,
    windows_cover_each_column_once,
    no_tile_of_dc_writes_over_another_window,
    what_tma_moves_is_aligned_and_wide,
    what_is_held_is_within_the_budget,
    nothing_counted_in_32_bits_is_larger,
)


def keeps_its_promises(request: Request, gpu: Gpu | None, impl) -> Plan:
    plan = plan_of(request, gpu, impl)
    for promise in PROMISES:
        try:
            promise(plan)
        except AssertionError as broken:
            raise AssertionError(f"{promise.__name__} of plan_of({request}, {gpu}, {impl!r}): {broken}") from None
    return plan


WIDTHS = (64, 128, 576, 768, 896, 1024, 1152, 1536, 2048, 2304, 2560, 3072, 4096, 5120, 5376, 7168, 8192, 16384)
VOCABULARIES = (
    32_000,
    32_064,
    49_152,
    50_257,
    50_304,
    64_000,
    100_352,
    128_256,
    131_072,
    151_936,
    152_064,
    200_064,
    201_088,
    256_000,
    256_128,
    262_144,
    262_208,
)
MULTIPROCESSORS = {
    "8.0": (108,),
    "8.6": (84, 28),
    "8.9": (142, 58),
    "9.0": (132, 114, 78),
    "10.0": (148, 160),
    "12.0": (170, 188),
}
GPUS = [Gpu(capability, n) for capability, counts in MULTIPROCESSORS.items() for n in counts]
GPUS += [Gpu("12.1", 48), INTERPRETER, replace(H200, interpreted=True)]


def drawn(rng: np.random.Generator) -> tuple[Request, Gpu | None, str]:
    """A call like a model's, or one of any size; half of them of the kind that the kernels for Hopper serve."""

    def size(low: float, high: float, multiple: int = 1) -> int:
        return up(int(2 ** rng.uniform(low, high)), multiple)

    def pick(values):
        return values[rng.integers(len(values))]

    for_hopper, multiple = rng.random() < 0.5, pick((1, 8, 64, 128))
    tokens = pick((size(0, 18), size(7, 17, multiple), max(64 * size(0, 11) + int(rng.integers(-9, 10)), 1)))
    width = pick((pick(WIDTHS), size(0, 14, multiple), size(5, 14, 64)))
    vocabulary = pick((pick(VOCABULARIES), size(0, 20, multiple), size(6, 20, 64), size(10, 18, 256)))
    e, c, bias = (bool(x) for x in rng.random(3) < (0.8, 0.8, 0.2))
    with_sum, impl = bool(rng.random() < 0.5), pick(("auto", "auto", "cce", "chunked"))
    gpu = None if impl == "chunked" and rng.random() < 0.5 else pick(GPUS)
    dtype = pick(("bfloat16", "bfloat16", "float16", "float32", "float64" if impl == "chunked" else "float32"))
    if for_hopper:
        tokens, width, vocabulary = max(tokens, 256), up(width, 64), up(vocabulary, 64)
        bias, impl = False, pick(("auto", "cce"))
        gpu = pick([gpu for gpu in GPUS if gpu.compute_capability == "9.0"])
        dtype = pick(("bfloat16", "bfloat16", "float16"))
    everything = 2 * tokens * vocabulary + 6 * tokens * width + 2**28
    shares = (int(rng.uniform(low, high) * everything) for low, high in ((0, 0.2), (0.2, 1), (0.2, 1.2)))
    budget = pick((0, SMALL, default_budget(tokens, width, ITEMSIZE[dtype]), size(10, 38), *shares, 2**62))
    head = Head(pick((None, None, None, 30.0, 50.0)), int(rng.integers(2)))
    wanted = Wanted(e, c, bias) if rng.random() < 0.8 else None
    wide_de, wide_dc, one_factor = (bool(x) for x in rng.random(3) < (0.2, 0.2, 0.5))
    tolerance = pick((0.0, 2.0**-7))
    own = np.random.default_rng((tokens, width, vocabulary))
    mean, with_temperature, detached = (bool(own.random() < 0.2) for _ in range(3))
    more = {"numbers": WantedNumbers(with_sum, mean, detached), "with_temperature": with_temperature}
    of = wide_de, wide_dc, one_factor, tolerance
    ids = int(own.choice((0, 0, 0, 0, 1, 128)))
    request = Request(tokens, width, vocabulary, dtype, head, bias, wanted, budget, *of, **more, ids=ids)
    return request, gpu, impl


def kinds(plan: Plan) -> Iterator[tuple[str, bool]]:
    """Of what there must be enough among the drawn plans, and whether this one is of the kind."""
    way = plan.gradients
    yield "none", way is None
    if way is None:
        return
    products, backward = way.products, backward_of(plan) is not None
    yield "in forward", not backward
    yield "splits", not backward and products is not None and products.splits > 1
    yield "hopper", backward and plan.engine is HOPPER
    yield "by XLA", way.way == "saved" and way.dz is None and products.engine is XLA
    yield "several windows", backward and plan.engine is HOPPER and products.windows.count > 1
    yield "recomputed", way.way == "recomputed"
    yield "padded rows", backward and plan.engine is XLA and plan.rows > plan.request.tokens
    yield "dz of saved", way.way == "saved" and way.dz is not None
    yield "padded dz", backward and way.dz is not None and padded_dz(plan, plan.rows, products.windows.columns) > 0


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_plan_keeps_its_promises(chunk):
    rng, found = np.random.default_rng(chunk), Counter()
    for _ in range(DRAWN):
        found.update(dict(kinds(keeps_its_promises(*drawn(rng)))))
    assert min(found.values()) >= 10, f"too few of a kind: {found}"


def test_every_gpu_of_the_table_is_drawn():
    assert {gpu.compute_capability for gpu in GPUS} >= {capability for capability, _ in TABLE}


@pytest.mark.parametrize("memory_budget", [0, SMALL])
@pytest.mark.parametrize(("tokens", "width"), [(256, 768), (256, 4096), (1024, 768)])
def test_few_tokens_have_partial_sums_of_de_on_hopper(tokens, width, memory_budget):
    """Else a few pairs of programs walk the whole vocabulary while most of the GPU idles."""
    request = request_of((tokens, width, 128_256), memory_budget, dtype="float16")  # whose exponentials are not saved
    plan = keeps_its_promises(request, H200, "auto")
    assert plan.way == "recomputed"
    assert plan.engine is HOPPER
    products = plan.gradients.products
    tiles_of_de = -(-tokens // products.de.of_pair[0]) * -(-width // products.de.of_pair[1])
    assert (products.splits > 1) == (memory_budget > 0)
    assert not memory_budget or products.splits * tiles_of_de > 0.7 * H200.multiprocessors / 2


@pytest.mark.parametrize(("shape", "count"), [((8192, 4096, 128_256), 59), ((8192, 2304, 256_000), 69)])
def test_in_float32_the_sum_for_de_is_the_result(shape, count):
    """And so leaves its bytes to larger windows."""
    plan = keeps_its_promises(request_of(shape, SMALL, dtype="float32"), H200, "auto")
    assert plan.way == "recomputed"
    assert plan.gradients.products.windows.count == count


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "mib"),
    [
        (8192, 2304, "bfloat16", 640),
        (8192, 4096, "bfloat16", 640),
        (65536, 2048, "bfloat16", 928),
        (139_264, 512, "bfloat16", 748),
        (8192, 2304, "float32", 640),
        (8192, 4096, "float32", 640),
        (65536, 2048, "float32", 1344),
        (131_072, 2304, "bfloat16", 2048),
    ],
)
def test_the_default_budget_leaves_many_tokens_large_windows(tokens, width, dtype, mib):
    shapes = Inputs(
        jax.ShapeDtypeStruct((tokens, width), dtype),
        jax.ShapeDtypeStruct((128_256, width), dtype),
        None,
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    plan = plan_for(shapes, Core(Head(), "auto", None, H200), BOTH)
    assert plan.held <= plan.request.memory_budget == mib * MIB
    assert plan.way == "recomputed"
    assert plan.gradients.products.windows.columns >= 1536


A, B, C = (8192, 2304, 256_000), (8192, 4096, 128_256), (32_768, 768, 128_256)
# Relative to three of XLA's matmuls, measured on an H200.
MEASURED_IN_FORWARD = [
    (A, 300 * MIB, 1.213),
    (A, 640 * MIB, 1.071),
    (A, 1.2e9, 1.019),
    (B, 300 * MIB, 1.082),
    (B, 640 * MIB, 1.027),
    (B, 1.2e9, 1.002),
    (C, 300 * MIB, 1.217),
    (C, 640 * MIB, 1.133),
    (C, 1.2e9, 1.096),
]
MEASURED_OTHERS = [(A, 1.36, 0.983), (B, 1.34, 0.973), (C, 1.49, 1.033)]


def of_one_factor(shape: tuple[int, int, int], memory_budget: float, way: ScheduleName | None = None) -> Plan:
    return plan_of(replace(request_of(shape, int(memory_budget)), one_factor=True), H200, "auto", way)


def each_way(shape: tuple[int, int, int], memory_budget: float) -> tuple[Plan, Plan, Plan]:
    """The logits computed again, the gradients formed in the forward pass, exponentials saved; whatever each holds."""
    again, in_forward, saved = (
        of_one_factor(shape, memory_budget, way) for way in ("recomputed", "in forward", "saved")
    )
    return again, in_forward, saved


@pytest.mark.parametrize(("shape", "memory_budget", "time"), MEASURED_IN_FORWARD)
def test_the_predicted_times_are_near_the_measured_ones(shape, memory_budget, time):
    plan = of_one_factor(shape, memory_budget)
    assert plan.in_forward is not None
    assert plan.time == pytest.approx(time, abs=0.06)


@pytest.mark.parametrize(("shape", "again", "saved"), MEASURED_OTHERS)
def test_so_are_those_of_the_other_ways(shape, again, saved):
    plan, large = each_way(shape, 300 * MIB)[0], of_one_factor(shape, 2**62)
    assert plan.way == "recomputed"
    assert plan.time == pytest.approx(again, abs=0.06)
    assert large.way == "saved"
    assert large.time == pytest.approx(saved, abs=0.06)


@pytest.mark.parametrize("shape", [A, B, C])
def test_the_way_of_the_least_predicted_time_is_taken(shape):
    """More memory never takes more time, and some exponentials are never saved."""
    before = np.inf
    for memory_budget in (*(64 * MIB * 2 ** (k / 4) for k in range(32)), 2**62):
        plan, (again, *others) = of_one_factor(shape, memory_budget), each_way(shape, memory_budget)
        allowed = [again, *(x for x in others if x.held <= memory_budget)]
        assert plan == min(allowed, key=lambda x: x.time)
        assert plan.saved in (0, plan.rows)
        assert plan.time <= 1.005 * before
        before = plan.time
    assert plan.saved == plan.rows


WAYS = {
    (Head(), False, True): "in forward",
    (Head(), False, False): "saved",
    (Head(5.0), False, True): "recomputed",
    (Head(5.0), False, False): "recomputed",
    (Head(5.0), True, True): "in forward",
    (Head(5.0), True, False): "saved",
}


@pytest.mark.parametrize(("head", "detached", "one_factor"), WAYS, ids=str)
def test_the_way_of_a_call_with_the_mean(head, detached, one_factor):
    """A softcap's slope is multiplied into the exponentials: the logits cannot be found from these."""
    request = Request(8192, 4096, 131072, "bfloat16", head, False, Wanted(True, True, False), 2**30)
    request = replace(request, numbers=WantedNumbers(False, True, detached), one_factor=one_factor)
    request = request if one_factor else replace(request, memory_budget=2**32)
    assert plan_of(request, H200, "auto").way == WAYS[head, detached, one_factor]
