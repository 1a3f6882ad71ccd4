"""The recipes of docs/coming-from.md for other trainers, against full logits as those libraries compute them."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "coming-from.md"
B, T, D, V = 2, 7, 8, 19
CLOSE: dict[str, Any] = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def recipes() -> SimpleNamespace:
    """What the blocks below the recipes' heading define, with the imports that the page made before."""
    start = PAGE.read_text().split("\n## Trainers in JAX", 1)[0].count("\n")
    found: dict[str, Any] = {}
    exec("import jax\nimport jax.numpy as jnp\nfrom cce_jax import linear_cross_entropy as jax_loss", found)
    for line, text in blocks(PAGE):
        if line > start:
            exec(text, found)
    return SimpleNamespace(**found)


@pytest.fixture
def arrays() -> SimpleNamespace:
    rng = np.random.default_rng(3)
    hidden, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, T, D), (D, V)))
    segmentation = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    return SimpleNamespace(
        hidden=hidden, kernel=kernel, targets=rng.integers(V, size=(B, T)), segmentation=segmentation
    )


def gradients(f, *arguments):
    return jax.grad(f, (0, 1))(*arguments)


def compare(ours, want):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, **CLOSE)


def softcapped(logits, cap):
    return logits if cap is None else cap * jnp.tanh(logits / cap)


@pytest.mark.parametrize(("z_loss", "softcap"), [(0.0, None), (1e-2, 3.0)])
def test_maxtext(recipes, arrays, z_loss, softcap):
    x = arrays

    def theirs(hidden, kernel):  # of one-hot targets, then the sums over the tokens that count
        logits = softcapped(hidden @ kernel, softcap)
        lse = jax.scipy.special.logsumexp(logits, axis=-1)
        xent = -jnp.sum(jax.nn.one_hot(x.targets, V) * (logits - lse[..., None]), -1)
        penalty = z_loss * lse**2
        kept = x.segmentation != 0
        return jnp.sum((xent + penalty) * kept), jnp.sum(jax.lax.stop_gradient(penalty) * kept)

    def ours(hidden, kernel):
        return recipes.maxtext_loss(hidden, kernel, x.targets, x.segmentation, z_loss, softcap)

    compare(ours(x.hidden, x.kernel), theirs(x.hidden, x.kernel))
    want = gradients(lambda *y: theirs(*y)[0], x.hidden, x.kernel)
    compare(gradients(lambda *y: ours(*y)[0], x.hidden, x.kernel), want)
    compare(gradients(lambda *y: sum(ours(*y)), x.hidden, x.kernel), want)  # the second has no gradient


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize("weighted", [False, True])
def test_levanter(recipes, arrays, reduction, weighted):
    x, w = arrays.hidden.reshape(-1, D), arrays.kernel
    labels, weight = arrays.targets.reshape(-1), np.linspace(0, 1, B * T, dtype=np.float32) if weighted else None

    def theirs(x, w):
        logits = softcapped(x @ w, 4.0)
        lse = jax.scipy.special.logsumexp(logits, axis=-1)
        loss = lse - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0] + 0.02 * lse**2
        loss = loss if weight is None else loss * weight
        total = len(labels) if weight is None else jnp.sum(weight)
        return {"mean": jnp.sum(loss) / total, "sum": jnp.sum(loss), None: loss}[reduction]

    options = dict(reduction=reduction, weight=weight, logsumexp_weight=0.02, logit_soft_cap=4.0)

    def ours(x, w):
        return recipes.levanter_loss(x, labels, w, **options)

    compare(ours(x, w), theirs(x, w))
    if reduction is not None:
        compare(gradients(ours, x, w), gradients(theirs, x, w))
    else:
        loss, argmax = recipes.levanter_loss(x, labels, w, return_argmax=True, **options)
        compare(loss, theirs(x, w))
        assert (argmax == jnp.argmax(x @ w, -1)).all()


def test_levanters_mean_of_no_weight_is_0(recipes, arrays):
    x, labels = arrays.hidden.reshape(-1, D), arrays.targets.reshape(-1)
    assert recipes.levanter_loss(x, labels, arrays.kernel, weight=np.zeros(B * T, np.float32)) == 0


def test_verl(recipes, arrays):
    hidden = torch.tensor(arrays.hidden, requires_grad=True)
    weight = torch.tensor(arrays.kernel.T.copy(), requires_grad=True)
    labels = torch.tensor(arrays.targets)
    logits = (hidden.double() @ weight.double().T / 0.7).flatten(0, 1)
    p = logits.softmax(-1)
    logprobs = logits.log_softmax(-1).gather(-1, labels.flatten()[:, None])[:, 0]
    entropy = logits.logsumexp(-1) - (p * logits).sum(-1)
    of = torch.linspace(-1, 1, B * T)
    ours = recipes.verl_linear_cross_entropy(hidden, weight, labels, 0.7)
    for x, y in zip(ours, (logprobs, entropy), strict=True):
        torch.testing.assert_close(x.double(), y, **CLOSE)
    found, want = (
        torch.autograd.grad((of * (x + 0.1 * y)).sum(), (hidden, weight)) for x, y in (ours, (logprobs, entropy))
    )
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 0.7])  # tunix takes 0 as 1
def test_tunix(recipes, arrays, temperature):
    prompt, completion = arrays.targets[:, :3], arrays.targets[:, 3:]

    def theirs(hidden, kernel):
        logits = (hidden @ kernel)[:, 2:-1] / (temperature or 1.0)
        log_p = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(log_p, completion[..., None], -1)[..., 0], -(jnp.exp(log_p) * log_p).sum(-1)

    def ours(hidden, kernel, **options):
        given = hidden, kernel, prompt, completion
        return recipes.tunix_per_token_logps(*given, temperature, return_entropy=True, **options)

    x, kernel = arrays.hidden, arrays.kernel
    compare(ours(x, kernel), theirs(x, kernel))
    alone = recipes.tunix_per_token_logps(x, kernel, prompt, completion, temperature)
    compare(alone, theirs(x, kernel)[0])

    def total(f):
        return lambda *y: sum(jnp.sum(part**2) for part in f(*y))

    with_gradients = total(lambda *y: ours(*y, stop_gradient=False))
    compare(gradients(with_gradients, x, kernel), gradients(total(theirs), x, kernel))
    assert all((g == 0).all() for g in gradients(total(ours), x, kernel))
