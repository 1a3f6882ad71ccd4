"""The logits of given ids on several devices: numbers and gradients against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax.core import statistics
from cce_jax.sharding import layout_of
from cce_kernels.head import Head
from tests.devices.layouts import BY_NAME
from tests.devices.meshes import Layout, collectives, in_turns, mesh_of
from tests.test_given_ids import Drawn, held, made, objective, results

NAMES = "tokens", "vocabulary", "tokens and vocabulary", "sequence and vocabulary over tensor"
HEAD = Head(5.0, 1, "highest")
CALLS = {
    "plain": made(64, 16, 64, 3, mean=False, temperature=False),
    "everything": made(64, 16, 64, 3, head=HEAD, bias=True, scale=True, weighted=True),
    "bfloat16": made(64, 16, 64, 3, "bfloat16", bias=True, mean=False, temperature=False),
}
SHAPE = 8, 8


def specs_of(layout: Layout, vocab_axis: int) -> dict[str, P]:
    of_tokens = P(*layout.e[:2])
    by_name = layout.specs(vocab_axis)
    return {**by_name, "ids": of_tokens, "inverse_temperature": of_tokens, "weights": by_name["bias"]}


def run(x: Drawn, layout: Layout, mode: str, impl: str):
    """As test_given_ids.ours; and the compiled program."""
    mesh, axis = mesh_of(layout, mode), x.head.vocab_axis
    specs = specs_of(layout, axis)

    def put(name: str, y):
        y = y.reshape(*SHAPE, *y.shape[1:]) if name in x.inputs.of_tokens else y
        return jax.device_put(y, NamedSharding(mesh, specs[name]))

    given = {k: put(k, y) for k, y in x.inputs._asdict().items() if y is not None and k != "scale"}
    of = jax.tree.map(
        lambda y: jax.device_put(y.reshape(*SHAPE, *y.shape[1:]), NamedSharding(mesh, specs["targets"])), x.of
    )
    core, sharding = x.core(impl), (specs["e"], specs["c"]) if mode == "auto" else None

    def of_leaves(leaves, others, of):
        inputs = x.inputs._replace(**leaves, **others)
        numbers = statistics(inputs, core, layout_of(inputs.e, inputs.c, axis, sharding))
        return objective(x, numbers, of, inputs.targets >= 0), numbers

    leaves = {name: given.pop(name) for name in ("e", "c", "bias") if name in given}
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(of_leaves, has_aux=True)).lower(leaves, given, of).compile()
        gradients, numbers = program(leaves, given, of)
    numbers = jax.tree.map(lambda y: np.asarray(y).reshape(-1, *y.shape[2:]), numbers)
    gradients["e"] = jnp.asarray(np.asarray(gradients["e"]).reshape(x.inputs.e.shape))
    return results(x, numbers, gradients), program


RUNS = [(call, impl) for call in CALLS for impl in ("chunked", "reference")] + [("bfloat16", "cce")]


@pytest.mark.parametrize(("name", "mode", "run_of"), in_turns(NAMES, ("auto", "explicit"), RUNS))
def test_over_devices(name, mode, run_of):
    call, impl = run_of
    x = CALLS[call]
    held(x, run(x, BY_NAME[name], mode, impl)[0])


def test_what_is_exchanged():
    """The numbers of the vocabulary's parts in one array, the sum of the ids' logits, and de."""
    _, program = run(CALLS["plain"], BY_NAME["vocabulary"], "auto", "chunked")
    assert collectives(program) == {"all-gather f32[8,64,2]": 1, "all-reduce f32[64,3]": 1, "all-reduce f32[8,8,16]": 1}
