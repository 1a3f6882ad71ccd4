"""JAX's transformations, with every implementation; and the errors of those that only the reference has."""

from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from cce_jax import linear_cross_entropy
from tests.cases import Case, inputs
from tests.tolerance import error

SMALL = inputs(Case("small", leading=(6,), width=8, vocabulary=40, arrays=("bias",)))
BATCH = inputs(Case("batch", leading=(3, 10), width=12, vocabulary=75))
BOTH = ("cce", "chunked")


def scanned(f, length: int = 2):
    return lambda x: jax.lax.scan(lambda s, _: (s + f(x), None), 0.0, length=length)[0]


FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp under jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "vmap of jvp": lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(x[None]),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "jvp of checkpoint": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    "jvp of scan": lambda f, x: jax.jvp(scanned(f), (x,), (x,)),
}
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
    "grad of scan": lambda f: jax.grad(scanned(f, 1)),
    "vmap of grad of scan of checkpoint": lambda f: (
        lambda x: jax.vmap(jax.grad(scanned(jax.checkpoint(f), 1)))(x[None])[0]
    ),
    "grad of shard_map": lambda f: jax.grad(
        jax.shard_map(f, mesh=jax.make_mesh((1,), ("data",)), in_specs=jax.P(), out_specs=jax.P())
    ),
}


def of(name: str, impl: str):
    """The loss as a function of one of its arguments, and that argument."""
    arrays = {"e": SMALL.e, "c": SMALL.c, "bias": SMALL.optional["bias"]}
    arrays = {k: jnp.asarray(x) for k, x in arrays.items()}
    options = {"targets": SMALL.targets, "impl": impl, "precision": "highest"}
    return lambda x: linear_cross_entropy(**options, **{**arrays, name: x}), arrays[name]


@pytest.mark.parametrize(
    ("derivative", "name", "impl"),
    list(zip([*FORWARD, *FORWARD], cycle(["e", "c", "bias", "e"]), cycle(["chunked", "auto", "cce"]), strict=False)),
)
def test_forward_mode_is_an_error_that_names_the_reference(derivative, name, impl):
    with pytest.raises(TypeError, match=r"forward-mode.*impl='reference'"):
        FORWARD[derivative](*of(name, impl))


@pytest.mark.parametrize("impl", BOTH)
@pytest.mark.parametrize("derivative", SECOND)
def test_second_derivatives_are_an_error_that_names_the_reference(derivative, impl):
    with pytest.raises((NotImplementedError, TypeError), match="impl='reference'"):
        SECOND[derivative](*of("e", impl))


@pytest.mark.parametrize("derivative", [*FORWARD, *SECOND])
def test_the_reference_has_it(derivative):
    for x in jax.tree.leaves((FORWARD | SECOND)[derivative](*of("e", "reference"))):
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    ("derivative", "name", "impl"),
    [*zip(REVERSE, cycle(["e", "c", "bias"]), cycle(["chunked"]), strict=False)]
    + [(x, "c", "cce") for x in ("jit of grad", "vmap of vjp", "vmap of grad of scan of checkpoint")],
)
def test_reverse_mode(derivative, name, impl):
    function, x = of(name, impl)
    reference, _ = of(name, "reference")
    assert error(REVERSE[derivative](function)(x), jax.grad(reference)(x)) < 2e-6


def test_forward_mode_in_what_is_not_the_cores_alone_is_fine():
    def loss(weight):
        return linear_cross_entropy(SMALL.e, SMALL.c, SMALL.targets, token_weight=weight, reduction="sum")

    loss, tangent = jax.jvp(loss, (jnp.ones(6),), (jnp.ones(6),))
    np.testing.assert_allclose(tangent, loss, rtol=1e-6)


def loss(e, c, targets, impl, **options):
    return linear_cross_entropy(e, c, targets, impl=impl, precision="highest", **options)


@pytest.mark.parametrize("impl", BOTH)
def test_vmap_and_its_gradients(impl):
    e, c, weights = jnp.asarray(BATCH.e), jnp.asarray(BATCH.c), jnp.arange(1.0, 4.0)

    def batched(e, c):
        return jnp.sum(weights * jax.vmap(lambda e, t: loss(e, c, t, impl))(e, BATCH.targets))

    def looped(e, c):
        return sum(w * loss(x, c, t, "reference") for w, x, t in zip(weights, e, BATCH.targets, strict=True))

    np.testing.assert_allclose(batched(e, c), looped(e, c), rtol=1e-6)
    for actual, want in zip(jax.grad(batched, (0, 1))(e, c), jax.grad(looped, (0, 1))(e, c), strict=True):
        assert error(actual, want) < 2e-6
    per_example = jax.vmap(jax.grad(loss, 1), (0, None, 0, None))(e, c, BATCH.targets, impl)
    for dc, x, t in zip(per_example, e, BATCH.targets, strict=True):
        assert error(dc, jax.grad(loss, 1)(x, c, t, "reference")) < 2e-6


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_buffers():
    want = jax.grad(loss, (0, 1))(BATCH.e, BATCH.c, BATCH.targets, "chunked")
    step = jax.jit(jax.grad(loss, (0, 1)), static_argnums=3, donate_argnums=(0, 1))
    e, c = jnp.array(BATCH.e), jnp.array(BATCH.c)
    actual = step(e, c, BATCH.targets, "chunked")
    assert e.is_deleted()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), actual, want)


def test_reference_has_derivatives_of_every_kind():
    given = inputs(Case("small", leading=(3,), width=4, vocabulary=7))
    with jax.enable_x64(True):
        e, c = jnp.float64(given.e), jnp.float64(given.c)
        for options in ({}, {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.1}):
            check_grads(lambda e, c, o=options: loss(e, c, given.targets, "reference", **o), (e, c), order=2)
        assert jax.hessian(loss)(e, c, given.targets, "reference").shape == (3, 4, 3, 4)


@pytest.mark.parametrize("impl", BOTH)
def test_a_loss_composed_of_lse_and_loss_is_exact(impl):
    """Anything a user builds from the returned numbers differentiates, with any cotangent."""

    def focal(e, c, impl):
        nll, lse = loss(e, c, BATCH.targets, impl, reduction="none", return_lse=True)
        return jnp.mean((1 - jnp.exp(-nll)) ** 2 * nll) + 0.1 * jnp.mean(jnp.square(lse))

    want = jax.grad(focal, (0, 1))(BATCH.e, BATCH.c, "reference")
    for x, y in zip(jax.grad(focal, (0, 1))(BATCH.e, BATCH.c, impl), want, strict=True):
        assert error(x, y) < 2e-6


@pytest.mark.parametrize("impl", BOTH)
def test_which_gradients_an_earlier_call_wanted_does_not_matter(impl):
    """JAX caches the traced rules of one call for the next; e's gradient was lost that way once."""
    e, c, targets = jnp.asarray(BATCH.e[:1]), jnp.asarray(BATCH.c), BATCH.targets[:1]
    want = jax.grad(loss, (0, 1))(e[0], c, targets[0], "reference")
    for _ in range(2):
        for wanted in ((0,), (1,), (0, 1)):
            for call in (loss, jax.checkpoint(loss, static_argnums=3)):

                def total(e, c, call=call):
                    return jax.lax.scan(lambda t, x: (t + call(x[0], c, x[1], impl), None), 0.0, (e, targets))[0]

                for i, gradient in zip(wanted, jax.grad(total, wanted)(e, c), strict=True):
                    assert error(gradient.reshape(want[i].shape), want[i]) < 2e-6
