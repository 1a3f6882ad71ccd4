"""What each layout exchanges; and the comparison of a layout with float64, for the calls that drawn.py draws."""

from itertools import cycle

import numpy as np
import pytest

from tests.cases import Case
from tests.devices.meshes import (
    BY_NAME,
    EXCHANGED,
    PLAIN,
    WHOLE,
    Layout,
    assert_exchanged,
    compiled_gradient,
    on_one_device,
    uneven,
)
from tests.tolerance import assert_close, assert_reference
from tests.truth import truth


def compare(
    case: Case, layout: Layout, mode: str, impl: str = "chunked", dtype: str = "float32", vocab_axis: int = 0, **more
) -> None:
    """Loss and gradients against float64, and where the gradients lie."""
    given = uneven(case, dtype)
    given = type(given)(given.e, given.c, given.targets, given.optional, np.float32(1.0), given.of_lse)
    want, _, of = truth(given, case.options)
    reference, references = on_one_device(given, vocab_axis, **case.options)
    options = {"impl": impl, "vocab_axis": vocab_axis, **case.options, **more}
    run, leaves, others = compiled_gradient(given, layout, mode, **options)
    loss, gradients = run(leaves, others)
    assert_close(loss, want, reference, "loss")
    assert set(gradients) == set(of)
    for name, x in gradients.items():
        wanted = of[name].T if name == "c" and vocab_axis else of[name]
        assert_reference(references[name], wanted, name)
        assert_close(x, wanted, references[name], name)
        if name in ("e", "c"):
            at = leaves[name].sharding
            assert x.sharding.is_equivalent_to(at, x.ndim), f"{name}: {x.sharding.spec} is not {at.spec}"


@pytest.mark.parametrize(
    ("name", "mode"),
    [("vocabulary", "auto"), ("vocabulary", "unchecked"), ("width over fsdp, vocabulary over tensor", "auto")],
)
def test_a_shard_whose_exponentials_underflow(name, mode):
    """And the gradient of a bias, which is not scattered where c's width is."""
    case = Case("bias", leading=(8, 8), width=16, vocabulary=64, arrays=("bias",))
    compare(case, BY_NAME[name], mode)


@pytest.mark.parametrize(("name", "mode"), list(zip(EXCHANGED, cycle(["auto", "explicit", "checked"]), strict=False)))
def test_what_is_exchanged(name, mode):
    """in_forward.py has other modes."""
    assert_exchanged(compiled_gradient(uneven(PLAIN), BY_NAME[name], mode)[0], BY_NAME[name], WHOLE)
