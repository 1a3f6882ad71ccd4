"""torch.nn.functional.linear_cross_entropy with this package's kernels: change the import, and nothing else."""

from collections.abc import Callable
from typing import Any, Literal, cast

from torch import Tensor

from cce_kernels import contract
from cce_torch import api, arguments
from cce_torch.options import Reduction

IGNORE_INDEX = -100
NAMES = {"e": "input", "c": "linear_weight", "targets": "target", "bias": "linear_bias", "class_weight": "weight"}


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] | str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    accumulate_into: Tensor | Callable[[], Tensor] | None = None,
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy` of PyTorch 2.13, without the logits. `target` holds class indices.

    It is `cross_entropy(linear(input, linear_weight, linear_bias), target, weight, ...)`, as in PyTorch, except that:

    - the loss is float32 for 16-bit inputs, as the logits are never rounded to 16 bits;
    - the "mean" is 0 where every token is ignored or there is none, where PyTorch has NaN;
    - a target outside [0, V) that is not ignore_index makes that token's loss NaN, where PyTorch raises;
    - it can be differentiated once. `options=None` in PyTorch can be differentiated any number of times.

    Args:
      input: (N, D), or (D,) for one token: bfloat16, float16, float32 or float64.
      linear_weight: (V, D), of input's type, or float32 beside a 16-bit input.
      target: integers, (N,), or () for one token.
      linear_bias: (V,), of linear_weight's type.
      weight: (V,), a weight for each class. "mean" divides by the sum of the weights of the targets. No gradient.
      reduction: "mean", "sum", or "none" for a loss for each token.
      ignore_index: tokens with this target have loss 0 and no gradient. None means -100.
      label_smoothing: in [0, 1], the share of the target that is spread evenly over the classes.
      options: a `torch.nn.LinearCrossEntropyOptions` or None. It has no effect: it says how PyTorch splits the work.
        `cce_torch.linear_cross_entropy` has `memory_budget`.
      accumulate_into: PyTorch has no such argument: a buffer of linear_weight's shape to which the backward pass adds
        the gradient of linear_weight, as in `cce_torch.linear_cross_entropy`.

    Returns:
      The loss in nats, float32 (float64 for float64 inputs): a scalar, or with reduction="none" of the shape of target.

    Raises:
      NotImplementedError: target holds probabilities, linear_weight has several axes of classes, (V, d_1, ..., D), or
        input has more than two axes.
      ValueError: shapes do not fit, or an option is out of its range.
      TypeError: an argument has a wrong type, or the types of several do not fit together.

    Examples:
      >>> import torch
      >>> from cce_torch.functional import linear_cross_entropy   # from torch.nn.functional import linear_cross_entropy
      >>> hidden = torch.randn(32, 64, requires_grad=True)        # (N, D)
      >>> head = torch.nn.Linear(64, 1000)
      >>> labels = torch.randint(1000, (32,))
      >>> linear_cross_entropy(hidden, head.weight, labels, linear_bias=head.bias).backward()
      >>> hidden.grad.shape, head.weight.grad.shape
      (torch.Size([32, 64]), torch.Size([1000, 64]))
    """
    _check_tensors(input, linear_weight, target, linear_bias, weight)
    if options is not None and type(options).__name__ != "LinearCrossEntropyOptions":
        raise TypeError(
            f"options must be a torch.nn.LinearCrossEntropyOptions or None, got {type(options).__name__}: the options "
            "of this package are arguments of cce_torch.linear_cross_entropy"
        )
    with contract.named(NAMES):
        return api.linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias,
            ignore_index=IGNORE_INDEX if ignore_index is None else ignore_index,
            reduction=cast(Reduction, reduction),
            class_weight=weight,
            label_smoothing=label_smoothing,
            accumulate_into=accumulate_into,
        )


def _check_tensors(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> None:
    """Raise what this function does not take, in the words of its own arguments."""
    given = dict(input=input, linear_weight=linear_weight, target=target, linear_bias=linear_bias, weight=weight)
    for name, x in given.items():
        if (x is not None or name not in ("linear_bias", "weight")) and type(x).__name__ != "DTensor":
            arguments.check_tensor(name, x, "linear_cross_entropy")
    tokens, width, classes = tuple(input.shape[:-1]), tuple(input.shape[-1:]), tuple(linear_weight.shape[:-1])
    if input.ndim > 2:
        raise NotImplementedError(
            f"input must be (N, D) or (D,), got {tuple(input.shape)}: flatten it, or write "
            "cce_torch.linear_cross_entropy, which takes (..., D)"
        )
    if linear_weight.ndim > 2:
        raise NotImplementedError(
            f"linear_weight must be (V, D), got {tuple(linear_weight.shape)}: a loss with several axes of classes is "
            "not there"
        )
    if input.ndim < 1 or linear_weight.ndim < 2 or linear_weight.shape[-1:] != width:
        raise ValueError(
            f"input must be (N, D) or (D,), and linear_weight (V, D), got {tuple(input.shape)} and "
            f"{tuple(linear_weight.shape)}"
        )
    if tuple(target.shape) == (*tokens, *classes):
        raise NotImplementedError(
            f"target must be class indices of shape {tokens}, got {tuple(target.shape)}: probabilities as targets are "
            "not there. For an even share of all classes give label_smoothing"
        )
    if target.is_floating_point() or target.is_complex():
        raise TypeError(f"target must be integers, got {str(target.dtype).removeprefix('torch.')}")
    if tuple(target.shape) != tokens:
        raise ValueError(f"target must be {tokens}, one class for each row of input, got {tuple(target.shape)}")
    for name, x in (("linear_bias", linear_bias), ("weight", weight)):
        if x is not None and tuple(x.shape) != classes:
            raise ValueError(f"{name} must be (V,) = {classes}, got {tuple(x.shape)}")
