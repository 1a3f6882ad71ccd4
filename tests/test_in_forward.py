"""Gradients that are formed in the forward pass, in chunks of tokens, and the format in which dc is summed."""

import random
from dataclasses import replace
from functools import partial
from itertools import islice
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_jax import linear_cross_entropy
from cce_kernels import blocks as ways
from cce_kernels.block_floats import LARGEST, block_of, decode, decoded, steps_shape
from cce_kernels.device import INTERPRETER
from cce_kernels.engines.engine import Part, Step
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.triton.tiles import TileConfig
from cce_kernels.engines.xla import XLA
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted
from cce_kernels.plan import choose
from cce_kernels.plan.schedules import Setting
from cce_kernels.request import Request
from cce_kernels.tokens import Chunks, gathered_rows
from cce_kernels.windows import Windows
from tests.nightly import draws
from tests.search import calls as search
from tests.search.calls import LEAVES, Data, Program, losses
from tests.search.run import failures
from tests.test_structure import equations
from tests.tolerance import assert_rounded

BOTH = Wanted(True, True, False)


@pytest.fixture(autouse=True, scope="module")
def in_forward():
    """Takes this way wherever the budget allows it, whatever is predicted to be faster."""
    with mock.patch.object(choose, "_is_faster", return_value=True):
        forget()
        yield
    forget()


def forget() -> None:
    choose.plan_of.cache_clear()
    jax.clear_caches()


def test_memory_that_nothing_wrote_counts_as_zeros():
    """A step of 0 makes 0 of every integer: so the first chunk needs no kernel of its own."""
    every = lax_bits(jnp.arange(2**16, dtype=jnp.uint16))
    assert not np.any(decode(every, jnp.float32(0)))
    finished = decoded(lax_bits(every.reshape(2, -1), "int16"), jnp.zeros((256, 2)), 128, 0)
    assert not np.any(finished)
    assert not np.any(np.signbit(finished))  # else the gradient of ignored tokens would have other bits at each call


def lax_bits(x: jax.Array, dtype="bfloat16") -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))


def summed(step: Step, gpu, parts, vocabulary: int, width: int, axis: int, dtype, factor: float):
    """factor · Σ pᵀ·e of the first `count` rows of each part (p, e, count), (V, D), summed by a step."""
    wide, head = dtype == "float32", Head(vocab_axis=axis, precision="highest")
    shape = (vocabulary, width) if axis == 0 else (width, vocabulary)
    dc = jnp.zeros(shape, dtype) if wide else lax_bits(jnp.arange(vocabulary * width, dtype=jnp.uint16), dtype)
    dc, steps = dc.reshape(shape), None if wide else jnp.zeros(steps_shape(vocabulary, width), jnp.float32)
    request = Request(24, width, vocabulary, dtype, head, False, Wanted(True, True, False), 0)
    add = jax.jit(partial(step.engine.sum_dc, step, request, gpu))
    for p, e, count in parts:
        dc, steps = add(dc, steps, Part(p, e, None, jnp.full(1, count)))
    if steps is not None:
        dc = decoded(lax_bits(dc, "int16"), steps, step.engine.columns_of_a_step(step), axis)
    found = (dc * factor).astype(dtype)
    return np.asarray(found if axis == 0 else found.T, np.float64)


@pytest.mark.parametrize("axis", [0, 1])
def test_xla_takes_no_integer_from_the_bits_of_a_sum(axis):
    """On an H200 it stored −1 for them with axis 1. `python -m tests.search --shapes gpu` draws such sums."""
    step, shape = Step(XLA, 128, windows=Windows(300, 128)), (300, 64) if axis == 0 else (64, 300)
    request = Request(24, 64, 300, "bfloat16", Head(vocab_axis=axis), False, BOTH, 0)
    part = Part(jnp.zeros((24, 300), "bfloat16"), jnp.zeros((24, 64), "bfloat16"), None, None)
    given = jnp.zeros(shape, "bfloat16"), jnp.zeros(steps_shape(300, 64)), part
    cuts = [
        x
        for x in equations(jax.make_jaxpr(partial(step.engine.sum_dc, step, request, None))(*given).jaxpr)
        if x.primitive.name == "bitcast_convert_type" and x.invars[0].aval.dtype == "float32"
    ]
    assert not cuts


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("engine", ["xla", "triton"])
def test_in_a_sum_of_dc_a_number_that_is_not_finite_stays_so(width, engine):
    """A maximum may drop NaN, as on a CPU and in Triton: dc was then finite where the loss was NaN."""
    draw = np.random.default_rng(width)
    p, e = (jnp.asarray(draw.normal(size=(24, n)), "bfloat16") for n in (512, width))
    step, gpu = Step(XLA, 256, windows=Windows(512, 512)), None
    if engine == "triton":
        step, gpu = Step(TRITON, TileConfig(rows=16, columns=256, depth=16, warps=4, stages=1)), INTERPRETER
    for columns in (1, width):
        parts = [(p, e.at[5, :columns].set(jnp.nan), 24), (p, e, 24), (p, e, 24)]
        found = summed(step, gpu, parts, 512, width, 0, "bfloat16", 1.0)
        assert np.isnan(found[:, :columns]).all()
        assert not np.isfinite(found).any(), "they share a step"


@pytest.mark.parametrize("engine", [XLA, TRITON], ids=["xla", "triton"])
@settings(max_examples=draws(6, 30), deadline=None)
@given(
    vocabulary=st.integers(1, 300),
    width=st.integers(1, 300),
    chunks=st.integers(1, 8),
    axis=st.integers(0, 1),
    dtype=st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]),
    seed=st.integers(0, 99),
)
def test_dc_summed(engine, vocabulary, width, chunks, axis, dtype, seed):
    """By Triton in chunks of which some have no tokens. Rows from `count` on and columns from V on hold NaN.

    Some vocabulary entries are a thousand times as frequent as others. Each number is off by at most half a step for
    each chunk, and by its rounding: integers whose bits are a NaN in the type of the result keep all of them.
    """
    draw, by_kernels = np.random.default_rng(seed), engine is TRITON
    columns, block = -(-vocabulary // 8) * 8 if by_kernels else vocabulary, 256 if block_of(width) == 256 else 128
    counts = [int(draw.choice([0, 1, draw.integers(1, 25), 24])) if by_kernels else 24 for _ in range(chunks)]
    frequency, parts = 10.0 ** draw.uniform(-3, 0, vocabulary), []
    for count in counts:
        p, e = np.full((24, columns), np.nan), np.full((24, width), np.nan)
        p[:count, :vocabulary] = draw.normal(size=(count, vocabulary)) * frequency
        e[:count] = draw.normal(size=(count, width))
        parts.append((*(jax.device_put(x.astype(jnp.dtype(dtype))) for x in (p, e)), count))
    sums = np.cumsum([np.float64(p[:n, :vocabulary]).T @ np.float64(e[:n]) for p, e, n in parts], axis=0)
    step = Step(TRITON, TileConfig(rows=16, columns=block, depth=16, warps=4, stages=1))
    if not by_kernels:
        step = Step(XLA, block, windows=Windows(vocabulary, int(draw.integers(1, vocabulary + 1))))
    found = summed(step, INTERPRETER if by_kernels else None, parts, vocabulary, width, axis, dtype, -2.0)
    off = np.abs(found / -2 - sums[-1])
    whole = np.pad(np.abs(sums), ((0, 0), (0, 0), (0, -width % block))).reshape(chunks, vocabulary, -1, block)
    steps = whole.max(3, keepdims=True).sum(0) / LARGEST
    steps = np.broadcast_to(steps, whole.shape[1:]).reshape(vocabulary, -1)[:, :width]
    rounding = np.finfo(np.float32).eps if dtype == "float32" else float(jnp.finfo(dtype).eps) / 2
    least = np.finfo(np.float16).smallest_subnormal if dtype == "float16" else 0
    of_sums = 4e-6 * np.abs(sums).max(axis=(0, 2))[:, None]
    assert (off <= 0.51 * steps * (dtype != "float32") + 1.01 * rounding * np.abs(sums[-1]) + least + of_sums).all()


@pytest.fixture
def any_chunks(monkeypatch):
    """any_chunks(seed): whatever a plan can choose, drawn: the size of a chunk."""

    def take(seed: int) -> list[Chunks]:
        def chosen(x: Setting) -> Chunks:
            tokens = gathered_rows(x.request.tokens)
            size = max(draw.randint(1, tokens), tokens // 8)
            used.append(Chunks(-(-tokens // size), size))
            return used[-1]

        used, draw = [], random.Random(seed)
        monkeypatch.setattr(choose, "fastest_chunks", chosen)
        forget()
        return used

    return take


@pytest.mark.parametrize(("impl", "number"), [*(("chunked", k) for k in range(4)), ("cce", 0), ("cce", 2)])
def test_any_chunks_are_right(impl, number, any_chunks):
    """Of Triton by its kernels, interpreted. XLA multiplies what they store by c if that has no more columns than V."""
    call = next(islice(losses(1, "jax"), number, None))
    dtype = "bfloat16" if impl == "cce" else ("bfloat16", "float16", "bfloat16", "float32")[number % 4]
    program = replace(call.program, impl=impl, dtype=dtype, objective=("loss",), memory_budget=2**40)
    softcap = None if impl == "cce" and program.label_smoothing else program.softcap  # exponentials cannot be stored
    wanted = tuple(x for x in LEAVES if x in ("e", "c", *program.arrays))
    program = replace(program, reduction=("mean", "sum")[number % 2], num_items=None, softcap=softcap, wanted=wanted)
    program = replace(program, leading=(50 + 60 * number,), shift=0, mixed=False)  # for several chunks
    used = any_chunks(number)
    assert not failures(replace(call, program=program))
    assert used


def test_chunks_of_triton_beside_every_option(any_chunks):
    arrays, used = ("bias", "class_weight", "token_weight"), any_chunks(157)
    program = Program(leading=(70,), width=40, vocabulary=157, dtype="bfloat16", arrays=arrays)
    program = replace(program, wanted=("e", "c", "bias", "token_weight"), vocab_axis=1, memory_budget=2**40)
    assert not failures(search.Call(replace(program, label_smoothing=0.2, logit_scale=1.3), Data(ignored="few")))
    assert used


def test_gradients_of_the_entropy_from_the_exponentials_of_a_chunk():
    """test_calls.py has those of saved exponentials, where each token has a cotangent of its own."""
    program = Program(
        function="linear_token_loss", fn="bonus", entropy=True, dtype="bfloat16", leading=(260,), width=16
    )
    program = replace(program, memory_budget=2**40, vocab_axis=1, temperatures=True, arrays=("bias",))
    program = replace(program, wanted=("e", "c", "bias"))
    of_tokens = Data(ignored="most"), Data(size=2.0), Data(size=0.01), Data(kind="confident", size=20.0)
    with mock.patch.object(ways, "form", wraps=ways.form) as begun:
        forget()
        assert not [words for data in of_tokens for words in failures(search.Call(program, data))]
        assert begun.called


def test_de_for_any_cotangents_has_the_temperature():
    program = Program(function="linear_log_probs", dtype="bfloat16", memory_budget=2**40, wanted=("e",), softcap=5.0)
    program = replace(program, temperatures=True, logit_scale=1.3, objective=("log_probs", "lse"))
    with mock.patch.object(ways, "de_of_any_cotangents", wraps=ways.de_of_any_cotangents) as formed:
        forget()
        assert not failures(search.Call(program, Data()))
    assert formed.called


def test_triton_multiplies_by_any_factor_and_again():
    """The backward pass writes over what it reads, but not over what another backward pass will read."""
    draw = np.random.default_rng(0)
    e, c = (jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for shape in ((60, 20), (157, 20)))
    targets = np.where(np.arange(60) % 5 == 0, -100, draw.integers(0, 157, 60))
    loss = partial(linear_cross_entropy, targets=targets, impl="cce", label_smoothing=0.1)
    with mock.patch.object(choose, "fastest_chunks", return_value=Chunks(3, 24)):
        forget()
        pullback = jax.jit(jax.vjp(jax.jit(loss), e, c)[1])
        once, twice, zero, infinite, again = (pullback(jnp.float32(x)) for x in (1, -2, 0, np.inf, 1))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, -2 * np.float32(y)), twice, once)
    assert not any(np.any(x) for x in zero)
    assert not np.any(infinite[0][::5])
    assert np.isinf(infinite[0]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loss_whose_lse_has_a_cotangent_too(dtype):
    """Their parts nearly cancel. So a gradient whose parts are rounded before they are added has too large an error."""
    draw = np.random.default_rng(0)
    e, c, bias = (jnp.asarray(draw.normal(size=shape) / 8, dtype) for shape in ((600, 256), (500, 256), 500))
    targets = draw.integers(0, 500, 600)

    def both(leaves, impl):
        e, c, bias = leaves
        loss, lse = linear_cross_entropy(
            e, c, targets, bias=bias, impl=impl, return_lse=True, precision="highest", reduction="sum"
        )
        return loss - 0.99 * jnp.sum(lse)

    with mock.patch.object(ways, "form", wraps=ways.form) as begun:
        forget()
        of = jax.jit(jax.grad(both), static_argnums=1)
        found, rounded = (of((e, c, bias), impl) for impl in ("chunked", "reference"))
    assert begun.called
    with jax.enable_x64(True):
        exact = jax.grad(partial(both, impl="reference"))([x.astype(jnp.float64) for x in (e, c, bias)])
    for name, *compared in zip(("e", "c", "bias"), found, exact, rounded, strict=True):
        assert_rounded(*compared, name, roundings=2)


@pytest.mark.parametrize("number", range(draws(3, 16)))
@pytest.mark.parametrize("package", ["jax", "torch"])
def test_with_a_frozen_head_the_forward_pass_forms_de_for_any_cotangents(package, number):
    """Random calls of "none" among them: no logits are computed again, and confident tokens keep their digits."""
    call = next(islice((x for x in losses(29, "jax") if x.program.objective != ("lse",)), number, None))
    wanted = "e", *(x for x in ("token_weight",) if x in call.program.arrays)
    program = replace(
        call.program,
        package=package,
        impl="chunked",
        label_smoothing=0.0,
        wanted=wanted,
        memory_budget=2**28,
        reduction="none",
        num_items=None,
    )
    with mock.patch.object(ways, "de_of_any_cotangents", wraps=ways.de_of_any_cotangents) as formed:
        assert failures(replace(call, program=program)) == []
    assert formed.called == (program.dtype != "float16" and program.tokens > 0)


def test_its_backward_pass_has_no_matmul():
    e, c, targets = jnp.ones((40, 12)), jnp.ones((90, 12)), jnp.zeros(40, jnp.int32)
    none = partial(linear_cross_entropy, c=c, targets=targets, reduction="none", impl="chunked")
    forward, backward = (str(x) for x in (jax.make_jaxpr(lambda e: jax.vjp(none, e)[0])(e), backward_of(none, e)))
    assert forward.count("dot_general") == 2
    assert "dot_general" not in backward


def backward_of(function, x):
    value, pull = jax.vjp(function, x)
    return jax.make_jaxpr(pull)(value)


@pytest.mark.parametrize("impl", ["chunked", "cce"])
def test_where_nothing_can_be_left_out_a_tolerance_changes_no_program(impl):
    def program(**more) -> str:
        loss = partial(linear_cross_entropy, targets=jnp.zeros(70, jnp.int32), impl=impl, **more)
        shapes = (jax.ShapeDtypeStruct((n, 20), jnp.bfloat16) for n in (70, 90))
        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).as_text()

    assert program(gradient_tolerance=0) == program() == program(gradient_tolerance=2.0**-7)
