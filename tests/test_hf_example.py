"""The Hugging Face example and benchmark, on models small enough to be quick."""

import importlib.util
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from subprocess import PIPE
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # Trainer needs it

from bench.hugging_face import __main__ as bench
from bench.hugging_face import alone
from bench.hugging_face.methods import METHODS


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hf_finetune", Path("examples/hf_finetune.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hf_finetune", module)  # dataclasses looks there
    spec.loader.exec_module(module)
    tiny = module.Size(64, 1, 512, 200_000, 16, 2, steps=4, learning_rate=2e-2, tolerance=1e-3)
    monkeypatch.setattr(module, "SMALL", tiny)
    monkeypatch.setattr(module, "LARGE", tiny)
    return module


def test_hf_finetune(example, tmp_path, monkeypatch, capsys):
    figure = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["hf_finetune.py", "--out", str(figure)])
    example.main()
    assert figure.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "\nunpatched " in printed
    assert "\ncce_patch " in printed
    assert "largest difference of the curves" in printed


def test_hf_finetune_finds_a_wrong_gradient(example, tmp_path, monkeypatch):
    """A patch that leaves the head's gradient out."""
    monkeypatch.setattr(example, "cce_patch", lambda model: model.lm_head.weight.requires_grad_(False))
    monkeypatch.setattr(sys, "argv", ["hf_finetune.py", "--out", str(tmp_path / "curves.png")])
    with pytest.raises(SystemExit, match="the curves part"):
        example.main()


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """A method's process would import torch, transformers and JAX once more."""

    def run(command: list[str], stdout: int, text: bool) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", "bench.hugging_face.alone"]
        assert (stdout, text) == (PIPE, True)
        with monkeypatch.context() as patched, redirect_stdout(io.StringIO()) as printed:
            patched.setattr(sys, "argv", command[2:])
            alone.main()
        return SimpleNamespace(stdout=printed.getvalue(), returncode=0)

    monkeypatch.setattr(bench, "run", run)


def run_benchmark(methods: list[str], out: Path, monkeypatch, *flags: str) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as main sets it, but not for other tests
    monkeypatch.setattr(sys, "argv", ["bench.hugging_face", "--tiny", "--method", *methods, "--out", str(out), *flags])
    bench.main()


@pytest.mark.usefixtures("in_this_process")
def test_benchmark(tmp_path, monkeypatch, capsys):
    out = tmp_path / "hugging-face"
    run_benchmark(["unpatched", "cce_patch", "cut_cross_entropy"], out, monkeypatch)
    printed = capsys.readouterr().out
    kept = json.loads(out.with_suffix(".json").read_text())
    assert {"device", "git_tree", "packages", "size"} <= set(kept)
    assert kept["packages"]["transformers"]
    assert [row["method"] for row in kept["rows"]] == ["unpatched", "cce_patch"]
    for row in kept["rows"]:
        assert row["tokens_per_second"] > 0
        assert row["last_loss"] < row["first_loss"]
    assert kept["without"] == [{"method": "cut_cross_entropy", "missing": "it needs a GPU"}]
    assert all(name in printed for name in ("unpatched", "cce_patch", "tokens_per_second"))


@pytest.mark.usefixtures("in_this_process")
def test_the_largest_batch_is_that_whose_memory_is_within_the_limit(tmp_path, monkeypatch):
    """The peak is told, as a CPU's is not: 1 GiB a sequence, and out of memory beyond 12."""

    class Memory:
        def restart(self) -> None:
            self.sequences = 0

        def gib(self) -> float:
            return 1.0 * self.sequences

    memory = Memory()

    def drawn(size):
        memory.sequences = size.batch
        if size.batch > 12:
            raise RuntimeError("CUDA out of memory")
        return torch.zeros(1, size.batch, size.context, dtype=torch.int64)

    monkeypatch.setattr(alone, "Memory", lambda: memory)
    monkeypatch.setattr(alone, "batches", drawn)
    monkeypatch.setattr(alone.memory, "release", lambda: None)  # it looks through all of this process' memory
    out = tmp_path / "largest"
    run_benchmark(["unpatched"], out, monkeypatch, "--largest", "6.5")
    [row] = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert (row["sequences"], row["limit_gib"], row["optimizer"]) == (6, 6.5, "AdamW")
    assert row["tokens_per_second"] > 0
    run_benchmark(["cce_patch"], out, monkeypatch, "--largest", "100")
    [row] = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert row["sequences"] == 12
    assert row["tried_gib"]["16"] is None


def scaled(self, input_ids, labels):
    loss = type(self).forward(self, input_ids=input_ids, labels=labels).loss
    return SimpleNamespace(loss=1.01 * loss)


def of_half_of_the_tokens(self, input_ids, labels):
    """An untrained model's loss is about ln V whatever the tokens are: this one shows later."""
    return type(self).forward(self, input_ids=input_ids, labels=labels.where(labels > 100, -100))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("planted", "which"), [(scaled, "first"), (of_half_of_the_tokens, "last")])
def test_benchmark_finds_another_loss(planted, which, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "cce_patch", lambda model: setattr(model, "forward", MethodType(planted, model)))
    with pytest.raises(SystemExit, match=f"cce_patch: the {which} losses differ"):
        run_benchmark(["unpatched", "cce_patch"], tmp_path / "hugging-face", monkeypatch)
