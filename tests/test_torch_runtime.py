"""cce_torch among other things that run in the process: FSDP, forks, the user's JAX settings, PyTorch's settings."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from cce_torch import tensors


class Named(torch.Tensor):
    """A subclass that only has a name: its memory is its own."""


def run(code: str, **environment: str) -> str:
    """What a process prints that runs the code."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")} | environment
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=own,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(x: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """x, a view or not, so many bytes of whose storage have been freed, or all."""
    storage = x.untyped_storage()
    storage.resize_(0 if count is None else storage.nbytes() - count)
    return x


@pytest.mark.parametrize(
    "x",
    [
        torch.rand(3, 4),
        torch.rand(3, 4).T,
        torch.rand(9)[3:],
        torch.rand(3, 1).expand(3, 4),
        torch.rand(4)[::2],
        torch.empty(0),
        without(torch.rand(3, 4)[:0]),
        torch.tensor(1.0),
        torch.nn.Parameter(torch.rand(3)),
        torch.rand(3).as_subclass(Named),
        FakeTensorMode().from_tensor(torch.rand(3)),
        torch.sparse_coo_tensor([[0]], [1.0], (3,)),
        None,
    ],
)
def test_tensors_that_can_be_read_are_taken(x):
    tensors.check({"e": x})


@pytest.mark.parametrize(
    "x",
    [
        without(torch.rand(3, 4)),
        without(torch.rand(9)[3:]),
        without(torch.rand(3, 4), 1),
        without(torch.rand(9)[::2], 1),
        without(torch.rand(3, 4).T),
        torch.nn.Parameter(without(torch.rand(3))),
        torch.empty(3, device="meta"),
    ],
)
def test_a_tensor_without_its_memory_is_named(x):
    with pytest.raises(TypeError, match=r"^c of shape .* has no memory.*forward of the module that FSDP wraps"):
        tensors.check({"e": torch.rand(2), "bias": None, "c": x})


def test_a_tensor_of_a_type_that_is_not_understood_is_named():
    with pytest.raises(TypeError, match=r"^bias is a TwoTensor.*forward of the module that FSDP wraps"):
        tensors.check({"e": torch.rand(2), "bias": TwoTensor(torch.rand(2), torch.rand(2))})


def test_what_functorch_wraps_is_taken():
    def function(x):
        tensors.check({"e": x})
        return x.sum()

    torch.func.vmap(torch.func.grad(function))(torch.rand(2, 3))


def test_the_result_of_a_collective_is_taken():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    tensors.check({"e": AsyncCollectiveTensor(torch.rand(3))})
