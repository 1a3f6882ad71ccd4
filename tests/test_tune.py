"""The sweep over tile configurations: what it tries, prints and keeps. Measuring itself needs a GPU."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest

from bench import roles, tune
from bench.data import SHAPES
from cce_kernels.device import H200, INTERPRETER
from cce_kernels.engines import hopper
from cce_kernels.engines.hopper.tiles import DC, DE, LOGITS, SAVED_DE
from cce_kernels.engines.triton.tiles import INTERPRETED, SAVED_DZ, TABLE, TileConfig
from tests.lowering import for_hopper


@pytest.fixture
def command(monkeypatch, tmp_path):
    def run(*arguments: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["tune", *arguments, "--out", str(tmp_path / "new" / "tune")])
        tune.main()
        kept = json.loads((tmp_path / "new" / "tune.json").read_text())
        assert {"device", "jax", "git_tree", "packages"} <= set(kept)
        return kept["rows"]

    return run


def test_every_kernel_is_timed(command, capsys):
    rows = command("--quick")
    expected = [role for role in roles.ROLES if role not in roles.ON_HOPPER]
    assert [row["role"] for row in rows] == [role for role in expected for _ in roles.TINY]
    chosen = [roles.SAVED_TINY[0] if role == "saved dz" else INTERPRETED for role in expected]
    assert [row["tiles"] for row in rows if row["shipped"]] == [tune.label(tiles) for tiles in chosen]
    assert all(row["ms"] > 0 and row["ratio"] == row["ms"] / row["matmul_ms"] for row in rows)
    printed = capsys.readouterr().out
    assert all(role in printed for role in expected)
    assert printed.count("shipped") == len(expected)


def test_candidates_that_spill_or_fail_are_listed(command, capsys, monkeypatch):
    spilling, failing = TileConfig(64, 32, 16, 4, 1), TileConfig(32, 64, 16, 4, 1)
    monkeypatch.setattr(roles, "TINY", [spilling, failing, INTERPRETED])
    real = roles.program

    def program(role, given, read, tiles, gpu):
        def fails(*_):
            raise ValueError(f"no {tiles.rows} rows\nand more")

        function, arguments = real(role, given, read, tiles, gpu)
        function = fails if tiles == failing else function
        function.spills = 24 if tiles == spilling else 0
        return function, arguments

    monkeypatch.setattr(tune, "program", program)
    monkeypatch.setattr(tune, "spilled", lambda function, *_: function.spills)
    rows = command("--quick", "--role", "dc")
    assert [(row["ms"] is None, row["spilled"], row.get("failed")) for row in rows] == [
        (True, 24, None), (True, 0, "ValueError: no 32 rows"), (False, 0, None),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "spills 24 bytes" in printed
    assert "no 32 rows" in printed


@pytest.mark.parametrize("role", ["dz", "de", "saved dz"])
def test_spills_are_known_before_a_candidate_runs(role):
    given = roles.Given.of(tune.Shape(64, 1024, 1024), "bfloat16", INTERPRETER)
    chosen, read = roles.shipped(role, given, H200), roles.buffer(role, given, H200)

    def spilled(tiles, gpu=H200):
        return roles.spilled(*roles.program(role, given, read, tiles, H200), gpu)

    assert spilled(chosen) == 0
    if role != "saved dz":
        spilling = replace(roles.SIXTEEN_BIT[0], warps=4)
        assert spilled(spilling) > 0
        assert spilled(spilling, INTERPRETER) == 0


@pytest.mark.parametrize("role", roles.ON_HOPPER)
def test_candidates_for_hopper_fit_it(role, monkeypatch):
    """In shared memory, every third of them; what is shipped is one of them, whatever the shape."""
    monkeypatch.setattr(hopper, "MOSAIC", True)
    listed, shape = partial(roles.candidates, role, gpu=H200), tune.Shape(512, 128, 4096)
    assert {LOGITS, *DE, *SAVED_DE, *DC} <= set(listed(shape, "bfloat16"))
    assert listed(shape, "float32") == listed(tune.QUICK, "bfloat16") == []
    assert listed(shape, "bfloat16", gpu=replace(H200, compute_capability="8.0")) == []
    given = roles.Given.of(shape, "bfloat16", INTERPRETER)
    assert roles.shipped(role, given, H200) in listed(shape, "bfloat16")
    read = roles.buffer(role, given, H200)
    for tiles in listed(shape, "bfloat16")[::3]:
        function, arguments = roles.program(role, given, read, tiles, H200)
        assert for_hopper(function, *arguments) == [roles.ON_HOPPER[role]]


def test_without_a_gpu_only_quick_runs(command, capsys):
    with pytest.raises(SystemExit):
        command()
    assert "needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_shipped_is_a_candidate(dtype):
    itemsize = 4 if dtype == "float32" else 2
    for role, tiles in TABLE[H200.compute_capability, itemsize]._asdict().items():
        assert tiles in roles.candidates(role, tune.QUICK, dtype, H200)
    saved = roles.candidates("saved dz", tune.QUICK, dtype, H200)
    assert (SAVED_DZ in saved) == (dtype == "bfloat16")
    for role in roles.ROLES:
        tried = roles.candidates(role, SHAPES["gemma2-2b"], dtype, H200)
        assert len(set(tried)) == len(tried)
