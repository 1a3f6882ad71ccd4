"""The benchmark runs and keeps what it says; its float64 truth is the tests' own."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bench import __main__ as command
from bench import errors, gist, methods, plot, profile, report
from bench import truth as float64
from bench.calls import Call, tensors
from bench.data import HEADS, SHAPES, SWEEPS, SWEPT, Shape, flat, hidden, trained
from bench.measure import HEATING, in_turns, steady
from bench.run import measure
from tests.cases import Case, inputs
from tests.truth import truth

PNG = b"\x89PNG"


def test_one_shape(tmp_path):
    """The command as it is given, with methods of both frameworks: what it prints and all that it writes."""
    out = tmp_path / "bench"
    arguments = ["-m", "bench", "--shape", "64x16x512", "--rounds", "1", "--data", "flat", "--out", str(out)]
    ours, eager, xla = names = ["cce_jax", "PyTorch eager", "full logits (XLA)"]
    done = subprocess.run(
        [sys.executable, *arguments, "--method", *names], check=True, timeout=120, capture_output=True
    )
    kept = json.loads(out.with_suffix(".json").read_text())
    assert {"device", "jax", "git_tree", "packages"} <= set(kept)
    assert [(r["test_data"], r["method"]) for r in kept["rows"]] == [("flat", method) for method in names]
    for row in kept["rows"]:
        assert row["runtime_ms"] > 0
        assert row["ratio"] == row["runtime_ms"] / row["floor_ms"]
        assert row["rounding_de"] <= row["de_error"] * 1.01
        assert max(row["loss_error"], row["de_error"], row["dc_error"]) < errors.bound(jnp.bfloat16)
        assert not row["marked"]
        if row["method"] != eager:  # PyTorch does not say what memory it takes on a CPU
            assert row["op_mem_mb"] > 0
    assert kept["missing"] == kept["failed"] == []
    assert out.with_suffix(".png").read_bytes().startswith(PNG)
    printed = done.stdout.decode()
    assert all(word in printed for word in ("runtime_ms", "op_mem_mb", ours, eager, xla))


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


def test_a_short_call_is_timed_as_hot_as_a_long_one():
    calls = []
    call = Call(lambda: calls.append(time.perf_counter()), lambda _: None)
    assert steady(call, 5) < 10
    assert calls[-6] - calls[0] > 0.9 * HEATING


def test_calls_that_are_compared_take_turns():
    order = ""

    def call(name: str, seconds: float) -> Call:
        def run() -> None:
            nonlocal order
            order += name
            time.sleep(seconds)

        return Call(run, lambda _: None)

    times = in_turns({"a": call("a", 0.002), "b": call("b", 0.008)}, 3)
    assert order.endswith(3 * "aaaabbbb")
    assert 2 <= times["a"] < 6 <= 8 <= times["b"]


def test_missing_and_failing_methods(monkeypatch, tmp_path):
    for fault in ("missing", "raises", "nan", "fine"):
        monkeypatch.setitem(methods.METHODS, fault, unusable(fault))
    given = trained(Shape(64, 16, 512), jnp.float32)
    names = ["missing", "raises", "fine", "nan"]
    ticks = []
    *_, found = measure(given, "trained", names, 1, ticks.append)
    assert [row["method"] for row in found.rows] == ["fine"]
    assert [x["method"] for x in found.missing] == ["missing"]
    assert "a_package_that_is_not_here" in found.missing[0]["reason"]
    assert [x["method"] for x in found.failed] == ["raises", "nan"]
    assert found.failed[0]["reason"] == "RuntimeError: a shape of mine"
    assert "not finite" in found.failed[1]["reason"]
    assert ticks == ["float64", "compiling", *names]
    report.write(tmp_path / "bench", found)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert (kept["missing"], kept["failed"]) == (found.missing, found.failed)
    assert kept["rows"][0]["op_mem_mb"] is None
    assert "missing: missing" in report.absences(found)[0]


def test_no_method_is_begun_when_time_is_over():
    given = trained(Shape(16, 8, 64), jnp.dtype("float32"))
    *_, found = measure(given, "trained", ["cce_jax", "full logits (XLA)"], 1, print, time.monotonic())
    assert found.rows == found.failed == []
    assert [x["method"] for x in found.missing] == ["cce_jax", "full logits (XLA)"]
    assert "time" in report.absences(found)[0]


def test_lists_of_methods_name_methods():
    assert {*methods.ALL, *methods.CLOSEST, *methods.QUICK, *methods.SWEPT} <= methods.METHODS.keys()


def test_every_head_has_its_methods(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench"])
    found = {job.shape: job.methods for job in command.jobs(command.arguments())}
    assert found == {SHAPES[x]: methods.ALL if x in HEADS else methods.CLOSEST for x in SHAPES}


def test_a_line_joins_the_settings_that_no_other_beats():
    assert plot.front([(4, 9), (1, 10), (2, 12), (3, 8), (5, 8)]) == [(1, 10), (3, 8)]


def test_a_wrong_result_is_marked():
    e, c, targets = trained(Shape(64, 16, 512), jnp.float32)
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
    monkeypatch.setattr(gist, "CHUNK", 16)  # three chunks
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # which takes 20 s and changes no gradient
    given = trained(Shape(48, 24, 90), jnp.float32)
    expected = errors.expected(*given)
    e, c, targets = tensors(*given)
    e, c = e.clone().requires_grad_(), c.clone().requires_grad_()
    loss = methods.METHODS[name].load()(e, c, targets.long())
    (3 * loss).backward()
    found = errors.of_result("torch", (loss.detach(), (e.grad / 3, c.grad / 3)), expected, jnp.float32)
    assert max(found["loss_error"], found["de_error"], found["dc_error"]) < 1e-5


def test_gist_compiles():
    e, c, targets = tensors(*trained(Shape(64, 16, 512), jnp.float32))
    e.requires_grad_()
    loss = gist.compiled()(e, c, targets.long())
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(e @ c.T, targets.long()))


def test_sweeps_change_one_number_and_are_drawn(tmp_path):
    rows = []
    for letter, shapes in SWEEPS.items():
        i = "NDV".index(letter)
        assert [shape[i] for shape in shapes] == sorted({shape[i] for shape in shapes})
        assert all(shape._replace(**{SWEPT._fields[i]: SWEPT[i]}) == SWEPT for shape in shapes)
        rows += [
            {"sweep": letter, "shape": list(shape), "method": method, "ratio": 1.5}
            for shape in shapes for method in methods.SWEPT
        ]  # fmt: skip
    plot.draw(rows, tmp_path / "sweeps.png")
    assert (tmp_path / "sweeps.png").read_bytes().startswith(PNG)


def test_the_picture_of_three_heads_has_the_words_and_figures_of_the_table(tmp_path, monkeypatch):
    page, results = Path("docs/performance.md").read_text(), Path("bench/results")
    [files] = re.findall(r"`python -m bench.plot (.*) --out bench.png`", (results / "README.md").read_text())
    panels = []
    monkeypatch.setattr(plot, "place", lambda axes, points, *_: panels.append(points))
    rows = [row for file in files.split() for row in json.loads((results / file).read_text())["rows"]]
    plot.draw(rows, tmp_path / "bench.png")
    lines = page.split("| method |")[1].split("\n\n")[0].splitlines()[2:]
    methods, *columns = zip(*(line.replace("`", "").strip("| ").split(" | ") for line in lines if line), strict=True)
    shown = [
        {plot.label(name): f"{ms:.1f} ms, {memory:.0f}" for name, (memory, ms) in points.items()} for points in panels
    ]
    assert [[panel.get(method, "not measured") for method in methods] for panel in shown] == [*map(list, columns)]
    assert all(set(panel) <= set(methods) for panel in shown)


def test_hidden_states_of_the_example(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path("examples").resolve()))
    import train_lm
    from lm.jax_model import linear_loss
    from lm.jax_trainer import Trainer
    from lm.settings import Settings

    tokens = np.random.default_rng(0).integers(0, 100, (2, 8), np.int32)
    trainer = Trainer(Settings(64, 1, 8, 100, batch=2, dtype="bfloat16"), 100)
    train_lm.save_hidden(tmp_path / "new" / "hidden.npz", trainer, tokens)
    e, c, targets = hidden(tmp_path / "new" / "hidden.npz", jnp.bfloat16)
    assert (e.shape, c.shape, targets.tolist()) == ((14, 64), (100, 64), tokens[:, 1:].ravel().tolist())
    params = trainer.state["params"]
    want = linear_loss(trainer.model.apply({"params": params}, tokens), params["tokens"]["embedding"], tokens)
    np.testing.assert_allclose(float64.mean_loss(e, c, targets).loss, want, rtol=1e-5)


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
        e, c, targets = make(shape)
        losses[make.__name__] = float64.mean_loss(e, c, targets).loss
        assert make(shape)[2].tolist() == targets.tolist(), "the same data for the same seed"
    assert losses["trained"] < 4
    assert 0 < losses["flat"] - np.log(4000) < 1.5


def test_idle_time_is_of_one_call_and_of_all_streams():
    ms, busy = 1e6, [(0, 4), (1, 2), (4.5, 5)]  # the second beside the first
    calls = [[(start + after, end + after) for start, end in busy] for after in range(0, 40 * profile.CALLS, 40)]
    events = [profile.Event("", start * ms, end * ms) for call in calls for start, end in call]
    np.testing.assert_allclose(profile.idle(events), [0.5] * profile.CALLS)
    stalled = [e if e.start < 4.5 * ms else profile.Event("", e.start + 50 * ms, e.end + 50 * ms) for e in events]
    assert max(profile.idle(stalled)) > 30, "longer than a pause"


def test_kernels_that_differ_in_a_number_are_one():
    events = [profile.Event(name, 0, 1e6) for name in ("fusion_12", "fusion_7", "cce_dz__3")] * profile.CALLS
    assert profile.kernels(events) == {"fusion": {"ms": 2, "launches": 2}, "cce_dz": {"ms": 1, "launches": 1}}
