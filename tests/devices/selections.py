"""The largest logits of each token and their ids on several devices, against float64."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from cce_jax import core
from cce_jax.sharding import layout_of
from cce_kernels.head import Head
from cce_kernels.selections import Asked, Selections
from tests.devices.given_ids import NAMES, SHAPE, specs_of
from tests.devices.layouts import BY_NAME
from tests.devices.meshes import Layout, in_turns, mesh_of
from tests.test_given_ids import Drawn, made
from tests.test_selections import held

CALLS = {
    "plain": made(64, 16, 64),
    "everything": made(64, 16, 64, 3, "bfloat16", head=Head(5.0, 1, "highest"), bias=True, scale=True),
}


def over_devices(x: Drawn, layout: Layout, mode: str, asked: Asked) -> Selections:
    mesh, axis = mesh_of(layout, mode), x.head.vocab_axis
    specs = specs_of(layout, axis)

    def put(name: str, y):
        y = y.reshape(*SHAPE, *y.shape[1:]) if name in x.inputs.of_tokens else y
        return jax.device_put(y, NamedSharding(mesh, specs[name]))

    given = {k: put(k, y) for k, y in x.inputs._asdict().items() if y is not None and k != "scale"}
    static, sharding = x.core("chunked"), (specs["e"], specs["c"]) if mode == "auto" else None

    def run(given) -> Selections:
        inputs = x.inputs._replace(**given)
        return core.with_selections(inputs, static, layout_of(inputs.e, inputs.c, axis, sharding), asked)[1]

    with jax.set_mesh(mesh):
        found = jax.jit(run)(given)
    return jax.tree.map(lambda y: np.asarray(y).reshape(-1, *y.shape[2:]), found)


@pytest.mark.parametrize(("name", "mode", "call"), in_turns(NAMES, ("auto", "explicit"), CALLS))
@pytest.mark.parametrize("k", [1, 5, 64])
def test_over_devices(name, mode, call, k):
    """k: also more than the columns of a device."""
    asked = Asked(k, mean_logit=True)
    held(CALLS[call], over_devices(CALLS[call], BY_NAME[name], mode, asked), asked)


@pytest.mark.parametrize("name", NAMES)
def test_ties_keep_the_lowest_ids(name):
    x = made(64, 16, 64, bias=True, temperature=False, ignored=0.0)
    bias = np.zeros(64, np.float32)
    bias[[3, 20, 40, 41, 63]] = 1
    x = x.with_(e=0 * x.inputs.e, bias=bias)
    found = over_devices(x, BY_NAME[name], "auto", Asked(8))
    np.testing.assert_array_equal(found.top_ids, np.tile([3, 20, 40, 41, 63, 0, 1, 2], (64, 1)))
