"""The mean of the logits and temperatures on several devices: numbers and gradients against float64."""

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
from tests.devices.meshes import collectives, in_turns, mesh_of
from tests.test_mean import made, ours, truth
from tests.tolerance import assert_close

NAMES = "tokens", "vocabulary", "tokens and vocabulary", "sequence and vocabulary over tensor"
CALLS = {
    "plain": made(64, 16, 64, with_sum=True),
    "softcap": made(64, 16, 64, head=Head(5.0, 1, "highest"), bias=True, scale=True),
}


def run(x, layout, mode: str, impl: str):
    """The numbers of all tokens and the gradients, as test_mean.ours; and the compiled program."""
    mesh, axis, shape = mesh_of(layout, mode), x.head.vocab_axis, (8, 8)
    specs = {**layout.specs(axis), "inverse_temperature": P(*layout.e[:2])}
    given = {name: y for name, y in x.inputs._asdict().items() if y is not None and name != "scale"}
    given |= {"e": given["e"].reshape(*shape, -1), "targets": given["targets"].reshape(shape)}
    given["inverse_temperature"] = given["inverse_temperature"].reshape(shape)
    arrays = {name: jax.device_put(y, NamedSharding(mesh, specs[name])) for name, y in given.items()}
    of = [jax.device_put(y.reshape(shape), NamedSharding(mesh, specs["targets"])) for y in x.of]
    core = x.core(impl)
    sharding = (specs["e"], specs["c"]) if mode == "auto" else None

    def objective(leaves, others):
        inputs = x.inputs._replace(**leaves, **others)
        numbers = statistics(inputs, core, layout_of(inputs.e, inputs.c, axis, sharding))
        named = zip(numbers, of, strict=False)
        return sum(jnp.sum(jnp.where(others["targets"] >= 0, y * z, 0)) for y, z in named if y is not None), numbers

    leaves = {name: arrays.pop(name) for name in ("e", "c", "bias") if name in arrays}
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(objective, has_aux=True)).lower(leaves, arrays).compile()
        gradients, numbers = program(leaves, arrays)
    kept = x.inputs.targets >= 0
    found = {k: np.asarray(y).reshape(-1)[kept] for k, y in numbers._asdict().items() if y is not None}
    gradients["e"] = gradients["e"].reshape(x.inputs.e.shape)
    return found | {k: np.asarray(y) for k, y in gradients.items()}, program


@pytest.mark.parametrize(("name", "mode", "call"), in_turns(NAMES, ("auto", "explicit"), CALLS))
@pytest.mark.parametrize("impl", ["chunked", "cce", "reference"])
def test_over_devices(name, mode, impl, call):
    x = CALLS[call]
    exact, reference = truth(x), ours(x, x.core("reference"))
    del exact["moved"]  # nothing is saved
    found, _ = run(x, BY_NAME[name], mode, impl)
    assert set(found) == set(exact)
    for what, value in found.items():
        assert_close(value, exact[what], reference[what], what)


def test_what_is_exchanged():
    """The numbers of the vocabulary's parts in one array, and de."""
    _, program = run(CALLS["plain"], BY_NAME["vocabulary"], "auto", "chunked")
    assert collectives(program) == {"all-gather f32[8,64,4]": 1, "all-reduce f32[8,8,16]": 1}
