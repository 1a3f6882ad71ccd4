"""What drawn calls (tests/search) of cce_torch.linear_divergence do not ask: roundings, memory, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cce_torch import linear_divergence


def given(dtype=torch.float32, tokens: int = 40, **others) -> Any:
    """A student of width 16, whose e and c require gradients, and a teacher of width 24, over 90 ids."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"e": (tokens, 16), "c": (90, 16), "teacher_e": (tokens, 24), "teacher_c": (90, 24)}
    tensors = {k: (torch.randn(shape, generator=generator) / 2).to(dtype) for k, shape in shapes.items()}
    for name in ("e", "c"):
        tensors[name].requires_grad_()
    return {**tensors, "impl": "torch_compile", "memory_budget": 0, **others}


def gradients(x: dict[str, Any], of: Any = 1.0) -> tuple[Tensor, ...]:
    return torch.autograd.grad(linear_divergence(**x) * of, (x["e"], x["c"]))


def test_a_teacher_of_float64_beside_a_student_of_float32():
    x = given(impl="auto")
    wide = x | {name: x[name].double() for name in ("teacher_e", "teacher_c")}
    torch.testing.assert_close(linear_divergence(**wide), linear_divergence(**x))


@pytest.mark.parametrize("impl", ["torch_compile", "chunked"])
class TestAutograd:
    def test_a_cotangent_adds_no_rounding(self, impl):
        """Where PyTorch computes alone, the gradients are finished before: it rounds them once more."""
        x = given(torch.bfloat16, impl=impl, divergence="reverse_kl", token_weight=torch.arange(40) % 3.0)
        exact = {k: y.detach().double().requires_grad_(y.requires_grad) for k, y in x.items() if isinstance(y, Tensor)}
        want = gradients(x | exact | {"impl": "reference"}, 0.7)
        for found, y in zip(gradients(x, 0.7), want, strict=True):
            rounding = torch.linalg.norm(y.bfloat16().double() - y)
            most = 1.75 if impl == "chunked" else 2.3
            assert torch.linalg.norm(found.double() - y) <= most * rounding

    def test_the_teacher_gets_none(self, impl):
        x = given(impl=impl)
        for name in ("teacher_e", "teacher_c"):
            x[name].requires_grad_()
        linear_divergence(**x).backward()
        assert x["teacher_e"].grad is None
        assert x["teacher_c"].grad is None


class DTensor(Tensor):
    """Known by its name alone."""


@pytest.mark.parametrize("name", ["c", "teacher_c"])
def test_a_dtensor_is_an_error(name):
    x = given()
    with pytest.raises(TypeError, match=f"^{name} is a DTensor, and linear_divergence takes plain tensors"):
        linear_divergence(**{**x, name: x[name].detach().as_subclass(DTensor)})
