"""Every layout in every mode gives the loss and the gradients of one device, and exchanges what it must."""

from collections import Counter

import jax
import numpy as np
import pytest

from tests.cases import Case
from tests.devices.meshes import (
    EVERYTHING,
    LAYOUTS,
    MODES,
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

ALLOWED = [[mode for mode in MODES if layout.allows(mode)] for layout in LAYOUTS]
SOME = [  # a third; drawn.py draws from all
    (layout, mode) for i, layout in enumerate(LAYOUTS) for mode in ALLOWED[i][i % min(3, len(ALLOWED[i])) :: 3]
]
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def compare(case: Case, layout: Layout, mode: str, impl: str = "chunked", dtype: str = "float32", vocab_axis: int = 0,
            **more) -> None:  # fmt: skip
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


@pytest.mark.parametrize(("layout", "mode"), SOME, ids=str)
def test_every_layout_and_every_mode(layout, mode):
    compare(EVERYTHING, layout, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layout", [x for x in LAYOUTS if x.name in ("three axes", "c's vocabulary over data")], ids=str
)
def test_the_reference(layout, mode):
    if layout.allows(mode):
        compare(EVERYTHING, layout, mode, impl="reference")


@pytest.mark.parametrize(
    ("layout", "mode"), [(BY_NAME["three axes"], mode) for mode in MODES if BY_NAME["three axes"].allows(mode)], ids=str
)
def test_c_of_shape_d_v(layout, mode):
    compare(EVERYTHING, layout, mode, vocab_axis=1)


@pytest.mark.parametrize("mode", MODES[:4])
def test_a_shard_whose_exponentials_underflow(mode):
    case = Case("bias", leading=(8, 8), width=16, vocabulary=64, arrays=("bias",))
    compare(case, BY_NAME["vocabulary"], mode)


KERNELS = [
    ("tokens and vocabulary", "auto", 0),
    ("tokens and vocabulary", "explicit", "all"),
    ("tokens and vocabulary", "checked", "all"),
    ("vocabulary", "unchecked", "all"),
    ("sequence and vocabulary over tensor", "auto", "all"),
    ("c's vocabulary over data", "checked", 0),
]


@pytest.mark.parametrize(("name", "mode", "memory_budget"), KERNELS)
def test_the_kernels(name, mode, memory_budget):
    """In Pallas' interpreter, with exponentials saved and without."""
    case = Case("few", leading=(8, 16), width=16, vocabulary=128, arrays=("bias",))
    compare(case, BY_NAME[name], mode, impl="cce", dtype="bfloat16", memory_budget=memory_budget)


@pytest.mark.parametrize("mode", MODES[:4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype, mode):
    compare(PLAIN, BY_NAME["three axes"], mode, dtype=dtype)


# What is exchanged for B = T = 8, D = 16, V = 64 beside the sums of the loss: e is f32[8,8,16], c f32[64,16]. Both
# passes gather c; XLA does it once where one program has both.
EXCHANGED = {
    "tokens": {"all-reduce f32[64,16]": 1},
    "vocabulary": {"all-gather f32[8,64,2]": 1, "all-reduce f32[8,8,16]": 1},
    "tokens and vocabulary": {
        "all-gather f32[4,32,2]": 1, "all-reduce f32[4,8,16]": 1, "all-reduce f32[16,16]": 1,
    },
    "sequence": {"all-reduce f32[64,16]": 1},
    "c's width over data": {"all-gather f32[64,16]": 1, "reduce-scatter f32[64,2]": 1},
    "c's vocabulary over data": {"all-gather f32[64,16]": 1, "reduce-scatter f32[8,16]": 1},
    "width over fsdp, vocabulary over tensor": {
        "all-gather f32[32,16]": 1, "reduce-scatter f32[32,4]": 1, "all-gather f32[2,16,2]": 1,
        "all-reduce f32[2,8,16]": 1,
    },
    "sequence and vocabulary over tensor": {  # e is smaller than c; targets are gathered with it
        "all-gather f32[4,8,16]": 1, "all-gather s32[4,8]": 1, "all-gather f32[4,32,2]": 1,
        "reduce-scatter f32[4,2,16]": 1, "all-reduce f32[16,16]": 1,
    },
    "all replicated": {},
}  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "explicit", "checked"])
@pytest.mark.parametrize("name", EXCHANGED)
def test_what_is_exchanged(name, mode):
    """The sums of the loss extend over the devices that split the tokens."""
    layout = BY_NAME[name]
    mesh = mesh_of(layout, mode)
    leaves, others = leaves_of(arrays(uneven(PLAIN), layout, mesh))
    with jax.set_mesh(mesh):
        found = collectives(jax.jit(gradient_of(layout, mode)).lower(leaves, others).compile())
    scalars = {k: found.pop(k) for k in list(found) if k.endswith("[]")}
    assert found == Counter(EXCHANGED[name])
    assert bool(scalars) == bool(layout.e)
    assert all(k.startswith("all-reduce") for k in scalars)
