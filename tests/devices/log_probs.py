"""linear_log_probs on several devices: what drawn calls (tests/search) do not ask, or seldom."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax import linear_log_probs
from tests.devices.meshes import BY_NAME, collectives, mesh_of
from tests.search.calls import LOG_PROBS, Call, Data, Program
from tests.search.run import failures


def over_devices(name, run, **more):
    """What run(found) makes of the numbers of 8 × 8 tokens over this layout, whose logits are the bias; the program."""
    layout = BY_NAME[name]
    mesh, specs = mesh_of(layout, "auto"), layout.specs()
    bias = jnp.zeros(64).at[jnp.array([3, 20, 40, 41, 63])].set(1)
    given = {"e": jnp.zeros((8, 8, 16)), "c": jnp.ones((64, 16)), "bias": bias, "targets": jnp.zeros((8, 8), int)}
    given |= {"ids": jnp.zeros((8, 8, 3), int)} if more.pop("ids", False) else {}
    given = {k: jax.device_put(x, NamedSharding(mesh, specs.get(k, P(*layout.e[:2])))) for k, x in given.items()}
    options = more | {"sharding": (layout.e, layout.c), "impl": "chunked"}
    with jax.set_mesh(mesh):
        program = jax.jit(run(lambda e, others: linear_log_probs(e, **others, **options)))
        program = program.lower(given.pop("e"), given).compile()
        return program, given


def test_ids_among_the_columns_of_other_devices():
    program = Program(function=LOG_PROBS, impl="chunked", layout="auto", split="vocabulary", leading=(8, 8), width=16)
    program = replace(program, vocabulary=64, ids=3, memory_budget=0, objective=("log_probs", "id_log_probs"))
    assert not failures(Call(program, Data(ignored="few")))


@pytest.mark.parametrize("name", ["vocabulary", "sequence and vocabulary over tensor"])
def test_ties_keep_the_lowest_ids(name):
    program, given = over_devices(name, lambda call: lambda e, others: call(e, others).top_ids, top_k=8)
    e = jax.device_put(jnp.zeros((8, 8, 16)), program.input_shardings[0][0])
    np.testing.assert_array_equal(program(e, given), np.tile([3, 20, 40, 41, 63, 0, 1, 2], (8, 8, 1)))


@pytest.mark.parametrize(
    ("asked", "exchanged"),
    [
        ({"entropy": True}, {"all-gather f32[8,4,64]": 1}),
        ({"ids": True}, {"all-gather f32[8,3,64]": 1, "all-reduce f32[64,3]": 1}),
    ],
    ids=["entropy", "ids"],
)
def test_what_is_exchanged(asked, exchanged):
    """The numbers of the vocabulary's parts in one array, the sum of the ids' logits, and de."""

    def gradient(call):
        def total(e, others):
            found = call(e, others)
            return sum(
                jnp.sum(x * x) for x in (found.log_probs, found.lse, found.entropy, found.id_log_probs) if x is not None
            )

        return jax.grad(total)

    found = collectives(over_devices("vocabulary", gradient, **asked)[0])
    assert Counter({k: n for k, n in found.items() if not k.endswith("[]")}) == Counter(
        exchanged | {"all-reduce f32[8,8,16]": 1}
    )
