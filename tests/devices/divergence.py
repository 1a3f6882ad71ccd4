"""Divergences on several devices: the loss of the whole, and gradients that lie as their inputs do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax import linear_divergence

B, T, D, E, V = 4, 16, 16, 24, 96
RNG = np.random.default_rng(0)
ARRAYS = {
    "e": RNG.normal(size=(B, T, D)),
    "c": RNG.normal(size=(V, D)) * 0.4,
    "bias": RNG.normal(size=V),
    "teacher_e": RNG.normal(size=(B, T, E)),
    "teacher_c": RNG.normal(size=(V, E)) * 0.3,
    "token_weight": RNG.uniform(size=(B, T)) * (RNG.random((B, T)) < 0.7),
}
ARRAYS = {name: jnp.asarray(x, jnp.float32) for name, x in ARRAYS.items()}
WEIGHTS = jnp.asarray(RNG.normal(size=(B, T)), jnp.float32)
STUDENT = "e", "c", "bias"
OPTIONS = {"divergence": "jsd", "beta": 0.3, "memory_budget": 0, "return_entropy": True, "precision": "highest"}


def run(arrays: dict, reduction: str, **options):
    def objective(own):
        value, entropy = linear_divergence(**{**arrays, **own}, **OPTIONS, reduction=reduction, **options)
        return (value if value.ndim == 0 else jnp.sum(value * WEIGHTS)), entropy

    own = {name: arrays[name] for name in STUDENT}
    return jax.jit(jax.value_and_grad(objective, has_aux=True))(own)


def close(found, want) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6)


def placed(of_e: P, of_c: P, mesh) -> dict:
    specs = {"e": of_e, "c": of_c, "bias": P(of_c[0]) if len(of_c) else P(), "teacher_e": of_e, "token_weight": of_e}
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in ARRAYS.items()}


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_xla_splits_the_program_by_itself(impl):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    arrays = placed(P("data"), P(), mesh)
    close(run(arrays, "mean", impl=impl), run(ARRAYS, "mean"))


def test_what_is_not_supported_says_so():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=r"\('tensor',\) split the vocabulary of c"):
        run(ARRAYS, "mean", sharding=(P("data"), P("tensor")))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="impl='reference' takes no sharding"):
        run(ARRAYS, "mean", sharding=(P("data"), P()), impl="reference")
