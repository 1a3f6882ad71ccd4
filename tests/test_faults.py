"""The faults of tests/planted.txt can still be planted. That tests see them is for `python -m tests.faults` to say."""

from functools import cache

import pytest

from tests.faults import FAULTS, PACKAGES, ROOT, Fault


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: f"{x.file}: {x.what}")
def test_a_fault_replaces_one_place_of_a_package(fault: Fault):
    assert fault.file.split("/")[0] in PACKAGES
    assert text(fault.file).count(fault.old) == 1
    assert fault.new != fault.old
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in text(f"tests/{file}") or not name
