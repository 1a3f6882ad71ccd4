"""bench.tune: what it tries reaches the plans. Measuring itself needs a GPU."""

import sys
from dataclasses import replace

import pytest

from bench import tune
from cce_kernels.device import H200
from cce_kernels.engines import hopper
from cce_kernels.head import Head
from cce_kernels.numbers import Wanted
from cce_kernels.plan import plan_of
from cce_kernels.request import Request


@pytest.mark.parametrize("engine", ["hopper", "triton"])
def test_candidates_are_planned_with(engine, monkeypatch):
    """Each kernel's tiles, in a call of some budget and reduction; afterwards what is shipped is planned with again."""
    monkeypatch.setattr(hopper, "MOSAIC", True)
    shape, listed, changed = (8192, 2304, 256000), list(tune.candidates(engine, "9.0")), set()
    for budget, one_factor in ((2**29, True), (2 * shape[0] * shape[2], False), (2**29, False)):
        head = Head(), engine == "triton", Wanted(True, True, False), budget
        request = replace(Request(*shape, "bfloat16", *head), one_factor=one_factor)
        shipped = plan_of(request, H200, "cce")
        for candidate in listed:
            with candidate.in_place():
                changed |= {candidate.kernel} if plan_of(request, H200, "cce") != shipped else set()
        assert plan_of(request, H200, "cce") == shipped
    of_other_widths = {"SUMMED 128", "SUMMED 192"}
    assert changed == {candidate.kernel for candidate in listed} - of_other_widths


def test_a_candidate_that_fails_costs_its_row_alone(monkeypatch):
    def fails(*_):
        raise ValueError("no such tiles\nand more")

    monkeypatch.setattr(tune, "call_of", fails)
    candidate = next(tune.candidates("hopper", "9.0"))
    row = tune.row_of(candidate, None, "", None, 1)
    assert row["failed"] == "ValueError: no such tiles"


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit):
        tune.main()
    assert "needs a GPU" in capsys.readouterr().err
