"""Flax NNX, Flax Linen and Equinox: the examples' gradients are those of full logits."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cce_jax import linear_cross_entropy
from tests.cases import Case, inputs
from tests.tolerance import error, roundoff

SUMS = 64 * roundoff(np.float32)  # float32 sums in another order, carried through the model's layers


def example(name: str):
    """The example as a module; skips where its framework does not run with this JAX: Flax 0.12 NNX with JAX 0.11."""
    try:
        return importlib.import_module(f"examples.{name}")
    except (ImportError, AttributeError) as reason:
        pytest.skip(f"{name}: {reason}")


def batches(micro_batches: int = 3) -> tuple[jax.Array, jax.Array]:
    """Tokens and their weights, (micro-batches, 2, 12). The micro-batches weigh differently."""
    rng = np.random.default_rng(0)
    shape = (micro_batches, 2, 12)
    weight = rng.uniform(0.1, 1.0, shape) * np.arange(1, micro_batches + 1)[:, None, None]
    return jnp.asarray(rng.integers(0, 256, shape), jnp.int32), jnp.asarray(weight, jnp.float32)


def full_logits(hidden, c, tokens, weight) -> jax.Array:
    """The weighted mean that the examples compute, by Optax from all logits. c: (V, D)."""
    logits = jnp.matmul(hidden[:, :-1], c.T, precision="highest")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * weight[:, 1:]) / weight[:, 1:].sum()


def nnx_model(tied: bool):
    module = example("flax_nnx")
    definition, params = module.nnx.split(module.LanguageModel(tied, module.nnx.Rngs(0), jnp.float32))

    def gradient(params, tokens, weight):
        return module.gradient_of(module.nnx.merge(definition, params), tokens, weight)

    def reference(params, tokens, weight):
        model = module.nnx.merge(definition, params)
        c = model.embed.embedding[...] if tied else model.head.kernel[...].T
        return full_logits(model(tokens), c, tokens, weight)

    return params, gradient, reference


def linen_model(tied: bool):
    module = example("flax_linen")
    model = module.LanguageModel(tied, jnp.float32)

    def reference(params, tokens, weight):
        c = params["embed"]["embedding"] if tied else params["head"]["kernel"].T
        return full_logits(model.apply({"params": params}, tokens), c, tokens, weight)

    params = jax.jit(lambda: model.init(jax.random.key(0), batches()[0][0], method="logits")["params"])()
    return params, lambda params, *batch: module.gradient_of(model, params, *batch), reference


def equinox_model(tied: bool):
    module = example("equinox_lm")
    params, rest = module.eqx.partition(module.LanguageModel(tied, jax.random.key(0)), module.eqx.is_inexact_array)

    def gradient(params, tokens, weight):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "DTYPE", jnp.float32)
            return module.gradient_of(module.eqx.combine(params, rest), tokens, weight)

    def reference(params, tokens, weight):
        model = module.eqx.combine(params, rest)
        head = model.embed if tied else model.head
        return full_logits(jax.vmap(model)(tokens), head.weight, tokens, weight)

    return params, gradient, reference


MODELS = {"nnx": nnx_model, "linen": linen_model, "equinox": equinox_model}


@pytest.mark.parametrize(("framework", "tied"), [("nnx", True), ("linen", False), ("equinox", True)])
def test_accumulated_gradients_of_the_examples_are_those_of_full_logits_of_one_batch(framework, tied):
    params, gradient, reference = MODELS[framework](tied)
    tokens, weight = batches()
    with jax.default_matmul_precision("highest"):
        loss, gradients = jax.jit(gradient)(params, tokens, weight)
        whole = (x.reshape(-1, x.shape[-1]) for x in (tokens, weight))
        want, wanted = jax.jit(jax.value_and_grad(reference))(params, *whole)
    assert error(loss, want) < SUMS
    found, wanted = (jax.tree_util.tree_leaves_with_path(x) for x in (gradients, wanted))
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, x), (_, y) in zip(found, wanted, strict=True):
        assert error(x, y) < SUMS, path


@pytest.mark.parametrize("name", ["flax_nnx", "flax_linen", "equinox_lm"])
def test_the_examples_run(name, capsys):
    example(name).main(steps=2)
    shown = capsys.readouterr().err.replace("\r", "\n")
    for head in ("tied head", "untied head"):
        loss = re.findall(rf"(?m)^{head}: 100%.*loss=(\d+\.\d+)", shown)[-1]
        assert abs(float(loss) - np.log(256)) < 1.5, "the first losses are near that of equal probabilities"


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_parameters_of_flax_nnx(impl):
    nnx = example("flax_nnx").nnx
    given = inputs(Case("nnx", (24,), 16, 70, arrays=("bias", "class_weight", "token_weight")))
    names = "bias", "class_weight", "token_weight", "num_items"
    arrays = {"e": given.e, "c": given.c.T, "targets": given.targets, "num_items": np.float32(12), **given.optional}
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}

    class Model(nnx.Module):
        def __init__(self):
            for name, x in arrays.items():
                setattr(self, name, (nnx.Param if jnp.issubdtype(x.dtype, jnp.floating) else nnx.Variable)(x))

    def loss(model, **options):
        optional = {name: getattr(model, name) for name in names}
        return linear_cross_entropy(model.e, model.c, model.targets, vocab_axis=1, impl=impl, **optional, **options)

    def of_arrays(leaves):
        return linear_cross_entropy(**{**arrays, **leaves}, vocab_axis=1, impl=impl)

    differentiable = ("e", "c", "bias", "token_weight")
    want, wanted = jax.value_and_grad(of_arrays)({name: arrays[name] for name in differentiable})
    assert loss(Model(), check_targets=True) == want
    both = nnx.value_and_grad
    for run in (both(loss), nnx.jit(both(loss)), both(nnx.jit(loss))):
        value, gradients = run(Model())
        np.testing.assert_allclose(value, want, rtol=1e-6)
        for name in differentiable:
            assert error(gradients[name][...], wanted[name]) < 1e-6, name
    for run in (nnx.grad(loss), nnx.jit(nnx.grad(loss))):
        assert error(run(Model())["c"][...], wanted["c"]) < 1e-6
