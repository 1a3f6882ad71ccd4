"""Memory budgets on a GPU, by what compiled programs take. `python -m tests.search` draws calls of any budget there."""

import jax
import jax.numpy as jnp
import pytest
import torch

import cce_torch
from bench.data import SHAPES, Shape
from cce_jax import linear_cross_entropy
from cce_torch.on_jax import bridge
from tests.plans import whole_bytes

pytestmark = pytest.mark.gpu
MIB = 2**20


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


@pytest.mark.parametrize("name", ["default", "all"])
@pytest.mark.parametrize(
    ("shape", "argnums"),
    [
        *((SHAPES[x], (0, 1)) for x in ("gemma2-2b", "llama3-8b", "gist")),
        *((SHAPES["llama3-8b"], x) for x in ((0,), (1,), (0, 1, 3))),  # a frozen argument; with a bias
        (SHAPES["llama3-8b"]._replace(tokens=8187), (0, 1)),
    ],
)
def test_a_call_stays_within_its_budget(shape, argnums, name):
    allowed = budgets(shape)[name]
    assert compiled(shape, allowed, argnums).memory_analysis().temp_size_in_bytes <= allowed


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
