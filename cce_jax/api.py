"""The contract of linear cross-entropy: checks of what a user passes, the shift, and the call."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cce_jax import losses
from cce_jax.core import Core, Impl, Statistics, statistics
from cce_kernels import contract
from cce_kernels.config import local_gpu
from cce_kernels.logits import Head

INT32 = np.iinfo(np.int32)


def linear_cross_entropy(
    e,
    c,
    targets,
    *,
    bias=None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: losses.Reduction = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    logit_scale: float | None = None,
    class_weight=None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight=None,
    num_items=None,
    vocab_axis: Literal[0, 1] = 0,
    impl: Impl = "auto",
    memory_budget: int = contract.MEMORY_BUDGET,
    precision: jax.lax.PrecisionLike = None,
    check_targets: bool = False,
) -> Any:
    """Cross-entropy of the logits `e @ c.T + bias` against `targets`, without holding the logits.

    Equivalent to the following, with exact gradients and O(N) memory in place of O(N·V):

        z = logit_scale * (e @ c.T + bias)                      # float32, (..., V)
        z = softcap * tanh(z / softcap)                         # if softcap
        lse = logsumexp(z, axis=-1)
        smooth = mean(class_weight * (lse - z), axis=-1)        # over the vocabulary
        ce = (1 - label_smoothing) * class_weight[targets] * (lse - z[targets]) + label_smoothing * smooth
        total = where(targets == ignore_index, 0, token_weight * (ce + z_loss * lse**2))
        loss = sum(total) / num_items                           # for reduction="mean"

    The gradient is that of Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009) without its filter: exact.
    Differentiable once in e, c, bias and token_weight with any impl, and by `return_lse` through lse.

    Args:
      e: embeddings, (..., D), bfloat16, float16 or float32 (float64 with impl "chunked" and "reference").
      c: classifier, of e's type: (V, D), or (D, V) with vocab_axis=1.
      targets: integers of shape (...). One outside [0, V) that is not ignore_index makes that token's loss NaN, and
        so every gradient it reaches.
      bias: (V,), of e's type.
      ignore_index: tokens with this target have loss 0 and no gradient, whatever their embedding holds.
      softcap: positive; logits become softcap·tanh(logit / softcap).
      reduction: "mean", "sum", or "none" for a loss per token.
      shift: k in [0, T), or True for 1: token i of the last axis of targets predicts target i + k. e is not copied.
      return_lse: return (loss, lse), lse of the shape of targets after the shift, 0 where ignored.
      logit_scale: a number that multiplies the logits before softcap. A learned one: multiply e instead.
      class_weight: (V,), a weight for each class; a constant to differentiation.
      label_smoothing: in [0, 1], the share of the target that is spread evenly over the vocabulary.
      z_loss: weight of lse² in each token's loss (PaLM's auxiliary loss; Chowdhery et al. 2022).
      token_weight: a weight for each token's loss, of the shape of targets (before the shift: it goes with the target).
      num_items: what "mean" divides by, a number or scalar array; by default the sum over the tokens that are not
        ignored of class_weight[target]·token_weight. Where it is 0 the loss and its gradients are 0.
      vocab_axis: the axis of c that is the vocabulary. The gradient of c has c's layout.
      impl: "cce": the Pallas kernels, for CUDA GPUs of compute capability 8.0 and up (elsewhere Pallas' interpreter
        runs them, for tests). "chunked": plain XLA on any device. "reference": full logits, differentiable any
        number of times in either mode. "auto": "cce" where it can run, "chunked" elsewhere.
      memory_budget: bytes that the call may hold beyond its inputs, its results and O(N) numbers, between forward and
        backward pass or within one; 300 MiB unless given. More is faster, the gradients stay the same. At the least a
        backward pass holds a float32 sum of the shape of e, 1024 columns of dz, c and dc, and 32 MiB of XLA's. With the
        next 256 MiB it takes larger groups of columns at a time. With more, for bfloat16 inputs, the forward pass saves
        exponentials, V·2 bytes a token, of a fifth of the tokens or more, whose logits the backward pass then does not
        compute again: none at all with 2·N·V + 2·N·D + 256·N bytes and 32 MiB, where the gradient of c is wanted and V
        is at least 2·N, else 2·N·V + 6·N·D + 256·N and 32 MiB; which is faster than holding the logits. Under a softcap
        outside of [2, 36] nothing is saved. "chunked" takes smaller blocks where the budget is below 4·N·D bytes + 192
        MiB and saves nothing; "reference" does not follow it.
      precision: of the matmuls, as in `jax.lax.dot_general`; float32 inputs follow jax_default_matmul_precision
        unless it is given.
      check_targets: raise if a target is outside [0, V) and not ignore_index. Waits for targets; not under jit.

    Returns:
      The loss in nats, float32 (float64 for float64 inputs): a scalar, or of the shape of targets after the shift.

    Raises:
      ValueError: shapes that do not fit, an option out of its range, or, with check_targets, a target out of range.
      TypeError: arrays of the wrong types.
      NotImplementedError: impl="cce" on a GPU that cannot run it.
    """
    contract.choice("reduction", reduction, contract.REDUCTIONS)
    contract.choice("impl", impl, contract.IMPLS)
    contract.choice("vocab_axis", vocab_axis, (0, 1))
    head = Head(
        scale=1.0 if logit_scale is None else contract.number("logit_scale", logit_scale),
        softcap=contract.softcap(softcap),
        vocab_axis=vocab_axis,
        precision=precision,
    )
    label_smoothing = contract.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    z_loss = contract.number("z_loss", z_loss)
    options = losses.Loss(reduction, smooths=label_smoothing > 0, has_z_loss=z_loss != 0)
    ignore_index = contract.integer("ignore_index", ignore_index)
    memory_budget = contract.memory_budget(memory_budget)
    shift = contract.integer("shift", shift)
    _check_types(e, c, bias, targets, class_weight, token_weight)
    contract.shapes(
        e.shape, c.shape, targets.shape, vocab_axis=vocab_axis, shift=shift, bias=_shape(bias),
        class_weight=_shape(class_weight), token_weight=_shape(token_weight),
    )  # fmt: skip
    if num_items is not None and np.shape(num_items) != ():
        raise ValueError(f"num_items must be a number or a scalar array, got shape {np.shape(num_items)}")
    if check_targets:
        _check_targets(targets, c.shape[vocab_axis], ignore_index, shift)
    targets, ignore_index = _int32(targets, ignore_index)
    loss, lse = _loss(
        e, c, bias, targets, class_weight, token_weight, num_items,
        core=Core(head, options.smooths, _resolve(impl, e.dtype), memory_budget), options=options,
        label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index, shift=shift,
    )  # fmt: skip
    return (loss, lse) if return_lse else loss


@partial(jax.jit, static_argnames=("core", "options", "label_smoothing", "z_loss", "ignore_index", "shift"))
def _loss(
    e, c, bias, targets, class_weight, token_weight, num_items,
    *, core: Core, options: losses.Loss, label_smoothing: float, z_loss: float, ignore_index: int, shift: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The loss and lse."""
    vocabulary = c.shape[core.head.vocab_axis]
    if shift:
        targets = _shifted(targets, shift, ignore_index)
        token_weight = None if token_weight is None else _shifted(token_weight, shift, 0)
    weights = None if class_weight is None else jax.lax.stop_gradient(class_weight.astype(jnp.float32))
    columns = losses.columns(targets, ignore_index, vocabulary)
    numbers = _statistics(e, c, bias, columns, weights, core)
    loss, lse = losses.loss(numbers, columns, weights, token_weight, num_items, vocabulary=vocabulary, options=options,
                            label_smoothing=label_smoothing, z_loss=z_loss)  # fmt: skip
    unshifted = (..., slice(None, columns.shape[-1] - shift)) if shift else ...
    return loss[unshifted] if options.reduction == "none" else loss, lse[unshifted]


def _statistics(e, c, bias, targets, weights, core: Core) -> Statistics:
    """The core's numbers over any number of leading axes, also over no tokens at all."""
    shape = targets.shape
    if targets.size == 0:
        zeros = jnp.zeros(shape, jnp.promote_types(e.dtype, jnp.float32))
        return Statistics(zeros, zeros, zeros if core.with_sum else None)
    flat = statistics(e.reshape(-1, e.shape[-1]), c, bias, targets.reshape(-1), weights, core)
    return jax.tree.map(lambda x: x.reshape(shape), flat)


def _shifted(x: jax.Array, shift: int, fill: int) -> jax.Array:
    """x[..., shift:] with `shift` fills after it: e keeps all its rows, and the last ones are ignored."""
    return jnp.concatenate([x[..., shift:], jnp.full_like(x[..., :shift], fill)], axis=-1)


def _shape(x: Any) -> tuple[int, ...] | None:
    return None if x is None else x.shape


def _check_types(e, c, bias, targets, class_weight, token_weight) -> None:
    arrays = dict(e=e, c=c, bias=bias, targets=targets, class_weight=class_weight, token_weight=token_weight)
    for name, x in arrays.items():
        if not (hasattr(x, "dtype") and hasattr(x, "shape")) and (x is not None or name in ("e", "c", "targets")):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets must be of an integer type, got targets {targets.dtype}")
    allowed = (*contract.KERNEL_TYPES, "float64")
    for name in ("e", "c", "bias"):
        if arrays[name] is not None and arrays[name].dtype.name not in allowed:
            raise TypeError(f"{name} must be one of {', '.join(allowed)}, got {name} {arrays[name].dtype}")
        if arrays[name] is not None and arrays[name].dtype != e.dtype:
            raise TypeError(f"{name} must be of e's type, got {name} {arrays[name].dtype} and e {e.dtype}")
    if e.dtype.name == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise TypeError(
            "e is float64, which JAX holds only with jax_enable_x64; enable it and use impl='chunked' or 'reference', "
            f"or cast to one of {', '.join(contract.KERNEL_TYPES)}"
        )
    for name in ("class_weight", "token_weight"):
        if arrays[name] is not None and jnp.issubdtype(arrays[name].dtype, jnp.complexfloating):
            raise TypeError(f"{name} must be real, got {name} {arrays[name].dtype}")


def _check_targets(targets, vocabulary: int, ignore_index: int, shift: int) -> None:
    if isinstance(targets, Tracer):
        raise ValueError(
            "check_targets=True reads the values of targets: call it outside jit and other transformations"
        )
    values = np.asarray(targets)
    bad = (values != ignore_index) & ((values < 0) | (values >= vocabulary))
    if shift:
        bad[..., :shift] = False  # these predict nothing
    if bad.any():
        position = np.argwhere(bad)[0]
        raise contract.bad_target(position.tolist(), int(values[tuple(position)]), vocabulary, ignore_index)


def _int32(targets, ignore_index: int):
    """targets as int32, and the ignore_index of those.

    A target that int32 does not hold stays outside every vocabulary instead of wrapping into one, and is ignored if it
    is the ignore_index; an ignore_index that the type of targets does not hold ignores none.
    """
    held = jnp.iinfo(targets.dtype)
    if held.max <= INT32.max and INT32.min <= ignore_index <= INT32.max:
        return targets.astype(np.int32), ignore_index
    numpy = jnp if isinstance(targets, jax.Array) else np
    ignored = held.min <= ignore_index <= held.max and targets == targets.dtype.type(ignore_index)
    fitting = numpy.clip(targets, max(held.min, INT32.min + 1), min(held.max, INT32.max)).astype(np.int32)
    return numpy.where(ignored, np.int32(INT32.min), fitting), INT32.min


def _resolve(impl: Impl, dtype) -> Impl:
    """impl, with "auto" decided where the type or this machine's GPU rules the kernels out."""
    if impl not in ("auto", "cce"):
        return impl
    gpu = local_gpu()
    typed, runs = dtype.name in contract.KERNEL_TYPES, gpu is None or gpu.supported
    if impl == "auto":
        return "auto" if typed and runs else "chunked"
    if not typed:
        allowed = ", ".join(contract.KERNEL_TYPES)
        raise TypeError(f"impl='cce' takes {allowed}; e is {dtype}, which 'chunked' and 'reference' take")
    if gpu is not None and not gpu.supported:
        raise NotImplementedError(
            f"impl='cce' needs an NVIDIA GPU of compute capability 8.0 or more, this one is {gpu.compute_capability}; "
            "impl='chunked' runs on it"
        )
    return impl
