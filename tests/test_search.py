"""A few hundred calls of the random search (tests/search.py); and the search: what it draws, what it finds, its bounds.

A test of calls that fails says what `python -m tests.search` is to be given to repeat one.
"""

import os
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import tests.truth
from cce_jax import chunked
from cce_kernels import backward, budget, forward, groups, tiles
from cce_kernels.config import H200, TileConfig, Tiles
from tests import search_run, test_hopper
from tests.search_calls import SHARED, Call, Data, Program, draw
from tests.search_data import drawn_arrays
from tests.search_run import engine, examine, failures
from tests.search_shrink import shrunk
from tests.search_truth import truth
from tests.test_hopper import INTERPRETED, SMALL, both_interpreters  # noqa: F401

# XLA's threads for a CPU. The interpreter of Mosaic GPU holds one for each kernel of a program that is ready, and with
# two of them it may wait for ever. Read when the first backend starts.
os.environ.setdefault("PJRT_NPROC", "16")

SEED = 1
PROGRAMS = 75  # of SHARED calls each
TOGETHER = 5  # programs of one test
HOPPER_PROGRAMS = 8


def known(call: Call, where: str) -> bool:
    """Whether a named test of a known defect stands for this call."""
    program = call.program
    of_torch = program.package == "torch" and program.objective == "lse" and call.data.out_of_range > 0
    return of_torch or (where == "hopper" and (program.softcap or 0) > 36)


def check(numbers, where: str) -> None:
    wrong = []
    for number in numbers:
        call = draw(SEED, number, where)
        if not known(call, where):
            wrong += [f"--seed {SEED} --only {number}: {call}: {words}" for words in failures(call)]
    search_run.forget()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER))
def test_calls_through_the_interpreter(first):
    check(range(first * SHARED, (first + TOGETHER) * SHARED), "small")


@pytest.fixture
def both(both_interpreters, monkeypatch):  # noqa: F811
    """Both interpreters, with tiles of 256 columns: Triton's rescue takes up the runs of the vocabulary that Hopper's
    statistics were cut into.
    """
    wide = Tiles.same(TileConfig(rows=128, columns=256, depth=16, warps=4, stages=1))
    for module in (forward, backward, budget):
        monkeypatch.setattr(module, "target_of", lambda *_: (SMALL, wide))
    monkeypatch.setattr(tiles, "MOSAIC", True)
    monkeypatch.setattr(test_hopper, "interpreter", lambda: plgpu.InterpretGPUParams(detect_races=False))


@INTERPRETED
@pytest.mark.parametrize("program", range(HOPPER_PROGRAMS))
def test_calls_through_the_interpreter_of_the_kernels_for_hopper(program, both):
    check(range(program * SHARED, (program + 1) * SHARED), "hopper")


@pytest.mark.xfail(strict=True, reason="cce_torch multiplies the NaN of such a token's loss by a cotangent of 0")
def test_in_torch_the_gradient_of_lse_alone_is_finite_for_a_target_out_of_range():
    pytest.importorskip("torch")
    program = Program("torch", leading=(4,), width=1, vocabulary=3, objective="lse", return_lse=True)
    assert not failures(Call(program, Data(out_of_range=1)))


@INTERPRETED
@pytest.mark.xfail(strict=True, reason="the kernels for Hopper lose digits of logits that a softcap is far above")
def test_on_hopper_a_large_softcap_costs_no_digits(both):
    program = Program(leading=(256,), width=128, vocabulary=256, dtype="bfloat16", softcap=1e5, return_lse=True)
    assert not failures(Call(program, Data()))


# The truth, and the bounds


def test_the_truth_is_that_of_the_other_tests():
    """Which differentiate the definition by PyTorch, and know nothing of cotangents, blocks and errors."""
    compared = 0
    for number in range(0, 200):
        call = draw(SEED, number, "small")
        program, given = call.program, drawn_arrays(call)
        if call.data.out_of_range or program.objective == "lse" or (program.softcap or 1e9) < 1:
            continue
        options = {k: v for k, v in program.options().items()
                   if k not in ("vocab_axis", "precision", "memory_budget")}  # fmt: skip
        found = truth(given, program)

        def finite(x):
            return np.where(np.isfinite(np.float32(x)), x, 0).astype(x.dtype)

        clean = replace(given, e=finite(given.e), optional={k: finite(v) for k, v in given.optional.items()})
        loss, lse, gradients = tests.truth.truth(clean, options | {"return_lse": program.objective == "both"})
        close = partial(np.testing.assert_allclose, rtol=1e-7, err_msg=str(call))
        close(found.loss[0], loss, atol=1e-9)
        close(found.lse[0], lse, atol=1e-9)
        for name in program.wanted:
            value = found.token_weight[0] if name == "token_weight" else found.rows[name].value
            size = np.abs(gradients[name]).max(initial=0)
            close(np.reshape(value, gradients[name].shape), gradients[name], atol=1e-7 * size)
            compared += 1
    assert compared > 200


PLAIN = Program(impl="chunked", leading=(64,), width=32, vocabulary=300, return_lse=True)
FAULTY = {
    "nothing": {},
    "lse off by 1e-4": {"statistics": lambda lse, target, total: (lse + 1e-4, target, total)},
    "1 % of de": {"gradients": lambda de, dc, db: (0.99 * de, dc, db)},
    "1 % of dc": {"gradients": lambda de, dc, db: (de, (0.99 * dc).astype(dc.dtype), db)},
    "64 columns of dc": {"gradients": lambda de, dc, db: (de, dc.at[100:164].set(0), db)},
    "a column of dc": {"gradients": lambda de, dc, db: (de, dc.at[jnp.argmax(jnp.abs(dc).sum(1))].set(0), db)},
    "a token of de": {"gradients": lambda de, dc, db: (de.at[5].set(0), dc, db)},
    "NaN": {"gradients": lambda de, dc, db: (de.at[5, 3].set(np.nan), dc, db)},
}


@pytest.fixture
def changed(monkeypatch):
    """changed(statistics=…, gradients=…): what impl="chunked" returns, changed by these."""

    def change(**by):
        for name, change in by.items():
            real = getattr(chunked, name)
            monkeypatch.setattr(chunked, name, lambda *a, real=real, change=change, **k: change(*real(*a, **k)))
        jax.clear_caches()
        search_run.forget()

    yield change
    monkeypatch.undo()
    change()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("data", [Data(), Data(kind="trained")], ids=lambda x: x.kind)
@pytest.mark.parametrize("fault", FAULTY)
def test_a_planted_fault_is_found(fault, data, dtype, changed):
    changed(**FAULTY[fault])
    found = [x.name for x in examine(Call(replace(PLAIN, dtype=dtype), data)) if not x.ratio <= 1]
    assert bool(found) == (fault != "nothing"), found


@pytest.mark.parametrize("largest", [2.0**-16, 2.0**30])
def test_a_wrong_size_of_dz_in_float16_is_found(largest, monkeypatch, changed):
    """dz underflows, or overflows."""
    monkeypatch.setattr(groups, "FLOAT16_LARGEST", largest)
    changed()
    assert failures(Call(replace(PLAIN, dtype="float16"), Data()))


# What is drawn


@pytest.mark.parametrize("where", ["small", "hopper", "gpu"])
def test_a_number_is_a_call_whose_literal_says_all(where):
    calls = [draw(3, number, where) for number in range(400)]
    assert calls == [draw(3, number, where) for number in range(400)]
    assert [eval(repr(call)) for call in calls] == calls
    programs = [call.program for call in calls]
    assert all(len(set(programs[i : i + SHARED])) == 1 for i in range(0, 400, SHARED))
    assert len(set(calls)) == 400
    assert calls[0] != draw(4, 0, where)


def test_everything_is_drawn():
    programs = {draw(0, SHARED * number, "small").program for number in range(2000)}
    for name, values in {
        "package": {"jax", "torch"}, "impl": {"cce", "chunked"}, "dtype": {"bfloat16", "float16", "float32"},
        "vocab_axis": {0, 1}, "objective": {"loss", "lse", "both"}, "return_lse": {True, False},
        "reduction": {"mean", "sum", "none"},
    }.items():  # fmt: skip
        assert {getattr(p, name) for p in programs} == values, name
    for name in ("shift", "softcap", "logit_scale", "label_smoothing", "z_loss", "num_items", "saved"):
        assert len({getattr(p, name) for p in programs}) > 2, name
    assert {x for p in programs for x in p.arrays} == {"bias", "class_weight", "token_weight"}
    assert len({p.wanted for p in programs}) > 10
    assert min(p.memory_budget for p in programs if p.memory_budget > 0) > 1000
    calls = [draw(0, number, "small") for number in range(2000)]
    assert len(Counter(c.data.ignored for c in calls)) == 7
    assert len(Counter(c.data.kind for c in calls)) == 4
    assert all(any(getattr(c.data, x) for c in calls) for x in ("poison", "out_of_range", "bias"))


def test_on_a_gpu_half_of_the_calls_are_hoppers_and_fit(monkeypatch):
    monkeypatch.setattr(search_run, "local_gpu", lambda: H200)
    monkeypatch.setattr(tiles, "MOSAIC", True)
    programs = [draw(0, SHARED * number, "gpu").program for number in range(1000)]
    engines = Counter(engine(p) for p in programs)
    assert engines["hopper"] > 550
    assert engines["triton"] > 150
    assert max(p.tokens * p.vocabulary for p in programs) <= 2**30 * 1.01
    assert max(p.vocabulary * p.width for p in programs) <= 2**27
    assert max(p.vocabulary for p in programs) > 2**17


# Shrinking


def test_a_failing_call_is_shrunk_to_what_makes_it_fail():
    def fails(call: Call) -> bool:
        p = call.program
        return "bias" in p.arrays and "c" in p.wanted and p.vocabulary >= 10 and call.data.kind != "flat"

    call = next(c for c in (draw(0, n, "small") for n in range(4000)) if fails(c) and c.program.softcap)
    found = shrunk(call, fails, seconds=60)
    assert fails(found)
    p = found.program
    assert (p.leading, p.width, p.vocabulary, p.arrays, p.wanted) == ((1,), 1, 10, ("bias",), ("c",)), found
    assert replace(p, leading=(40,), width=20, vocabulary=229, arrays=(), wanted=("e", "c")) == Program()
    assert found.data == Data(seed=call.data.seed, kind=call.data.kind)


def test_shrinking_ends_in_time():
    call = draw(0, 0, "small")
    assert shrunk(call, lambda _: True, seconds=0) == call
