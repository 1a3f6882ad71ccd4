"""What each layout exchanges; and the comparison of a layout with float64, for the calls that drawn.py draws."""

from collections import Counter
from itertools import cycle

import jax
import numpy as np
import pytest

from tests.cases import Case
from tests.devices.meshes import (
    LAYOUTS,
    PLAIN,
    Layout,
    arrays,
    collectives,
    gradient_of,
    leaves_of,
    mesh_of,
    on_one_device,
    uneven,
)
from tests.tolerance import assert_close, assert_reference
from tests.truth import truth

BY_NAME = {layout.name: layout for layout in LAYOUTS}


def compare(
    case: Case, layout: Layout, mode: str, impl: str = "chunked", dtype: str = "float32", vocab_axis: int = 0, **more
) -> None:
    """Loss and gradients against float64, and where the gradients lie."""
    given = uneven(case, dtype)
    given = type(given)(given.e, given.c, given.targets, given.optional, np.float32(1.0), given.of_lse)
    want, _, of = truth(given, case.options)
    reference, references = on_one_device(given, vocab_axis, **case.options)
    mesh = mesh_of(layout, mode)
    leaves, others = leaves_of(arrays(given, layout, mesh, vocab_axis))
    with jax.set_mesh(mesh):
        run = jax.jit(gradient_of(layout, mode, impl=impl, vocab_axis=vocab_axis, **case.options, **more))
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


# What is exchanged for B = T = 8, D = 16, V = 64 beside the sums of the loss: e is f32[8,8,16], c f32[64,16]. Both
# passes gather c; XLA does it once where one program has both.
EXCHANGED = {
    "tokens": {"all-reduce f32[64,16]": 1},
    "vocabulary": {"all-gather f32[8,3,64]": 1, "all-reduce f32[8,8,16]": 1},
    "tokens and vocabulary": {"all-gather f32[4,3,32]": 1, "all-reduce f32[4,8,16]": 1, "all-reduce f32[16,16]": 1},
    "sequence": {"all-reduce f32[64,16]": 1},
    "c's width over data": {"all-gather f32[64,16]": 1, "reduce-scatter f32[64,2]": 1},
    "c's vocabulary over data": {"all-gather f32[64,16]": 1, "reduce-scatter f32[8,16]": 1},
    "width over fsdp, vocabulary over tensor": {
        "all-gather f32[32,16]": 1,
        "reduce-scatter f32[32,4]": 1,
        "all-gather f32[2,3,16]": 1,
        "all-reduce f32[2,8,16]": 1,
    },
    "sequence and vocabulary over tensor": {  # e is smaller than c; targets are gathered with it
        "all-gather f32[4,8,16]": 1,
        "all-gather s32[4,8]": 1,
        "all-gather f32[4,3,32]": 1,
        "reduce-scatter f32[4,2,16]": 1,
        "all-reduce f32[16,16]": 1,
    },
    "all replicated": {},
}


@pytest.mark.parametrize(("name", "mode"), list(zip(EXCHANGED, cycle(["auto", "explicit", "checked"]), strict=False)))
def test_what_is_exchanged(name, mode):
    """The sums of the loss extend over the devices that split the tokens. in_forward.py has other modes."""
    layout = BY_NAME[name]
    mesh = mesh_of(layout, mode)
    leaves, others = leaves_of(arrays(uneven(PLAIN), layout, mesh))
    with jax.set_mesh(mesh):
        found = collectives(jax.jit(gradient_of(layout, mode)).lower(leaves, others).compile())
    scalars = {k: found.pop(k) for k in list(found) if k.endswith("[]")}
    assert found == Counter(EXCHANGED[name])
    assert bool(scalars) == bool(layout.e)
    assert all(k.startswith("all-reduce") for k in scalars)
