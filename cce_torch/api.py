"""The public function and module for PyTorch: they check the arguments, choose the impl and compute the loss."""

import inspect
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import accumulate, arguments, in_forward, losses, ops, statistics
from cce_torch.arguments import constant, flat, shifted
from cce_torch.call import Given, Scheduled, lse_of
from cce_torch.on_jax import tensors
from cce_torch.options import Impl, OptionsOfModule, OptionsOfTokens, Reduction
from cce_torch.processes.vocab_parallel import Setting, VocabParallel

Result = TypeVar("Result")


@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = False,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionsOfTokens],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = False,
    *,
    return_lse: Literal[True],
    **options: Unpack[OptionsOfTokens],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    reduction: Reduction,
    shift: bool | int,
    return_lse: Literal[True],
    **options: Unpack[OptionsOfTokens],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = False,
    return_lse: bool = False,
    **options: Unpack[OptionsOfTokens],
) -> Tensor | tuple[Tensor, Tensor]: ...
@arguments.traced
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = False,
    return_lse: bool = False,
    *,
    logit_scale: float | None = None,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    vocab_axis: Literal[0, 1] = 0,
    impl: Impl = "auto",
    memory_budget: float | Literal["all"] | None = None,
    precision: Literal["highest", "high", "medium"] | None = None,
    check_targets: bool = False,
    gradient_tolerance: float = 0.0,
    vocab_parallel: VocabParallel | None = None,
    vocab_parallel_options: Any = None,
    accumulate_into: Tensor | Callable[[], Tensor] | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of the logits `e @ c.T + bias` against `targets`, without holding the logits.

    Equivalent to the following, with exact gradients and O(N) memory in place of O(N·V):

        z = logit_scale * (e.float() @ c.float().T + bias)      # (..., V)
        z = softcap * tanh(z / softcap)                         # if softcap
        lse = logsumexp(z, -1)
        smooth = mean(class_weight * (lse - z), -1)             # over the vocabulary
        ce = (1 - label_smoothing) * class_weight[targets] * (lse - z[targets]) + label_smoothing * smooth
        total = where(targets == ignore_index, 0, token_weight * (ce + z_loss * lse**2))
        loss = sum(total) / num_items                           # for reduction="mean"

    With ignore_index alone this is `torch.nn.functional.cross_entropy`, except that it is 0 if every token is ignored.
    The first nine arguments are those of cut_cross_entropy. The gradient is that of Cut Cross-Entropy (Wijmans et al.
    2024, arXiv:2411.09009) without its filter: exact, unless gradient_tolerance is given. The loss, and with
    `return_lse` lse too, can be differentiated once in e, c, bias and token_weight with any impl. Under autocast the
    products are computed in the type in which `torch.nn.functional.linear` computes them; the gradients of a float32 c
    and bias are not rounded to it.

    Args:
      e: embeddings, (..., D), bfloat16, float16 or float32 (float64 with impl "reference" and "torch_compile").
      c: classifier: (V, D), or (D, V) with vocab_axis=1. A transposed c is not copied. It has e's type, or is float32
        beside a 16-bit e: the loss is then that of c rounded to e's type, and the gradient of c comes in float32 from
        float32 sums. The rounded copy of c, 2·V·D bytes, is held from the forward pass to the backward pass, besides
        what memory_budget bounds.
      targets: integers of shape (...). A target outside [0, V) that is not ignore_index makes that token's loss NaN,
        and every gradient that the token contributes to.
      bias: (V,), of c's type.
      ignore_index: tokens with this target have loss 0 and no gradient, whatever their embedding holds.
      softcap: positive; logits become softcap·tanh(logit / softcap).
      reduction: "mean", "sum", or "none" for a loss per token.
      shift: k in [0, T), or True for 1: token i of the last axis of targets predicts target i + k. e is not copied.
        1 is allowed for T = 1 and T = 0 too: no token has a target then, and the loss is 0.
      return_lse: return (loss, lse). lse has the shape of targets after the shift, and is 0 for ignored tokens.
      logit_scale: a number that multiplies the logits before softcap. If the scale is learned, multiply e by it.
      class_weight: (V,), a weight for each class; it gets no gradient.
      label_smoothing: in [0, 1], the share of the target that is spread evenly over the vocabulary.
      z_loss: weight of lse² in each token's loss (PaLM's auxiliary loss; Chowdhery et al. 2022).
      token_weight: a weight for each token's loss, of the shape of targets. It is shifted along with targets.
      num_items: the number that "mean" divides by, at least 0, or a tensor of one element. By default the sum of
        class_weight[target]·token_weight over the tokens that are not ignored. Where it is 0, the loss and its
        gradients are 0. Only "mean" takes it.
      vocab_axis: the axis of c that is the vocabulary. The gradient of c has c's layout.
      impl: "cce": always the Pallas kernels, for CUDA GPUs of compute capability 8.0 and up (on a CPU Pallas'
        interpreter runs them, for tests). "chunked": XLA's matmuls in windows of the vocabulary, on CUDA and CPU.
        "torch_compile": PyTorch alone, on any device, without JAX. "reference": full logits in PyTorch, differentiable
        any number of times. "auto": on a GPU that can run "cce" the kernels for 16 bits, and XLA's matmuls in windows
        of the vocabulary for float32, as they were measured to be faster; "chunked" on a CPU; "torch_compile" for
        float64, older GPUs and other devices.
      memory_budget: a whole number of bytes, such as 2e9, or "all" for no bound. By default 640 MiB, or 6·D + 2560
        bytes a token where that is more. It bounds what a call holds beyond its inputs, its results and a few numbers
        for each token. More memory makes the call faster; the gradients stay the same up to rounding. docs/memory.md
        says what the memory is used for, and the least that a call needs.
      precision: of float32 matmuls on a GPU: one of the values of `torch.set_float32_matmul_precision`; by default the
        value that was set there. "high" and "medium" are TF32.
      check_targets: raise if a target is outside [0, V) and not ignore_index. This waits until targets is computed, and
        does not work under torch.compile.
      gradient_tolerance: a number τ in [0, 1). With 0 the gradients are exact. With more, the products that form those
        of e and c may leave out blocks of the vocabulary with small probabilities, which saves time. Of each token's
        cotangents of the logits they leave out at most τ of the sum of magnitudes, whatever the loss consists of, and
        never the target's. There is no bound for a single row of the gradient of c: that of a rare token may consist of
        small probabilities alone. Only the kernels for Hopper GPUs leave out anything, in bfloat16, where the forward
        pass forms the gradients; every other call is exact, with impl "chunked", "torch_compile" and "reference" too.
        The loss, lse and the gradients of bias and token_weight are always exact. docs/options.md says more.
      vocab_parallel: the rows of the whole classifier that c holds, if each process of a group holds some. c is then
        (stop - start, D), or (D, stop - start) with vocab_axis=1, and bias (stop - start,). V is still that of the
        whole vocabulary: targets are columns of it, and class_weight is (V,), on every process. The loss and lse are
        those of the whole vocabulary, equal on all processes of the group. So e, targets and all options must be equal
        on all processes too. It does not work with torch.func.
      vocab_parallel_options: the same as cut_cross_entropy's VocabParallelOptions. The first call with one of them
        waits for all processes of its group: make it once.
      accumulate_into: a buffer of c's shape, float32 or of 16 bits, to which the backward pass adds the gradient of c,
        or a function without arguments that it calls for this buffer. c then gets no gradient. But if c has the
        attribute grad_added_to_main_grad, as the parameters of Megatron have, the backward pass makes it True, and c
        gets a gradient of zeros, so that hooks of the parameter run. Under torch.compile the call is a
        break in the graph. It does not work with torch.func and DTensors.

    Returns:
      The loss in nats, float32 (float64 for float64 inputs): a scalar; for reduction="none" a tensor of the shape of
      targets after the shift.

    Raises:
      ValueError: shapes or devices do not fit, an option is out of its range, or, with check_targets, a target is out
        of range.
      TypeError: a tensor has a wrong type, or an option is unknown.
      NotImplementedError: the impl does not run on this device.
      torch.OutOfMemoryError: there is no memory for the scratch, even after freeing PyTorch's cache.

    Examples:
      Loss and gradients of a model that predicts the next token, with its embedding as the head:

      >>> import torch
      >>> from cce_torch import linear_cross_entropy
      >>> hidden = torch.randn(2, 16, 64, requires_grad=True)                 # (B, T, D), what the model returns
      >>> embedding = torch.randn(1000, 64, requires_grad=True)               # (V, D)
      >>> tokens = torch.randint(1000, (2, 16))                               # (B, T)
      >>> loss = linear_cross_entropy(hidden, embedding, tokens, shift=1)
      >>> loss.backward()
      >>> loss.shape, hidden.grad.shape, embedding.grad.shape
      (torch.Size([]), torch.Size([2, 16, 64]), torch.Size([1000, 64]))
    """
    if unknown:
        raise contract.unknown_options(
            "linear_cross_entropy", unknown, OPTIONS | OptionsOfTokens.__annotations__.keys()
        )
    contract.choice("return_lse", return_lse, (False, True))
    given = dict(e=e, c=c, targets=targets, bias=bias, class_weight=class_weight, token_weight=token_weight)
    numbers = logit_scale, softcap, label_smoothing, z_loss, ignore_index, memory_budget, gradient_tolerance, shift
    options = arguments.Options(reduction, impl, vocab_axis, precision, *numbers)
    if tensors.has_dtensor(given):
        from cce_torch.processes import dtensors

        if accumulate_into is not None:
            raise NotImplementedError(
                "linear_cross_entropy: accumulate_into does not work with DTensors: pass to_local() of each tensor, "
                "and vocab_parallel if c is split"
            )
        shared = dict(vocab_parallel=vocab_parallel, vocab_parallel_options=vocab_parallel_options)
        named = options._asdict() | shared | dict(check_targets=check_targets, return_lse=return_lse)
        return dtensors.loss(linear_cross_entropy, given, num_items, named)  # type: ignore[call-arg]
    options = arguments.checked(options)
    shard = arguments.shard_of(vocab_parallel, vocab_parallel_options)
    x = arguments.prepared("linear_cross_entropy", given, options, num_items, check_targets, shard)
    if accumulate_into is not None:
        x = accumulate.accumulated(x, c, accumulate_into, vocab_axis)
    class_weight = None if class_weight is None else class_weight.detach()
    scheduled = Scheduled(options.label_smoothing, options.z_loss, options.logit_scale)
    call = x.call(
        reduction, smooths=constant(scheduled.label_smoothing > 0), has_z_loss=constant(scheduled.z_loss != 0)
    )
    if x.alone:
        flattened = Given(flat(x.e, 1), x.c, x.bias, x.targets, class_weight, flat(token_weight), x.num_items)
        loss, found, _ = ops.loss(flattened, scheduled, call, return_lse, x.called)
        lse = lse_of(found) if return_lse else None
    else:
        if x.shift:
            token_weight = None if token_weight is None else shifted(token_weight, x.shift, 0)
        weights = None if class_weight is None else class_weight.to(torch.promote_types(x.e.dtype, torch.float32))
        operands = statistics.operands_of(x)._replace(weights=weights)
        terms = losses.Terms(operands.columns, weights, flat(token_weight), x.vocabulary)
        if shard is not None and reduction != "none" and not return_lse:
            setting = Setting(call, scheduled, x.targets.shape, shard)
            formed = in_forward.total(operands, losses.BuiltIn(terms, scheduled), setting)
            if formed is not None:
                return losses.reduced(formed[0], terms, x.num_items, reduction)
        found, _ = statistics.numbers(x, operands, call, scheduled)
        loss, lse = losses.loss(found, terms, x.num_items, reduction, scheduled)
    if reduction == "none":
        loss = x.unshifted(loss)
    return (loss, x.unshifted(lse)) if return_lse else loss  # type: ignore[arg-type]


class LinearCrossEntropy(torch.nn.Module, Generic[Result]):
    """`linear_cross_entropy` as a module: the options are given once, the tensors at each call.

    The options are the function's keyword arguments, and are given by name. class_weight becomes a buffer. bias,
    token_weight, num_items and accumulate_into are arguments of the call. `LinearCrossEntropyHead` is a module with a
    weight of its own, as torch.nn.LinearCrossEntropyLoss is.

    Raises:
      TypeError: an option is unknown or given without its name, or belongs to the call.
      ValueError: an option is out of its range.
    """

    __call__: Callable[..., Result]  # torch.nn.Module says Any

    @overload
    def __init__(
        self: "LinearCrossEntropy[Tensor]", *, return_lse: Literal[False] = False, **options: Unpack[OptionsOfModule]
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropy[tuple[Tensor, Tensor]]",
        *,
        return_lse: Literal[True],
        **options: Unpack[OptionsOfModule],
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropy[Tensor | tuple[Tensor, Tensor]]",
        *,
        return_lse: bool = False,
        **options: Unpack[OptionsOfModule],
    ) -> None: ...
    def __init__(self, *unnamed: Any, class_weight: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.class_weight: Tensor | None
        if unnamed:
            sizes = ", ".join(map(repr, unnamed[:2])) if len(unnamed) > 1 else "in_features, out_features"
            raise TypeError(
                f"LinearCrossEntropy takes its options by name, got {unnamed}. A module with a weight of its own, as "
                f"torch.nn.LinearCrossEntropyLoss({sizes}) is one, is cce_torch.LinearCrossEntropyHead({sizes})"
            )
        for name in OF_CALL & options.keys():
            raise TypeError(
                f"{name} belongs to a batch, not to LinearCrossEntropy(...): give it to the call, as in "
                f"LinearCrossEntropy()(e, c, targets, {name}={name})"
            )
        unknown = options.keys() - OPTIONS
        if unknown:
            raise contract.unknown_options("LinearCrossEntropy", unknown, OPTIONS)
        own = dict(ignore_index=-100, softcap=None, reduction="mean", shift=False, return_lse=False)
        self.options: dict[str, Any] = own | options
        checked = {**inspect.unwrap(cast(Any, linear_cross_entropy)).__kwdefaults__, **self.options}
        arguments.checked(arguments.Options(*(checked[name] for name in arguments.Options._fields)))
        if class_weight is not None and not isinstance(class_weight, Tensor):
            arguments.check_other("class_weight", class_weight, "linear_cross_entropy")
        self.register_buffer("class_weight", class_weight)

    def forward(
        self,
        e: Tensor,
        c: Tensor,
        targets: Tensor,
        bias: Tensor | None = None,
        *,
        token_weight: Tensor | None = None,
        num_items: float | Tensor | None = None,
        accumulate_into: Tensor | Callable[[], Tensor] | None = None,
    ) -> Result:
        """As `linear_cross_entropy`."""
        return linear_cross_entropy(
            e,
            c,
            targets,
            bias,
            class_weight=self.class_weight,
            token_weight=token_weight,
            num_items=num_items,
            accumulate_into=accumulate_into,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


OF_CALL = {"bias", "token_weight", "num_items", "accumulate_into"}
OPTIONS = {*OptionsOfModule.__annotations__, "return_lse"}
