"""Other packages' mean losses. Each function imports its package when it is called, and returns loss(e, c, targets)."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bench.calls import Loss

# What the versions that were measured are called on PyPI.
PACKAGES = (
    *("torch", "triton", "transformers", "cut-cross-entropy", "liger-kernel", "quack-kernels"),
    *("nvidia-cutlass-dsl", "tokamax", "trl", "verl"),
)


def cut_cross_entropy(exact: bool = False) -> Loss:
    """exact: nothing is left out; by default it filters out small gradients."""
    loss = import_module("cut_cross_entropy").linear_cross_entropy
    has_presets = find_spec("cut_cross_entropy.cce_utils") is not None  # absent from the release 25.1.1
    options = {"impl": "cce_exact"} if has_presets else {"filter_eps": None}
    return partial(loss, **options if exact else {})


def liger(chunk_mem_const: int = 1, float32_sums: bool = False, cute: bool = False) -> Loss:
    """chunk_mem_const: a chunk's logits take about so many times the bytes of e. float32_sums: dc is summed in float32.
    cute: its softmax is the one in CuTe, which its public function never takes, instead of the one in Triton.
    """
    import torch

    function = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    sums, softmax = torch.float32 if float32_sums else None, "nvidia-cutedsl" if cute else None
    if cute:
        import_module("cutlass.cute")  # says so where it is missing

    def loss(e, c, targets):
        options = (None, None, -100, 0.0, 0.0, "mean", None, False, sums, False, False, False)
        return function.apply(e, c, targets, *options, softmax, None, chunk_mem_const)[0]

    return loss


def liger_sm90() -> Loss:
    """Its function for Hopper, in CuTe, which keeps all logits in bfloat16."""
    module = import_module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    return module.LigerFusedLinearCrossEntropySM90Function.apply


def quack(chunk_size: int = 4096) -> Loss:
    """chunk_size: in tokens. It takes its fused pipeline wherever that serves the call."""
    loss = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return partial(loss, chunk_size=chunk_size)


def torch_linear_cross_entropy(chunked: bool) -> Loss:
    """PyTorch's own, since 2.13: by default full logits, with options in chunks."""
    import torch

    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    options: Any = torch.nn.LinearCrossEntropyOptions() if chunked else None  # type: ignore[attr-defined]
    return partial(torch.nn.functional.linear_cross_entropy, options=options)  # type: ignore[attr-defined]


def tokamax(implementation: str | None = None) -> Loss:
    loss = import_module("tokamax").linear_softmax_cross_entropy_loss
    return lambda e, c, targets: loss(e, targets, c.T, reduction="mean", implementation=implementation)
