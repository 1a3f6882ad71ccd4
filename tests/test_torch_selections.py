"""cce_torch.linear_log_probs with the largest logits and the mean logit: one product, as in JAX, and its gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cce_jax
from cce_torch import linear_log_probs, ops
from cce_torch.call import Call
from cce_torch.on_jax import bridge
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


def test_the_numbers_are_those_of_jax():
    for tokens in ((3, 7), (2, 5), (4, 9), (2, 11), (3, 100), (6,)):  # some of them padded
        e, c, targets = drawn(*tokens)
        temperature = torch.linspace(0.5, 2, targets.numel()).reshape(targets.shape)
        options = {**ASKED, "shift": 1, "softcap": 4.0, "impl": "chunked"}
        found = linear_log_probs(e, c, targets, temperature=temperature, precision="highest", **options)
        arrays = (jnp.asarray(x.detach().numpy()) for x in (e, c, targets, temperature))
        *arrays, by = arrays
        want = cce_jax.linear_log_probs(*arrays, temperature=by, precision="highest", **options)
        for name, x in found._asdict().items():
            y = getattr(want, name)
            assert (x is None) == (y is None)
            if x is not None:
                np.testing.assert_allclose(x.detach().numpy(), np.asarray(y), rtol=1e-5, atol=1e-6, err_msg=name)
        assert found.predicted.dtype == found.top_ids.dtype == torch.int64
        assert not any(x.requires_grad for x in (found.top_log_probs, found.mean_logit, found.top_ids))


@pytest.mark.parametrize("asked", [{"top_k": 3}, {"predicted": True}, {"mean_logit": True}])
def test_each_alone_and_its_gradients(asked):
    e, c, targets = drawn(3, 7)
    found, plain = (linear_log_probs(e, c, targets, entropy=True, impl="chunked", **x) for x in (asked, {}))
    for name, x in linear_log_probs(e, c, targets, impl="chunked", **ASKED)._asdict().items():
        if name in ("top_ids", "top_log_probs"):
            x = x[..., :3]
        if getattr(found, name) is not None:
            torch.testing.assert_close(getattr(found, name), x)
    names = {"top_k": ("top_ids", "top_log_probs"), "predicted": ("predicted",), "mean_logit": ("mean_logit",)}
    selections = ("predicted", "top_ids", "top_log_probs", "mean_logit")
    given = next(iter(asked))
    assert tuple(name for name in selections if getattr(found, name) is not None) == names[given]
    gradients = (torch.autograd.grad(total(x), (e, c)) for x in (found, plain))
    torch.testing.assert_close(*gradients)


def test_under_checkpoints():
    e, c, targets = drawn(3, 7)

    def run(e, c):
        found = linear_log_probs(e, c, targets, impl="chunked", **ASKED)
        return total(found), found.top_ids, found.top_log_probs, found.mean_logit

    plain, *selected = run(e, c)
    want = torch.autograd.grad(plain, (e, c))
    for reentrant in (False, True):
        value, *others = checkpoint(run, e, c, use_reentrant=reentrant)
        torch.testing.assert_close(others, selected)
        leaves = [x.detach().requires_grad_() for x in (e, c)]
        value, *_ = checkpoint(run, *leaves, use_reentrant=reentrant)
        value.backward()
        torch.testing.assert_close([x.grad for x in leaves], list(want))


def test_compiled_for_any_k():
    torch._dynamo.reset()
    e, c, targets = drawn(3, 7)

    def run(e, c, k):
        found = linear_log_probs(e, c, targets, top_k=k, mean_logit=True, entropy=True, impl="chunked")
        return total(found), found.top_ids, found.top_log_probs, found.mean_logit

    for k in (1, 2, 3, 5):
        results = []
        for call in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
            value, *others = call(e, c, k)
            results.append([*others, *torch.autograd.grad(value, (e, c))])
        torch.testing.assert_close(*results)


def test_transforms_of_functions():
    e, c, targets = (x.detach() for x in drawn(3, 7))

    def run(e, c, targets):
        found = linear_log_probs(e, c, targets, impl="chunked", **ASKED)
        return total(found), (found.top_ids, found.top_log_probs, found.mean_logit)

    leaves = [x.clone().requires_grad_() for x in (e, c)]
    value, selected = run(*leaves, targets)
    want = torch.autograd.grad(value, leaves)
    gradients, others = torch.func.grad(run, (0, 1), has_aux=True)(e, c, targets)
    torch.testing.assert_close((gradients, others), (want, selected))
    each = torch.func.vmap(torch.func.grad(run, has_aux=True), (0, None, 0))
    torch.testing.assert_close(each(e, c, targets), (want[0], selected))


def test_opcheck():
    e, c, targets = (x.detach() for x in drawn(21))
    call = Call(reduction="none", impl="chunked", with_mean=True, top_k=3, mean_logit=True)
    given = e, c, None, targets, None, None, None, None, torch.tensor([0.0, 0.0, 1.0]), 1
    torch.library.opcheck(torch.ops.cce_torch.loss.default, (*given, [], False, *call.encoded()))
    assert len(ops.loss(ops.Given(*given), call, True)) == 5


@pytest.mark.parametrize("tokens", [(0,), (3, 0)])
def test_no_tokens(tokens):
    e, c = torch.ones(*tokens, D, requires_grad=True), torch.ones(V, D, requires_grad=True)
    found = linear_log_probs(e, c, torch.zeros(tokens, dtype=torch.int64), impl="chunked", **ASKED)
    assert found.top_ids.shape == found.top_log_probs.shape == (*tokens, 5)
    assert found.predicted.shape == found.mean_logit.shape == tokens
    assert not torch.autograd.grad(total(found), c)[0].any()
