"""The kernels for Hopper: which calls they compute, and what they compute, in the interpreter of JAX 0.11."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from cce_jax import core, linear_cross_entropy
from cce_kernels import backward, budget, config, forward, hopper, hopper_kernels, tiles
from cce_kernels.budget import whole_bytes
from cce_kernels.config import Gpu, TileConfig, Tiles
from cce_kernels.groups import Beside, Wanted
from cce_kernels.logits import Head
from cce_kernels.tokens import Kept
from cce_kernels.windows import Groups
from tests.lowering import for_hopper, loop_equations

S = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16
SHAPE = 512, 128, 4096
GROUP = ["statistics", "dz", "de", "dc"]


@pytest.fixture(autouse=True, scope="module")
def in_every_jax():
    """Also where calls do not come here, because it is not the JAX that the kernels were measured with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MOSAIC", True)
        yield


def launched(*of, **options):
    return for_hopper(*call(*of, **options))


def call(shape=SHAPE, dtype=BF16, vocab_axis=0, bias=False, gradient=True, memory_budget=0, **options):
    """The loss or its gradient, and its arguments."""
    n, d, v = shape

    def loss(e, c, t, bias_):
        more = {"bias": bias_} if bias else {}
        return linear_cross_entropy(
            e, c, t, impl="cce", vocab_axis=vocab_axis, memory_budget=memory_budget, **more, **options
        )

    c = S((v, d) if vocab_axis == 0 else (d, v), dtype)
    arrays = S((n, d), dtype), c, S((n,), jnp.int32), S((v,), dtype)
    return jax.value_and_grad(loss, (0, 1)) if gradient else loss, *arrays


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "logit_scale": 2.0, "z_loss": 1e-4}])
def test_a_gradient_is_four_kernels_that_the_device_need_not_choose_between(dtype, vocab_axis, options):
    assert launched(dtype=dtype, vocab_axis=vocab_axis, **options) == GROUP


def test_beside_its_kernels_a_group_computes_single_numbers():
    """What it needs of each token is computed once for all groups, not by a launch more in each."""
    launches = "custom_vmap_call", "run_state", "empty", "optimization_barrier"
    equations = loop_equations(*call())
    assert [x.primitive.name for x in equations].count("run_state") == 3
    rest = [x for x in equations if x.primitive.name not in launches]
    assert max(v.aval.size for x in rest for v in x.outvars) == 1


def test_what_is_saved_is_multiplied_too(monkeypatch):
    """By XLA where everything is saved and there is memory for what it holds beside."""
    monkeypatch.setattr(core, "local_gpu", lambda: config.H200)
    shape = 2048, 128, 65536
    exponentials = 2 * 2048 * 65536
    assert launched(shape, memory_budget=whole_bytes(*shape)) == ["statistics"]
    assert launched(shape, memory_budget=whole_bytes(*shape) - 1) == ["statistics", "dc", "saved_de"]
    assert launched(shape, memory_budget=exponentials) == ["statistics", "dc", "saved_de"]
    assert launched(shape, memory_budget=exponentials - 1) == [*GROUP, "saved_de"]


def test_what_is_saved_under_a_softcap_is_left_to_xla_and_triton():
    assert launched((2048, 128, 65536), softcap=30.0, memory_budget=2**31) == ["statistics"]
    part = launched((2048, 128, 65536), softcap=30.0, memory_budget=2**29)
    assert part == GROUP  # of the others


def test_evaluation_is_the_statistics():
    assert launched(gradient=False) == ["statistics"]
    assert launched((509, 128, 4096), gradient=False) == []  # e is not gathered, so not in whole tiles


@pytest.mark.parametrize("tokens", [256, 509])
def test_any_number_of_tokens_from_256_on(tokens):
    assert launched((tokens, 128, 4096)) == GROUP


def test_a_call_that_does_not_look_for_ignored_tokens_launches_the_same(monkeypatch):
    """As bench.ignored has it, to measure what looking costs."""
    for module in (forward, backward):
        monkeypatch.setattr(module, "kept_tokens", lambda *_: None)
    assert launched() == GROUP


@pytest.mark.parametrize(
    "call",
    [{"shape": (255, 128, 4096)}, {"shape": (512, 96, 4096)}, {"shape": (512, 64, 4096)}, {"dtype": jnp.float32},
     {"shape": (512, 128, 4093)}, {"shape": (512, 128, 4104)}, {"bias": True}, {"label_smoothing": 0.1}],
)  # fmt: skip
def test_other_calls_are_left_to_triton(call):
    assert launched(**call) == []


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70), st.integers(1, 9))
def test_each_tile_is_computed_once(pairs, column_tiles, units, group):
    found = []
    for unit in range(units):
        count, at = hopper_kernels._spread(jnp.int32(unit), units, jnp.int32(pairs), jnp.int32(column_tiles), group)
        if int(count):
            row, column = at(jnp.arange(int(count)))
            found += zip(np.asarray(row).tolist(), np.asarray(column).tolist(), strict=True)
    assert sorted(found) == [(i, j) for i in range(pairs) for j in range(column_tiles)]


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=200), st.sampled_from([8, 16, 32]))
def test_where_a_block_of_kept_tokens_can_be_read_side_by_side(kept, block):
    targets = jnp.where(jnp.asarray(kept), 0, -1)
    of = Kept.of(targets, targets.size)
    order = np.flatnonzero(kept)
    for k, start in enumerate(np.asarray(of.starts(block))):
        here = order[k * block : (k + 1) * block]
        if start >= 0 and here.size:
            assert start % 8 == 0
            assert start + block <= targets.size
            assert np.array_equal(here, np.arange(start, start + here.size))
        elif here.size:
            assert here[0] % 8 or here[0] + block > targets.size or here[-1] - here[0] != here.size - 1


INTERPRETED = pytest.mark.skipif(not hasattr(plgpu, "InterpretGPUParams"), reason="JAX 0.10 has no interpreter for it")
SMALL = Gpu("9.0", 4)
TOKENS, WIDTH, VOCABULARY, COLUMNS = 304, 128, 640, 256
EVERY = np.full(1, TOKENS, np.int32)
GROUPS = Groups(VOCABULARY, COLUMNS, beyond=True)


def interpreter():
    return plgpu.InterpretGPUParams(detect_races=True)


def problem(vocab_axis: int):
    keys = jax.random.split(jax.random.key(0), 3)
    e = jax.random.normal(keys[0], (TOKENS, WIDTH)).astype(BF16)
    c = (0.3 * jax.random.normal(keys[1], (VOCABULARY, WIDTH))).astype(BF16)
    targets = jax.random.randint(keys[2], (TOKENS,), 0, VOCABULARY, jnp.int32)
    z = e.astype(jnp.float32) @ c.astype(jnp.float32).T
    return e, c if vocab_axis == 0 else c.T, targets, z


def error(found, wanted) -> float:
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@INTERPRETED
@pytest.mark.parametrize(("vocab_axis", "softcap"), [(0, None), (1, 5.0)])
def test_statistics_and_what_is_saved(vocab_axis, softcap):
    e, c, targets, z = problem(vocab_axis)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    target = z[jnp.arange(TOKENS), targets]
    saved = S((TOKENS, VOCABULARY), BF16)
    head = Head(softcap=softcap, vocab_axis=vocab_axis)
    lse, p = hopper_kernels.statistics(e, c, target, None, EVERY, saved, head=head, splits=2, interpret=interpreter())
    np.testing.assert_allclose(jax.nn.logsumexp(lse, axis=0), jax.nn.logsumexp(z, axis=1), rtol=2e-6)
    assert error(p, jnp.exp(z - target[:, None])) < 2.0**-9


@INTERPRETED
def test_statistics_of_blocks_that_are_read_where_they_lie():
    """The tokens are rows 8 to 263 of e; the third block's lie apart, and are left to another kernel."""
    e, c, _, z = problem(0)
    target = jnp.zeros(TOKENS)
    starts, few = jnp.array([8, 136, -1], jnp.int32), jnp.array([290], jnp.int32)
    lse, _ = hopper_kernels.statistics(e, c, target, starts, few, None, head=Head(), splits=2, interpret=interpreter())
    found = jax.nn.logsumexp(lse, axis=0)
    np.testing.assert_allclose(found[:256], jax.nn.logsumexp(z, axis=1)[8:264], rtol=2e-6)


@INTERPRETED
@pytest.mark.parametrize("group", range(3))
def test_a_group_of_dz_and_its_part_of_dc(group):
    """The last group has fewer columns; only tokens up to `count` take part, the rest have embeddings of 0."""
    e, c, targets, z = problem(0)
    count = 270
    kept = jnp.arange(TOKENS) < count
    e = jnp.where(kept[:, None], e, 0)
    lse = jnp.where(kept, jax.nn.logsumexp(z, axis=1), jnp.inf)
    cotangents = jnp.where(kept, jnp.stack([jnp.linspace(0.5, 1.5, TOKENS), jnp.linspace(-1.0, -2.0, TOKENS)]), 0)
    window = GROUPS.window(jnp.int32((group + 1) % GROUPS.count))
    columns = slice(group * COLUMNS, min((group + 1) * COLUMNS, VOCABULARY))
    options = {"head": Head(), "gpu": SMALL, "interpret": interpreter()}
    few = jnp.array([count], jnp.int32)
    dz = hopper_kernels.dz_of_groups(e, c, lse, targets, cotangents, few, groups=GROUPS, **options)(window)
    p = jnp.exp(jnp.where(kept[:, None], z - lse[:, None], -jnp.inf))
    wanted = cotangents[0][:, None] * p + cotangents[1][:, None] * (targets[:, None] == jnp.arange(VOCABULARY))
    here = dz[:, : columns.stop - columns.start]
    assert error(here[:count], wanted[:count, columns]) < 2.0**-9
    products = hopper_kernels.products(e, c, unit=None, count=few, groups=GROUPS, **options)
    dc = products.put_dc(jnp.full_like(c, 7), dz, window)
    assert error(dc[columns], here.astype(jnp.float32).T @ e.astype(jnp.float32)) < 2.0**-9
    others = np.delete(np.arange(VOCABULARY), np.arange(VOCABULARY)[columns])
    assert np.all(np.asarray(dc)[others] == 7)


@INTERPRETED
def test_a_classifier_of_shape_d_by_v():
    e, c, targets, z = problem(1)
    lse, window = jax.nn.logsumexp(z, axis=1), GROUPS.window(jnp.int32(2))
    ones = jnp.stack([jnp.ones(TOKENS), -jnp.ones(TOKENS)])
    options = {"head": Head(vocab_axis=1), "gpu": SMALL, "interpret": interpreter()}
    dz = hopper_kernels.dz_of_groups(e, c, lse, targets, ones, EVERY, groups=GROUPS, **options)(window)
    wanted = jnp.exp(z - lse[:, None]) - (targets[:, None] == jnp.arange(VOCABULARY))
    assert error(dz, wanted[:, COLUMNS : 2 * COLUMNS]) < 2.0**-9
    dc = hopper_kernels.products(e, c, unit=jnp.float32(2), count=EVERY, groups=GROUPS, **options).put_dc(
        jnp.zeros_like(c), dz, window
    )
    assert error(dc[:, COLUMNS : 2 * COLUMNS], 2 * e.astype(jnp.float32).T @ dz.astype(jnp.float32)) < 2.0**-9
    assert not jnp.any(np.delete(dc, np.arange(COLUMNS, 2 * COLUMNS), axis=1))


@INTERPRETED
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("kept", [0, 100, 128])
def test_dc_of_two_parts_of_the_tokens(kept, vocab_axis):
    """Of those saved, 128, some are kept, and rows of P from the next multiple of 64 on may hold anything."""
    e, c, *_ = problem(vocab_axis)
    keys = jax.random.split(jax.random.key(3), 2)
    dz = jax.random.normal(keys[0], (TOKENS - 128, COLUMNS)).astype(BF16)
    p = jax.random.normal(keys[1], (128, VOCABULARY)).astype(BF16)
    p = jnp.where(jnp.arange(128)[:, None] < kept, p, 0).at[-(-kept // 64) * 64 :].set(jnp.nan)
    first = Beside(p, e[:128], jnp.array([kept], jnp.int32))
    products = hopper_kernels.products(
        e[128:], c, head=Head(vocab_axis=vocab_axis), unit=None, count=jnp.array([TOKENS - 128], jnp.int32), gpu=SMALL,
        groups=GROUPS, beside=first, interpret=interpreter(),
    )  # fmt: skip
    found = jnp.moveaxis(products.put_dc(jnp.full_like(c, 7), dz, GROUPS.window(jnp.int32(2))), vocab_axis, 0)
    group = slice(COLUMNS, 2 * COLUMNS)
    wide, of_p = e.astype(jnp.float32), p[:kept, group].astype(jnp.float32)
    assert error(found[group], dz.astype(jnp.float32).T @ wide[128:] + of_p.T @ wide[:kept]) < 2.0**-9
    assert np.all(np.delete(np.asarray(found), np.arange(COLUMNS, 2 * COLUMNS), axis=0) == 7)


@INTERPRETED
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("kept", [0, 100, 304])
def test_de_of_saved_tokens(kept, vocab_axis):
    """In the place of another array, from rows of P that may hold anything where no token is kept."""
    _, c, *_ = problem(vocab_axis)
    keys = jax.random.split(jax.random.key(5), 2)
    p = jax.random.uniform(keys[0], (TOKENS, VOCABULARY)).astype(BF16).at[kept:].set(jnp.nan)
    r = jax.random.normal(keys[1], (TOKENS,))
    found = hopper_kernels.de_of_saved(
        p, r, c, jnp.array([kept], jnp.int32), jnp.full((TOKENS, WIDTH), 7, BF16), head=Head(vocab_axis=vocab_axis),
        gpu=SMALL, interpret=interpreter(),
    )  # fmt: skip
    wide = (c if vocab_axis == 0 else c.T).astype(jnp.float32)
    wanted = r[:kept, None] * (p[:kept].astype(jnp.float32) @ wide)
    assert found.shape == (TOKENS, WIDTH)
    assert kept == 0 or error(found[:kept], wanted) < 2.0**-9


@pytest.fixture
def both_interpreters(monkeypatch):
    """Calls go as on a GPU with few multiprocessors; Triton's kernels run in their interpreter, these in theirs.

    It knows no copy that adds: in its place stands a sum, whose tiles must not reach beyond the array.
    """
    copy, launch, serves = plgpu.copy_smem_to_gmem, hopper.launch, tiles.for_hopper

    def added(source, destination, reduction_op=None):
        if reduction_op == "add":
            before = plgpu.load(destination, optimized=False)  # type: ignore[reportCallIssue]
            source[...] += plgpu.layout_cast(before, plgpu.Layout.WGMMA)
        copy(source, destination)

    def tiles_of(dtype, width, interpret):
        return SMALL, Tiles.same(TileConfig(rows=128, columns=32, depth=16, warps=4, stages=1))

    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", added)
    monkeypatch.setattr(hopper_kernels, "launch", lambda *a, **k: launch(*a, **k | {"interpret": interpreter()}))
    for module in (forward, backward):
        monkeypatch.setattr(module, "for_hopper", lambda *call: serves(*call[:-1], interpret=False))
    for module in (forward, backward, budget):
        monkeypatch.setattr(module, "target_of", tiles_of)


@INTERPRETED
@pytest.mark.parametrize(("tokens", "saved"), [(512, 0), (512, 128), (509, 128), (512, 512), (509, 512)])
def test_both_passes(tokens, saved, both_interpreters):
    """A third of the tokens ignored; of those kept none, some or all with their exponentials saved."""
    vocabulary, head = 768, Head()
    keys = jax.random.split(jax.random.key(1), 4)
    e = jax.random.normal(keys[0], (tokens, WIDTH)).astype(BF16)
    c = (0.3 * jax.random.normal(keys[1], (vocabulary, WIDTH))).astype(BF16)
    targets = jax.random.randint(keys[2], (tokens,), 0, vocabulary, jnp.int32)
    targets = jnp.where(jax.random.uniform(keys[3], (tokens,)) < 0.3, -1, targets)
    weights = jnp.where(targets >= 0, jnp.linspace(0.5, 1.5, tokens), 0)

    def exact(e, c):
        z = e @ c.T
        target = jnp.take_along_axis(z, jnp.maximum(targets, 0)[:, None], 1)[:, 0]
        return jnp.sum(weights * (jax.nn.logsumexp(z, axis=1) - target))

    wanted, (de, dc) = jax.value_and_grad(exact, (0, 1))(e.astype(jnp.float32), c.astype(jnp.float32))
    run = partial(forward.statistics, e, c, None, targets, None, head=head, with_sum=False, interpret=True)
    lse, target, _, p = run(may_copy=True, saved_tokens=saved)
    np.testing.assert_allclose(jnp.sum(weights * (lse - target)), wanted, rtol=1e-5)
    first = None
    for of_e, of_c in [(True, True), *[(True, False), (False, True)] * (saved > 0), (True, True)]:
        found_e, found_c, _, p = backward.gradients(
            e, c, None, targets, None, lse, target, p, jnp.stack([weights, -weights]), head=head,
            wanted=Wanted(of_e, of_c, False), memory_budget=0, interpret=True,
        )  # fmt: skip
        assert (found_e is not None, found_c is not None) == (of_e, of_c)
        assert not of_e or error(found_e, de) < 1.8 * 2.0**-9.2
        # dc is rounded once, twice it would be 1.75; with all saved the scaled e, whose rounding is one more, is all
        assert not of_c or error(found_c, dc) < (1.8 if saved == 512 else 1.6) * 2.0**-9.2
        assert not of_e or not jnp.any(found_e[targets < 0])
        if of_e and of_c:  # again from the same P, which the passes before wrote to
            bits = [x.view(jnp.int16) for x in (found_e, found_c)]
            first = first or bits
            assert all(jnp.array_equal(x, y) for x, y in zip(bits, first, strict=True))
    evaluated, target, *_ = run()
    np.testing.assert_allclose(jnp.sum(weights * (evaluated - target)), wanted, rtol=1e-5)


@pytest.mark.parametrize("number", range(len(config.HOPPER.de)))
def test_every_tile_that_a_product_may_choose_fits_shared_memory(number):
    one = config.HOPPER._replace(**{x: (getattr(config.HOPPER, x)[number],) for x in ("de", "saved_de", "dc")})
    for axis in (0, 1):

        def every(e, c, dz, p, r, de, dc, n, axis=axis):
            options = {"head": Head(vocab_axis=axis), "gpu": config.H200, "tiles": one}
            groups = Groups(4096, 1024, beyond=True)
            of = hopper_kernels.products(e, c, unit=None, count=n, groups=groups, **options)
            saved_de = hopper_kernels.de_of_saved(p, r, c, n, e, **options)
            window = groups.window(jnp.int32(0))
            return of.add_de(de, dz, window), of.put_dc(dc, dz, window), saved_de

        c = S((4096, 768) if axis == 0 else (768, 4096), BF16)
        e, dz, p, r = S((512, 768), BF16), S((512, 1024), BF16), S((512, 4096), BF16), S((512,), jnp.float32)
        arrays = e, c, dz, p, r, S((512, 768), jnp.float32), c, S((1,), jnp.int32)
        assert sorted(for_hopper(every, *arrays)) == ["dc", "de", "saved_de"]
