"""gradient_tolerance on a GPU. Where c or e is the identity, de and dc are the logits' cotangents themselves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.data import SHAPES, trained
from cce_jax import linear_cross_entropy
from cce_kernels.plan import choose, plan_of

pytestmark = pytest.mark.gpu
SIZE = 2048  # tokens, width and vocabulary
BUDGET = 8 * 2**20  # bytes: several chunks
DISTRIBUTIONS = "flat", "peaked", "power law", "one part", "tail", "late"


def logits(distribution: str, rng: np.random.Generator) -> np.ndarray:
    columns, noise = np.arange(SIZE), rng.normal(size=(SIZE, SIZE))
    if distribution == "flat":
        return noise / 10
    if distribution == "peaked":
        return noise + 15 * (rng.integers(SIZE, size=(SIZE, 1)) == columns)
    if distribution == "power law":
        return 12 - 1.5 * np.log1p(columns) + noise
    if distribution == "one part":
        return noise + 12 * (columns // 64 == 5 * (np.arange(SIZE)[:, None] // 256) % (SIZE // 64))
    if distribution == "tail":  # near the bound of 2⁻⁷: as much outside of one part as may be left out
        return noise / 100 + np.where(columns // 64 == 3, np.log(127 * (SIZE / 64 - 1)), 0)
    return noise + 20 * (columns == rng.integers(SIZE, size=(SIZE, 1))) - columns / 200  # all but sure of one token


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    """Gradients are formed in the forward pass, also where that is predicted to take longer."""
    monkeypatch.setattr(choose, "_is_faster", lambda *_: True)
    plan_of.cache_clear()
    yield
    plan_of.cache_clear()


def gradients(e, c, targets, **options):
    loss = partial(linear_cross_entropy, reduction="sum", memory_budget=BUDGET, **options)
    return jax.jit(jax.grad(loss, (0, 1)))(e, c, targets)


@pytest.mark.parametrize(
    ("distribution", "tolerance"),
    [*zip(DISTRIBUTIONS, [2.0**-5, 2.0**-7, 2.0**-9] * 2, strict=True), ("power law", 2.0**-3), ("one part", 2.0**-3)],
)
def test_what_is_left_out_is_within_the_bound_of_every_token(distribution, tolerance):
    rng = np.random.default_rng(DISTRIBUTIONS.index(distribution))
    z, identity = jnp.asarray(logits(distribution, rng), jnp.bfloat16), jnp.eye(SIZE, dtype=jnp.bfloat16)
    likely = np.argmax(np.float32(z) + rng.gumbel(size=z.shape), axis=1)
    targets = jnp.asarray(np.where(rng.uniform(size=SIZE) < 0.1, -100, likely), jnp.int32)
    kept = np.asarray(targets) >= 0
    of = {"softcap": 30.0, "z_loss": 1e-3}
    for number, given in enumerate(((z, identity), (identity, z.T))):
        exact, found = (
            np.float64(gradients(*given, targets, **of, gradient_tolerance=x)[number]) for x in (0.0, tolerance)
        )
        exact, found = (x if number == 0 else x.T for x in (exact, found))
        assert (found[~kept] == 0).all()
        # dc is summed in block floating point: in steps of 2⁻¹⁵ of the largest number of 256
        rounding = 0.0 if number == 0 else 2.0**-14 * np.abs(exact).max() * SIZE
        left_out, whole = np.abs(found - exact)[kept].sum(axis=1), np.abs(exact)[kept].sum(axis=1)
        assert (left_out <= tolerance * whole * (1 + 2.0**-7) + rounding).all()
        if number == 0:  # what is not left out has the same bits, and so has the target
            assert np.isin(found[found != exact], 0).all()
            assert (found[kept, targets[kept]] == exact[kept, targets[kept]]).all()
        if tolerance == 2.0**-3 and distribution not in ("flat", "tail"):
            assert (found[kept] == 0).mean() > 0.3
    again = gradients(z, identity, targets, **of, gradient_tolerance=tolerance)
    for x, y in zip(again, gradients(z, identity, targets, **of, gradient_tolerance=tolerance), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_an_error_far_below_rounding_at_a_head():
    e, c, targets = trained(SHAPES["4096x4096x128256"])
    exact, found = (
        jax.jit(jax.grad(partial(linear_cross_entropy, gradient_tolerance=x), (0, 1)))(e, c, targets)
        for x in (0.0, 2.0**-7)
    )
    for x, y in zip(found, exact, strict=True):
        error = jnp.linalg.norm((x - y).astype(jnp.float32)) / jnp.linalg.norm(y.astype(jnp.float32))
        assert 0 < error < 2.0**-8


def test_in_pytorch_the_gradients_have_the_same_bits():
    torch, cce_torch = pytest.importorskip("torch"), pytest.importorskip("cce_torch")
    e, c, targets = trained(SHAPES["4096x4096x128256"])
    exact, found = (
        jax.jit(jax.grad(partial(linear_cross_entropy, gradient_tolerance=x), (0, 1)))(e, c, targets)
        for x in (0.0, 2.0**-5)
    )
    leaves = [torch.from_dlpack(x).clone().requires_grad_() for x in (e, c)]
    labels = torch.from_dlpack(targets).long()
    cce_torch.linear_cross_entropy(*leaves, labels, gradient_tolerance=2.0**-5).backward()
    for leaf, x, y in zip(leaves, found, exact, strict=True):
        np.testing.assert_array_equal(leaf.grad.view(torch.int16).cpu().numpy(), np.asarray(x).view(np.int16))
        assert (np.asarray(x) != np.asarray(y)).any()
