"""The public function and module for PyTorch: they check the arguments, choose the impl and compute the loss."""

import sys
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Generic, Literal, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import losses, ops
from cce_torch.call import Call, Given, Operands
from cce_torch.on_jax import tensors
from cce_torch.options import Impl, Options, OptionsOfTokens, Reduction
from cce_torch.processes import vocab_in_forward, vocab_statistics
from cce_torch.processes import vocab_parallel as parallel
from cce_torch.processes.vocab_parallel import VocabParallel
from cce_torch.torch_alone import compiled, reference

IMPLS = (*contract.IMPLS, "torch_compile")
OF_TORCH = ("torch_compile", "reference")  # which run without JAX
PRECISIONS = ("highest", "high", "medium")
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
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
        interpreter runs them, for tests). "chunked": XLA's matmuls in groups of the vocabulary, on CUDA and CPU.
        "torch_compile": PyTorch alone, on any device, without JAX. "reference": full logits in PyTorch, differentiable
        any number of times. "auto": on a GPU that can run "cce" the kernels for 16 bits, and XLA's matmuls in groups of
        the vocabulary for float32, as they were measured to be faster; "chunked" on a CPU; "torch_compile" for float64,
        older GPUs and other devices.
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

    Returns:
      The loss in nats, float32 (float64 for float64 inputs): a scalar; for reduction="none" a tensor of the shape of
      targets after the shift.

    Raises:
      ValueError: shapes or devices do not fit, an option is out of its range, or, with check_targets, a target is out
        of range.
      TypeError: a tensor has a wrong type.
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
    given = dict(e=e, c=c, targets=targets, bias=bias, class_weight=class_weight, token_weight=token_weight)
    if tensors.has_dtensor(given):
        from cce_torch.processes import dtensors

        options = {
            "ignore_index": ignore_index,
            "softcap": softcap,
            "reduction": reduction,
            "shift": shift,
            "return_lse": return_lse,
            "logit_scale": logit_scale,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "vocab_axis": vocab_axis,
            "impl": impl,
            "memory_budget": memory_budget,
            "precision": precision,
            "check_targets": check_targets,
            "gradient_tolerance": gradient_tolerance,
            "vocab_parallel": vocab_parallel,
            "vocab_parallel_options": vocab_parallel_options,
        }
        return dtensors.loss(linear_cross_entropy, given, num_items, options)  # type: ignore[call-arg]
    options = (
        reduction,
        impl,
        vocab_axis,
        precision,
        logit_scale,
        softcap,
        label_smoothing,
        z_loss,
        ignore_index,
        memory_budget,
        gradient_tolerance,
        shift,
    )
    cacheable = CACHEABLE.issuperset(map(type, options)) and not torch.compiler.is_compiling()
    check = _checked_once if cacheable else _checked
    scale, softcap, label_smoothing, z_loss, ignore_index, budget, tolerance, shift = check(*options)
    contract.num_items(num_items, reduction)
    required = e is not None and c is not None and targets is not None
    if not required or num_items is not None or not tensors.are_usual(*given.values()):
        _check_tensors(given, num_items)
    if torch.is_autocast_enabled(e.device.type):
        e, c, bias = _autocast(e, c, bias)
    _check_types(e, c, bias, targets, class_weight, token_weight)
    for name, x in (("logit_scale", scale), ("z_loss", z_loss), ("num_items", num_items)):
        if x is not None and not isinstance(x, Tensor):  # a tensor is not looked at: that could wait for a GPU
            contract.finite(name, x, _name(e))
    shard = _shard(vocab_parallel, vocab_parallel_options)
    shapes = {name: _shape(x) for name, x in given.items()}
    if shard is not None:
        shapes = parallel.of_whole(shapes, vocab_axis, shard)
    contract.shapes(**shapes, vocab_axis=vocab_axis, shift=shift)
    if shift and not targets.shape[-1]:
        shift = 0  # there are no tokens to shift; the results are empty anyway
    if vocab_axis == 1:
        c = c.T
    vocabulary = c.shape[0] if shard is None else shard.vocabulary
    targets = targets.long()  # in a narrower type a large ignore_index would wrap to another number
    if check_targets:
        tensors.check_targets(targets, vocabulary, ignore_index, shift)
    if num_items is not None:
        num_items = _scalar(num_items, e)
    class_weight = None if class_weight is None else class_weight.detach()
    impl = resolved(impl, e)
    if impl not in OF_TORCH and torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"torch.jit.trace cannot record the JAX programs of impl={impl!r}: give impl='torch_compile'"
        )
    alone = impl not in OF_TORCH and shard is None
    smooths, has_z_loss = _constant(label_smoothing > 0), _constant(z_loss != 0)
    call = Call(
        softcap,
        budget,
        tolerance,
        ignore_index if alone else -1,
        shift if alone else 0,
        reduction,
        smooths,
        has_z_loss,
        precision,
        impl,
        c.dtype != e.dtype,
        shard is not None,
    )
    scheduled = label_smoothing, z_loss, scale
    if alone:
        flat = _flat(e, 1), c, bias, _flat(targets), class_weight, _flat(token_weight), num_items, None
        row_length = targets.shape[-1] if shift else 1
        loss, statistics = ops.loss(Given(*flat, scheduled, row_length), call, return_lse)
        lse = statistics[0].clone() if return_lse else None  # the statistics are saved for the backward pass
    else:
        if shift:
            targets = _shifted(targets, shift, ignore_index)
            token_weight = None if token_weight is None else _shifted(token_weight, shift, 0)
        columns = losses.columns(_flat(targets), ignore_index, vocabulary)
        weights = None if class_weight is None else class_weight.to(torch.promote_types(e.dtype, torch.float32))
        terms = losses.Terms(columns, weights, _flat(token_weight), vocabulary)
        operands = Operands(e if shard is not None else _flat(e, 1), c, bias, columns, weights)
        if shard is not None:
            setting = parallel.Setting(call, scheduled, targets.shape, shard)
            if reduction != "none" and not return_lse:
                summed = vocab_in_forward.total(operands, terms, setting)
                if summed is not None:
                    return losses.reduced(summed, terms, num_items, reduction)
            statistics = vocab_statistics.statistics(operands, setting)
        else:
            run = compiled.statistics if impl == "torch_compile" else reference.statistics
            statistics = run(operands, call, scale)
        loss, lse = losses.loss(statistics, terms, num_items, reduction, scheduled)

    def unshifted(x: Any) -> Any:
        x = x.reshape(targets.shape)
        return x[..., :-shift] if shift else x

    if reduction == "none":
        loss = unshifted(loss)
    return (loss, unshifted(lse)) if return_lse else loss


class LinearCrossEntropy(torch.nn.Module, Generic[Result]):
    """`linear_cross_entropy` as a module: the options are given once, the tensors at each call.

    The options are the function's keyword arguments. class_weight becomes a buffer. bias, token_weight and num_items
    are arguments of the call.
    """

    __call__: Callable[..., Result]  # torch.nn.Module says Any

    @overload
    def __init__(
        self: "LinearCrossEntropy[Tensor]",
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: bool | int = False,
        return_lse: Literal[False] = False,
        **options: Unpack[Options],
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropy[tuple[Tensor, Tensor]]",
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: bool | int = False,
        *,
        return_lse: Literal[True],
        **options: Unpack[Options],
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropy[tuple[Tensor, Tensor]]",
        ignore_index: int,
        softcap: float | None,
        reduction: Reduction,
        shift: bool | int,
        return_lse: Literal[True],
        **options: Unpack[Options],
    ) -> None: ...
    @overload
    def __init__(
        self: "LinearCrossEntropy[Tensor | tuple[Tensor, Tensor]]",
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: bool | int = False,
        return_lse: bool = False,
        **options: Unpack[Options],
    ) -> None: ...
    def __init__(
        self,
        ignore_index: int = -100,
        softcap: float | None = None,
        reduction: Reduction = "mean",
        shift: bool | int = False,
        return_lse: bool = False,
        *,
        class_weight: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.class_weight: Tensor | None
        for name in OF_CALL & options.keys():
            raise TypeError(
                f"{name} belongs to a batch, not to LinearCrossEntropy(...): give it to the call, as in "
                f"LinearCrossEntropy()(e, c, targets, {name}={name})"
            )
        own = dict(ignore_index=ignore_index, softcap=softcap, reduction=reduction, shift=shift, return_lse=return_lse)
        unknown = options.keys() - OPTIONS
        if unknown:
            allowed = sorted({*own, "class_weight", *OPTIONS})
            raise TypeError(f"unknown options {sorted(unknown)}; allowed: {', '.join(allowed)}")
        self.options: dict[str, Any] = own | options
        checked = {**cast(Any, linear_cross_entropy).__kwdefaults__, **self.options}
        _checked(*(checked[name] for name in CHECKED))
        if not isinstance(class_weight, Tensor):
            _check_other("class_weight", class_weight)
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
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.options.items())


OF_CALL = {"bias", "token_weight", "num_items"}
OPTIONS = Options.__annotations__.keys()


CHECKED = (
    *("reduction", "impl", "vocab_axis", "precision", "logit_scale", "softcap", "label_smoothing", "z_loss"),
    *("ignore_index", "memory_budget", "gradient_tolerance", "shift"),
)


def _checked(*options: Any) -> tuple:
    """scale, softcap, label_smoothing, z_loss, ignore_index, budget, tolerance, shift; or an error that names one.

    options: in the order of CHECKED.
    """
    reduction, impl, vocab_axis, precision, logit_scale, softcap, label_smoothing, z_loss, *others = options
    ignore_index, memory_budget, tolerance, shift = others
    contract.choice("reduction", reduction, contract.REDUCTIONS)
    contract.choice("impl", impl, IMPLS)
    contract.choice("vocab_axis", vocab_axis, (0, 1))
    contract.choice("precision", precision, (None, *PRECISIONS))
    scale = 1.0 if logit_scale is None else contract.number("logit_scale", logit_scale)
    return (
        scale,
        contract.softcap(softcap),
        contract.number("label_smoothing", label_smoothing, low=0.0, high=1.0),
        contract.number("z_loss", z_loss),
        contract.integer("ignore_index", ignore_index),
        contract.memory_budget(memory_budget),
        contract.gradient_tolerance(tolerance),
        contract.integer("shift", shift),
    )


CACHEABLE = {str, int, bool, float, type(None)}  # types of options that a cache can hold
_checked_once = lru_cache(maxsize=256, typed=True)(_checked)


def _shard(vocab_parallel: VocabParallel | None, options: Any) -> VocabParallel | None:
    if options is not None and vocab_parallel is not None:
        raise ValueError("vocab_parallel and vocab_parallel_options are the same: give one of them")
    if options is not None:
        return parallel.of(options)
    if vocab_parallel is not None and not isinstance(vocab_parallel, VocabParallel):
        raise TypeError(f"vocab_parallel must be a cce_torch.VocabParallel, got {type(vocab_parallel).__name__}")
    if vocab_parallel is not None and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "vocab_parallel does not work with torch.func and torch.vmap: write torch.autograd.grad(loss, ...) or "
            "loss.backward()"
        )
    return vocab_parallel


def _scalar(x: float | Tensor, e: Tensor) -> Tensor:
    """num_items as a scalar tensor on e's device, which gets no gradient. Waits for no GPU."""
    dtype = torch.promote_types(e.dtype, torch.float32)
    if not isinstance(x, Tensor):
        if torch.compiler.is_compiling():  # all factors share one compilation; in torch.full each number has one
            return torch.ones((), dtype=dtype, device=e.device) * x
        return torch.full((), float(x), dtype=dtype, device=e.device)
    x = x.detach()
    if e.is_cuda and not x.is_cuda:
        x = x.clone()  # a copy from pinned memory could read x after the caller has changed it; a clone is not pinned
    return x.to(e.device, dtype, non_blocking=e.is_cuda).reshape(())


def _constant(condition: bool) -> bool:
    """condition, which may be a symbol under torch.compile. The branch makes it a constant of the graph."""
    return True if condition else False  # noqa: SIM210


def _shifted(x: Tensor, shift: int, fill: float) -> Tensor:
    """x[..., shift:] followed by `shift` times fill. So e keeps all its rows, and its last rows are ignored."""
    return torch.nn.functional.pad(x[..., shift:], (0, shift), value=fill)


def _flat(x: Any, last: int = 0) -> Any:
    """x with all but its `last` last axes made one axis. x itself, not a view, if it has that shape already."""
    return x if x is None or x.dim() == 1 + last else x.reshape(-1, *x.shape[x.dim() - last :])


def _shape(x: Any) -> Any:
    return None if x is None else tuple(x.shape)


def _autocast(e: Tensor, c: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """e, c and bias, cast as torch.nn.functional.linear casts them under autocast, which is enabled.

    A float32 c and bias beside an e of 16 bits are left as they are: the loss rounds them, but not their gradients.
    """

    def cast(x: Any) -> Any:
        return x if x is None or x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))

    e = cast(e)
    if e.itemsize == 2 and c.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32):
        return e, c, bias
    return e, cast(c), cast(bias)


def _check_tensors(given: dict[str, Tensor | None], num_items: float | Tensor | None) -> None:
    """Raises an error for a tensor that no impl takes."""
    present: dict[str, Any] = {name: x for name, x in given.items() if x is not None or name in ("e", "c", "targets")}
    if num_items is not None:
        present["num_items"] = num_items
    for name, x in present.items():
        if not isinstance(x, Tensor):
            _check_other(name, x)
        elif x.layout is not torch.strided:
            raise TypeError(f"{name} is a sparse tensor of layout {x.layout}: pass {name}.to_dense()")
    number = present.pop("num_items", None)
    if isinstance(number, Tensor):
        tensors.check({"num_items": number})
        if number.numel() != 1:
            raise ValueError(f"num_items must be a number or a tensor of one element, got shape {tuple(number.shape)}")
    tensors.check(present)
    if len({x.device for x in present.values()}) > 1:
        found = ", ".join(f"{name} {x.device}" for name, x in present.items())
        raise ValueError(f"all tensors must be on one device, got {found}")


def _check_other(name: str, x: Any) -> None:
    """Raise unless x, which is no tensor, is allowed for the argument `name`."""
    if (x is None and name not in ("e", "c", "targets")) or (name == "num_items" and type(x) in (int, float)):
        return
    jax, numpy = sys.modules.get("jax"), sys.modules.get("numpy")  # a module not imported has no arrays
    if jax is not None and isinstance(x, getattr(jax, "Array", ())):
        raise TypeError(
            f"{name} is a jax.Array: cce_jax.linear_cross_entropy takes those; or write torch.from_dlpack({name})"
        )
    if name == "num_items":
        return
    remedy = ""
    if numpy is not None and isinstance(x, numpy.ndarray):
        remedy = f": write torch.from_numpy({name})"
    elif isinstance(x, torch.nn.Module) and isinstance(getattr(x, "weight", None), Tensor):
        remedy = ": pass its weight" + (", and its bias as bias" if getattr(x, "bias", None) is not None else "")
    elif isinstance(x, (list, tuple)):
        of_tensors = len(x) > 0 and all(isinstance(part, Tensor) for part in x)
        remedy = f": write torch.{'stack' if of_tensors else 'tensor'}({name})"
    raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{remedy}")


def _check_types(e, c, bias, targets, class_weight, token_weight) -> None:
    if targets.dtype not in INTEGERS:
        raise TypeError(f"targets must be of an integer type, got targets {_name(targets)}: write targets.long()")
    for name, x in (("class_weight", class_weight), ("token_weight", token_weight)):
        if x is not None and x.is_complex():
            raise TypeError(f"{name} must be real, got {name} {_name(x)}")
    if e.dtype in FLOATING and c.dtype == e.dtype and (bias is None or bias.dtype == e.dtype):
        return
    for name, x in (("e", e), ("c", c), ("bias", bias)):
        if x is not None and x.dtype not in FLOATING:
            allowed = ", ".join((*contract.KERNEL_TYPES, "float64"))
            raise TypeError(f"{name} must be one of {allowed}, got {name} {_name(x)}")
    contract.types(_name(e), _name(c), None if bias is None else _name(bias), "to")


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


_capability = cache(torch.cuda.get_device_capability)


def resolved(impl: Impl, e: Tensor) -> Impl:
    """impl, with "auto" decided by the device and type of e. Raises if the impl cannot run there."""
    if impl in OF_TORCH:
        return impl
    device, typed = e.device.type, e.dtype != torch.float64
    runs = device == "cpu" or (device == "cuda" and torch.version.cuda is not None)
    # torch.compile warns about functions that functools caches.
    capability = torch.cuda.get_device_capability if torch.compiler.is_compiling() else _capability
    kernels_run = device == "cpu" or (runs and capability(e.device.index)[0] >= 8)
    if impl == "auto":
        return "torch_compile" if not (typed and kernels_run) else "auto" if device == "cuda" else "chunked"
    if not typed:
        allowed = ", ".join(contract.KERNEL_TYPES)
        raise TypeError(f"impl={impl!r} takes {allowed}; e is float64, which 'reference' and 'torch_compile' take")
    if not (kernels_run if impl == "cce" else runs):
        raise NotImplementedError(
            f"impl={impl!r} does not run on {e.device}"
            + (": it needs compute capability 8.0 or more" if runs else "")
            + "; impl='torch_compile' does"
        )
    return impl
