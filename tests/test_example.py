"""The tutorial runs, on a few steps: its three trainings agree."""

import subprocess
import sys


def test_train_lm(tmp_path):
    figure = tmp_path / "curves.png"
    done = subprocess.run(
        [sys.executable, "examples/train_lm.py", "--steps", "3", "--out", str(figure)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert figure.stat().st_size > 10_000
    for run in ("linear cross-entropy  ", "full logits  ", "linear cross-entropy, PyTorch  "):
        assert f"\n{run}" in done.stdout
    assert "largest difference of the curves" in done.stdout
