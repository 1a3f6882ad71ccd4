"""Memory budgets and ignored tokens on a GPU: exact, within their bytes, and as fast as promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import cce_torch
from bench import truth as float64
from bench.data import SHAPES, Shape, trained
from cce_jax import linear_cross_entropy
from cce_kernels.device import local_gpu
from cce_kernels.plan import plan_of
from cce_torch.on_jax import bridge
from tests.plans import request_of, whole_bytes

pytestmark = pytest.mark.gpu
MIB = 2**20
SHAPE = Shape(2048, 512, 16384)


def budgets(shape: Shape) -> dict[str, int]:
    return {"default": 300 * MIB, "all": whole_bytes(*shape)}


def compiled(shape: Shape, memory_budget: int, argnums: tuple[int, ...] = (0, 1)):
    """The loss of e, c, targets and bias, and its gradients; 3 in argnums gives it a bias."""
    tokens, width, vocabulary = shape
    with_bias = 3 in argnums

    def loss(e, c, targets, bias=None):
        return linear_cross_entropy(e, c, targets, bias=bias, memory_budget=memory_budget)

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, width), (vocabulary, width), (vocabulary,))]
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    given = *arrays[:2], targets, *arrays[2 : 2 + with_bias]
    return jax.jit(jax.value_and_grad(loss, argnums)).lower(*given).compile()


def ignored(targets: jax.Array, kind: str) -> jax.Array:
    tokens = np.arange(targets.size)
    where = {
        "none": tokens < 0,
        "one": tokens == 7,
        "a tenth": np.random.default_rng(0).random(targets.size) < 0.1,
        "most, at random": np.random.default_rng(0).random(targets.size) < 0.75,
        "most, in runs": tokens // 300 % 4 != 0,
        "all but one": tokens != 7,
    }
    return jnp.where(where[kind], -100, targets)


def that_saves(shape: Shape) -> int:
    """The least budget, in whole MiB, with which exponentials are saved."""
    return next(mib * MIB for mib in range(1000) if plan_of(request_of(shape, mib * MIB), local_gpu(), "auto").saved)


def check(shape: Shape, saves: bool, kind: str) -> None:
    """Error at most 1.8 times that of rounding the true gradient, NaN in ignored tokens' embeddings or not."""
    e, c, targets = trained(shape)
    targets = ignored(targets, kind)
    kept = np.asarray(targets) >= 0
    dirty = jnp.where(jnp.asarray(kept)[:, None], e, jnp.nan).astype(e.dtype)
    run = compiled(shape, that_saves(shape) * saves)
    loss, (de, dc) = run(dirty, c, targets)
    want = float64.mean_loss(e[kept], c, targets[kept])
    np.testing.assert_allclose(loss, want.loss, rtol=1e-4)
    assert not np.asarray(de)[~kept].any()
    most = 1.8 if kept.sum() > 1 else 2.5  # of one token each row of dc has one coefficient, whose rounding all share
    for actual, exact in ((de[kept], want.de), (dc, want.dc)):
        assert float64.relative_error(actual, exact) <= most * float64.rounding_error(exact, e.dtype)
    again = run(dirty, c, targets)
    assert all((x.view(jnp.int16) == y.view(jnp.int16)).all() for x, y in zip((de, dc), again[1], strict=True))


@pytest.mark.parametrize("kind", ["none", "one", "a tenth", "most, at random", "most, in runs", "all but one"])
@pytest.mark.parametrize("saves", [False, True])
def test_exact_whatever_is_saved_and_ignored(saves, kind):
    check(SHAPE, saves, kind)


@pytest.mark.parametrize("kind", ["none", "a tenth", "most, at random"])
@pytest.mark.parametrize("saves", [False, True])
def test_exact_where_the_vocabulary_is_odd(saves, kind):
    check(SHAPE._replace(vocabulary=SHAPE.vocabulary - 3), saves, kind)


@pytest.mark.parametrize("name", ["default", "all"])
@pytest.mark.parametrize("shape", ["gemma2-2b", "llama3-8b", "gist"])
def test_a_call_stays_within_its_budget(shape, name):
    allowed = budgets(SHAPES[shape])[name]
    analysis = compiled(SHAPES[shape], allowed).memory_analysis()
    assert analysis.temp_size_in_bytes <= allowed


@pytest.mark.parametrize("name", ["default", "all"])
@pytest.mark.parametrize(
    ("tokens", "argnums"),
    [(8192, (0,)), (8192, (1,)), (8192, (0, 1, 3)), (8187, (0, 1))],
    ids=["frozen classifier", "frozen embeddings", "bias", "ragged"],
)
def test_a_call_of_another_kind_stays_within_its_budget(tokens, argnums, name):
    shape = SHAPES["llama3-8b"]._replace(tokens=tokens)
    allowed = budgets(shape)[name]
    held = compiled(shape, allowed, argnums).memory_analysis().temp_size_in_bytes
    assert held <= allowed


@pytest.mark.parametrize("name", ["default", "all"])
@pytest.mark.parametrize("shape", ["gemma2-2b", "llama3-8b", "gist"])
def test_a_call_from_torch_stays_within_its_budget(shape, name, monkeypatch):
    """What is saved in PyTorch's pool, and what the program of the gradients takes in JAX's.

    Of a loss for each token, whose gradients the forward pass cannot form.
    """
    tokens, width, vocabulary = SHAPES[shape]
    allowed = budgets(SHAPES[shape])[name]
    ran, run = [], bridge.run

    def recorded(program, inputs, outputs, scratch=()):
        ran.append((program, inputs, outputs, scratch))
        return run(program, inputs, outputs, scratch)

    monkeypatch.setattr(bridge, "run", recorded)
    e, c = (
        torch.randn(s, device="cuda").div(width**0.5).bfloat16().requires_grad_()
        for s in ((tokens, width), (vocabulary, width))
    )
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    cce_torch.linear_cross_entropy(e, c, targets, memory_budget=allowed, reduction="none").sum().backward()
    saved = [x for x in ran[0][2] if x.dim() == 2 and x.dtype == torch.bfloat16]
    program, inputs, outputs, scratch = ran[1]
    given = [*scratch, *outputs, *inputs]
    shapes = [jax.ShapeDtypeStruct(x.shape, str(x.dtype)[6:]) if torch.is_tensor(x) else x for x in given]
    analysis = program.lower(*shapes).compile().memory_analysis()
    assert bool(saved) == (name == "all")
    assert sum(x.nbytes for x in saved) + analysis.temp_size_in_bytes <= allowed


def test_rows_far_below_the_largest_logit_with_everything_saved():
    """Their exponentials, relative to the target's, would overflow: they are saved relative to lse instead."""
    e, c, targets = trained(SHAPE)
    far = jnp.argmin(e[:64].astype(jnp.float32) @ c.astype(jnp.float32).T, axis=1)
    e = e.at[:64].multiply(8)
    targets = targets.at[:64].set(far.astype(targets.dtype))
    want = float64.mean_loss(e, c, targets)
    loss, (de, dc) = compiled(SHAPE, budgets(SHAPE)["all"])(e, c, targets)
    assert want.loss > 5
    np.testing.assert_allclose(loss, want.loss, rtol=1e-4)
    for actual, exact in ((de, want.de), (dc, want.dc)):
        assert float64.relative_error(actual, exact) <= 1.8 * float64.rounding_error(exact, e.dtype)
