"""Layouts, types, options and implementations drawn at random give the loss and the gradients of one device."""

from functools import partial

import hypothesis
import jax
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.cases import ARRAYS, DTYPES, Case
from tests.devices.layouts import compare
from tests.devices.meshes import MODES, Layout, arrays, gradient_of, leaves_of, mesh_of, on_one_device, uneven
from tests.tolerance import error, roundoff

# Without shrinking: a simpler layout that fails takes minutes of compilation.
DRAWS = partial(
    hypothesis.settings, suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate]
)
MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 8}]


@st.composite
def layouts(draw) -> tuple[Layout, str]:
    mesh = draw(st.sampled_from(MESHES))
    e: list[list[str]] = [[], []]
    c: list[list[str]] = [[], []]
    for axis in mesh:
        of_e, of_c = draw(st.sampled_from([None, 0, 1])), draw(st.sampled_from([None, 0, 1]))
        if of_e is not None:
            e[of_e].append(axis)
        if of_c is not None:
            c[of_c].append(axis)
    specs = [P(*(tuple(entry) or None for entry in x)) for x in (e, c)]
    layout = Layout("drawn", mesh, *specs)
    mode = draw(st.sampled_from([mode for mode in MODES if layout.allows(mode)]))
    # Inside jax.shard_map a device's columns must be consecutive: axes that split the tokens too come last.
    shared = [a in {x for entry in e for x in entry} for a in c[0]]
    hypothesis.assume(shared == sorted(shared) or not layout.manual(mode))
    return layout, mode


@st.composite
def options_of(draw) -> dict:
    """Options of a loss that is one number, and vocab_axis."""
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum"])),
        "vocab_axis": draw(st.integers(0, 1)),
        "softcap": draw(st.sampled_from([None, 5.0])),
        "logit_scale": draw(st.sampled_from([None, 1.3])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.2])),
        "z_loss": draw(st.sampled_from([0.0, 0.02])),
        "shift": draw(st.integers(0, 2)),
    }
    if options["reduction"] == "mean":
        options["num_items"] = draw(st.sampled_from([None, 12.5]))
    return options


@DRAWS(max_examples=8)
@hypothesis.given(
    layouts(),
    options_of(),
    st.sampled_from(["cce", "chunked", "chunked", "reference"]),
    st.sampled_from(list(DTYPES)),
    st.lists(st.sampled_from(ARRAYS), unique=True),
    st.sampled_from([8, 64]),
    st.sampled_from([0, "all"]),
)
def test_drawn(drawn, options, impl, dtype, arrays, rows, memory_budget):
    """rows: B, so that there are fewer tokens than columns, or more: the smaller of e and c is gathered."""
    layout, mode = drawn
    axis = options.pop("vocab_axis")
    case = Case("drawn", (8 if impl == "cce" else rows, 8), 16, 128, tuple(arrays), options=options)
    compare(case, layout, mode, impl, dtype, axis, memory_budget=memory_budget)


@DRAWS(max_examples=2)
@hypothesis.given(layouts(), st.sampled_from(["cce", "chunked"]), st.integers(0, 1))
def test_drawn_float32_parameters_beside_16_bits(drawn, impl, vocab_axis):
    """dz is rounded to 16 bits, of which some fall differently where sums are split; the gradients are not."""
    layout, mode = drawn
    case = Case("drawn", leading=(8, 8), width=16, vocabulary=64, arrays=("bias",))
    given, exact = uneven(case, "bfloat16"), uneven(case)
    given = type(given)(given.e, exact.c, given.targets, exact.optional, given.of_loss, given.of_lse)
    mesh = mesh_of(layout, mode)
    leaves, others = leaves_of(arrays(given, layout, mesh, vocab_axis))
    with jax.set_mesh(mesh):
        loss, gradients = jax.jit(gradient_of(layout, mode, impl=impl, vocab_axis=vocab_axis))(leaves, others)
    want, wanted = on_one_device(given, vocab_axis)
    assert error(loss, want) < 2e-6
    for name, x in gradients.items():
        assert x.dtype == leaves[name].dtype, name
        assert error(x, wanted[name]) < roundoff("bfloat16") / (1 if name == "e" else 2), name
