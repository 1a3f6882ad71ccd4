"""JAX's transformations, with every implementation; and the errors of those that only the reference has."""

from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_jax import linear_cross_entropy, linear_divergence, linear_log_probs, linear_token_loss
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
NESTED = {  # tests/search draws what they are made of, one at a time
    "grad of vmap": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(x[None])[0],
    "jacrev of jit": lambda f: jax.jacrev(jax.jit(f)),
    "vmap of grad of scan of checkpoint": lambda f: (
        lambda x: jax.vmap(jax.grad(scanned(jax.checkpoint(f), 1)))(x[None])[0]
    ),
}
FUNCTIONS = {  # of e, c, targets and options: the mean of a loss
    "linear_cross_entropy": linear_cross_entropy,
    "linear_log_probs": lambda *given, **options: -jnp.mean(linear_log_probs(*given, **options).log_probs),
    "linear_token_loss": lambda *given, **options: linear_token_loss(*given, negative, **options),
    "linear_divergence": lambda e, c, _, **options: linear_divergence(
        e, c, jnp.flip(e), jnp.flip(c), reduction="none", **options
    ).mean(),
}


def negative(numbers):
    return -numbers.log_probs


def of(name: str, impl: str, function: str = "linear_cross_entropy"):
    """The loss as a function of one of its arguments, and that argument."""
    arrays = {"e": SMALL.e, "c": SMALL.c, "bias": SMALL.optional["bias"]}
    arrays = {k: jnp.asarray(x) for k, x in arrays.items()}

    def loss(x):
        given = {**arrays, name: x}
        options = {"bias": given["bias"], "impl": impl, "precision": "highest"}
        return FUNCTIONS[function](given["e"], given["c"], SMALL.targets, **options)

    return loss, arrays[name]


@pytest.mark.parametrize(
    ("derivative", "name", "impl", "function"),
    [*zip(FORWARD, cycle(["e", "c", "bias", "e"]), cycle(["chunked", "auto", "cce"]), cycle(FUNCTIONS), strict=False)],
)
def test_forward_mode_is_an_error_that_names_the_function_and_the_reference(derivative, name, impl, function):
    with pytest.raises(TypeError, match=rf"^{function} has no forward-mode.*impl='reference'"):
        FORWARD[derivative](*of(name, impl, function))


@pytest.mark.parametrize(
    ("derivative", "impl", "function"), list(zip(cycle(SECOND), cycle(BOTH), [*FUNCTIONS] * 2, strict=False))
)
def test_second_derivatives_are_an_error_that_names_the_function_and_the_reference(derivative, impl, function):
    what = "first derivatives only" if derivative == "grad of grad" else "no forward-mode derivative"
    with pytest.raises(NotImplementedError, match=rf"^{function} has {what}.*impl='reference'"):
        SECOND[derivative](*of("e", impl, function))


@pytest.mark.parametrize(
    ("derivative", "name", "impl"), list(zip(NESTED, ("e", "c", "c"), ("chunked", "chunked", "cce"), strict=True))
)
def test_reverse_mode(derivative, name, impl):
    function, x = of(name, impl)
    reference, _ = of(name, "reference")
    assert error(NESTED[derivative](function)(x), jax.grad(reference)(x)) < 2e-6


def test_forward_mode_in_what_is_not_the_cores_alone_is_fine():
    def loss(weight):
        return linear_cross_entropy(SMALL.e, SMALL.c, SMALL.targets, token_weight=weight, reduction="sum")

    loss, tangent = jax.jvp(loss, (jnp.ones(6),), (jnp.ones(6),))
    np.testing.assert_allclose(tangent, loss, rtol=1e-6)


def loss(e, c, targets, impl, **options):
    return linear_cross_entropy(e, c, targets, impl=impl, precision="highest", **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_outside_of_jit_a_graph_holds_the_inputs_and_no_copy(reduction):
    e, c = jnp.asarray(BATCH.e[0]), jnp.asarray(BATCH.c)
    _, backward = jax.vjp(lambda e, c: loss(e, c, BATCH.targets[0], "chunked", reduction=reduction), e, c)
    held = [x for x in jax.tree.leaves(backward) if isinstance(x, jax.Array) and x.shape in (e.shape, c.shape)]
    own = {x.unsafe_buffer_pointer() for x in (e, c)}
    assert own == {x.unsafe_buffer_pointer() for x in held if any(np.array_equal(x, y) for y in (e, c))}


def test_sizes_that_are_not_known():
    """jax.export with symbolic shapes."""
    tokens = jax.ShapeDtypeStruct((jax.export.symbolic_shape("n")[0], BATCH.e.shape[-1]), "float32")
    for function, more in ((linear_log_probs, ()), (linear_divergence, (tokens, BATCH.c))):

        def export(impl, function=function, more=more):
            first = jax.jit(lambda *given: jax.tree.leaves(function(*given, impl=impl))[0])
            return jax.export.export(first)(tokens, BATCH.c, *more)

        assert "stablehlo" in str(export("reference").mlir_module())
        with pytest.raises(NotImplementedError, match=rf"^{function.__name__}: impl='chunked' .* sizes .*'reference'"):
            export("chunked")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_buffers():
    want = jax.grad(loss, (0, 1))(BATCH.e, BATCH.c, BATCH.targets, "chunked")
    step = jax.jit(jax.grad(loss, (0, 1)), static_argnums=3, donate_argnums=(0, 1))
    e, c = jnp.array(BATCH.e), jnp.array(BATCH.c)
    actual = step(e, c, BATCH.targets, "chunked")
    assert e.is_deleted()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), actual, want)


def test_which_gradients_an_earlier_call_wanted_does_not_matter():
    """JAX caches the traced rules of one call for the next; e's gradient was lost that way once."""
    e, c, targets = jnp.asarray(BATCH.e[:1]), jnp.asarray(BATCH.c), BATCH.targets[:1]
    want = jax.grad(loss, (0, 1))(e[0], c, targets[0], "reference")
    for _ in range(2):
        for wanted in ((0,), (1,), (0, 1)):
            for call in (loss, jax.checkpoint(loss, static_argnums=3)):

                def total(e, c, call=call):
                    return jax.lax.scan(lambda t, x: (t + call(x[0], c, x[1], "chunked"), None), 0.0, (e, targets))[0]

                for i, gradient in zip(wanted, jax.grad(total, wanted)(e, c), strict=True):
                    assert error(gradient.reshape(want[i].shape), want[i]) < 2e-6


@pytest.mark.parametrize("impl", BOTH)
def test_which_gradients_an_earlier_call_wanted_does_not_matter_to_a_jitted_function(impl):
    """For e alone the forward pass leaves another residual than for e and c. JAX keeps one tree for both."""

    def total(e, c, impl):
        losses = linear_cross_entropy(e, c, BATCH.targets, reduction="none", impl=impl)
        return jnp.sum(losses * jnp.arange(losses.size).reshape(losses.shape) / losses.size**2)

    @jax.jit
    def gradients(e, c):
        one = jax.jit(lambda e, c: total(e, c, impl))
        return *jax.grad(one, (0, 1))(e, c), jax.grad(one)(e, c)

    e, c = jnp.asarray(BATCH.e), jnp.asarray(BATCH.c)
    want, of_c = jax.grad(total, (0, 1))(e, c, "reference")
    alone = jax.grad(total)(e, c, impl)
    for found, right in zip((alone, *gradients(e, c)), (want, want, of_c, want), strict=True):
        assert error(found, right) < 2e-6
