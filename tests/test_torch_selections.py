"""cce_torch.linear_log_probs with the largest logits and the mean logit: one product, as in JAX, and its gradients."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cce_torch import linear_log_probs, ops
from cce_torch.call import Call, Given, Scheduled
from cce_torch.on_jax import bridge
from cce_torch.operators import flat
from tests.test_structure import flops

N, D, V = 40, 24, 600
ASKED: dict[str, Any] = {"top_k": 5, "predicted": True, "mean_logit": True, "entropy": True}
IGNORED = -100


def drawn(*tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(len(tokens))
    e, c = (torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for shape in ((*tokens, D), (V, D)))
    targets = torch.tensor(rng.integers(0, V, tokens))
    targets[torch.tensor(rng.uniform(size=tokens)) < 0.3] = IGNORED
    return e.requires_grad_(), c.requires_grad_(), targets


def total(found: Any) -> torch.Tensor:
    return (found.log_probs + 0.1 * found.entropy + 0.01 * found.lse).sum()


@pytest.fixture
def products(monkeypatch) -> list[float]:
    """How many products of e and c each JAX program does, in turn."""
    found, run = [], bridge.run

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype)[6:]) if isinstance(x, torch.Tensor) else x

    def counted(program, inputs, outputs, scratch=()):
        jaxpr = jax.make_jaxpr(program)(*map(shape, (*scratch, *outputs, *inputs))).jaxpr
        found.append(flops(jaxpr) / (2.0 * N * D * V))
        return run(program, inputs, outputs, scratch)

    monkeypatch.setattr(bridge, "run", counted)
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("impl", ["auto", "cce", "chunked"])
def test_one_product_gives_all_numbers(impl, compiled, products):
    """And the backward pass takes three: the logits, de and dc."""
    torch._dynamo.reset()
    e, c, targets = drawn(N)

    def run(e, c):
        return linear_log_probs(e, c, targets, impl=impl, **(ASKED | {"entropy": impl != "cce"}))

    if compiled:
        found = torch.compile(run, fullgraph=True, backend="aot_eager")(e, c)
    else:
        with FlopCounterMode(display=False) as in_torch:
            found = run(e, c)
        assert in_torch.get_total_flops() == 0
    assert products == [pytest.approx(1)]
    torch.autograd.grad(found.log_probs.sum(), (e, c))
    assert products == [pytest.approx(1), pytest.approx(3)] or impl == "cce"  # whose kernels are not counted


def test_compiled_for_any_k():
    torch._dynamo.reset()
    e, c, targets = drawn(3, 7)

    def run(e, c, k):
        found = linear_log_probs(e, c, targets, top_k=k, mean_logit=True, entropy=True, impl="chunked")
        return total(found), found.top_ids, found.top_log_probs, found.mean_logit

    for k in (1, 3, 5):
        results = []
        for call in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
            value, *others = call(e, c, k)
            results.append([*others, *torch.autograd.grad(value, (e, c))])
        torch.testing.assert_close(*results)


def test_opcheck():
    e, c, targets = (x.detach() for x in drawn(21))
    call = Call(reduction="none", impl="chunked", with_mean=True, top_k=3, mean_logit=True)
    given, numbers = Given(e, c, None, targets), Scheduled()
    torch.library.opcheck(torch.ops.cce_torch.loss.default, tuple(flat(given, numbers, None, [], call)))
    assert None not in ops.loss(given, numbers, call, True, "linear_log_probs")[2]
