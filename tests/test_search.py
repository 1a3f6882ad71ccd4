"""A few hundred calls of the random search (tests/search); and the search: what it draws, what it finds, its bounds.

A test of calls that fails says what `python -m tests.search` is to be given to repeat one.
"""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from cce_jax import plans
from cce_kernels import blocks, gradients
from cce_kernels.block_sparse import DC_BLOCK, DE_BLOCK, PART, Blocks
from cce_kernels.device import H200
from cce_kernels.engines import hopper
from cce_kernels.plan import choose, plan_of, schedules
from cce_kernels.tokens import Chunks, gathered_rows
from tests.nightly import NIGHTLY, draws
from tests.search import bounds
from tests.search import run as search_run
from tests.search.bounds import checks
from tests.search.calls import (
    CROSS_ENTROPY,
    DEFAULT,
    DIVERGENCE,
    DIVERGENCES,
    FORMS,
    FUNCTIONS,
    FUNCTIONS_OF_TOKENS,
    IN_JAX,
    IN_TORCH,
    INDEX_TYPES,
    LOG_PROBS,
    MODES,
    SETTINGS,
    SHARED,
    SPLITS,
    STRIDES,
    TOLERANCES,
    WHERE,
    Call,
    Data,
    Program,
    draw,
    losses,
    pairs,
)
from tests.search.data import drawn_arrays
from tests.search.logits import Head, Logits
from tests.search.refusals import refusal
from tests.search.run import engine, examine, failures, planned
from tests.search.shrink import shrunk
from tests.search.truth import truth
from tests.test_hopper import INTERPRETED, SMALL, adding_copies  # noqa: F401

ROOT = Path(__file__).parents[1]
SEED = 1
PROGRAMS = draws(25, 60)  # of SHARED calls each, of each package
TOGETHER = 5  # programs of one test
HOPPER_PROGRAMS = 8
IN_PARTS = 1, 3, 7  # of these: programs whose de has partial sums


def check(numbers, where: str) -> None:
    wrong, found, run = [], [], search_run.run

    def recorded(*given):
        found.append(run(*given))
        return found[-1]

    for number in numbers:
        call = draw(SEED, number, where)
        how = f"--shapes {where} --seed {SEED} --only {number}"
        found.clear()
        with mock.patch.object(search_run, "run", recorded):
            wrong += [f"{how}: {call}: {words}" for words in failures(call)]
        if found and number % SHARED == 0 and refusal(call) is None and not same_bits(call, found[0]):
            wrong.append(f"{how}: {call}: other bits when called again")
    search_run.forget()
    assert not wrong, "\n".join(wrong)


def same_bits(call: Call, found: dict[str, np.ndarray]) -> bool:
    """Whether the call has the same bits again."""

    def bits(x):
        return np.ascontiguousarray(x).view(np.uint8)

    again = search_run.run(call, drawn_arrays(call))
    return found.keys() == again.keys() and all(np.array_equal(bits(x), bits(again[k])) for k, x in found.items())


@pytest.fixture
def blocks_of_evaluation(monkeypatch):
    """Of the fewest tokens, so that few tokens make several."""
    monkeypatch.setattr(schedules, "EVALUATED", 1)
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


@pytest.mark.parametrize("first", range(0, PROGRAMS, TOGETHER))
@pytest.mark.parametrize("where", ["jax", "torch"])
@pytest.mark.usefixtures("blocks_of_evaluation")
def test_calls_without_a_gpu(where, first, monkeypatch):
    """The kernels through Pallas' interpreter; and every implementation without kernels.

    Half of PyTorch's calls are padded, as a number of tokens is that comes late.
    """
    call_torch = pytest.importorskip("tests.call_torch", exc_type=ImportError)
    if where == "torch" and first // TOGETHER % 2:
        from cce_torch.on_jax import kinds

        monkeypatch.setattr(kinds, "EXACT", 0)
        monkeypatch.setattr(kinds, "SMALLEST", 16)
        monkeypatch.setattr(kinds, "_kinds", {})
    with call_torch.small_blocks(narrow=first % 2 == 1):
        check(range(first * SHARED, (first + TOGETHER) * SHARED), where)


@pytest.mark.parametrize(("where", "cases"), [("sharded", draws(18, 60)), ("processes", draws(12, 48))])
def test_calls_of_several_devices_and_processes(where, cases):
    """In a process of their own: JAX on 8 devices, PyTorch in 2 and 4 processes."""
    pytest.importorskip("torch")
    numbers = map(str, range(cases))
    command = [sys.executable, "-m", "tests.search", "--shapes", where, "--seed", str(SEED), "--shrink", "0", "--only"]
    done = subprocess.run([*command, *numbers], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert f"{where}: {cases} calls" in done.stdout


@pytest.fixture
def both(adding_copies, monkeypatch):  # noqa: F811
    """What would run on a Hopper GPU with few multiprocessors runs in both interpreters."""
    monkeypatch.setattr(plans, "INTERPRETER", SMALL)
    monkeypatch.setattr(hopper, "MOSAIC", True)
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


@pytest.fixture
def of_chunks(monkeypatch):
    """The blocks that the products of each chunk keep, in the order of the chunks."""
    kept_blocks, found = blocks.kept_blocks, []

    def recorded(*given):
        blocks = kept_blocks(*given)
        jax.debug.callback(lambda *x: found.append(Blocks(*map(np.asarray, x))), *blocks, ordered=True)
        return blocks

    monkeypatch.setattr(blocks, "kept_blocks", recorded)
    return found


def leaves_out(program: Program) -> bool:
    plan = planned(program)
    return plan is not None and plan.in_forward is not None and plan.in_forward.thresholds is not None


@INTERPRETED
@pytest.mark.parametrize("program", range(HOPPER_PROGRAMS))
def test_calls_through_the_interpreter_of_the_kernels_for_hopper(program, both, monkeypatch):
    """Every other program is for more multiprocessors than most products have tiles: de is a sum of partial sums."""
    numbers = range(program * SHARED, (program + 1) * SHARED)
    if program % 2:
        monkeypatch.setattr(plans, "INTERPRETER", replace(SMALL, multiprocessors=16))
        plan = planned(draw(SEED, numbers[0], "hopper").program)
        assert program not in IN_PARTS or plan.gradients.products.splits > 1
    check(numbers, "hopper")


@pytest.fixture
def in_chunks(both, monkeypatch):
    """in_chunks(size): the forward pass forms gradients, in chunks of so many tokens. Returns the engines that do."""

    def take(size: int) -> list[str]:
        def chunks(x):
            return Chunks(-(-gathered_rows(x.request.tokens) // size), size)

        def in_forward(x, chosen):
            formed.append(x.engine.name)
            return as_ever(x, chosen)

        formed, as_ever = [], choose.in_forward
        monkeypatch.setattr(choose, "fastest_chunks", chunks)
        monkeypatch.setattr(choose, "in_forward", in_forward)
        monkeypatch.setattr(choose, "_is_faster", lambda *_: True)
        return formed

    yield take
    search_run.forget()


def formed_in_forward(number: int) -> tuple[Call, int]:
    """A drawn call whose gradients the forward pass may form, and a size of chunks; dc in 16 bits or in float32."""
    call, rng = draw(SEED, number * SHARED, "hopper"), np.random.default_rng(number)
    reduction = str(rng.choice(["mean", "sum"]))
    program = replace(
        call.program,
        reduction=reduction,
        num_items=call.program.num_items if reduction == "mean" else None,
        objective=("loss",),
        wanted=tuple(dict.fromkeys(("e", "c", *call.program.wanted))),
        dtype="bfloat16",
        memory_budget=2**30,
        gradient_tolerance=0.0,
        mixed=number % 3 == 0,
    )
    return Call(program, call.data), 8 * int(rng.integers(10, 40))


@INTERPRETED
@pytest.mark.parametrize("number", range(6))
def test_gradients_formed_in_the_forward_pass_by_the_kernels_for_hopper(number, in_chunks):
    """Drawn calls, in chunks of a drawn size."""
    call, size = formed_in_forward(number)
    formed = in_chunks(size)
    assert not failures(call)
    assert set(formed) == {"hopper"}


SPARSE = Program(dtype="bfloat16", memory_budget=2**30, width=128)


@INTERPRETED
def test_on_hopper_the_forward_pass_forms_gradients_of_the_entropy(in_chunks):
    formed = in_chunks(160)
    program = replace(SPARSE, function="linear_token_loss", fn="bonus", entropy=True, leading=(304,), temperatures=True)
    assert not failures(Call(replace(program, vocabulary=640, vocab_axis=1), Data(ignored="few")))
    assert set(formed) == {"hopper"}


@INTERPRETED
@pytest.mark.parametrize("memory_budget", [0, 2**40])
def test_on_hopper_the_entropy_of_each_token(memory_budget, both):
    """From logits that are computed again, and from saved exponentials."""
    program = replace(SPARSE, function=LOG_PROBS, entropy=True, objective=("log_probs", "lse", "entropy"))
    program = replace(program, leading=(304,), vocabulary=640, temperatures=True, logit_scale=1.5)
    program = replace(program, softcap=None if memory_budget else 5.0, vocab_axis=int(memory_budget > 0))
    assert not failures(Call(replace(program, memory_budget=memory_budget), Data(ignored="few")))


@INTERPRETED
@pytest.mark.parametrize(("kind", "teacher_width"), [("forward_kl", 64), ("jsd", 128)])
def test_on_hopper_a_divergence(kind, teacher_width, in_chunks, monkeypatch):
    """In several chunks, with columns that are padded to whole tiles. 64 are too few for the kernel of the logits."""
    formed = in_chunks(200)
    monkeypatch.setattr(choose, "MOST_LOGITS", (100,))
    program = replace(
        SPARSE, function=DIVERGENCE, divergence=kind, teacher_width=teacher_width, teacher_dtype="bfloat16"
    )
    program = replace(program, leading=(560,), vocabulary=632, arrays=("bias",), wanted=("e", "c", "bias"))
    assert not failures(Call(replace(program, return_entropy=True), Data()))
    assert set(formed) <= {"hopper", "triton"}


CAPPED = replace(SPARSE, arrays=("class_weight",), softcap=20.0, logit_scale=1.3, z_loss=1e-3)
SIDE_BY_SIDE = Data(seed=8, kind="together", size=14.0, ignored="few", poison="nan")
LEFT_OUT = {
    "(D, V)": Call(
        replace(SPARSE, leading=(264,), vocabulary=448, vocab_axis=1, gradient_tolerance=2.0**-9), SIDE_BY_SIDE
    ),
    # de alone: in the interpreter the maximum that finds a step of dc drops the NaN of a target out of range.
    "softcap": Call(
        replace(CAPPED, leading=(264,), vocabulary=456, wanted=("e",), gradient_tolerance=2.0**-5),
        replace(SIDE_BY_SIDE, out_of_range=1),
    ),
}


@INTERPRETED
@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_kernels_for_hopper_leave_out_what_a_gradient_is_not_worth(name, in_chunks, of_chunks):
    """Gradients within the bound of the search, and what is left out within that of cce_kernels/block_sparse.py."""
    call, size = LEFT_OUT[name], 136
    program, formed = call.program, in_chunks(size)
    assert not failures(call)
    assert set(formed) == {"hopper"}
    given = drawn_arrays(call)
    live = given.targets != program.ignore_index
    head = Logits(given.e[live], given.c, given.optional.get("bias"), Head.of(program)).of(slice(None))
    z, slope, targets = head.z.detach().numpy(), head.slope.numpy(), given.targets[live]
    valid = (targets >= 0) & (targets < program.vocabulary)
    mass = np.exp(z - z.max(1, keepdims=True)) * slope
    mass[np.arange(len(z))[valid], targets[valid]] = 0
    for block, kept in zip((DE_BLOCK, DC_BLOCK), zip(*of_chunks, strict=True), strict=True):
        keeps = np.concatenate([x.repeat(block.tokens, axis=0)[:size] for x in kept])[: len(z)]
        keeps = keeps.repeat(block.columns, axis=1)[:, : program.vocabulary]
        left_out = np.sum(np.where(keeps, 0, mass), axis=1)
        assert np.all(left_out <= program.gradient_tolerance * mass.sum(1))
        assert keeps[~valid].all(), "a target out of range"
        assert np.mean(keeps) < 0.7, "little is left out"


@INTERPRETED
@pytest.mark.parametrize("number", range(4))
def test_few_kept_tokens_where_the_kernels_for_hopper_saved_all(number, both, monkeypatch):
    """Hopper's matmuls stop at the last kept token."""
    call = draw(SEED, number * SHARED, "hopper")
    program = replace(call.program, reduction="none", dtype="bfloat16", memory_budget=2**60, label_smoothing=0.0)
    program = replace(program, vocabulary=-(-program.vocabulary // 64) * 64, width=-(-program.width // 64) * 64)
    engines, as_ever = [], choose.backward

    def backward(x, saves):
        plan = as_ever(x, saves)
        engines.append(plan.gradients.of_few.engine.name if plan.gradients.of_few else "")
        return plan

    monkeypatch.setattr(choose, "backward", backward)
    assert not failures(Call(program, replace(call.data, ignored="most", poison="nan")))
    search_run.forget()
    assert "hopper" in engines


@INTERPRETED
def test_on_hopper_a_large_softcap_costs_no_digits(both):
    program = Program(leading=(256,), width=128, vocabulary=256, dtype="bfloat16", softcap=1e5, return_lse=True)
    assert not failures(Call(program, Data()))


# The truth, and the bounds


def test_full_logits_in_float32_are_within_a_third_of_the_bounds():
    """PyTorch's reference. Of gradients, some of which are rounded once, within all of it."""
    compared = Counter()
    for number in range(300):
        call = draw(SEED, number, "torch")
        program = replace(call.program, impl="reference", form="function", transformation="gradient")
        if program.dtype == "float64" or program.divergence:
            continue
        program = replace(program, top_k=0, predicted=False, mean_logit=False)
        data = replace(call.data, out_of_range=0, poison="", masked=0)
        call = Call(program, replace(data, ignored="few" if data.ignored == "all" else data.ignored))
        given = drawn_arrays(call)
        found = search_run.run(call, given)
        if not np.all(np.isfinite(np.concatenate([np.ravel(np.float32(x)) for x in found.values()]))):
            continue
        program = replace(program, impl="chunked")  # which has no rounding of its own
        for x in checks(found, truth(given, program), program):
            assert x.ratio <= (1 if x.name in program.wanted else 1 / 3), f"{number}: {call}: {x.words}"
            compared[x.name] += 1
    assert set(compared) == {"loss", "lse", "log_probs", "entropy", "id_log_probs", "token_weight", "e", "c", "bias"}
    assert min(compared.values()) > 10


PLAIN = Program(impl="chunked", leading=(64,), width=32, vocabulary=300, return_lse=True, reduction="none")
FAULTY = {
    "nothing": {},
    "lse off by 3e-4": {"numbers": lambda x: x._replace(log_mass=x.log_mass + 3e-4)},
    "1 % of de": {"gradients": lambda x: x._replace(e=(0.99 * x.e).astype(x.e.dtype))},
    "1 % of dc": {"gradients": lambda x: x._replace(c=(0.99 * x.c).astype(x.c.dtype))},
    "64 columns of dc": {"gradients": lambda x: x._replace(c=x.c.at[100:164].set(0))},
    "a column of dc": {"gradients": lambda x: x._replace(c=x.c.at[jnp.argmax(jnp.abs(x.c).sum(1))].set(0))},
    "a token of de": {"gradients": lambda x: x._replace(e=x.e.at[5].set(0))},
    "NaN": {"gradients": lambda x: x._replace(e=x.e.at[5, 3].set(np.nan))},
}


@pytest.fixture
def changed(monkeypatch):
    """changed(numbers=…, gradients=…): what both passes return, changed by these."""

    def change(**by):
        for name, change in by.items():
            real = getattr(blocks, name)

            def faulty(*given, real=real, change=change):
                found, saved = real(*given)
                return change(found), saved

            monkeypatch.setattr(blocks, name, faulty)
        jax.clear_caches()
        search_run.forget()

    yield change
    monkeypatch.undo()
    change()


@pytest.mark.parametrize(
    ("fault", "dtype"), [*((x, "bfloat16") for x in FAULTY), ("nothing", "float16"), ("nothing", "float32")]
)
def test_a_planted_fault_is_found(fault, dtype, changed):
    changed(**FAULTY[fault])
    for data in (Data(), Data(kind="trained", seed=2)):
        found = [x.name for x in examine(Call(replace(PLAIN, dtype=dtype), data)) if not x.ratio <= 1]
        assert bool(found) == (fault != "nothing"), (data, found)


@pytest.mark.parametrize("largest", [2.0**-16, 2.0**30])
def test_a_wrong_size_of_dz_in_float16_is_found(largest, monkeypatch, changed):
    """dz underflows, or overflows."""
    monkeypatch.setattr(gradients, "FLOAT16_LARGEST", largest)
    changed()
    assert failures(Call(replace(PLAIN, dtype="float16"), Data()))


@pytest.mark.parametrize(("true", "found", "off"), [(7e4, np.inf, 0), (6e4, np.inf, 5520), (6e4, -np.inf, -125520)])
def test_float16_that_overflows_is_off_by_as_little_as_it_can_be(true, found, off):
    squares, *_ = bounds._squares(np.array([[found]], np.float16), torch.tensor([[true]], dtype=torch.float64))
    assert squares[0] == off**2


def without(call: Call, share: float, target: bool) -> dict[str, np.ndarray]:
    """Results that lack what the least likely columns of each target's part add, up to a share of p; or the target."""
    given, program = drawn_arrays(call), call.program
    token = np.arange(program.tokens)
    p = Logits(given.e, given.c, None, Head.of(program)).of(slice(None)).p.numpy()
    p[token, given.targets] = 0
    others = p.sum(1, keepdims=True)
    in_part = np.arange(program.vocabulary) // PART == given.targets[:, None] // PART
    order = np.argsort(np.where(in_part, p, np.inf), axis=1)
    left_out = np.zeros(p.shape, bool)
    np.put_along_axis(left_out, order, np.cumsum(np.take_along_axis(p, order, 1), axis=1) <= share * others, 1)
    dz = np.where(left_out, 0, p)
    dz[token, given.targets] = 0 if target else -others[:, 0]
    dz, kind = dz * float(given.cotangents["loss"]), np.dtype("bfloat16")
    e, c = np.float64(given.e), np.float64(given.c)
    loss = np.float32(truth(given, program).results["loss"][0])
    return {"loss": loss, "e": (dz @ c).astype(kind), "c": (dz.T @ e).astype(kind)}


@pytest.mark.parametrize(("share", "target", "held"), [(1, False, True), (2, False, False), (1, True, False)])
def test_what_a_tolerance_does_not_allow_is_found(share, target, held):
    """The columns of a part are about parallel here, so that what is left out of them adds up."""
    program = Program(leading=(256,), width=48, vocabulary=640, dtype="bfloat16", reduction="sum")
    call = Call(replace(program, gradient_tolerance=0.05), Data(kind="together", size=7.0, seed=3))
    found = checks(without(call, share * 0.05, target), truth(drawn_arrays(call), call.program), call.program)
    ratios = {x.name: x.ratio for x in found}
    assert all(ratios[name] <= 1 for name in ("e", "c")) == held
    exact = replace(call.program, gradient_tolerance=0.0)
    assert any(x.ratio > 1 for x in checks(without(call, 0.05, False), truth(drawn_arrays(call), exact), exact))


# What is drawn


@pytest.mark.parametrize("where", WHERE)
def test_a_number_is_a_call_whose_literal_says_all(where):
    calls = [draw(3, number, where) for number in range(200)]
    assert calls == [draw(3, number, where) for number in range(200)]
    assert [eval(repr(call)) for call in calls] == calls
    programs = [call.program for call in calls]
    assert all(len(set(programs[i : i + SHARED])) == 1 for i in range(0, 200, SHARED))
    assert len(set(calls)) > 190
    assert calls[0] != draw(4, 0, where)


def test_everything_is_drawn():
    """Less than a tenth is refused. And in the nightly mode, of 3000 calls every pair of values has five."""
    every = []
    for where in ("jax", "torch"):
        programs = [draw(0, SHARED * number, where).program for number in range(draws(220, 1000))]
        counts = Counter(pair for program in programs for pair in pairs(program))
        assert len(counts) > 3000
        assert not NIGHTLY or not [pair for pair, n in counts.items() if SHARED * n < 5]
        assert sum(refusal(Call(program, Data())) is not None for program in programs) < len(programs) / 10
        every += [draw(0, number, where) for number in range(660)]
    every += [draw(0, number, where) for where in ("sharded", "processes") for number in range(660)]
    programs = [call.program for call in every]
    for name, values in {
        "function": FUNCTIONS,
        "form": FORMS,
        "impl": ("auto", "cce", "chunked", "reference", "torch_compile"),
        "dtype": ("bfloat16", "float16", "float32", "float64"),
        "index_dtype": INDEX_TYPES,
        "transformation": {*IN_JAX, *IN_TORCH},
        "setting": SETTINGS,
        "layout": ("one", *MODES, "processes"),
        "split": ("", *SPLITS, "vocabulary", "tokens"),
        "processes": (1, 2, 4),
        "strides_e": STRIDES,
        "strides_c": STRIDES,
        "vocab_axis": (0, 1),
        "reduction": ("mean", "sum", "none"),
        "fn": ("", *FUNCTIONS_OF_TOKENS),
        "divergence": ("", *DIVERGENCES),
        "gradient_tolerance": TOLERANCES,
    }.items():
        assert {getattr(p, name) for p in programs} == set(values), name
    for name in ("shift", "softcap", "logit_scale", "label_smoothing", "z_loss", "num_items", "memory_budget", "beta"):
        assert len({getattr(p, name) for p in programs}) > 2, name
    assert {x for p in programs for x in p.arrays} == {"bias", "class_weight", "token_weight"}
    assert len({p.wanted for p in programs}) > 10
    assert {0, DEFAULT, "all"} < {p.memory_budget for p in programs}
    assert min(p.temperature for p in programs) < 1e-8
    assert len(Counter(c.data.ignored for c in every)) == 7
    assert len(Counter(c.data.kind for c in every)) == 5
    assert {c.data.offset for c in every} == {0.0, 1e2, 1e3, 1e4}
    assert "together" in {draw(0, number, "hopper").data.kind for number in range(400)}
    assert all(any(getattr(c.data, x) for c in every) for x in ("poison", "out_of_range", "bias", "odd", "masked"))


def test_on_a_gpu_half_of_the_calls_are_hoppers_and_fit(monkeypatch):
    monkeypatch.setattr(search_run, "local_gpu", lambda: H200)
    monkeypatch.setattr(hopper, "MOSAIC", True)
    plan_of.cache_clear()
    programs = [draw(0, SHARED * number, "gpu").program for number in range(300)]
    engines = Counter(engine(p) for p in programs if p.function == CROSS_ENTROPY)
    assert engines["hopper"] > 20
    assert engines["triton"] > 12
    assert sum(leaves_out(p) for p in programs) > 8
    assert max(p.tokens * p.vocabulary for p in programs) <= 2**30 * 1.01
    assert max(p.vocabulary * p.width for p in programs) <= 2**29
    assert max(p.vocabulary for p in programs) > 2**17
    plan_of.cache_clear()


def test_of_the_calls_for_hoppers_interpreter_some_may_leave_out_blocks(monkeypatch):
    monkeypatch.setattr(plans, "INTERPRETER", SMALL)
    monkeypatch.setattr(hopper, "MOSAIC", True)
    plan_of.cache_clear()
    calls = [draw(0, number, "hopper") for number in range(600)]
    left_out = [call for call in calls if leaves_out(call.program)]
    assert len(left_out) > 30
    assert sum(call.data.kind == "together" for call in left_out) > 12
    plan_of.cache_clear()


# Shrinking


def test_a_failing_call_is_shrunk_to_what_makes_it_fail():
    def fails(call: Call) -> bool:
        p = call.program
        return "bias" in p.arrays and "c" in p.wanted and p.vocabulary >= 10 and call.data.kind != "flat"

    call = next(c for c in losses(0, "jax") if fails(c) and c.program.softcap)
    found = shrunk(call, lambda x: ["c is off by 0.1"] * fails(x) or ["ValueError"] * (not x.program.arrays), 60)
    assert fails(found)
    p = found.program
    assert (p.leading, p.width, p.vocabulary, p.arrays, p.wanted) == ((1,), 1, 10, ("bias",), ("c",)), found
    assert replace(p, leading=(40,), width=20, vocabulary=229, arrays=(), wanted=("e", "c")) == Program()
    assert found.data == Data(seed=call.data.seed, kind=call.data.kind)
    assert shrunk(call, lambda _: [""], seconds=0) == call
