"""linear_log_probs on several devices: every number and its gradients as on one, and what the devices exchange."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax import linear_log_probs
from tests.devices.layouts import BY_NAME
from tests.devices.meshes import collectives, mesh_of
from tests.search.calls import LOG_PROBS, Call, Data, Program
from tests.search.run import failures

RNG = np.random.default_rng(0)
ARRAYS = {name: np.float32(RNG.normal(size=shape)) for name, shape in (("e", (8, 8, 16)), ("c", (64, 16)))}
ARRAYS["bias"] = np.float32(RNG.normal(size=64))
TARGETS = np.where(RNG.random((8, 8)) < 0.3, -100, RNG.integers(0, 64, (8, 8)))
IDS = RNG.integers(-1, 66, (8, 8, 3))
OF = RNG.normal(size=(8, 8)).astype(np.float32)


def program(layout=None, explicit=False, **options):
    """(leaves, others) -> gradients and numbers. layout: None for one device."""
    if layout is not None and not explicit:
        options["sharding"] = layout.e, layout.c

    def objective(leaves, others):
        found = linear_log_probs(**leaves, **others, precision="highest", **options)
        total = jnp.sum(OF * found.log_probs * found.lse)
        total = total if found.entropy is None else total + jnp.sum(found.entropy**2)
        ids = found.id_log_probs
        return total if ids is None else total + jnp.sum(jnp.where(ids > -jnp.inf, ids, 0) ** 2), found

    return jax.grad(objective, has_aux=True)


def over_devices(name, mode, others, **options):
    """What the program returns over this layout, and the program."""
    layout = BY_NAME[name]
    mesh, of_tokens = mesh_of(layout, mode), P(*layout.e[:2])
    specs = layout.specs() | dict.fromkeys(others, of_tokens)
    given = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in {**ARRAYS, **others}.items()}
    leaves = {k: given.pop(k) for k in ARRAYS}
    with jax.set_mesh(mesh):
        run = jax.jit(program(layout, mode == "explicit", **options)).lower(leaves, given).compile()
        return run(leaves, given), run


def test_ids_among_the_columns_of_other_devices():
    """A call of tests/search, which seldom draws one."""
    program = Program(function=LOG_PROBS, impl="chunked", layout="auto", split="vocabulary", leading=(8, 8), width=16)
    program = replace(program, vocabulary=64, ids=3, memory_budget=0, objective=("log_probs", "id_log_probs"))
    assert not failures(Call(program, Data(ignored="few")))


@pytest.mark.parametrize("name", ["vocabulary", "sequence and vocabulary over tensor"])
def test_ties_keep_the_lowest_ids(name):
    arrays = {"targets": np.zeros((8, 8), np.int32), "temperature": np.ones((8, 8), np.float32)}
    bias = np.zeros(64, np.float32)
    bias[[3, 20, 40, 41, 63]] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARRAYS, "e", 0 * ARRAYS["e"])
        patch.setitem(ARRAYS, "bias", bias)
        (_, found), _ = over_devices(name, "auto", arrays, top_k=8)
    np.testing.assert_array_equal(found.top_ids, np.tile([3, 20, 40, 41, 63, 0, 1, 2], (8, 8, 1)))


@pytest.mark.parametrize(
    ("more", "options", "exchanged"),
    [
        ({}, {"entropy": True}, {"all-gather f32[8,4,64]": 1}),
        ({"ids": IDS}, {}, {"all-gather f32[8,3,64]": 1, "all-reduce f32[64,3]": 1}),
    ],
    ids=["entropy", "ids"],
)
def test_what_is_exchanged(more, options, exchanged):
    """The numbers of the vocabulary's parts in one array, the sum of the ids' logits, and de."""
    _, run = over_devices("vocabulary", "auto", {"targets": TARGETS, **more}, impl="chunked", **options)
    found = {name: count for name, count in collectives(run).items() if not name.endswith("[]")}
    assert sum(name.startswith("all-reduce f32[8,8,16]") for name in found) == 1
    assert {name: count for name, count in found.items() if "[8,8,16]" not in name} == exchanged
