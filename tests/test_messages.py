"""Errors that name the way out, and that nothing else raises; what a package says of itself."""

import importlib.metadata
import importlib.resources
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cce_jax
import cce_torch
from cce_jax import linear_cross_entropy
from tests.cases import Case, inputs
from tests.tolerance import error

GIVEN = inputs(Case("small", leading=(6,), width=8, vocabulary=40, arrays=("bias",)))
E, C, BIAS, T = jnp.asarray(GIVEN.e), jnp.asarray(GIVEN.c), jnp.asarray(GIVEN.optional["bias"]), GIVEN.targets
FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp under jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "vmap of jvp": lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(x[None]),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "jvp of checkpoint": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    "jvp of scan": lambda f, x: jax.jvp(lambda x: jax.lax.scan(lambda s, _: (s + f(x), None), 0.0, length=2)[0],
                                        (x,), (x,)),
}  # fmt: skip
SECOND = {
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "grad of grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x),
}
REVERSE = {
    "grad": jax.grad,
    "value_and_grad": lambda f: lambda x: jax.value_and_grad(f)(x)[1],
    "jacrev": jax.jacrev,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "grad of vmap": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(x[None])[0],
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0],
    "vmap of vjp": lambda f: lambda x: jax.vmap(lambda a: jax.vjp(f, x)[1](a)[0])(jnp.ones(1))[0],
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda s, _: (s + f(x), None), 0.0, length=1)[0]),
    "vmap of grad of scan of checkpoint": lambda f: (
        lambda x: jax.vmap(
            jax.grad(lambda x: jax.lax.scan(lambda s, _: (s + jax.checkpoint(f)(x), None), 0.0, length=1)[0])
        )(x[None])[0]
    ),
    "grad of shard_map": lambda f: jax.grad(
        jax.shard_map(f, mesh=jax.make_mesh((1,), ("data",)), in_specs=jax.P(), out_specs=jax.P())
    ),
}


def of(name: str, impl: str):
    """The loss as a function of one of its arguments, and that argument."""
    arrays = {"e": E, "c": C, "bias": BIAS}
    function = lambda x: linear_cross_entropy(targets=T, impl=impl, precision="highest", **{**arrays, name: x})  # noqa: E731
    return function, arrays[name]


@pytest.mark.parametrize("name", ["e", "c", "bias"])
@pytest.mark.parametrize("impl", ["chunked", "auto"])
@pytest.mark.parametrize("derivative", FORWARD)
def test_forward_mode_is_an_error_that_names_the_reference(derivative, impl, name):
    with pytest.raises(TypeError, match=r"forward-mode.*impl='reference'"):
        FORWARD[derivative](*of(name, impl))


@pytest.mark.parametrize("derivative", SECOND)
def test_second_derivatives_are_an_error_that_names_the_reference(derivative):
    with pytest.raises((NotImplementedError, TypeError), match="impl='reference'"):
        SECOND[derivative](*of("e", "chunked"))


@pytest.mark.parametrize("derivative", [*FORWARD, *SECOND])
def test_the_reference_has_it(derivative):
    for x in jax.tree.leaves((FORWARD | SECOND)[derivative](*of("e", "reference"))):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("name", ["e", "c", "bias"])
@pytest.mark.parametrize("derivative", REVERSE)
def test_reverse_mode_is_as_it_was(derivative, name):
    function, x = of(name, "chunked")
    reference, _ = of(name, "reference")
    assert error(REVERSE[derivative](function)(x), jax.grad(reference)(x)) < 2e-6


def test_forward_mode_in_what_is_not_the_cores_alone_is_fine():
    weight = jnp.ones(6)
    loss, tangent = jax.jvp(lambda w: linear_cross_entropy(E, C, T, token_weight=w, reduction="sum"),
                            (weight,), (weight,))  # fmt: skip
    np.testing.assert_allclose(tangent, loss, rtol=1e-6)


@pytest.mark.parametrize("package", [cce_jax, cce_torch])
def test_version(package, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1.2.3")
    assert package.__version__ == "cce-jax 1.2.3"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert package.__version__ == "0+unknown"
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        package.versoin  # noqa: B018


@pytest.mark.parametrize("package", ["cce_jax", "cce_torch", "cce_kernels"])
def test_the_types_are_there_for_others_to_check(package):
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


WITHOUT_TRITON = """
import sys
sys.modules["jaxlib.mlir._mlir_libs._triton_ext"] = None  # what the wheels of jaxlib for Windows lack
import jax, jax.numpy as jnp
from cce_jax import linear_cross_entropy

e, c, targets = jnp.ones((300, 128), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16), jnp.zeros(300, jnp.int32)
for impl in ("auto", "chunked", "reference"):
    gradient = jax.jit(jax.value_and_grad(lambda e, c: linear_cross_entropy(e, c, targets, impl=impl), (0, 1)))
    assert abs(gradient(e, c)[0] - jnp.log(256)) < 1e-5
    gradient.trace(e, c).lower(lowering_platforms=("cuda",))
try:
    linear_cross_entropy(e, c, targets, impl="cce")
except NotImplementedError as error:
    print(error)
"""


def test_without_triton_all_but_its_kernels_work():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "impl='cce' needs Triton, which this jaxlib lacks" in run.stdout
    assert "impl='chunked'" in run.stdout
