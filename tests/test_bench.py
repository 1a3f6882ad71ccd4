"""The benchmark runs and keeps what it says; its float64 truth is the tests' own."""

import json
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bench import __main__ as command
from bench import (
    divergence,
    errors,
    float32_head,
    log_probs,
    methods,
    plot,
    profile,
    report,
    rivals,
    tolerance,
    torch_losses,
)
from bench import truth as float64
from bench.calls import Call, step
from bench.data import HEADS, SHAPES, Shape, flat, trained
from bench.devices.__main__ import plot as plot_devices
from bench.devices.__main__ import related
from bench.in_time import prepared, timed
from bench.measure import HEATING, in_turns, steady
from bench.run import measure
from bench.sparsity.inputs import mean_probabilities
from tests.cases import Case, inputs
from tests.truth import truth

PNG = b"\x89PNG"
SMALL = Shape(64, 16, 512)


@pytest.fixture(autouse=True)
def unheated(monkeypatch):
    """A CPU's time is what is measured here, and nobody reads it."""
    monkeypatch.setattr("bench.measure.HEATING", 0.0)


class Clock:
    """In place of the module time: it goes on when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def call(self, seconds: float, run: Callable[[], object] = lambda: None) -> Call:
        def passes() -> None:
            run()
            self.now += seconds

        return Call(passes, lambda _: None)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in ("measure", "in_time"):
        monkeypatch.setattr(f"bench.{module}.time", clock)
    return clock


@pytest.fixture
def options_of_jax() -> Iterator[None]:
    """What the command tells JAX about memory ends with the test."""
    name = "jax_pjrt_client_create_options"
    before = getattr(jax.config, name)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("options_of_jax")
def test_one_shape(tmp_path, monkeypatch, capsys):
    """The command as it is given, with methods of both frameworks: what it prints and all that it writes."""
    out = tmp_path / "new" / "bench"
    arguments = ["-m", "--shape", "64x16x512", "--rounds", "1", "--data", "flat", "--out", str(out)]
    ours, eager, xla = names = ["cce_jax", "PyTorch eager", "full logits (XLA)"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--method", *names])
    runpy.run_path(command.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    kept = json.loads(out.with_suffix(".json").read_text())
    assert {"device", "jax", "git_tree", "packages"} <= set(kept)
    assert [(r["test_data"], r["method"]) for r in kept["rows"]] == [("flat", method) for method in names]
    for row in kept["rows"]:
        assert row["runtime_ms"] > 0
        assert row["ratio"] == row["runtime_ms"] / row["floor_ms"]
        assert row["rounding_de"] <= row["de_error"] * 1.01
        assert max(row["loss_error"], row["de_error"], row["dc_error"]) < errors.bound(jnp.bfloat16)
        assert not row["marked"]
        assert (row["op_mem_mb"] or 0) > 0 or row["method"] == eager  # PyTorch does not say what it takes on a CPU
    assert kept["missing"] == kept["failed"] == []
    assert out.with_suffix(".png").read_bytes().startswith(PNG)
    assert all(word in printed for word in ("runtime_ms", "besides", ours, eager, xla))


def test_without_its_libraries_a_command_says_what_to_install():
    code = "import sys, runpy; sys.modules['matplotlib'] = None; sys.argv = ['-m', '--help']; "
    code += "runpy.run_module('bench', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert 'need matplotlib, which are not installed here: pip install ".[bench]"' in done.stderr


def unusable(fault: str):
    """Methods that a run must survive."""

    def loss(e, c, targets):
        if fault == "raises":
            raise RuntimeError("a shape of mine\nand more of it")
        correct = (e @ c.T).logsumexp(1).mean() - (e * c[targets]).sum(1).mean()
        return correct * torch.nan if fault == "nan" else correct

    def load():
        return __import__("a_package_that_is_not_here") if fault == "missing" else loss

    return methods.Method("torch", load)


def test_missing_and_failing_methods(monkeypatch, tmp_path):
    names = ["missing", "raises", "fine", "nan"]
    for fault in names:
        monkeypatch.setitem(methods.METHODS, fault, unusable(fault))
    *steps, (_, found) = measure(trained(SMALL, jnp.float32), "trained", names, 1)
    assert [comes for comes, _ in steps] == ["float64", "compiling", *names]
    assert [row["method"] for row in found.rows] == ["fine"]
    assert [x["method"] for x in found.missing] == ["missing"]
    assert "a_package_that_is_not_here" in found.missing[0]["reason"]
    assert [x["method"] for x in found.failed] == ["raises", "nan"]
    assert found.failed[0]["reason"] == "RuntimeError: a shape of mine"
    assert "not finite" in found.failed[1]["reason"]
    report.write(tmp_path / "bench", **found._asdict())
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert (kept["missing"], kept["failed"]) == (found.missing, found.failed)
    assert "missing: missing" in command.absences(found)[0]
    assert "–" in command.table(found.rows), "on a CPU no method of PyTorch says what memory it takes"


def test_no_method_is_begun_when_time_is_over():
    names = ["cce_jax", "full logits (XLA)"]
    *_, (_, found) = measure(trained(SMALL, jnp.float32), "trained", names, 1, time.monotonic())
    assert found.rows == found.failed == []
    assert [x["method"] for x in found.missing] == names
    assert "time" in command.absences(found)[0]


def test_every_head_has_its_methods(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench"])
    found = {job.shape: job.methods for job in command.jobs(command.arguments())}
    assert found == {SHAPES[x]: methods.ALL if x in HEADS else methods.CLOSEST for x in SHAPES}
    assert {*methods.ALL, *methods.CLOSEST, *methods.QUICK} <= methods.METHODS.keys()


def test_a_short_call_is_timed_as_hot_as_a_long_one(clock, monkeypatch):
    monkeypatch.setattr("bench.measure.HEATING", HEATING)
    starts = []
    assert steady(clock.call(0.001, lambda: starts.append(clock.now)), 5) == pytest.approx(1)
    assert starts[-6] - starts[0] > 0.9 * HEATING
    assert len(starts) < 1.1 * HEATING / 0.001 + 6


def test_calls_that_are_compared_take_turns(clock):
    order = []
    calls = {name: clock.call(seconds, partial(order.append, name)) for name, seconds in (("a", 0.002), ("b", 0.008))}
    assert in_turns(calls, 3) == pytest.approx({"a": 2, "b": 8})
    assert "".join(order).endswith(3 * "aaaabbbb")


def test_a_wrong_result_is_marked():
    e, c, targets = trained(SMALL, jnp.float32)
    expected = errors.expected(e, c, targets)
    right = expected.truth.loss, (expected.truth.de, expected.truth.dc)
    assert not errors.of_result("jax", right, expected, e.dtype)["marked"]
    doubled = expected.truth.loss, (expected.truth.de, 2 * expected.truth.dc)
    wrong = errors.of_result("jax", doubled, expected, e.dtype)
    assert wrong["marked"]
    assert wrong["dc_error"] == pytest.approx(1)
    with pytest.raises(ValueError, match=r"dc has shape \(16, 512\)"):
        errors.of_result("jax", (0.0, (expected.truth.de, expected.truth.dc.T)), expected, e.dtype)


@pytest.mark.parametrize("name", ["cce_torch", "PyTorch eager", "gist"])
def test_torch_methods_have_the_gradients_of_the_truth(name, monkeypatch):
    monkeypatch.setattr(torch_losses, "CHUNK", 16)  # three chunks
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes 20 s and changes no gradient
    given = trained(Shape(48, 24, 90), jnp.float32)
    loss = methods.METHODS[name].load()
    result = step("torch", lambda *x: 3 * loss(*x), *given)()
    found = errors.of_result("torch", (result[0] / 3, [x / 3 for x in result[1]]), errors.expected(*given), jnp.float32)
    assert max(found["loss_error"], found["de_error"], found["dc_error"]) < 1e-5


def test_a_line_joins_the_settings_that_no_other_beats():
    assert plot.front([(4, 9), (1, 10), (2, 12), (3, 8), (5, 8)]) == [(1, 10), (3, 8)]
    nearly = [(100, 9), (100.5, 8), (300, 7)]  # memory that differs by less than 1 %
    assert plot.front(nearly) == nearly[1:]


def test_the_picture_tells_the_gpu_the_type_and_the_sizes(monkeypatch, tmp_path):
    rows = json.loads(Path("bench/results/head-gemma2-2b.json").read_text())["rows"]
    drawn = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda figure, path: drawn.append(figure))
    plot.draw(rows, "NVIDIA H200", tmp_path / "bench.png")
    [axes], [legend] = drawn[0].axes, drawn[0].legends
    assert axes.get_title("left") == "NVIDIA H200, bfloat16\n8,192 tokens, width 2,304, vocabulary 256,000"
    shown = {x.label for name, x in plot.PACKAGES.items() if any(row["method"].startswith(name) for row in rows)}
    assert {text.get_text() for text in legend.get_texts()} == {*shown, "three matrix products, by XLA"}
    assert all(any(row["method"].startswith(name) for name in plot.PACKAGES) for row in rows), "every method is drawn"
    assert {text.get_text() for text in axes.texts} == {"300 MiB", "default", "all"}


def test_the_table_of_three_heads_has_the_points_of_the_picture():
    page, results = Path("docs/performance.md").read_text(), Path("bench/results")
    [files] = re.findall(r"`python -m bench.plot (.*) --out bench.png`", (results / "README.md").read_text())
    rows = [row for file in files.split() for row in json.loads((results / file).read_text())["rows"]]
    titles, _, *lines = page.split("| method |")[1].split("\n\n")[0].splitlines()
    columns = zip(*([cell.strip() for cell in line.split("|")[2:-1]] for line in lines), strict=True)
    for title, cells in zip(re.findall(r"\d+×\d+×\d+", titles), columns, strict=True):
        points = plot.points([row for row in rows[::-1] if report.size(row["shape"]) == title])  # the first counts
        assert sorted(filter(None, cells)) == sorted(f"{ms:.1f} ms, {held:.0f}" for held, ms in points.values())


def test_the_first_screen_has_the_figures_of_the_files():
    def found(name: str) -> dict:
        return json.loads(Path(f"bench/results/{name}.json").read_text())

    heads = [{row["method"]: row for row in found(f"head-{x}")["rows"]} for x in ("gemma2-2b", "llama3-8b", "gist")]
    heads[0]["quack"], *_ = (row for row in found("heads-quack")["rows"] if row["method"] == "quack")
    places = [plot.points(list(rows.values())) for rows in heads]
    both = [(of[x], of["torch.compile"]) for of in places for x in ("cce_jax", "cce_torch")]
    times, memory = zip(*((ours[1] / full[1], full[0] / ours[0]) for ours, full in both), strict=True)
    largest = {row["method"]: row for row in found("largest-hugging-face")["rows"]}
    ours, full = (largest[x]["sequences"] for x in ("cce_patch", "unpatched"))
    more = 100 * (largest["cce_patch"]["tokens_per_second"] / largest["unpatched"]["tokens_per_second"] - 1)
    figures = [
        f"{min(memory):.1f} to {max(memory):.0f} times the memory",
        f"takes {min(times):.2f} to {max(times):.2f} of that time",
        f"on {ours} sequences of 2048 tokens in place of {full}, and on {more:.0f} % more tokens a second.",
    ]
    for page in ("README.md", "docs/index.md"):
        text = " ".join(Path(page).read_text().split())
        assert [x for x in figures if x not in text] == [], page

    text, rows = Path("README.md").read_text(), heads[0]
    names = ("cce_jax", "cce_jax all", "Liger 16", "quack", "torch.compile", "PyTorch eager", "cut_cross_entropy")
    table = text.split("| --- | --- | --- |\n")[1].split("\n\n")[0].splitlines()
    assert [line.split(" | ")[1:] for line in table] == [
        [f"{time:.1f}", f"{held:.0f} |"] for held, time in (places[0][x] for x in names)
    ]
    assert f"matrix products alone take {rows['cce_jax']['floor_ms']:.1f} ms" in text
    ours, full, liger = (
        [row[f"{x}_error"] / row[f"rounding_{x}"] for x in ("de", "dc")]
        for row in (rows[x] for x in ("cce_jax", "torch.compile", "Liger 16"))
    )
    assert f"is {ours[0]:.1f} to {ours[1]:.1f} times that of rounding" in text
    assert {round(x) for x in full + liger} == {7}


def test_log_probs_of_ours_and_of_a_float32_head_are_not_those_of_rounded_logits(monkeypatch):
    monkeypatch.setattr(float32_head, "BLOCK", 48)  # two blocks, the last one ragged
    ours, rounded, in_float32 = float32_head.rows_of("trained", Shape(64, 1024, 512))
    assert (ours["way"], rounded["way"], in_float32["way"]) == tuple(float32_head.WAYS)
    assert max(ours["max"], in_float32["max"]) < 1e-3 * rounded["max"]
    assert 0.01 < rounded["max"] < 0.126  # logits between 16 and 32 are rounded by up to 2⁻⁴: the target's, and lse's


def test_the_page_has_the_errors_of_the_float32_head():
    page, results = Path("docs/log-probabilities.md").read_text(), Path("bench/results/float32-head.json")
    text = page.split("## A head in float32\n")[1].split("\n## ")[0]
    ours, rounded, in_float32 = (x for x in json.loads(results.read_text())["rows"] if x["data"] == "trained")
    for row in (ours, in_float32):
        assert f"{row['max']:.1e}".replace("e-0", "e-") in text
        assert f"{row['mean']:.1e}".replace("e-0", "e-") in text
    assert f"{rounded['max']:.2f} and {rounded['mean']:.3f} in the mean" in text.replace("\n", " ")
    assert f"may be {rounded['largest_ratio']:.2f} " in text
    assert report.size(ours["shape"]) in text


def test_truth(monkeypatch):
    monkeypatch.setattr(float64, "BLOCK", 16)  # several blocks, the last one ragged
    given = inputs(Case("plain", leading=(40,), width=12, vocabulary=90, ignored=0.0))
    actual = float64.mean_loss(jnp.asarray(given.e), jnp.asarray(given.c), jnp.asarray(given.targets))
    loss, _, gradients = truth(given, {})
    np.testing.assert_allclose(actual.loss, loss, rtol=1e-12)
    scale = float(given.of_loss)
    np.testing.assert_allclose(scale * actual.de, gradients["e"], atol=1e-14)
    np.testing.assert_allclose(scale * actual.dc, gradients["c"], atol=1e-14)
    assert float64.relative_error(actual.de, actual.de) == 0
    assert float64.relative_error(1.5 * actual.dc, actual.dc) == pytest.approx(0.5)
    assert 1e-3 < float64.rounding_error(actual.dc, jnp.bfloat16) < 2.5e-3


def test_data_is_like_a_models():
    """Trained-like: the target's logit near the top and a loss of a few nats. Flat: a loss just above log V."""
    shape = Shape(256, 2048, 4000)
    losses = {}
    for make in (trained, flat):
        losses[make.__name__] = float64.mean_loss(*make(shape)).loss
        first, second = make(SMALL), make(SMALL)
        assert all(map(np.array_equal, first, second)), "the same data for the same seed"
    assert losses["trained"] < 4
    assert 0 < losses["flat"] - np.log(4000) < 1.5


def test_idle_time_is_of_one_call_and_of_all_streams():
    ms, busy = 1e6, [(0, 4), (1, 2), (4.5, 5)]  # the second beside the first
    calls = [[(start + after, end + after) for start, end in busy] for after in range(0, 40 * profile.CALLS, 40)]
    events = [profile.Event("", start * ms, end * ms) for call in calls for start, end in call]
    np.testing.assert_allclose(profile.idle(events), [0.5] * profile.CALLS)
    stalled = [e if e.start < 4.5 * ms else profile.Event("", e.start + 50 * ms, e.end + 50 * ms) for e in events]
    assert max(profile.idle(stalled)) > 30, "longer than a pause"


def test_the_bare_time_of_several_gpus_has_each_matmul_and_collective():
    bare = {"layout": "fsdp", "method": "bare", "z": 1, "de": 2, "dc": 3}
    bare |= {"all-gather of c": 10, "reduce-scatter of dc": 100, "all-reduce of dc": 1000}
    [row] = related([bare, {"layout": "fsdp", "method": "default", "gpus": 2, "ms": 252}])
    assert (row["bare_ms"], row["ratio"]) == (126, 2)  # c is gathered twice


def test_the_picture_of_several_gpus_has_a_panel_for_each_layout(monkeypatch, tmp_path):
    found, drawn = json.loads(Path("bench/results/devices.json").read_text()), []
    monkeypatch.setattr(plot.Figure, "savefig", lambda figure, path: drawn.append(figure))
    plot_devices(found["rows"], found["device"], tmp_path / "devices.png")
    panels = drawn[0].axes
    assert len(panels) == len({row["layout"] for row in found["rows"]}) == 3
    assert found["device"] in panels[-1].get_xlabel()
    named = {text.get_text() for text in drawn[0].legends[0].get_texts()}
    assert {"cce_jax, default", "cce_torch, 2NV in all", "cce_jax, bare"} <= named


def test_ids_in_order_of_probability_change_no_loss():
    """bench.tolerance's order of the vocabulary: its first half is likelier than the second."""
    (e, c, targets), own = tolerance.given(SMALL, "sorted"), tolerance.given(SMALL, "own")
    assert float64.mean_loss(e, c, targets).loss == pytest.approx(float64.mean_loss(*own).loss, rel=1e-6)
    likely = np.asarray(mean_probabilities(e, c))
    assert likely[:256].min() >= likely[256:].max()
    first, second = tolerance.errors((c, 2 * c), (c, c))
    assert (first, second) == (0, 1)


def failing(after: int):
    """A call that fails after so many times."""
    left = iter(range(after))
    return lambda: Call(lambda: next(left), lambda _: None)


def test_a_call_that_fails_stops_no_other():
    fine = Call(lambda: 1, lambda _: None)
    found = prepared({"now": failing(0), "in its turn": failing(6), "fine": lambda: fine}, 1)
    assert (list(found.calls), list(found.missing)) == (["in its turn", "fine"], ["now"])
    times = timed({"ours": fine}, found, 1)
    assert (list(times), list(found.missing)) == (["ours", "fine"], ["now", "in its turn"])
    assert "StopIteration" in found.missing["in its turn"]


def test_no_call_is_begun_for_which_no_time_is_left(clock):
    slow = clock.call(0.02)  # 8 calls of it take 0.16 s, and it is heated for 0.3 s
    makes = {name: lambda: slow for name in ("first", "second", "third")}
    found = prepared(makes, 1, 0.7)
    assert list(found.calls) == ["first"]
    assert "ms a call" in found.missing["second"]
    assert list(prepared(makes, 1, 0).missing) == list(makes)


def numbers(fault: str):
    """Another package's numbers, which a run must survive or mark."""

    def found(e, c, targets, temperature):
        if fault == "raises":
            raise RuntimeError("a shape of mine")
        return [x + 1 for x in rivals.full_logits.numbers()(e, c, targets, temperature)]

    return lambda *_: __import__("a_package_that_is_not_here") if fault == "missing" else found


def test_numbers_per_token_in_turns_with_others(monkeypatch, tmp_path):
    """The command with few calls: its rows, and what it says of others that are missing, fail or are wrong."""
    for ours in ("forwards", "steps"):
        all_of = getattr(log_probs, ours)
        few = lambda x, all_of=all_of: {k: f for k, f in all_of(x).items() if k in log_probs.COMPARED}  # noqa: E731
        monkeypatch.setattr(log_probs, ours, few)
    in_torch = log_probs.in_torch
    monkeypatch.setattr(
        log_probs, "in_torch", lambda x: {k: f for k, f in in_torch(x).items() if k.endswith("the loss")}
    )
    loads = {x: numbers(x) for x in ("missing", "raises", "wrong", "not asked for")}
    monkeypatch.setattr(rivals, "NUMBERS", {"full logits": rivals.full_logits.numbers, **loads})
    out = tmp_path / "numbers.json"
    arguments = ["", "--shape", "64x128x512", "--rounds", "1", "--seconds", "30", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--package", "full", "missing", "raises", "wrong"])
    log_probs.main()
    kept = json.loads(out.read_text())
    assert [x["call"] for x in kept["rows"]] == [*log_probs.COMPARED, "PyTorch: the loss"]
    assert all(x["runtime_ms"] > 0 and x["ratio"] > 0 and x["of_loss"] > 0 for x in kept["rows"] + kept["others"])
    forward, step = "log_probs, entropy", "log_probs and entropy of a vector"
    others = {x["call"]: x for x in kept["others"] if ": " in x["call"]}
    assert list(others) == [f"{x}: {call}" for x in ("full logits", "wrong") for call in (forward, step)]
    for call in (forward, step):
        for name in ("log_probs_error", "entropy_error"):
            assert others[f"full logits: {call}"][name] < 0.4, "the rounding of logits of 20 to 40"
            assert others[f"wrong: {call}"][name] > 0.6
    row, base = others[f"wrong: {step}"], next(x for x in kept["others"] if x["call"] == log_probs.LOSS)
    assert row["of_loss"] == row["runtime_ms"] / base["runtime_ms"]
    assert [x["call"].split(":")[0] for x in kept["missing"]] == ["missing", "missing", "raises", "raises"]
    assert "a shape of mine" in kept["missing"][2]["reason"]


def of_trl(monkeypatch):
    """TRL's modules of kernels, whose constants the benchmark changes, and gets back after the test."""
    for name, constants in {"logprob": ["TOKEN"], "divergence": ["TOKEN", "VOCAB"]}.items():
        module = pytest.importorskip(f"trl.kernels.chunked_{name}")
        for x in constants:
            monkeypatch.setattr(module, f"{x}_CHUNK_SIZE", getattr(module, f"{x}_CHUNK_SIZE"))


@pytest.mark.parametrize("name", ["full logits", "TRL"])
def test_others_numbers_are_those_of_the_truth(name, monkeypatch):
    """log_probs, entropy, and gradients for a cotangent of each, of three chunks in both directions."""
    if name == "TRL":
        of_trl(monkeypatch)
    e, c, targets = flat(Shape(40, 24, 90), jnp.float32)
    draw = np.random.default_rng(0)
    of_log_probs, of_entropy = cotangents = [jnp.asarray(draw.normal(size=40), jnp.float32) for _ in range(2)]
    load = {"full logits": rivals.full_logits.numbers(), "TRL": rivals.trl.numbers(16, 32)}[name]
    found, gradients = rivals.step(load, e, c, targets, *cotangents)()
    for x, again in zip(found, rivals.forward(load, e, c, targets)(), strict=True):
        np.testing.assert_array_equal(x, again)
    e, c, g, h = (np.asarray(x, np.float64) for x in (e, c, of_log_probs, of_entropy))
    z = e @ c.T
    log_p = z - np.logaddexp.reduce(z, 1, keepdims=True)
    p, is_target = np.exp(log_p), np.eye(90)[np.asarray(targets)]
    entropy = -np.sum(p * log_p, 1)
    dz = g[:, None] * (is_target - p) - h[:, None] * p * (log_p + entropy[:, None])
    for x, want in zip((*found, *gradients), (log_p[is_target > 0], entropy, dz @ c, dz.T @ e), strict=True):
        np.testing.assert_allclose(x, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", divergence.BETAS)
def test_others_divergences_are_those_of_the_truth(kind, monkeypatch):
    monkeypatch.setattr(float64, "BLOCK", 16)  # several blocks, the last one ragged
    of_trl(monkeypatch)
    arrays = *flat(Shape(40, 24, 90), jnp.float32)[:2], *flat(Shape(40, 20, 90), jnp.float32, seed=1)[:2]
    truth = float64.mean_divergence(*arrays, divergence.BETAS[kind])
    e, c, teacher_e, teacher_c = (np.asarray(x, np.float64) for x in arrays)
    s, t = (np.exp(z - np.logaddexp.reduce(z, 1, keepdims=True)) for z in (e @ c.T, teacher_e @ teacher_c.T))
    pairs = {"forward_kl": [(t, s)], "reverse_kl": [(s, t)], "jsd": [(t, (s + t) / 2), (s, (s + t) / 2)]}[kind]
    want = np.mean([np.sum(p * np.log(p / q), 1).mean() for p, q in pairs])
    assert truth.loss == pytest.approx(want, rel=1e-9)
    check, beta = divergence.against(truth), divergence.BETAS[kind]
    for load in (rivals.full_logits.divergence(beta), rivals.trl.divergence(beta, 16, 32)):
        found = check(rivals.loss_step(load, *arrays)())
        assert max(found.values()) < 1e-4
    doubled = check(rivals.loss_step(lambda *x: 2 * load(*x), *arrays)())
    assert [*doubled.values()] == pytest.approx([1, 1], rel=1e-3)


def test_divergences_in_turns_with_others(monkeypatch, tmp_path):
    loads = {"full logits": rivals.full_logits.divergence, "none": numbers("missing"), "left out": numbers("missing")}
    monkeypatch.setattr(rivals, "DIVERGENCES", loads)
    out = tmp_path / "divergence.json"
    arguments = ["", "--shape", "64x128x512", "--teacher-width", "96", "--divergence", "jsd", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--package", "full", "none", "--out", str(out)])
    divergence.main()
    kept = json.loads(out.read_text())
    calls = {x["call"]: x for x in kept["rows"] + kept["others"]}
    assert set(calls) == {"cce_jax", "cce_torch", "full logits"}
    assert [x["call"] for x in kept["missing"]] == ["none"]
    assert all(0 < x["de_error"] < 0.1 for x in calls.values())
