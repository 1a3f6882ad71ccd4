"""The gradient of c, added to a buffer that exists: accumulate_into, in one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cce_torch import LinearCrossEntropy, LinearCrossEntropyHead, accumulate, linear_cross_entropy
from cce_torch import functional as functional_form
from tests.call_torch import small_blocks
from tests.tolerance import error, roundoff

D, V, TOKENS = 16, 70, 40
IMPLS = pytest.mark.parametrize("impl", ["cce", "chunked", "torch_compile", "reference"])


@pytest.fixture(autouse=True)
def uncompiled():
    """To compile the functions of impl="torch_compile" takes seconds."""
    with small_blocks():
        yield


def drawn(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    e = torch.randn(TOKENS, D, generator=generator).to(dtype).requires_grad_()
    c = torch.randn(V, D, generator=torch.Generator().manual_seed(99)).to(dtype).requires_grad_()
    return e, c, torch.randint(V, (TOKENS,), generator=generator)


def total(e, c, targets, **options: Any) -> torch.Tensor:
    return linear_cross_entropy(e, c, targets, **options).sum()


def gradient(*given, **options: Any) -> torch.Tensor:
    return torch.autograd.grad(total(*given, **options), given[1])[0]


def sum_of_steps(buffer: torch.Tensor, steps: int, **options: Any) -> torch.Tensor:
    for step in range(steps):
        e, c, targets = drawn(step)
        total(e, c, targets, accumulate_into=buffer, **options).backward()
        assert c.grad is None
        assert e.grad is not None
    return buffer


@pytest.mark.parametrize("impl", ["chunked", "torch_compile"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_errors_of_sums(impl, reduction):
    """Each step's gradient is rounded to 16 bits, a float32 sum never: so it has the roundings of one gradient.

    Whether the forward pass forms the gradients or the backward pass computes them.
    """
    steps, options = 32, {"impl": impl, "reduction": reduction}
    truth = torch.zeros(V, D, dtype=torch.float64)
    for step in range(steps):
        e, c, targets = (x.detach() for x in drawn(step))
        given = e.double(), c.double().requires_grad_(), targets
        truth += gradient(*given, impl="reference", reduction=reduction)
    of_float32, of_bfloat16 = (
        error(sum_of_steps(torch.zeros(V, D, dtype=x), steps, **options).float(), truth)
        for x in (torch.float32, torch.bfloat16)
    )
    assert of_float32 <= 2 * error(truth.bfloat16().float(), truth) + 16 * roundoff("float32")  # tests/tolerance.py
    assert 4 * of_float32 < of_bfloat16 <= (2 + steps) * roundoff("bfloat16")


@IMPLS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_added_is_the_gradient(impl, dtype, monkeypatch):
    """In parts of a few rows on a CPU, for a (D, V) classifier too."""
    monkeypatch.setattr(accumulate, "AT_A_TIME", 3 * D)
    e, c, targets = drawn(0, dtype)
    want = gradient(e, c, targets, impl=impl)
    for axis in (0, 1):
        of_axis = (c.T if axis else c).detach().clone().requires_grad_()
        buffer = torch.ones(of_axis.shape)
        total(e, of_axis, targets, impl=impl, vocab_axis=axis, accumulate_into=buffer).backward()
        assert of_axis.grad is None
        torch.testing.assert_close(buffer, 1 + (want.T if axis else want).float(), rtol=0, atol=1e-6)


def test_every_form_of_the_loss_takes_it():
    e, c, targets = drawn(0, torch.float32)
    head = LinearCrossEntropyHead(D, V, bias=False)
    head.weight.data.copy_(c.detach())
    want, weight = gradient(e, c, targets), head.weight
    for call in (
        lambda buffer: functional_form.linear_cross_entropy(e, weight, targets, accumulate_into=buffer),
        lambda buffer: LinearCrossEntropy()(e, weight, targets, accumulate_into=buffer),
        lambda buffer: head(e, targets, accumulate_into=buffer),
        lambda buffer: head(e, targets, accumulate_into=lambda: buffer),
        lambda buffer: checkpoint(lambda e: head(e, targets, accumulate_into=buffer), e, use_reentrant=False),
        lambda buffer: checkpoint(lambda e: head(e, targets, accumulate_into=buffer), e, use_reentrant=True),
    ):
        buffer = torch.zeros(V, D)
        call(buffer).backward()
        assert weight.grad is None
        torch.testing.assert_close(buffer, want)
    with pytest.raises(TypeError, match="num_items and accumulate_into belong to the loss"):
        head(e, accumulate_into=torch.zeros(V, D))


def test_hooks_of_a_head_do_not_see_the_buffer():
    """FSDP2's mixed precision casts the float tensors among the arguments: a sum in a copy would be lost."""
    e, _, targets = drawn(0, torch.float32)
    head, buffer, seen = LinearCrossEntropyHead(D, V, bias=False), torch.zeros(V, D), []
    head.register_forward_pre_hook(lambda _, args, kwargs: seen.extend(kwargs.values()), with_kwargs=True)
    head(e, targets, accumulate_into=buffer).backward()
    assert not any(isinstance(x, torch.Tensor) and x.shape == buffer.shape for x in seen)
    assert buffer.any()


@IMPLS
def test_it_is_added_when_it_is_asked_for_and_each_time(impl):
    e, c, targets = drawn(0, torch.float32)
    want, buffer = gradient(e, c, targets, impl=impl), torch.zeros(V, D)
    loss = total(e, c, targets, impl=impl, accumulate_into=buffer)
    torch.autograd.grad(loss, e, retain_graph=True)
    assert not buffer.any(), "the gradient of e alone was asked for"
    for times in (1, 2):
        (3 * loss).backward(retain_graph=True)
        torch.testing.assert_close(buffer, 3 * times * want)
    with torch.no_grad():
        total(e, c, targets, impl=impl, accumulate_into=buffer)


class Tied(nn.Module):
    """A model whose embedding is its head, as Megatron prepares its parameters, with its hook."""

    def __init__(self, zero_out_wgrad: bool) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.randn(V, D, generator=torch.Generator().manual_seed(1)))
        self.weight.main_grad = torch.zeros(V, D)
        self.weight.grad_added_to_main_grad, self.weight.zero_out_wgrad = False, zero_out_wgrad
        self.ran = 0
        self.weight.register_post_accumulate_grad_hook(self.hook)

    def hook(self, weight) -> None:
        """megatron.core.distributed.DistributedDataParallel._make_backward_post_hook"""
        self.ran += 1
        assert weight.grad is not None, "overlap_grad_reduce needs one"
        if not weight.grad_added_to_main_grad or weight.zero_out_wgrad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    def loss(self, tokens, accumulate_into=None, frozen=False):
        embedding = self.weight.detach() if frozen else self.weight
        h = nn.functional.embedding(tokens, embedding)
        return linear_cross_entropy(h, self.weight, tokens, shift=1, accumulate_into=accumulate_into)


@pytest.mark.parametrize("zero_out_wgrad", [False, True])
@pytest.mark.parametrize("lazily", [False, True])
def test_a_parameter_of_megatron(zero_out_wgrad, lazily):
    """Where the weight is an embedding too, Megatron sets zero_out_wgrad: its hook then adds the embedding's part."""
    tokens, frozen = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(2)), not zero_out_wgrad
    model, plain = Tied(zero_out_wgrad), Tied(zero_out_wgrad)
    weight = model.weight
    weight.get_main_grad = lambda: weight.main_grad  # of Megatron-FSDP
    for _ in range(3):
        weight.grad_added_to_main_grad = False
        model.loss(tokens, weight.get_main_grad if lazily else weight.main_grad, frozen).backward()
        assert weight.grad_added_to_main_grad
        assert weight.grad is None
        plain.loss(tokens, frozen=frozen).backward()
    assert model.ran == plain.ran == 3
    torch.testing.assert_close(weight.main_grad, plain.weight.main_grad)


def test_torch_compile_breaks_the_graph():
    e, c, targets = drawn(0, torch.float32)
    want, buffer = gradient(2 * e, c, targets), torch.zeros(V, D)

    def loss(e):
        return total(2 * e, c, targets, accumulate_into=buffer)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="accumulate_into is written by the backward pass"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(e)
    torch.compile(loss, backend="aot_eager")(e).backward()
    torch.testing.assert_close(buffer, want)


def test_what_it_refuses():
    e, c, targets = drawn(0, torch.float32)
    buffer = torch.zeros(V, D)

    def loss(e=e, accumulate_into: Any = buffer):
        return linear_cross_entropy(e, c, targets, accumulate_into=accumulate_into)

    for transformed in (torch.func.grad(loss), lambda e: torch.func.vmap(loss)(e[None])):
        with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy: accumulate_into .* torch\.func"):
            transformed(e)
    with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy: accumulate_into .*is_grads_batched"):
        torch.autograd.grad(loss(), (e, c), torch.ones(3), is_grads_batched=True)
    (de,) = torch.autograd.grad(loss(), e, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy has first derivatives"):
        de.sum().backward()
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: accumulate_into gets the gradient of c, but"):
        linear_cross_entropy(e, c.detach(), targets, accumulate_into=buffer)
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: elements of accumulate_into share memory"):
        loss(accumulate_into=torch.zeros(1, D).expand(V, D))
    with pytest.raises(ValueError, match=r"accumulate_into must have c's shape, \(70, 16\), got \(16, 70\)"):
        loss(accumulate_into=lambda: torch.zeros(D, V)).backward()
    assert not buffer.any()
