"""bench.training: what it computes from trainings, and its search for the largest batch."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from bench.training import __main__ as command
from bench.training import compare, run
from bench.training.jobs import OURS, REFERENCE, REFERENCES, Job, jobs
from bench.training.models import model_type
from bench.training.run import train
from examples.lm.settings import Settings
from examples.lm.text import Text

SETTINGS = Settings(64, 1, 16, 300, batch=4, steps=20, dtype="bfloat16")


def test_each_training_has_a_reference():
    trainings = [job for job in jobs() if job.kind == "train"]
    assert len({job.file for job in trainings}) == len(trainings)
    for job in trainings:
        assert Job("train", REFERENCES[job.package], job.seed, package=job.package) in trainings


def test_trainings_are_compared(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], 4000)))
    Text.prepare([text], SETTINGS.vocabulary, 10**6).save(tmp_path / "text")
    trained = (
        Job("train", REFERENCE),
        Job("train", OURS),
        Job("train", REFERENCE, 1),
        Job("train", REFERENCE, 0, "nudged"),
    )
    tokens, rows = Text.load(tmp_path / "text"), []
    for job in trained:
        found = train(job, replace(SETTINGS, seed=job.seed), tokens, tmp_path)
        rows.append({**asdict(job), "label": job.label, **found})
    compare.compare(rows, tmp_path)
    first, ours, _, nudged = rows
    assert "from_reference" not in first
    assert len(first["curve"]) == 2
    assert list(first["validation"]) == [5, 10, 15, 20]
    assert first["curve"][0] - first["curve"][1] > 0.1  # it learns
    seeds = compare.spread(rows, tmp_path)
    assert seeds is not None
    for row in (ours, nudged):  # nearer to the reference than its other seed is, but not it
        apart = row["from_reference"]
        assert 0 < apart["largest_curve_difference"] < seeds["largest_curve_difference"] / 5
        assert 0 < apart["distance_of_weights"] < 0.1 < seeds["distance_of_weights"]
    compare.plot(rows, SETTINGS.steps, tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "cce_torch, seed 0" in compare.table(rows)


class Training:
    """A training whose memory grows with the batch, GIB a sequence, and ends at MOST sequences."""

    GIB, MOST = 0.1, 10**6

    def __init__(self, *_) -> None:
        self.trainer = self.optimizer = self.memory = self

    def zero_grad(self): ...
    def restart(self): ...
    def wait(self): ...

    def step(self, tokens):
        self.sequences = tokens.shape[1]
        if self.sequences > self.MOST:
            raise RuntimeError("CUDA out of memory")

    def gib(self):
        return 1 + self.sequences * self.GIB


@pytest.mark.parametrize(
    ("gib", "most", "want"),
    [(0.1, 10**6, 224), (0.2, 10**6, 112), (1.0, 10**6, 16), (0.01, 600, 600), (30, 10**6, 0), (0.0, 10**6, 2048)],
)
def test_largest_batch(monkeypatch, gib, most, want):
    monkeypatch.setattr(run, "release", lambda: None)  # it looks through all of this process' memory
    monkeypatch.setattr(run, "InTorch", type("Fake", (Training,), {"GIB": gib, "MOST": most}))
    row = run.largest(Job("largest", OURS), SETTINGS, limit_gib=24, most=2048)
    assert row["sequences"] == want


def test_rivals_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("Liger", "cut_cross_entropy"):
        with pytest.raises(ImportError, match="needs a GPU"):
            model_type(name)


def test_a_job_that_hangs_costs_only_itself():
    row = command.row_of(Job("train", OURS), ["no settings"], 0.1)
    assert (row["label"], row["failed"]) == ("cce_torch, seed 0", "it took more than 0 s")
