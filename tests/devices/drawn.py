"""Layouts and options for in_forward.py, drawn at random; tests/search draws calls over the layouts of meshes.py."""

from functools import partial

import hypothesis
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.devices.meshes import MODES, Layout

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
