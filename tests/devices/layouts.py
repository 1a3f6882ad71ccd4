"""What each layout exchanges, and what drawn calls (tests/search) ask seldom."""

from dataclasses import replace
from itertools import cycle

import pytest

from tests.devices.meshes import BY_NAME, EXCHANGED, PLAIN, WHOLE, assert_exchanged, compiled_gradient, uneven
from tests.search.calls import Call, Data, Program
from tests.search.run import failures


@pytest.mark.parametrize(
    ("name", "mode"),
    [("vocabulary", "auto"), ("vocabulary", "unchecked"), ("width over fsdp, vocabulary over tensor", "auto")],
)
def test_a_shard_whose_exponentials_underflow(name, mode):
    """And the gradient of a bias, which is not scattered where c's width is."""
    program = Program(impl="chunked", layout=mode, split=name, leading=(8, 8), width=16, vocabulary=64)
    program = replace(program, arrays=("bias",), wanted=("e", "c", "bias"))
    assert not failures(Call(program, Data(kind="confident", size=150.0, ignored="few")))


@pytest.mark.parametrize(("name", "mode"), list(zip(EXCHANGED, cycle(["auto", "explicit", "checked"]), strict=False)))
def test_what_is_exchanged(name, mode):
    """in_forward.py has other modes."""
    assert_exchanged(compiled_gradient(uneven(PLAIN), BY_NAME[name], mode)[0], BY_NAME[name], WHOLE)
