"""What a plan promises, held to tens of thousands of calls drawn at random.

Each promise is a function of a Plan that raises if it is broken. It says again, from the rules of the kernels, what
must hold: nothing here asks the planner's own arithmetic.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax.passes import Core, plan_for
from cce_kernels.call import ITEMSIZE, Call
from cce_kernels.contract import default_budget
from cce_kernels.device import H200, INTERPRETER, Gpu
from cce_kernels.engines.engine import Multiplying
from cce_kernels.engines.hopper import HOPPER, tiles
from cce_kernels.engines.triton.tiles import TABLE
from cce_kernels.engines.xla import XLA
from cce_kernels.engines.xla.splitk import multiple
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Wanted
from cce_kernels.plan import Plan, plan_of
from cce_kernels.plan.plan import Part
from cce_kernels.windows import Groups
from tests.plans import BOTH, call_of

CHUNKS, DRAWN = 8, 2500
MIB = 2**20
FROZEN = Wanted(e=True, c=False, bias=False)  # c
DEFAULT = 300 * MIB
PAIR_ROWS = 256  # of a pair's tile on Hopper, whatever its columns
TMA_ROWS, TMA_BYTES = 8, 128  # of one tile that TMA copies
LIMIT = 2**31


pytestmark = pytest.mark.usefixtures("hopper_kernels_in_every_jax")


def up(x: int, of: int) -> int:
    return -(-x // of) * of


class Visits(NamedTuple):
    """The groups of a plan in the order in which they are visited: columns of the vocabulary, an array each."""

    start: np.ndarray  # the first that is computed
    owned: np.ndarray  # the first that is counted
    stop: np.ndarray  # after the last one that is computed and lies in the vocabulary

    @classmethod
    def of(cls, groups: Groups) -> "Visits":
        """By the numbers that kernels compute windows from."""
        _, start, owned = groups.window(np.arange(groups.count))
        return cls(start, owned, np.minimum(start + groups.columns, groups.vocabulary))


def parts(plan: Plan) -> list[Part]:
    return [] if plan.backward is None else [x for x in (plan.backward.saved, plan.backward.others) if x is not None]


def products_of(part: Part) -> list[Multiplying]:
    return [part.products] if part.few is None else [part.products, part.few]


def all_groups(plan: Plan) -> Iterator[tuple[Groups, bool]]:
    """With whether an engine computes them that reads zeros beyond an array, and so may go beyond the vocabulary."""
    if plan.forward.sums.engine is XLA:
        yield plan.forward.sums.tiles, False  # type: ignore[misc]
    for part in parts(plan):
        forms_beyond = part.dz is None or part.dz.engine is HOPPER
        yield part.groups, forms_beyond and all(x.engine is HOPPER for x in products_of(part))


def groups_cover_each_column_once(plan: Plan) -> None:
    vocabulary = plan.call.vocabulary
    for groups, may_go_beyond in all_groups(plan):
        visits = Visits.of(groups)
        assert groups.vocabulary == vocabulary
        assert (visits.start >= 0).all()
        assert (visits.start <= visits.owned).all()
        order = np.argsort(visits.owned)
        first, stop = visits.owned[order], visits.stop[order]
        assert first[0] == 0
        assert stop[-1] == vocabulary
        assert (first[1:] == stop[:-1]).all(), "the columns that groups count lie side by side"
        if not may_go_beyond:
            assert (visits.start + groups.columns <= vocabulary).all(), "nothing there masks what lies beyond"
        else:
            assert (visits.start == visits.owned).all(), "nothing there leaves out columns of another group"


def dc_written(how: Multiplying, groups: Groups, vocab_axis: int) -> np.ndarray:
    """Of each visit the column of the vocabulary after the last that the tiles of dc write in the array."""
    visits = Visits.of(groups)
    if how.engine is not HOPPER:  # masked, or XLA's
        return visits.stop
    size = PAIR_ROWS if vocab_axis == 0 else how.dc.columns  # type: ignore[attr-defined]
    tiles_end = visits.start + -(-(visits.stop - visits.start) // size) * size
    return np.minimum(tiles_end, groups.vocabulary)  # TMA writes nothing beyond the array


def no_tile_of_dc_writes_over_another_group(plan: Plan) -> None:
    """But for columns of groups that are visited later, and write them again, by the one that is visited first."""
    for part in parts(plan):
        for how in products_of(part):
            visits, written = Visits.of(part.groups), dc_written(how, part.groups, plan.call.head.vocab_axis)
            assert (written == visits.stop).all()
            assert (visits.start[1:] == visits.owned[1:]).all()


def no_tile_of_de_writes_over_another_sum(plan: Plan) -> None:
    """Of several sums one below the other. On Hopper a tile that reaches into the next one adds zeros there."""
    for part in parts(plan):
        for how in products_of(part):
            assert how.splits >= 1
            if how.engine is XLA:
                assert how.splits == 1
            elif how.splits > 1 and how.engine is HOPPER:
                assert part.dz is not None  # dz ends with the part's tokens: below them TMA reads zeros
                assert part.tokens % TMA_ROWS == 0
                steps = up(part.groups.columns, 64 * how.splits) // 64  # of each sum: beyond dz it reads zeros
                assert part.groups.columns + steps * 64 < 2**30, "the index that stands for beyond every array"


def parts_are_of_all_rows(plan: Plan) -> None:
    """Each row is saved or computed again; rows are a few more than the tokens only where they are gathered, or where
    XLA would pad them.
    """
    rows, tokens = plan.rows, plan.call.tokens
    if plan.forward.sums.engine is XLA and rows != tokens:
        fewest = min(1024, plan.call.vocabulary)
        assert tokens % rows_that_xla_needs(plan, fewest, tokens) > 0
        assert tokens < rows < tokens + rows_that_xla_needs(plan, fewest, rows)
    else:
        assert rows == tokens or (plan.looks and plan.forward.gathered and rows == up(tokens, 8))
    if plan.call.wanted is None:
        assert plan.backward is None
        assert plan.saved == 0
        return
    assert plan.backward is not None
    saved, others = plan.backward.saved, plan.backward.others
    assert (0 if saved is None else saved.tokens) == plan.saved
    assert plan.saved + (0 if others is None else others.tokens) == rows
    assert others is None or others.tokens > 0 or rows == 0


def rows_that_xla_needs(plan: Plan, columns: int, tokens: int) -> int:
    """A divisor of the number of tokens, lest XLA pads both operands of the matmul for dc of so many columns."""
    call = plan.call
    assert call.wanted is not None
    wide = max(call.itemsize, 4) if call.wide_dc else call.itemsize
    return multiple(columns, call.width, tokens, call.itemsize, wide, plan.gpu) if call.wanted.c else 1


def xla_pads_no_sum_over_tokens(plan: Plan) -> None:
    """It would copy dz of a group, and e. Of engines that stop the plan takes their own matmuls instead."""
    for part in parts(plan):
        if part.products.engine is XLA:
            assert part.tokens % rows_that_xla_needs(plan, part.groups.columns, part.tokens) == 0


class Array(NamedTuple):
    """A matrix that TMA copies or stores."""

    name: str
    rows: int
    columns: int
    itemsize: int = 2


def tma_arrays(plan: Plan) -> Iterator[Array]:
    call = plan.call
    width, vocabulary = call.width, call.vocabulary
    c = (vocabulary, width) if call.head.vocab_axis == 0 else (width, vocabulary)
    if plan.forward.sums.engine is HOPPER:
        yield Array("e", plan.rows if plan.forward.gathered else call.tokens, width)
        yield Array("c", *c)
        if plan.saved:
            yield Array("P", plan.saved, vocabulary)
    for part in parts(plan):
        read = Array("dz", part.tokens, part.groups.columns)
        if part.dz is not None and part.dz.engine is HOPPER:
            yield from (Array("e of a part", part.tokens, width), Array("c", *c), read)
        if any(how.engine is HOPPER for how in products_of(part)):
            yield from (Array("e of a part", part.tokens, width), Array("c or dc", *c))
            yield Array("P", part.tokens, vocabulary) if part.dz is None else read
            yield from (Array("de", how.splits * part.tokens, width, 4) for how in products_of(part))
    if plan.backward is not None and plan.backward.together:
        assert plan.backward.saved is not None
        assert plan.saved <= plan.rows
        yield from (Array("P", plan.saved, vocabulary), Array("the place of de", plan.rows, width), Array("c", *c))


def what_tma_moves_is_aligned_and_wide(plan: Plan) -> None:
    """Whole tiles of 8 rows and 128 bytes, and more than one tile wide: beyond an array of one TMA writes over it."""
    for array in set(tma_arrays(plan)):
        assert array.rows > 0, array
        assert array.rows % TMA_ROWS == 0, array
        assert array.columns * array.itemsize % TMA_BYTES == 0, array
        assert array.columns * array.itemsize > TMA_BYTES, array
        assert array.columns % 64 == 0, f"sums over columns go in steps of 64: {array}"
    if plan.forward.sums.engine is HOPPER:
        assert not plan.call.with_bias
        assert not plan.call.with_sum
        assert plan.call.itemsize == 2


def only_a_second_term_of_dc_is_for_hopper(plan: Plan) -> None:
    """The sum of dc over saved and other tokens, and what goes beyond the vocabulary, are in its kernels alone."""
    if plan.backward is None or not plan.backward.together:
        return
    assert plan.backward.de_of_saved is not None
    assert plan.backward.de_of_saved.engine is HOPPER
    assert not plan.call.with_bias
    for part in parts(plan):
        assert part.few is None
        assert part.products.engine is HOPPER
        assert part.groups.beyond


def workspace(engine) -> int:
    return 32 * MIB if engine is XLA else 0


def of_xla(plan: Plan) -> int:
    """Bytes of an element of what XLA makes of logits: dz lies in their place where it has their type.

    On a CPU logits, exponentials and dz are there together. Copies of c_g and dc_g, and of e, are counted elsewhere.
    """
    wide = max(plan.call.itemsize, 4)
    return 3 * wide if plan.gpu is None else wide if plan.call.itemsize == wide else wide + plan.call.itemsize


def of_a_copy(call: Call) -> int:
    """Bytes of a column of c_g or dc_g."""
    return max(call.itemsize, 4 if call.wide_dc else 0) * call.width


def padded_dz(plan: Plan, tokens: int, columns: int) -> int:
    """The copy of dz that XLA makes of a whole odd vocabulary, where it splits the sum for de of few tokens."""
    call = plan.call
    assert call.wanted is not None
    if plan.forward.sums.engine is not XLA or not call.wanted.e:
        return 0
    needed = multiple(tokens, call.width, columns, call.itemsize, max(call.itemsize, 4), plan.gpu)
    return call.itemsize * tokens * columns * (columns % needed > 0)


def group_bytes(plan: Plan, part: Part, columns: int) -> int:
    """dz of a group, what becomes of it, copies of c_g or dc_g, and what dbias is summed from."""
    call = plan.call
    assert part.dz is not None
    of_form = of_xla(plan) * part.tokens + call.itemsize * call.width  # c_g beside
    dz = of_form if part.dz.engine is XLA else call.itemsize * part.tokens
    rows_of_tile = 64 if part is not plan.backward.saved else 16  # type: ignore[union-attr]
    sums = 4 * -(-part.tokens // rows_of_tile) if call.wanted is not None and call.wanted.bias else 0
    copied = of_a_copy(call) if part.products.engine is XLA else 0
    return columns * (dz + copied + sums) + padded_dz(plan, part.tokens, columns)


def held(plan: Plan) -> int:
    """What the backward pass holds at most, array by array."""
    call, rows, saved = plan.call, plan.rows, plan.saved
    width, vocabulary, wanted = call.width, call.vocabulary, call.wanted
    assert plan.backward is not None
    assert wanted is not None
    of_saved, others = plan.backward.saved, plan.backward.others
    numbers, exponentials = 256 * rows, 2 * saved * up(vocabulary, 8)
    placed = rows == call.tokens and plan.forward.sums.engine is not XLA
    e = 0 if placed else call.itemsize * rows * width  # a copy that has no place in what will be de
    sum_of_de = wide = max(call.itemsize, 4) * rows * width
    if not wanted.e:
        sum_of_de = call.itemsize * rows * width * placed  # there is none, but the copy of e has no place then
    elif plan.forward.sums.engine is XLA and rows == call.tokens and call.itemsize >= 4:
        sum_of_de = 0  # it is the result
    if of_saved is None:
        if others is None:
            return 0
        return e + sum_of_de + numbers + workspace(others.products.engine) + group_bytes(
            plan, others, others.groups.columns
        )  # fmt: skip
    if of_saved.dz is not None:  # dz is formed of saved tokens too
        largest = max(group_bytes(plan, x, x.groups.columns) for x in parts(plan))
        return e + exponentials + sum_of_de + wide + numbers + 32 * MIB + largest
    if plan.backward.together:
        beside = 2 * rows * width if wanted.c and not wanted.e else 0  # the scaled e, otherwise in de's place
        most = beside
    else:
        beside = 2 * saved * width  # de, rounded
        if wanted.c and 2 * saved <= vocabulary:  # de in float32 lies where dc will
            most = 2 * saved * width + 32 * MIB + numbers
        else:
            most = 4 * saved * width + max(2 * saved * width, 32 * MIB) + numbers
    if others is not None:
        tokens = others.tokens
        of_others = 2 * tokens * width + max(4 * tokens * width, 17 * MIB) + numbers
        most = max(most, beside + of_others + group_bytes(plan, others, others.groups.columns))
    return e + exponentials + most


def least(plan: Plan) -> int:
    """What any backward pass of this call holds: nothing saved, groups of 1024 columns."""
    call, rows = plan.call, plan.rows
    engine = plan.forward.sums.engine
    by_xla = engine is not HOPPER
    dz = of_xla(plan) * rows + call.itemsize * call.width if engine is XLA else call.itemsize * rows
    sums = 4 * -(-rows // 64) if call.wanted is not None and call.wanted.bias else 0
    group = min(1024, call.vocabulary) * (dz + of_a_copy(call) * by_xla + sums)
    placed = rows == call.tokens and engine is not XLA  # in the memory of de
    e = 0 if placed else call.itemsize * rows * call.width
    group += padded_dz(plan, rows, min(1024, call.vocabulary))
    return e + max(call.itemsize, 4) * rows * call.width + 256 * rows + 32 * MIB * by_xla + group


def what_is_held_is_within_the_budget(plan: Plan) -> None:
    """Or it is the least plan; and the plan says how much it is."""
    budget, forward = plan.call.memory_budget, plan.forward
    if plan.backward is not None:
        assert held(plan) <= plan.held <= max(budget, plan.least)
        assert plan.least <= least(plan)
    if forward.sums.engine is XLA:
        call, columns = plan.call, forward.sums.tiles.columns  # type: ignore[attr-defined]
        blocks = (of_xla(plan) * call.tokens + call.itemsize * call.width) * columns
        assert blocks <= budget or columns <= 1024
        assert plan.backward is None or blocks + 256 * call.tokens + workspace(XLA) <= plan.held
    else:
        assert forward.splits == 1 or 4 * forward.splits * plan.rows <= 3 * MIB, "of partial sums"


def counts(plan: Plan) -> Iterator[tuple[str, int]]:
    """The largest numbers that kernels count in 32 bits: programs, tiles, steps, indices along one axis.

    (Where elements lie in an array Triton counts in 64 bits if it has more than 2³² bytes, TMA by one number an axis.)
    """
    call, how = plan.call, plan.forward
    width, vocabulary, gpu = call.width, call.vocabulary, plan.gpu
    yield "columns", vocabulary + PAIR_ROWS + 1
    if how.sums.engine is not XLA:
        tile: Any = how.sums.tiles
        rows = PAIR_ROWS if how.sums.engine is HOPPER else tile.rows
        column_tiles = -(-vocabulary // tile.columns)
        yield "runs of the vocabulary", (how.splits + 1) * column_tiles
        yield "programs of statistics", 2 * -(-plan.rows // rows) * how.splits
        yield "steps of a program", column_tiles * (-(-width // 64) + 1)
    units = 1 if gpu is None else max(gpu.multiprocessors // 2, 1)
    for part in parts(plan):
        columns, tokens = part.groups.columns, part.tokens
        if part.dz is not None and part.dz.engine is not XLA:
            tile = part.dz.tiles
            rows = PAIR_ROWS if part.dz.engine is HOPPER else tile.rows
            number = -(-tokens // rows) * -(-columns // tile.columns)
            yield "tiles of dz", number + units
            if part.dz.engine is HOPPER:
                yield "steps of dz", -(-number // units) * (width // 64)
        for multiplying in products_of(part):
            de, dc = multiplying.de, multiplying.dc
            if multiplying.engine is XLA:
                continue
            rows_of_de = up(tokens, PAIR_ROWS if multiplying.engine is HOPPER else de.rows)  # type: ignore[attr-defined]
            yield "rows of sums for de", multiplying.splits * rows_of_de
            yield "tiles of de", multiplying.splits * rows_of_de * -(-width // de.columns)  # type: ignore[attr-defined]
            of_dc = (columns, width) if call.head.vocab_axis == 0 else (width, columns)
            rows = PAIR_ROWS if multiplying.engine is HOPPER else dc.rows  # type: ignore[attr-defined]
            number = -(-of_dc[0] // rows) * -(-of_dc[1] // dc.columns)  # type: ignore[attr-defined]
            yield "tiles of dc", number + units
            if multiplying.engine is HOPPER:
                yield "steps of dc", -(-number // units) * -(-plan.rows // 64)


def nothing_counted_in_32_bits_is_larger(plan: Plan) -> None:
    for name, count in counts(plan):
        assert count < LIMIT, name


PROMISES: tuple[Callable[[Plan], None], ...] = (
    parts_are_of_all_rows,
    xla_pads_no_sum_over_tokens,
    groups_cover_each_column_once,
    no_tile_of_dc_writes_over_another_group,
    no_tile_of_de_writes_over_another_sum,
    what_tma_moves_is_aligned_and_wide,
    only_a_second_term_of_dc_is_for_hopper,
    what_is_held_is_within_the_budget,
    nothing_counted_in_32_bits_is_larger,
)


def keeps_its_promises(call: Call, gpu: Gpu | None, impl) -> Plan:
    plan = plan_of(call, gpu, impl)
    for promise in PROMISES:
        try:
            promise(plan)
        except AssertionError as broken:
            raise AssertionError(f"{promise.__name__} of plan_of({call}, {gpu}, {impl!r}): {broken}") from None
    return plan


WIDTHS = (64, 128, 576, 768, 896, 1024, 1152, 1536, 2048, 2304, 2560, 3072, 4096, 5120, 5376, 7168, 8192, 16384)
VOCABULARIES = (32_000, 32_064, 49_152, 50_257, 50_304, 64_000, 100_352, 128_256, 131_072, 151_936, 152_064, 200_064,
                201_088, 256_000, 256_128, 262_144, 262_208)  # fmt: skip
MULTIPROCESSORS = {"8.0": (108,), "8.6": (84, 28), "8.9": (142, 58), "9.0": (132, 114, 78), "10.0": (148, 160),
                   "12.0": (170, 188)}  # fmt: skip
GPUS = [Gpu(capability, n) for capability, counts in MULTIPROCESSORS.items() for n in counts]
GPUS += [Gpu("12.1", 48), INTERPRETER, replace(H200, interpreted=True)]


def drawn(rng: np.random.Generator) -> tuple[Call, Gpu | None, str]:
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
        bias, with_sum, impl = False, False, pick(("auto", "cce"))
        gpu = pick([gpu for gpu in GPUS if gpu.compute_capability == "9.0"])
        dtype = pick(("bfloat16", "bfloat16", "float16"))
    everything = 2 * tokens * vocabulary + 6 * tokens * width + 2**28
    shares = (int(rng.uniform(low, high) * everything) for low, high in ((0, 0.2), (0.2, 1), (0.2, 1.2)))
    budget = pick((0, DEFAULT, default_budget(tokens, width, ITEMSIZE[dtype]), size(10, 38), *shares, 2**62))
    head = Head(pick((None, None, None, 30.0, 50.0)), int(rng.integers(2)))
    wanted = Wanted(e, c, bias) if rng.random() < 0.8 else None
    wide_de, wide_dc = bool(rng.random() < 0.2), bool(np.random.default_rng(tokens).random() < 0.2)
    call = Call(tokens, width, vocabulary, dtype, head, bias, with_sum, wanted, budget, wide_de, wide_dc)
    return call, gpu, impl


KINDS = ("hopper", "together", "several groups", "splits", "dz of saved", "none", "padded rows")


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_plan_keeps_its_promises(chunk):
    rng = np.random.default_rng(chunk)
    found: dict[str, int] = dict.fromkeys(KINDS, 0)
    for _ in range(DRAWN):
        plan = keeps_its_promises(*drawn(rng))
        backward = plan.backward
        found["none"] += backward is None
        if backward is None:
            continue
        by_hopper = plan.forward.sums.engine is HOPPER
        found["hopper"] += by_hopper
        found["together"] += backward.together
        found["several groups"] += by_hopper and any(x.groups.count > 1 for x in parts(plan))
        found["splits"] += any(how.splits > 1 for x in parts(plan) for how in products_of(x))
        found["padded rows"] += plan.forward.sums.engine is XLA and plan.rows > plan.call.tokens
        found["dz of saved"] += backward.saved is not None and backward.saved.dz is not None
    assert min(found.values()) >= 10, f"too few of a kind: {found}"


def test_every_gpu_of_the_table_is_drawn():
    assert {gpu.compute_capability for gpu in GPUS} >= {capability for capability, _ in TABLE}


# Where dc of a (D, V) classifier was computed in tiles that do not divide a group, 128 columns of it were zero.
OVERWRITTEN = [((8192, 2304, 256_000), 0), ((8192, 2560, 262_144), 0)]


@pytest.fixture
def any_tile_for_dc(monkeypatch):
    """As a plan once took them."""
    monkeypatch.setattr(tiles, "dc_tiles", lambda *_: tiles.DC)
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


@pytest.mark.parametrize(("shape", "memory_budget"), OVERWRITTEN)
@pytest.mark.usefixtures("any_tile_for_dc")
def test_a_tile_of_dc_that_does_not_divide_a_group_breaks_a_promise(shape, memory_budget):
    with pytest.raises(AssertionError, match="no_tile_of_dc_writes_over_another_group"):
        keeps_its_promises(call_of(shape, memory_budget, Head(vocab_axis=1)), H200, "auto")


@pytest.mark.usefixtures("any_tile_for_dc")
def test_it_is_among_the_calls_that_are_drawn():
    with pytest.raises(AssertionError, match="no_tile_of_dc_writes_over_another_group"):
        test_every_plan_keeps_its_promises(0)


@pytest.mark.parametrize(("shape", "memory_budget"), [*OVERWRITTEN, ((8192, 1152, 262_144), DEFAULT)])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_calls_whose_dc_was_wrong_once(shape, memory_budget, vocab_axis):
    keeps_its_promises(call_of(shape, memory_budget, Head(vocab_axis=vocab_axis)), H200, "auto")


@pytest.mark.parametrize("memory_budget", [0, DEFAULT, 2**30])
@pytest.mark.parametrize("shape", [(504, 64, 52_864), (300, 128, 999)])
def test_a_plan_counts_the_dz_that_xla_pads(shape, memory_budget):
    plan = keeps_its_promises(call_of(shape, memory_budget, dtype="float32"), H200, "auto")
    if memory_budget or shape[2] < 1024:
        assert padded_dz(plan, plan.rows, parts(plan)[0].groups.columns) > 0


@pytest.mark.parametrize("shape", [(16_383, 768, 50_257), (65_535, 640, 262_144)])
def test_a_plan_adds_the_rows_that_xla_would_pad(shape):
    plan = keeps_its_promises(call_of(shape, 0, dtype="float32"), H200, "auto")
    assert plan.rows == shape[0] + 1
    assert keeps_its_promises(call_of(shape, 0, dtype="float32", wanted=FROZEN), H200, "auto").rows == shape[0]


@pytest.mark.parametrize(("shape", "count"), [((8192, 4096, 128_256), 59), ((8192, 2304, 256_000), 69)])
def test_in_float32_the_sum_for_de_is_the_result(shape, count):
    """And so leaves its bytes to larger groups."""
    plan = keeps_its_promises(call_of(shape, DEFAULT, dtype="float32"), H200, "auto")
    assert parts(plan)[0].groups.count == count


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "mib"),
    [(8192, 2304, "bfloat16", 300), (8192, 4096, "bfloat16", 300), (65536, 2048, "bfloat16", 1024),
     (139_264, 512, "bfloat16", 952), (8192, 2304, "float32", 300), (8192, 4096, "float32", 320),
     (65536, 2048, "float32", 1536)],
)  # fmt: skip
def test_the_default_budget_leaves_many_tokens_large_groups(tokens, width, dtype, mib):
    shapes = Inputs(jax.ShapeDtypeStruct((tokens, width), dtype), jax.ShapeDtypeStruct((128_256, width), dtype),
                    None, jax.ShapeDtypeStruct((tokens,), jnp.int32))  # fmt: skip
    plan = plan_for(shapes, Core(Head(), False, "auto", None, H200), BOTH)
    assert plan.held <= plan.call.memory_budget == mib * MIB
    assert plan.backward is not None
    assert plan.backward.others is not None
    assert plan.backward.others.groups.columns >= 2048
