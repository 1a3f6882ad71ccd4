"""The benchmark runs and keeps what it says; its float64 truth is the tests' own."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from bench import truth as float64
from bench.data import Shape, flat, trained
from tests.cases import Case, inputs
from tests.truth import truth


def test_one_shape(tmp_path):
    out = tmp_path / "bench"
    command = ["-m", "bench", "--shape", "64x16x512", "--rounds", "1", "--data", "trained", "--out", str(out)]
    subprocess.run([sys.executable, *command, "--method", "cce_jax", "full logits (XLA)"], check=True, timeout=300)
    kept = json.loads(out.with_suffix(".json").read_text())
    assert {"device", "jax", "git_tree", "regimes"} <= set(kept)
    assert [(r["method"], r["kind"]) for r in kept["rows"]][:3] == [
        ("cce_jax", "loss-fw"), ("cce_jax", "loss-bw"), ("cce_jax", "loss-fw-bw"),
    ]  # fmt: skip
    for row in kept["rows"]:
        assert row["runtime_ms_steady"] > 0
        assert row["ratio_spaced"] > 0
        assert row["rounding_de"] <= row["de_error"] * 1.01
    assert out.with_suffix(".csv").read_text().count("\n") == 1 + len(kept["rows"])


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
