"""Every way through PyTorch's autograd, for every way to the gradients: the same numbers, and mostly the same bits."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cce_torch import linear_cross_entropy
from tests import call_torch
from tests.test_in_forward import in_forward as on  # noqa: F401  # for all tests of this file
from tests.tolerance import error

AGAIN = {"impl": "chunked", "reduction": "none", "label_smoothing": 0.1}
WAYS = {
    "again": (torch.float32, AGAIN),  # the backward pass computes the logits again
    "formed": (torch.float32, {"impl": "chunked"}),  # in the forward pass
    "formed in 16 bits": (torch.bfloat16, {"impl": "chunked"}),
    "saved": (torch.bfloat16, {"impl": "cce", "memory_budget": "all"}),  # exponentials
    "torch_compile": (torch.float32, {"impl": "torch_compile", "reduction": "none"}),
    "reference": (torch.float32, {"impl": "reference"}),
}
EVERY = pytest.mark.parametrize("way", WAYS)
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # where the bits are those of another program


@pytest.fixture(autouse=True)
def small_blocks():
    with call_torch.small_blocks():
        yield


def example(way: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, dtype = 40 if way == "saved" else 300, WAYS[way][0]  # the kernels' interpreter is slow
    generator = torch.Generator().manual_seed(0)
    e, c = (torch.randn(n, 24, generator=generator).to(dtype).requires_grad_() for n in (tokens, 232))
    targets = torch.randint(0, 232, (tokens,), generator=generator)
    targets[::5] = -100
    return e, c, targets


def total(way: str, e: torch.Tensor, c: torch.Tensor, t: torch.Tensor, **more) -> torch.Tensor:
    return linear_cross_entropy(e, c, t, **{**WAYS[way][1], "precision": "highest", **more}).sum()


def gradients(value, *leaves, **more):
    return torch.autograd.grad(value, leaves, **more)


def same(found, want) -> None:
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def close(found, want) -> None:
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        assert error(x.detach().float(), y.detach().float()) <= CLOSE[x.dtype]


@EVERY
def test_a_kept_graph(way):
    e, c, t = example(way)
    value = total(way, e, c, t)
    first = gradients(value, e, c, retain_graph=True)
    same(gradients(value, e, retain_graph=True), first[:1])
    same(gradients(value, c, retain_graph=True), first[1:])
    times = gradients(value, e, c, grad_outputs=torch.tensor(-4.0), retain_graph=True)
    same(times, [-4 * x for x in first])
    same(gradients(value, e, c), first)
    same(gradients(total(way, e, c, t), e, c), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(value, e, c)


@EVERY
def test_checkpointed(way):
    e, c, t = example(way)
    want = gradients(total(way, e * 2, c, t), e, c)
    for reentrant in (False, True):
        e.grad = c.grad = None
        checkpoint(lambda e: total(way, e * 2, c, t), e, use_reentrant=reentrant).backward()
        same([e.grad, c.grad], want)


@EVERY
def test_a_hook_may_move_saved_tensors_and_drop_their_strides(way):
    e, c, t = example(way)
    c = c.detach().T.contiguous().requires_grad_()
    want = gradients(total(way, e, c, t, vocab_axis=1), e, c)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):  # copies into row-major memory, on a CPU too
        value = total(way, e, c, t, vocab_axis=1)
    found = gradients(value, e, c, retain_graph=True)
    close(found, want)
    same(gradients(value, e, c), found)
    assert want[1].stride() == c.stride()


@EVERY
def test_a_frozen_input_changes_nothing_for_the_other(way):
    e, c, t = example(way)
    want = gradients(total(way, e, c, t), e, c)
    compare = same if way == "saved" else close
    compare(gradients(total(way, e, c.detach(), t), e), want[:1])
    compare(gradients(total(way, e.detach(), c, t), c), want[1:])


@EVERY
def test_inputs_of_any_strides(way):
    e, c, t = example(way)
    want = gradients(total(way, e, c, t), e, c)
    wide = torch.zeros(len(e), 48, dtype=e.dtype)
    wide[:, ::2] = e.detach()
    tall = torch.cat([c.detach()[:1], c.detach()])
    views = wide[:, ::2].requires_grad_(), tall[1:].requires_grad_(), torch.stack([t, t], 1)[:, 0]
    close(gradients(total(way, *views), *views[:2]), want)
    negated = torch._neg_view(-e.detach()).requires_grad_()
    close(gradients(total(way, negated, c, t), negated, c), want)
    unaligned = torch.zeros(e.numel() + 1, dtype=e.dtype)[1:].view(e.shape).copy_(e.detach()).requires_grad_()
    close(gradients(total(way, unaligned, c, t), unaligned, c), want)


@pytest.mark.parametrize("kind", ["expanded", "sliced", "transposed", "negated"])
@pytest.mark.parametrize("way", ["again", "torch_compile"])
def test_cotangents_of_any_strides(way, kind):
    e, c, t = example(way)
    given = {
        "expanded": torch.randn(20, 1).expand(20, 15),
        "sliced": torch.randn(20, 30)[:, ::2],
        "transposed": torch.randn(15, 20).T,
        "negated": torch._neg_view(torch.randn(20, 15)),
    }[kind]
    both = linear_cross_entropy(e.view(20, 15, -1), c, t.view(20, 15), return_lse=True, **WAYS[way][1])
    found = torch.autograd.grad(both, (e, c), (given, given), retain_graph=True)
    dense = given.clone(memory_format=torch.contiguous_format).resolve_neg()
    same(found, torch.autograd.grad(both, (e, c), (dense, dense)))


@EVERY
def test_func_grad_and_vmap_of_it(way):
    e, c, t = example(way)
    want = gradients(total(way, e, c, t), e, c)
    close(torch.func.grad(lambda e, c: total(way, e, c, t), (0, 1))(e.detach(), c.detach()), want)
    each = torch.func.vmap(torch.func.grad(lambda e: total(way, e, c.detach(), t)))(torch.stack([e, 2 * e]).detach())
    close(each, [*want[:1], *torch.autograd.grad(total(way, twice := 2 * e, c, t), twice)])


@EVERY
def test_cotangents_may_be_batched(way):
    e, c, t = example(way)
    value, factors = total(way, e, c, t), torch.tensor([1.0, -2.0, 0.25])
    found = gradients(value, e, c, grad_outputs=factors, is_grads_batched=True, retain_graph=True)
    each = zip(*(gradients(value, e, c, grad_outputs=k, retain_graph=True) for k in factors), strict=True)
    close(found, [torch.stack(x) for x in each])


def _tangent(f, e):
    """The derivative of f along e, by dual numbers."""
    with torch.autograd.forward_ad.dual_level():
        f(e.detach())  # which has no tangent
        dual = torch.autograd.forward_ad.make_dual(e.detach(), torch.ones_like(e))
        return torch.autograd.forward_ad.unpack_dual(f(dual)).tangent


OTHER = {
    "jvp": lambda f, e: torch.func.jvp(f, (e,), (e,)),
    "hessian": lambda f, e: torch.func.hessian(f)(e),
    "dual numbers": _tangent,
    "twice": lambda f, e: torch.autograd.grad(torch.autograd.grad(f(e), e, create_graph=True)[0].sum(), e),
}


@pytest.mark.parametrize("derivative", OTHER)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "reference"])
def test_other_derivatives_are_an_error_that_names_the_reference(way, derivative):
    e, c, t = example(way)
    if (way, derivative) != ("torch_compile", "dual numbers"):  # where PyTorch's own error is raised
        with pytest.raises(NotImplementedError, match="impl='reference'"):
            OTHER[derivative](lambda e: total(way, e, c, t), e)
    small = e.detach()[:3].float().requires_grad_()
    f = partial(linear_cross_entropy, c=c.detach()[:7].float(), targets=t[:3] % 7, impl="reference")
    assert OTHER[derivative](f, small) is not None


@EVERY
def test_under_torch_compile(way):
    torch._dynamo.reset()
    e, c, t = example(way)
    step = torch.compile(lambda e, c: total(way, e * 2, c, t), fullgraph=True, backend="aot_eager")
    close(gradients(step(e, c), e, c), gradients(total(way, e * 2, c, t), e, c))


@EVERY
def test_evaluation_leaves_nothing_for_a_backward_pass(way):
    e, c, t = example(way)
    run = partial(linear_cross_entropy, e, c, t, return_lse=True, **WAYS[way][1])
    trained = run()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = run()
        assert all(x.grad_fn is None for x in found)
        close(found, trained)
