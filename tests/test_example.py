"""The example trains a model that can be resumed, and its losses train the same."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

SIZES = ["--width", "64", "--layers", "1", "--context", "16", "--vocabulary", "300", "--batch", "4", "--evaluate", "2"]
MESH = "data=2,tensor=2"


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path("examples").resolve()))


@pytest.fixture
def novel(tmp_path) -> Path:
    """A folder with a text, a copy of it, and a binary file."""
    folder = tmp_path / "novel"
    folder.mkdir()
    words = np.random.default_rng(0).choice(["the", "cat", "sat", "on", "a", "mat", "and", "slept"], 3000)
    for name in ("one.txt", "two.txt"):
        (folder / name).write_text(" ".join(words))
    (folder / "picture.bin").write_bytes(b"\x89PNG\0\xff" * 100)
    return folder


COMPARE = """
import sys
sys.path.insert(0, "examples")
import compare_losses
tiny = compare_losses.Settings(64, 1, 32, 512, batch=4, steps=3)
compare_losses.SMALL = tiny
compare_losses.TEXT_BYTES[tiny], compare_losses.TOLERANCE[tiny] = 300_000, 1e-4
compare_losses.main()
"""


def test_compare_losses(tmp_path):
    """Small; also on four devices, which XLA makes of the CPU."""
    figure = tmp_path / "curves.png"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, "--mesh", MESH, "--out", str(figure)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert figure.stat().st_size > 10_000
    for run in (
        "linear cross-entropy  ",
        "full logits  ",
        "the same, data=2,tensor=2  ",
        "linear cross-entropy, PyTorch  ",
    ):
        assert f"\n{run}" in done.stdout
    assert "largest difference of the curves" in done.stdout


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_resumed_training_is_the_same(tmp_path, novel, framework):
    import train_lm

    out = tmp_path / "out"
    options = ["--framework", framework, "--text", str(novel), "--out", str(out), *SIZES, "--accumulation", "2"]
    train_lm.main([*options, "--steps", "6", "--save", "4"])
    whole = log(out)
    assert [row["step"] for row in whole if "validation" in row] == [2, 4, 6]
    assert all(row["perplexity"] == pytest.approx(np.exp(row["validation"])) for row in whole if "validation" in row)
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):  # it would mix the checkpoints of two trainings
        train_lm.main(options)
    shutil.rmtree(out / "checkpoints" / "6")
    train_lm.main(["--out", str(out), "--resume"])
    assert [row for row in log(out) if "validation" in row] == [row for row in whole if "validation" in row]


def test_under_torchrun_the_curve_is_that_of_one_process(tmp_path, novel):
    """Four processes, which talk by gloo: FSDP2 over the data, and the vocabulary split."""
    import train_lm

    options = ["--framework", "torch", "--text", str(novel / "one.txt"), *SIZES, "--steps", "3"]
    train_lm.main([*options, "--out", str(tmp_path / "one")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["examples/train_lm.py", *options, "--mesh", MESH, "--out", str(tmp_path / "four")]
    environment = {"PYTHONPATH": os.pathsep.join((".", "kernels")), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    logs = log(tmp_path / "one"), log(tmp_path / "four")
    one, four = ([row[k] for row in rows for k in ("loss", "validation") if k in row] for rows in logs)
    assert len(one) == 3  # of steps 2 and 3
    np.testing.assert_allclose(four, one, rtol=1e-6)


def log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_parts_of_a_batch_add_up(novel, framework):
    from lm.settings import Settings
    from lm.text import Text, files_in
    from train_lm import make_trainer

    settings = Settings(64, 1, 16, 300, batch=4, steps=2)
    text = Text.prepare(files_in([novel]), settings.vocabulary, 10**6)
    losses = []
    for parts in (1, 4):
        trainer = make_trainer(framework, replace(settings, accumulation=parts), text.vocabulary, None, None)
        losses.append([float(trainer.step(text.batch(trainer.settings, step))) for step in (0, 1, 2)])
    assert losses[0][0] - losses[0][2] > 0.01  # the steps change the loss by much more than the bound
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_text(novel):
    from lm.settings import Settings
    from lm.text import END, Text, files_in

    text = Text.prepare(files_in([novel]), 300, 10**6)
    assert (text.tokenizer.get_vocab_size(), text.vocabulary) == (276, 320)
    one = (novel / "one.txt").read_text()
    every = np.concatenate([text.tokens, text.held_out])
    assert text.tokenizer.decode(every.tolist(), skip_special_tokens=False) == one + END  # the copy is left out
    assert 0.04 < len(text.held_out) / len(every) < 0.06
    settings = Settings(64, 1, 16, 300, batch=4, accumulation=2)
    count = len(text.tokens) // 16
    steps = -(-count // 4)
    seen = np.concatenate([text.batch(settings, step).reshape(-1, 16) for step in range(steps)])
    whole = text.tokens[: count * 16].reshape(-1, 16)
    np.testing.assert_array_equal(np.sort(seen[:count], axis=0), np.sort(whole, axis=0))  # each once
    assert not np.array_equal(seen[:count], whole)
    other = text.batch(replace(settings, seed=1), 0)
    assert other.shape == (2, 2, 16)
    assert not np.array_equal(other, text.batch(settings, 0))
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        files_in([novel / "absent"])


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, ["0", "1"]), ("4,5", ["4", "5"]), ("3", ["3", "3"]), ("", ["", ""])]
)
def test_each_process_sees_its_own_gpu(visible, seen):
    from lm.processes import gpu_of

    assert [gpu_of(rank, visible) for rank in (0, 1)] == seen


def test_settings_that_do_not_fit():
    from lm.settings import Settings

    with pytest.raises(ValueError, match="multiple of 64"):
        Settings(width=100)
    with pytest.raises(ValueError, match="3 equal parts"):
        Settings(batch=16, accumulation=3)
