"""JAX's transformations, with every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from cce_jax import linear_cross_entropy
from tests.cases import IMPLS, Case, inputs
from tests.tolerance import error

BATCH = Case("batch", leading=(3, 10), width=12, vocabulary=75)
FIRST_ORDER = ("cce", "chunked", "auto")


def loss(e, c, targets, impl, **options):
    return linear_cross_entropy(e, c, targets, impl=impl, precision="highest", **options)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_grad_value_and_grad_and_jit_agree(impl):
    given = inputs(BATCH)
    eager = jax.value_and_grad(loss, (0, 1))(given.e, given.c, given.targets, impl)
    jitted = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=3)(given.e, given.c, given.targets, impl)
    inside = jax.value_and_grad(jax.jit(loss, static_argnums=3), (0, 1))(given.e, given.c, given.targets, impl)
    only = jax.grad(loss)(given.e, given.c, given.targets, impl)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), jitted, eager)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), inside, eager)
    np.testing.assert_allclose(only, eager[1][0], atol=1e-7)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_vmap_and_its_gradients(impl):
    given = inputs(BATCH)
    weights = jnp.arange(1.0, 4.0)

    def batched(e, c):
        return jnp.sum(weights * jax.vmap(lambda e, t: loss(e, c, t, impl))(e, given.targets))

    def looped(e, c):
        return sum(w * loss(x, c, t, "reference") for w, x, t in zip(weights, e, given.targets, strict=True))

    np.testing.assert_allclose(batched(given.e, given.c), looped(jnp.asarray(given.e), given.c), rtol=1e-6)
    for actual, want in zip(
        jax.grad(batched, (0, 1))(given.e, given.c),
        jax.grad(looped, (0, 1))(jnp.asarray(given.e), given.c),
        strict=True,
    ):
        assert error(actual, want) < 2e-6
    per_example = jax.vmap(jax.grad(loss, 1), (0, None, 0, None))(given.e, given.c, given.targets, impl)
    for dc, e, t in zip(per_example, given.e, given.targets, strict=True):
        assert error(dc, jax.grad(loss, 1)(e, given.c, t, "reference")) < 2e-6


@pytest.mark.parametrize("impl", IMPLS)
def test_checkpoint_and_scan(impl):
    given = inputs(BATCH)

    def scanned(e, c):
        def step(total, row):
            return total + jax.checkpoint(lambda e, c: loss(e, c, row[1], impl))(row[0] * 1.5, c), None

        return jax.lax.scan(step, 0.0, (e, given.targets))[0]

    def plain(e, c):
        return sum(loss(x * 1.5, c, t, "reference") for x, t in zip(e, given.targets, strict=True))

    actual = jax.jit(jax.grad(scanned, (0, 1)))(jnp.asarray(given.e), jnp.asarray(given.c))
    for x, y in zip(actual, jax.grad(plain, (0, 1))(jnp.asarray(given.e), given.c), strict=True):
        assert error(x, y) < 2e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_buffers(impl):
    given = inputs(BATCH)
    want = jax.grad(loss, (0, 1))(given.e, given.c, given.targets, impl)
    step = jax.jit(jax.grad(loss, (0, 1)), static_argnums=3, donate_argnums=(0, 1))
    e, c = jnp.array(given.e), jnp.array(given.c)
    actual = step(e, c, given.targets, impl)
    assert e.is_deleted()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), actual, want)


@pytest.mark.parametrize("impl", FIRST_ORDER)
def test_forward_mode_and_second_derivatives_are_clear_errors(impl):
    given = inputs(BATCH)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda e: loss(e, given.c, given.targets, impl), (given.e,), (given.e,))
    with pytest.raises((TypeError, NotImplementedError), match=r"forward-mode|impl='reference'"):
        jax.hessian(lambda e: loss(e, given.c, given.targets, impl))(given.e)
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        jax.grad(lambda e: jnp.sum(jax.grad(loss)(e, given.c, given.targets, impl) ** 2))(given.e)


def test_reference_has_derivatives_of_every_kind():
    given = inputs(Case("small", leading=(3,), width=4, vocabulary=7))
    with jax.enable_x64(True):
        e, c = jnp.float64(given.e), jnp.float64(given.c)
        for options in ({}, {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.1}):
            check_grads(lambda e, c, o=options: loss(e, c, given.targets, "reference", **o), (e, c), order=2)
        assert jax.hessian(loss)(e, c, given.targets, "reference").shape == (3, 4, 3, 4)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_loss_composed_of_lse_and_loss_is_exact(impl):
    """Anything a user builds from the returned numbers differentiates, with any cotangent."""
    given = inputs(BATCH)

    def focal(e, c, impl):
        nll, lse = loss(e, c, given.targets, impl, reduction="none", return_lse=True)
        return jnp.mean((1 - jnp.exp(-nll)) ** 2 * nll) + 0.1 * jnp.mean(jnp.square(lse))

    want = jax.grad(focal, (0, 1))(given.e, given.c, "reference")
    for x, y in zip(jax.grad(focal, (0, 1))(given.e, given.c, impl), want, strict=True):
        assert error(x, y) < 2e-6


@pytest.mark.parametrize("impl", FIRST_ORDER[:2])
def test_which_gradients_an_earlier_call_wanted_does_not_matter(impl):
    """JAX caches the traced rules of one call for the next; e's gradient was lost that way once."""
    given = inputs(BATCH)
    want = jax.grad(loss, (0, 1))(given.e[0], given.c, given.targets[0], "reference")
    for _ in range(2):
        for wanted in ((0,), (1,), (0, 1)):
            for transform in (lambda f: f, jax.checkpoint):

                def total(e, c, transform=transform):
                    return jax.lax.scan(
                        lambda t, row: (
                            (t + transform(loss, static_argnums=3)(row[0], c, row[1], impl), None)
                            if transform is jax.checkpoint
                            else (t + loss(row[0], c, row[1], impl), None)
                        ),
                        0.0,
                        (e, given.targets[:1]),
                    )[0]

                gradients = jax.grad(total, wanted)(jnp.asarray(given.e[:1]), jnp.asarray(given.c))
                for i, gradient in zip(wanted, gradients, strict=True):
                    assert error(gradient.reshape(want[i].shape), want[i]) < 2e-6
