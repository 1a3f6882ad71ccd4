"""The kernels for Hopper: which calls they compute, and what they compute, in the interpreter of JAX 0.11."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from cce_jax import linear_cross_entropy, linear_log_probs, prepare
from cce_kernels import selections
from cce_kernels.block_floats import decoded, steps_shape
from cce_kernels.device import H200, Gpu
from cce_kernels.engines.engine import Multiplying, Part, Problem, Step
from cce_kernels.engines.hopper import HOPPER, matmul
from cce_kernels.engines.hopper.every_tile import spread
from cce_kernels.engines.hopper.tiles import DC, DE, LOGITS, SUMMED
from cce_kernels.exponentials import saved_shape
from cce_kernels.head import Head
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Numbers, Wanted, WantedNumbers
from cce_kernels.plan import choose, plan_of
from cce_kernels.request import Request
from cce_kernels.windows import ALL_COLUMNS, Windows
from tests.lowering import for_hopper, loop_equations
from tests.test_shards import OF_SHARDS
from tests.test_shards import check as check_shards

S = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16
SHAPE = 512, 128, 4096
WINDOW = ["statistics", "dz", "de", "dc"]

# Calls take these kernels from JAX 0.11 on, which also has the interpreter.
INTERPRETED = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="JAX 0.10 has no interpreter for it")
pytestmark = INTERPRETED


def launched(*of, **options):
    return for_hopper(*call(*of, **options))


def call(
    shape=SHAPE, dtype=BF16, vocab_axis=0, bias=False, gradient=True, memory_budget=0, reduction="none", **options
):
    """The sum of the losses or its gradient, and its arguments."""
    n, d, v = shape

    def loss(e, c, t, bias_):
        more = {"bias": bias_} if bias else {}
        found = linear_cross_entropy(
            e,
            c,
            t,
            impl="cce",
            vocab_axis=vocab_axis,
            memory_budget=memory_budget,
            reduction=reduction,
            **more,
            **options,
        )
        return jnp.sum(found)

    c = S((v, d) if vocab_axis == 0 else (d, v), dtype)
    arrays = S((n, d), dtype), c, S((n,), jnp.int32), S((v,), dtype)
    return jax.value_and_grad(loss, (0, 1)) if gradient else loss, *arrays


@pytest.mark.parametrize(("dtype", "vocab_axis"), [(BF16, 0), (jnp.float16, 1)])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "logit_scale": 2.0, "z_loss": 1e-4}])
def test_a_gradient_is_four_kernels_that_the_device_need_not_choose_between(dtype, vocab_axis, options):
    assert launched(dtype=dtype, vocab_axis=vocab_axis, **options) == WINDOW
    for tokens in (256, 509):  # e is gathered, into a multiple of 8 rows
        assert launched((tokens, 128, 4096), dtype=dtype, vocab_axis=vocab_axis, **options) == WINDOW
        assert launched((tokens, 128, 4096), dtype=dtype, vocab_axis=vocab_axis, gradient=False) == ["statistics"]


@pytest.mark.parametrize("saved", [0, 2**31])
def test_where_jax_has_64_bits_the_kernels_lower_the_same(saved, monkeypatch):
    """Numbers that kernels count with stay of 32 bits."""
    monkeypatch.setattr(prepare, "local_gpu", lambda: H200)
    with jax.enable_x64(True):
        assert launched(memory_budget=saved) == launched_by_default(saved)
        assert launched(gradient=False) == ["statistics"]


def launched_by_default(memory_budget: int) -> list[str]:
    with jax.enable_x64(False):
        return launched(memory_budget=memory_budget)


def test_beside_its_kernels_a_window_computes_single_numbers():
    """What it needs of each token is computed once for all windows, not by a launch more in each."""
    launches = "custom_vmap_call", "run_state", "empty", "optimization_barrier"
    equations = loop_equations(*call())
    assert [x.primitive.name for x in equations].count("run_state") == 3
    rest = [x for x in equations if x.primitive.name not in launches]
    assert max(v.aval.size for x in rest for v in x.outvars) == 1


ENOUGH = 2 * 2048 * 65536 + 4 * 2048 * 128 + 256 * 2048 + 32 * 2**20  # bytes, to save all exponentials of that shape


def test_what_is_saved_is_multiplied_too(monkeypatch):
    """By XLA; but few kept tokens by kernels that stop at the last."""
    monkeypatch.setattr(prepare, "local_gpu", lambda: H200)
    shape = 2048, 128, 65536
    for softcap in (None, 30.0):  # it changes no kernel
        assert launched(shape, softcap=softcap, memory_budget=ENOUGH) == ["statistics", "de", "dc"]
        assert launched(shape, softcap=softcap, memory_budget=ENOUGH - 1) == WINDOW


@pytest.mark.parametrize(
    "call",
    [
        *({"shape": shape} for shape in ((255, 128, 4096), (512, 96, 4096), (512, 64, 4096), (512, 128, 4093))),
        {"shape": (512, 128, 4104), "vocab_axis": 1},
        {"dtype": jnp.float32},
        {"bias": True},
    ],
)
def test_other_calls_are_left_to_triton(call):
    assert launched(**call) == []


def test_label_smoothing_computes_no_logits_again():
    """Triton's kernels do. Where the forward pass forms the gradients, or saves exponentials, these here multiply."""
    assert launched(label_smoothing=0.1, memory_budget=0) == []
    assert "statistics" in launched(label_smoothing=0.1, memory_budget=2**30)


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70), st.integers(1, 9))
def test_each_tile_is_computed_once(pairs, column_tiles, units, group):
    found = []
    for unit in range(units):
        count, at = spread(jnp.int32(unit), units, jnp.int32(pairs), jnp.int32(column_tiles), group)
        if int(count):
            row, column = at(jnp.arange(int(count)))
            found += zip(np.asarray(row).tolist(), np.asarray(column).tolist(), strict=True)
    assert sorted(found) == [(i, j) for i in range(pairs) for j in range(column_tiles)]


SMALL = Gpu("9.0", 4, interpreted=True)
TOKENS, WIDTH, COLUMNS = 304, 128, 256
VOCABULARIES = 632, 640  # by vocab_axis: of (V, D) a multiple of 8, of (D, V) a multiple of 64
PADDED = 640  # columns of dz and of P
EVERY = np.full(1, TOKENS, np.int32)
WINDOWS = Windows(PADDED, COLUMNS, beyond=True)


def problem_of(inputs: Inputs, head: Head, gpu: Gpu = SMALL, with_mean: bool = False) -> Problem:
    (tokens, width), dtype = inputs.e.shape, str(inputs.e.dtype)
    request = Request(tokens, width, head.vocabulary(inputs.c), dtype, head, False, Wanted(True, True, False), 0)
    return Problem(replace(request, numbers=WantedNumbers(mean=with_mean)), gpu, inputs)


def problem(vocab_axis: int):
    keys, vocabulary = jax.random.split(jax.random.key(0), 3), VOCABULARIES[vocab_axis]
    e = jax.random.normal(keys[0], (TOKENS, WIDTH)).astype(BF16)
    c = (0.3 * jax.random.normal(keys[1], (vocabulary, WIDTH))).astype(BF16)
    targets = jax.random.randint(keys[2], (TOKENS,), 0, vocabulary, jnp.int32)
    z = e.astype(jnp.float32) @ c.astype(jnp.float32).T
    return Inputs(e, c if vocab_axis == 0 else c.T, None, targets), z


def error(found, wanted) -> float:
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def sums(inputs: Inputs, reference, save: bool, head: Head):
    return HOPPER.sums(Step(HOPPER, LOGITS, 2), problem_of(inputs, head), None, reference, save)


def form_dz(inputs: Inputs, lse, of, count, window, head: Head):
    """Relative to lse, so that the cotangents of log-masses of 0 are those that are given."""
    step, numbers = Step(HOPPER, LOGITS, windows=WINDOWS), Numbers(jnp.zeros_like(lse), lse, lse)
    return HOPPER.form_dz(step, problem_of(inputs, head), numbers, Cotangents(*of, None), count)(window)[0]


def products(inputs: Inputs, count, head: Head, unit=None, windows=WINDOWS):
    return HOPPER.products(Multiplying(HOPPER, DE[0], DC[0], windows), problem_of(inputs, head), unit, count)


@pytest.mark.parametrize(("vocab_axis", "softcap", "scale"), [(0, None, None), (1, 5.0, 1.5)])
def test_statistics_and_what_is_saved(vocab_axis, softcap, scale):
    inputs, z = problem(vocab_axis)
    z = z if scale is None else scale * z
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    target = z[jnp.arange(TOKENS), inputs.targets]
    given = inputs._replace(scale=None if scale is None else jnp.full(1, scale))
    found = sums(given, target, True, Head(softcap=softcap, vocab_axis=vocab_axis))
    lse = jax.nn.logsumexp(found.log_mass, axis=0) + target
    np.testing.assert_allclose(lse, jax.nn.logsumexp(z, axis=1), rtol=2e-6)
    slope = 1.0 if softcap is None else 1 - (z / softcap) ** 2
    vocabulary = VOCABULARIES[vocab_axis]
    assert found.saved.shape == (TOKENS, PADDED)
    assert error(found.saved[:, :vocabulary], jnp.exp(z - target[:, None]) * slope) < 2.0**-9
    assert not np.any(found.saved[:, vocabulary:])


def with_temperatures(inputs: Inputs) -> Inputs:
    return inputs._replace(inverse_temperature=jnp.linspace(0.3, 2.0, TOKENS), scale=jnp.full(1, 1.5))


def test_a_sum_for_the_mean_that_overflows_is_left_to_the_rescue():
    """The exponentials' sum is finite still."""
    inputs, z = problem(0)
    reference = jnp.max(z, axis=1).at[7].add(-86.5)
    found = HOPPER.sums(Step(HOPPER, LOGITS, 1), problem_of(inputs, Head(), with_mean=True), None, reference, False)
    assert np.isfinite(sums(inputs, reference, False, Head()).log_mass).all()
    assert np.flatnonzero(~np.isfinite(found.log_mass[0])).tolist() == [7]


def test_a_logit_that_is_computed_again_is_not_above_lse():
    inputs, _ = problem(0)
    given, window = with_temperatures(inputs), WINDOWS.window(jnp.int32(1))
    of = jnp.stack([jnp.ones(TOKENS), jnp.zeros(TOKENS)])
    dz = form_dz(given, jnp.full(TOKENS, -200.0), of, EVERY, window, Head())
    largest = jnp.max(jnp.abs(given.inverse_temperature * given.scale))
    assert jnp.max(jnp.abs(dz)) <= 1.01 * largest


def test_passes_over_shards_with_temperatures():
    """Both passes, from saved exponentials. (The interpreter lacks what adds to de where nothing is saved.)"""
    program = replace(OF_SHARDS, leading=(304,), width=128, vocabulary=640, temperatures=True, softcap=9.0)
    check_shards(program, (0, 256, 640), SMALL)


@pytest.mark.parametrize("softcap", [0.1, 30.0, 1e6])
def test_a_softcap_of_any_size_is_as_exact_as_the_logits(softcap):
    """1 − 2/(1 + exp(2x)), times a large cap, would be off by more than any logit: the cap times 2⁻²³."""
    inputs, z = problem(0)
    capped = softcap * np.tanh(np.asarray(z, np.float64) / softcap)
    target = jnp.asarray(capped[np.arange(TOKENS), np.asarray(inputs.targets)], jnp.float32)
    found = jax.nn.logsumexp(sums(inputs, target, False, Head(softcap=softcap)).log_mass, axis=0) + target
    exact = np.log(np.sum(np.exp(capped), axis=1))
    largest = np.max(np.abs(capped))
    np.testing.assert_allclose(found, exact, rtol=0, atol=8 * 2.0**-24 * (largest + np.log(VOCABULARIES[0])))


@pytest.mark.parametrize("number", range(3))
def test_a_window_of_dz_and_its_part_of_dc(number):
    """The last window has fewer columns; only tokens up to `count` take part, the rest have embeddings of 0."""
    inputs, z = problem(0)
    # All logits far below 0: beyond V, where they are 0, exponentials relative to lse are infinite.
    inputs = inputs._replace(e=inputs.e.at[:, 0].set(1), c=inputs.c.at[:, 0].set(-600))
    z = inputs.e.astype(jnp.float32) @ inputs.c.astype(jnp.float32).T
    count = 270
    kept = jnp.arange(TOKENS) < count
    inputs = inputs._replace(e=jnp.where(kept[:, None], inputs.e, 0))
    lse = jnp.where(kept, jax.nn.logsumexp(z, axis=1), FLOAT32_MAX)
    cotangents = jnp.where(kept, jnp.stack([jnp.linspace(0.5, 1.5, TOKENS), jnp.linspace(-1.0, -2.0, TOKENS)]), 0)
    window = WINDOWS.window(jnp.int32((number + 1) % WINDOWS.count))
    vocabulary = VOCABULARIES[0]
    columns = slice(number * COLUMNS, min((number + 1) * COLUMNS, vocabulary))
    few = jnp.array([count], jnp.int32)
    dz = form_dz(inputs, lse, cotangents, few, window, Head())
    p = jnp.exp(jnp.where(kept[:, None], z - lse[:, None], -jnp.inf))
    is_target = inputs.targets[:, None] == jnp.arange(vocabulary)
    wanted = cotangents[0][:, None] * p + cotangents[1][:, None] * is_target
    here = dz[:, : columns.stop - columns.start]
    assert error(here[:count], wanted[:count, columns]) < 2.0**-9
    assert not np.any(dz[:count, columns.stop - columns.start : PADDED - columns.start]), "what multiplies no row of c"
    dc = products(inputs, few, Head()).put_dc(jnp.full_like(inputs.c, 7), dz, window)
    assert error(dc[columns], here.astype(jnp.float32).T @ inputs.e.astype(jnp.float32)) < 2.0**-9
    others = np.delete(np.arange(vocabulary), np.arange(vocabulary)[columns])
    assert np.all(np.asarray(dc)[others] == 7)


def test_a_classifier_of_shape_d_by_v():
    inputs, z = problem(1)
    head = Head(vocab_axis=1)
    lse, window = jax.nn.logsumexp(z, axis=1), WINDOWS.window(jnp.int32(2))
    dz = form_dz(inputs, lse, jnp.stack([jnp.ones(TOKENS), -jnp.ones(TOKENS)]), EVERY, window, head)
    wanted = jnp.exp(z - lse[:, None]) - (inputs.targets[:, None] == jnp.arange(VOCABULARIES[1]))
    assert error(dz, wanted[:, COLUMNS : 2 * COLUMNS]) < 2.0**-9
    dc = products(inputs, EVERY, head, unit=jnp.float32(2)).put_dc(jnp.zeros_like(inputs.c), dz, window)
    assert error(dc[:, COLUMNS : 2 * COLUMNS], 2 * inputs.e.astype(jnp.float32).T @ dz.astype(jnp.float32)) < 2.0**-9
    assert not jnp.any(np.delete(dc, np.arange(COLUMNS, 2 * COLUMNS), axis=1))


@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("kept", [0, 100, 304])
def test_dc_of_saved_exponentials(kept, vocab_axis):
    """Of the whole vocabulary at once; rows of P from the next multiple of 64 on may hold anything."""
    inputs, _ = problem(vocab_axis)
    e, c, head = inputs.e, inputs.c, Head(vocab_axis=vocab_axis)
    p = jax.random.normal(jax.random.key(3), (TOKENS, PADDED)).astype(BF16).at[:, VOCABULARIES[vocab_axis] :].set(0)
    p = jnp.where(jnp.arange(TOKENS)[:, None] < kept, p, 0).at[-(-kept // 64) * 64 :].set(jnp.nan)
    windows = Windows(PADDED, PADDED, beyond=True)
    of = products(inputs, jnp.array([kept], jnp.int32), head, windows=windows)
    found = jnp.moveaxis(of.put_dc(jnp.full_like(c, 7), p, ALL_COLUMNS), vocab_axis, 0)
    wanted = (p[:kept].astype(jnp.float32).T @ e[:kept].astype(jnp.float32))[: len(found)]
    assert error(found, wanted) < 2.0**-9 if kept else not found.any()


def interpret(monkeypatch, **parameters) -> None:
    """Has the interpreter run the kernels with these parameters changed."""
    before = matmul.interpret_params

    def changed(gpu):
        found = before(gpu)
        return found and replace(found, **parameters)

    monkeypatch.setattr(matmul, "interpret_params", changed)


@pytest.fixture
def adding_copies(monkeypatch):
    """The interpreter knows no copy that adds. A sum stands in its place, which reads NaN beyond an array's edge."""
    copy = plgpu.copy_smem_to_gmem

    def added(source, destination, reduction_op=None):
        if reduction_op == "add":
            before = plgpu.load(destination, optimized=False)  # type: ignore[reportCallIssue]
            source[...] += plgpu.layout_cast(before, plgpu.Layout.WGMMA)
            plgpu.commit_smem()  # the copy reads what was just written
        copy(source, destination)

    interpret(monkeypatch, out_of_bounds_reads="uninitialized")
    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", added)


@pytest.mark.parametrize("number", range(len(DE)))
def test_every_tile_that_a_product_may_choose_fits_shared_memory(number):
    for axis in (0, 1):

        def every(e, c, dz, de, dc, n, axis=axis):
            problem = problem_of(Inputs(e, c, None, None), Head(vocab_axis=axis), H200)  # type: ignore[arg-type]
            windows = Windows(4096, 1024, beyond=True)
            of = HOPPER.products(Multiplying(HOPPER, DE[number], DC[number], windows), problem, None, n)
            window = windows.window(jnp.int32(0))
            return of.add_de(de, dz, window), of.put_dc(dc, dz, window)

        c = S((4096, 768) if axis == 0 else (768, 4096), BF16)
        arrays = S((512, 768), BF16), c, S((512, 1024), BF16), S((512, 768), jnp.float32), c, S((1,), jnp.int32)
        assert sorted(for_hopper(every, *arrays)) == ["dc", "de"]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("columns", SUMMED)
def test_dc_summed_over_chunks(columns, vocab_axis):
    """In block floating point: every row of dc, a vocabulary entry, is as accurate as one rounding leaves it.

    Some entries are a thousand times as frequent as others, one has an infinite exponential, and one NaN. Memory that
    nothing wrote, and rows of P and e from the next multiple of 64 on, may hold anything. Chunks without tokens write
    nothing.
    """
    draw, head = np.random.default_rng([columns, vocab_axis]), Head(vocab_axis=vocab_axis)
    vocabulary, width, tokens = (int(x) * y for x, y in zip(draw.integers(2, [8, 7, 20]), (64, 64, 8), strict=True))
    vocabulary -= 8 * int(draw.integers(8)) * (vocab_axis == 0)
    columns_of_p = saved_shape(tokens, vocabulary)[1]
    frequency = 10.0 ** draw.uniform(-3, 0, vocabulary)
    frequency[:2] = 0.0, 1.0
    counts = [*draw.permutation([0, tokens, *draw.integers(0, tokens, 3)]), draw.integers(0, tokens)]
    request = Request(tokens, width, vocabulary, "bfloat16", head, False, Wanted(True, True, False), 0)
    sum_dc = jax.jit(partial(HOPPER.sum_dc, Step(HOPPER, SUMMED[columns]), request, SMALL))
    bad, want = int(draw.integers(2, vocabulary)), np.zeros((vocabulary, width))
    dc = jnp.full((vocabulary, width) if vocab_axis == 0 else (width, vocabulary), jnp.nan, BF16)
    steps = jnp.zeros((-(-width // columns), steps_shape(vocabulary, width)[1]), jnp.float32)
    for count in counts:
        p, e = (jnp.asarray(draw.normal(size=(tokens, n)), BF16) for n in (vocabulary, width))
        kept = jnp.arange(tokens)[:, None] < count
        p = jnp.where(kept, p * frequency.astype(BF16), 0)
        want += np.float64(p).T @ np.float64(e)
        p = jnp.pad(p, ((0, 0), (0, columns_of_p - vocabulary)))
        p = p.at[count - 1, bad].set(jnp.inf).at[count - 1, bad - 1].set(jnp.nan) if count else p
        p, e = (x.at[-(-count // 64) * 64 :].set(jnp.nan) for x in (p, e))
        before = [np.asarray(x) for x in (dc.view(jnp.int16), steps)]
        dc, steps = sum_dc(dc, steps, Part(p, e, None, jnp.full(1, count, jnp.int32)))
        if count == 0:
            assert all(np.array_equal(x, y) for x, y in zip(before, (dc.view(jnp.int16), steps), strict=True))
    found = decoded(dc.view(jnp.int16), steps, columns, vocab_axis).astype(BF16)
    found = np.moveaxis(np.float64(found), vocab_axis, 0)
    assert not np.isfinite(found[bad - 1 : bad + 1]).any()
    found, want = (np.delete(x, [bad - 1, bad], axis=0) for x in (found, want))
    of_rounding = np.linalg.norm(np.float64(jnp.asarray(want, BF16)) - want, axis=1)
    assert (np.linalg.norm(found - want, axis=1) <= 1.5 * of_rounding).all()
    assert np.linalg.norm(found - want) <= 1.05 * np.linalg.norm(of_rounding)


@pytest.fixture
def formed_on_an_h200(monkeypatch):
    """The forward pass forms the gradients."""
    monkeypatch.setattr(prepare, "local_gpu", lambda: H200)
    monkeypatch.setattr(choose, "_is_faster", lambda *_: True)
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


@pytest.mark.parametrize(("width", "vocab_axis"), [(256, 0), (192, 1)])
def test_dc_is_summed_by_one_kernel_in_both_layouts(width, vocab_axis, formed_on_an_h200):
    names = launched((2048, width, 65536), vocab_axis=vocab_axis, memory_budget=2**27, reduction="mean")
    assert sorted(set(names)) == ["dc_sum", "de", "statistics"]


def test_a_tolerance_of_0_is_the_program_without_one(formed_on_an_h200):
    options = {"memory_budget": 2**27, "reduction": "mean"}
    programs = [
        str(jax.make_jaxpr(function)(*arrays))
        for function, *arrays in (
            call((2048, 256, 65536), **options, **of)
            for of in ({}, {"gradient_tolerance": 0.0}, {"gradient_tolerance": 2.0**-7})
        )
    ]
    assert programs[0] == programs[1]
    assert ["cce_thresholds" in x for x in programs] == [False, False, True]


@pytest.mark.parametrize("seed", range(4))
def test_drawn_selections(seed, monkeypatch):
    """Of chunks of 256 tokens, some of them ignored, with ties and logits that are NaN."""
    draw = np.random.default_rng(seed)
    axis, k, tokens = seed % 2, (2, 1, 40, 5)[seed], int(draw.integers(300, 600 if seed else 3000))
    vocabulary = 64 * int(draw.integers(3, 12)) if axis else 32 * int(draw.integers(5, 24))
    head = Head(float(draw.uniform(3, 20)) if draw.integers(2) else None, axis)
    e, c = draw.normal(size=(tokens, 128)), draw.normal(size=(vocabulary, 128)) * 3 / 128**0.5
    if seed == 3:  # logits far below those of columns that do not exist, which are 0
        e, c = 6 * abs(e), -abs(c)
    c[vocabulary // 2 :] = c[: vocabulary - vocabulary // 2]  # each logit occurs twice
    targets = np.where(draw.random(tokens) < 0.2, -1, draw.integers(0, vocabulary, tokens))
    inputs = Inputs(
        jnp.asarray(e, BF16),
        jnp.asarray(c if axis == 0 else c.T, BF16),
        None,
        jnp.asarray(targets, jnp.int32),
        None,
        jnp.full(1, 1.3) if draw.integers(2) else None,
        jnp.asarray(draw.uniform(0.3, 2.5, tokens), jnp.float32) if seed else None,
        jnp.asarray(draw.integers(-1, vocabulary + 1, (tokens, 3)), jnp.int32),
    )
    request = replace(
        Request(tokens, 128, vocabulary, "bfloat16", head, False, None, 2**30),
        numbers=WantedNumbers(mean=bool(draw.integers(2))),
        with_temperature=seed > 0,
        ids=3,
    )
    plan = plan_of(request, SMALL, "cce")
    assert selections.step_of(plan, 256) is not None
    monkeypatch.setattr(selections, "MOST", 256)
    monkeypatch.setattr(selections, "CHUNKS_OF_STEP", (3, 1, 16, 2)[seed])
    asked = selections.Asked(k, bool(draw.integers(2)))
    numbers, found = selections.numbers_and_selections(inputs, plan, asked)
    want, wanted = selections.numbers_and_selections(inputs, replace(plan, gpu=None), asked)
    assert selections.step_of(replace(plan, gpu=None), 256) is None
    # Two matmuls agree to the digits of the logits. log_mass and mean relative to the reference may be far smaller.
    whole, of_want = (x.relative_to(jnp.zeros(tokens))._replace(reference=None) for x in (numbers, want))
    for a, b in zip((*whole, *found), (*of_want, *wanted), strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < 1e-6 or a.dtype == jnp.int32
    # Rounding may exchange logits that are nearly equal: each id's own logit is what its place asks for.
    kept, z = targets >= 0, np.float64(inputs.e) @ np.float64(inputs.c if axis else inputs.c.T)
    z = z if inputs.scale is None else 1.3 * z
    z = z if head.softcap is None else head.softcap * np.tanh(z / head.softcap)
    z = (z if inputs.inverse_temperature is None else z * np.float64(inputs.inverse_temperature)[:, None])[kept]
    ids = np.asarray(found.top_ids)[kept]
    np.testing.assert_allclose(np.take_along_axis(z, ids, 1), found.top_logits[kept], atol=4e-6 * np.abs(z).max())
    assert all(len(set(row)) == k for row in ids)
    bad = jnp.asarray(c, BF16).at[jnp.array([3, vocabulary - 1])].set(jnp.nan)
    inputs = inputs._replace(c=bad if axis == 0 else bad.T)
    numbers, found = selections.numbers_and_selections(inputs, plan, asked)
    _, wanted = selections.numbers_and_selections(inputs, replace(plan, gpu=None), asked)
    assert np.isnan(np.asarray(numbers.lse)[np.asarray(inputs.targets) >= 0]).all()
    assert error(found.top_logits, wanted.top_logits) < 1e-6


@pytest.mark.parametrize(
    ("bias", "vocabulary", "by"), [(False, 640, ["whole_logits"]), (True, 640, []), (False, 648, [])]
)
def test_the_kernel_of_the_likeliest_ids(bias, vocabulary, by):
    """XLA computes the logits where the kernel does not take the arrays."""
    given = S((512, 128), BF16), S((vocabulary, 128), BF16), S((512,), jnp.int32), S((vocabulary,), BF16)

    def run(e, c, targets, bias_):
        return linear_log_probs(e, c, targets, bias_ if bias else None, top_k=3, entropy=True)

    assert for_hopper(run, *given) == by
