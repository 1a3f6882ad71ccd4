"""The public function for JAX: it checks the arguments, shifts the targets and computes the loss."""

import sys
from functools import cache, partial
from numbers import Real
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from cce_jax import losses, settings
from cce_jax.core import Common, Terms, statistics, summed
from cce_jax.devices import knows_cotangents, whole_weights
from cce_jax.options import Array, Options
from cce_jax.passes import Core, Impl
from cce_jax.reverse_mode import reverse_mode_only
from cce_jax.sharding import Layout, layout_of, no_explicit_vmap
from cce_kernels import contract
from cce_kernels.device import Gpu, has_triton, local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, Statistics

INT32 = np.iinfo(np.int32)
ARRAYS = ("e", "c", "bias", "targets", "class_weight", "token_weight", "num_items")


@overload
def linear_cross_entropy(
    e: Array, c: Array, targets: Array, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> jax.Array: ...
@overload
def linear_cross_entropy(
    e: Array, c: Array, targets: Array, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_cross_entropy(
    e: Array, c: Array, targets: Array, *, return_lse: bool, **options: Unpack[Options]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
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
    memory_budget: float | Literal["all"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    check_targets: bool = False,
    sharding: tuple[jax.sharding.PartitionSpec, jax.sharding.PartitionSpec] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
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
    The loss, and with `return_lse` lse too, can be differentiated once in e, c, bias and token_weight with any impl.

    Args:
      e: embeddings, (..., D), bfloat16, float16 or float32 (float64 with impl "chunked" and "reference"). Any argument
        that is an array may also be an object with `__jax_array__`, such as Flax NNX's Param.
      c: classifier: (V, D), or (D, V) with vocab_axis=1. It has e's type, or is float32 beside a 16-bit e: the loss is
        then that of c rounded to e's type, and the gradient of c comes in float32 from float32 sums. The call holds the
        rounded copy of c, 2·V·D bytes, besides what memory_budget bounds.
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
      num_items: the number that "mean" divides by, at least 0, or a scalar array. By default the sum of
        class_weight[target]·token_weight over the tokens that are not ignored. Where it is 0, the loss and its
        gradients are 0. Only "mean" takes it.
      vocab_axis: the axis of c that is the vocabulary. The gradient of c has c's layout.
      impl: "cce": always the Pallas kernels, for CUDA GPUs of compute capability 8.0 and up (elsewhere Pallas'
        interpreter runs them, for tests). "chunked": XLA's matmuls in groups of the vocabulary, on any device.
        "reference": full logits, differentiable any number of times in either mode. "auto": for bfloat16 and float16
        the Pallas kernels where they can run; for float32 and float64 on a GPU XLA's matmuls, as with "chunked"
        (measured faster for float32; the kernels take no float64); elsewhere "chunked".
      memory_budget: a whole number of bytes, such as 2e9, or "all" for no bound. By default 640 MiB, or 6·D + 2560
        bytes a token where that is more. It bounds what a call holds beyond its inputs, its results and a few numbers
        for each token. More memory makes the call faster; the gradients stay the same up to rounding. docs/memory.md
        says what the memory is used for, and the least that a call needs.
      precision: of the matmuls, as in `jax.lax.dot_general`. By default float32 inputs follow
        jax_default_matmul_precision.
      check_targets: raise if a target is outside [0, V) and not ignore_index. This waits until targets is computed, and
        does not work under jit.
      sharding: for several devices (docs/devices.md): which axes of the mesh split e and c, as a pair of
        jax.sharding.PartitionSpec such as (P("data"), P("tensor")). It is needed where the types of e and c do not say
        so: for the kernels over Auto axes, and inside jax.shard_map where a mesh axis splits one loss. There "mean" and
        "sum" extend over the axes that split e, and targets are columns of the whole vocabulary even if an axis splits
        c. targets and token_weight must be split as e without its last axis is, bias and class_weight as the vocabulary
        of c is. memory_budget is that of each device.

    Returns:
      The loss in nats, float32 (float64 for float64 inputs): a scalar; for reduction="none" an array of the shape of
      targets after the shift.

    Raises:
      ValueError: shapes do not fit, an option is out of its range, sharding contradicts mesh or arrays, or, with
        check_targets, a target is out of range.
      TypeError: an array has a wrong type.
      NotImplementedError: the GPU cannot run impl="cce", or XLA would have to split the kernels over devices.

    Examples:
      Loss and gradients of a model that predicts the next token, with its embedding as the head:

      >>> import jax, jax.numpy as jnp
      >>> from cce_jax import linear_cross_entropy
      >>> hidden = jax.random.normal(jax.random.key(0), (2, 16, 64))          # (B, T, D), what the model returns
      >>> embedding = jax.random.normal(jax.random.key(1), (1000, 64))        # (V, D)
      >>> tokens = jax.random.randint(jax.random.key(2), (2, 16), 0, 1000)    # (B, T)
      >>> def loss(hidden, embedding):
      ...     return linear_cross_entropy(hidden, embedding, tokens, shift=1)
      >>> value, (of_hidden, of_embedding) = jax.value_and_grad(loss, (0, 1))(hidden, embedding)
      >>> value.shape, of_hidden.shape, of_embedding.shape
      ((), (2, 16, 64), (1000, 64))
    """
    contract.choice("reduction", reduction, contract.REDUCTIONS)
    contract.choice("impl", impl, contract.IMPLS)
    contract.choice("vocab_axis", vocab_axis, (0, 1))
    _check_static(ignore_index=ignore_index, softcap=softcap, shift=shift, logit_scale=logit_scale,
                  label_smoothing=label_smoothing, z_loss=z_loss, memory_budget=memory_budget)  # fmt: skip
    _check_precision(precision)
    head = Head(softcap=contract.softcap(softcap), vocab_axis=vocab_axis, precision=precision)
    scale = 1.0 if logit_scale is None else contract.number("logit_scale", logit_scale)
    label_smoothing = contract.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    z_loss = contract.number("z_loss", z_loss)
    options = losses.Loss(reduction, smooths=label_smoothing > 0, has_z_loss=z_loss != 0)
    ignore_index = contract.integer("ignore_index", ignore_index)
    budget = contract.memory_budget(memory_budget)
    shift = contract.integer("shift", shift)
    given = (e, c, bias, targets, class_weight, token_weight, num_items)
    e, c, bias, targets, class_weight, token_weight, num_items = map(_array, ARRAYS, given)
    contract.num_items(num_items, reduction)
    _check_types(e, c, bias, targets, class_weight, token_weight)
    if isinstance(num_items, Real):
        num_items = float(num_items)  # JAX makes an int32 of an integer, which may be too small for it
        contract.finite("num_items", num_items, e.dtype.name)
    contract.finite("logit_scale", scale, e.dtype.name)
    contract.finite("z_loss", z_loss, e.dtype.name)
    layout = layout_of(e, c, vocab_axis, sharding) if e.ndim > 0 and c.ndim == 2 else None
    shape_of_c = c.shape if layout is None else layout.whole_width(c, vocab_axis)
    contract.shapes(
        e.shape, shape_of_c, targets.shape, vocab_axis=vocab_axis, shift=shift, bias=_shape(bias),
        class_weight=_shape(class_weight), token_weight=_shape(token_weight),
        parts=1 if layout is None else layout.size(layout.split_sequences),
    )  # fmt: skip
    if num_items is not None and np.shape(num_items) != ():
        raise ValueError(f"num_items must be a number or a scalar array, got shape {np.shape(num_items)}")
    if shift and layout is not None and layout.split_sequences and (reduction == "none" or return_lse):
        raise ValueError(
            f"shift={shift} with reduction='none' or return_lse needs whole sequences, but sharding splits them over "
            f"{layout.split_sequences} inside jax.shard_map: shift targets before jax.shard_map"
        )
    if check_targets:
        vocabulary = c.shape[vocab_axis] if layout is None else layout.whole_vocabulary(c, vocab_axis)
        _check_targets(targets, vocabulary, ignore_index, shift)
    if impl != "reference":
        no_explicit_vmap()
    gpu = None if impl == "reference" else local_gpu()
    core = Core(head, options.smooths, resolved(impl, e.dtype, gpu), budget, gpu, wide_dc=c.dtype != e.dtype,
                may_chunk=layout is not None or may_chunk(gpu), debug_nans=jax.config.jax_debug_nans)  # type: ignore[attr-defined]  # fmt: skip
    with settings.defaults():
        targets, ignore_index = _int32(targets, ignore_index)
        scales = None if scale == 1.0 else np.full(1, scale, jnp.promote_types(e.dtype, jnp.float32))
        loss, lse = _loss(
            e, c, bias, targets, class_weight, token_weight, num_items, scales,
            label_smoothing if options.smooths else None, z_loss if options.has_z_loss else None,
            core=core, layout=layout, options=options, ignore_index=ignore_index, shift=shift,
        )  # fmt: skip
    return (loss, lse) if return_lse else loss


@partial(jax.jit, static_argnames=("core", "layout", "options", "ignore_index", "shift"))
def _loss(
    e, c, bias, targets, class_weight, token_weight, num_items, scale, label_smoothing, z_loss,
    *, core: Core, layout: Layout | None, options: losses.Loss, ignore_index: int, shift: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The loss and lse."""
    vocab_axis = core.head.vocab_axis
    vocabulary = c.shape[vocab_axis] if layout is None else layout.whole_vocabulary(c, vocab_axis)
    if shift:
        targets = _shifted(targets, shift, ignore_index, layout)
        token_weight = None if token_weight is None else _shifted(token_weight, shift, 0, layout)
    weights = None
    if class_weight is not None:
        weights = jax.lax.stop_gradient(class_weight.astype(jnp.promote_types(e.dtype, jnp.float32)))
    if layout is not None:
        e = layout.laid_out(e, layout.spec_of_e, layout.given_e)
        c = layout.laid_out(c, layout.spec_of_c(vocab_axis), layout.given_c)
        bias, weights = (layout.laid_out(x, layout.spec_of_columns) for x in (bias, weights))
        targets, token_weight = (layout.laid_out(x, layout.spec_of_tokens) for x in (targets, token_weight))
    columns = losses.columns(targets, ignore_index, vocabulary)
    inputs = Inputs(e, c, bias, columns, weights, scale)
    one_sum = core.impl != "reference" and options.reduction != "none" and columns.size
    if one_sum and (layout is None or knows_cotangents(inputs, token_weight, layout)):
        loss, lse = _summed(inputs, token_weight, num_items, core, layout, options, label_smoothing, z_loss)
        return loss, _unshifted(lse, shift, layout)
    numbers = _statistics(inputs, core, layout)
    loss, lse = losses.loss(numbers, columns, whole_weights(weights, layout), token_weight, num_items,
                            vocabulary=vocabulary, options=options, label_smoothing=label_smoothing, z_loss=z_loss,
                            summed=() if layout is None else layout.summed,
                            out_sharding=None if layout is None else layout.out_sharding)  # fmt: skip
    if options.reduction == "none":
        loss = _unshifted(loss, shift, layout)
    return loss, _unshifted(lse, shift, layout)


def _summed(
    inputs: Inputs, token_weight, num_items, core: Core, layout: Layout | None, options: losses.Loss, label_smoothing,
    z_loss,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The "mean" or "sum", and lse."""
    e, c, bias = jax.tree.map(reverse_mode_only, (inputs.e, inputs.c, inputs.bias))
    columns, wide, weights = inputs.targets, jnp.promote_types(e.dtype, jnp.float32), inputs.weights
    over, at = ((), None) if layout is None else (layout.summed, layout.out_sharding)
    whole = whole_weights(weights, layout)
    vocabulary = core.head.vocabulary(c) if layout is None else layout.whole_vocabulary(c, core.head.vocab_axis)
    of_targets = losses.target_weights(columns, whole, vocabulary, at)
    weight = losses.weights(columns, token_weight, wide)
    common = Common(label_smoothing, z_loss, whole if options.smooths else None)
    inputs = inputs._replace(e=e, c=c, bias=bias)
    value, lse = summed(inputs, Terms(columns, of_targets, weight), common, core, options, layout)
    return losses.reduced(value, columns, weight, of_targets, num_items, options=options, summed=over), lse


def may_chunk(gpu: Gpu | None) -> bool:
    """Whether a call without a layout may take its tokens in chunks.

    XLA may split the tokens of a program without kernels over all devices. It would then gather each chunk of them.
    """
    return gpu is not None or jax.device_count() == 1


def _statistics(inputs: Inputs, core: Core, layout: Layout | None) -> Statistics:
    """The core's numbers for e (..., D) and targets (...) of any number of axes, and for no tokens."""
    if inputs.targets.size == 0:
        zeros = jnp.zeros_like(inputs.targets, jnp.promote_types(inputs.e.dtype, jnp.float32))
        return Statistics(zeros, zeros, zeros if core.with_sum else None)
    if core.impl != "reference":
        e, c, bias = jax.tree.map(reverse_mode_only, (inputs.e, inputs.c, inputs.bias))
        inputs = inputs._replace(e=e, c=c, bias=bias)
    return statistics(inputs, core, layout)


def _shifted(x: jax.Array, shift: int, fill: int, layout: Layout | None) -> jax.Array:
    """x[..., shift:] followed by `shift` times fill. So e keeps all its rows, and its last rows are ignored."""
    if layout is not None:
        x = layout.whole_sequences(x)
    shifted = jnp.concatenate([x[..., shift:], jnp.full_like(x[..., :shift], fill)], axis=-1)
    return shifted if layout is None else layout.own_sequences(shifted)


def _unshifted(x: jax.Array, shift: int, layout: Layout | None) -> jax.Array:
    """x without the last `shift` tokens, which have no target."""
    if not shift:
        return x
    if layout is not None:
        x = layout.laid_out(x, layout.spec_of_sequences)
    return x[..., : x.shape[-1] - shift]


def _shape(x: Any) -> tuple[int, ...] | None:
    return None if x is None else x.shape


def _array(name: str, x: Any) -> Any:
    """x, or x.__jax_array__() if x has that method. TypeError if x is a torch.Tensor."""
    torch = sys.modules.get("torch")  # if torch was not imported, x is no tensor
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        raise TypeError(
            f"{name} is a torch.Tensor: cce_torch.linear_cross_entropy takes those; this function takes arrays"
        )
    convert = getattr(x, "__jax_array__", None)  # None on JAX's tracers
    return x if convert is None else convert()


def _check_static(**options: Any) -> None:
    """TypeError if an option is known only when a program runs: the program depends on it."""
    for name, value in options.items():
        if isinstance(value, Tracer):
            learned = ", or multiply e by a scale that is learned" if name == "logit_scale" else ""
            raise TypeError(
                f"{name} must be a Python number, got {value}, which JAX traces: give it as a static argument, such as "
                f"jax.jit(..., static_argnames={name!r}){learned}"
            )


def _check_precision(precision: Any) -> None:
    """ValueError unless precision is one of JAX's. A DotAlgorithm is not checked: that depends on the types."""
    known = precision is None or isinstance(
        precision, jax.lax.Precision | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
    )
    if not known and not (isinstance(precision, str | tuple) and _is_precision(precision)):
        names = ", ".join(repr(x.name.lower()) for x in jax.lax.Precision)
        raise ValueError(
            f"precision={precision!r} must be None, {names}, or another precision of jax.lax.dot_general, such as "
            "jax.lax.DotAlgorithmPreset.BF16_BF16_F32"
        )


@cache
def _is_precision(precision: Any) -> bool:
    x = jax.ShapeDtypeStruct((1,), np.float32)
    try:
        jax.eval_shape(partial(jax.lax.dot, precision=precision), x, x)
    except (TypeError, ValueError):
        return False
    return True


def _instead(name: str, x: Any) -> str:
    """What to write instead of an argument that is no array."""
    if isinstance(x, list | tuple):
        return f": write jnp.asarray({name})"
    for part, shape in (("weight", "(V, D)"), ("embedding", "(V, D)"), ("kernel", "(D, V)")):
        if hasattr(x, part) or (isinstance(x, dict) and part in x):
            return f": pass its {part}, with vocab_axis={int(shape == '(D, V)')} if its shape is {shape}"
    return ""


def _check_types(e, c, bias, targets, class_weight, token_weight) -> None:
    arrays = dict(e=e, c=c, bias=bias, targets=targets, class_weight=class_weight, token_weight=token_weight)
    for name, x in arrays.items():
        if not (hasattr(x, "dtype") and hasattr(x, "shape")) and (x is not None or name in ("e", "c", "targets")):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}{_instead(name, x)}")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"targets must be of an integer type, got targets {targets.dtype}: write targets.astype(jnp.int32)"
        )
    allowed = (*contract.KERNEL_TYPES, "float64")
    for name in ("e", "c", "bias"):
        if arrays[name] is not None and arrays[name].dtype.name not in allowed:
            raise TypeError(f"{name} must be one of {', '.join(allowed)}, got {name} {arrays[name].dtype}")
    contract.types(e.dtype.name, c.dtype.name, None if bias is None else bias.dtype.name, "astype")
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
        bad[..., :shift] = False  # no token predicts these targets
    if bad.any():
        position = np.argwhere(bad)[0]
        raise contract.bad_target(position.tolist(), int(values[tuple(position)]), vocabulary, ignore_index)


def _int32(targets, ignore_index: int):
    """targets as int32, and the ignore_index that goes with them.

    A target that does not fit int32 must not wrap into the vocabulary: it is clipped to a number outside every
    vocabulary, and is still ignored if it equals ignore_index. An ignore_index that does not fit the type of targets
    ignores no token.
    """
    held = jnp.iinfo(targets.dtype)
    if held.max <= INT32.max and INT32.min <= ignore_index <= INT32.max:
        return targets.astype(np.int32), ignore_index
    numpy = jnp if isinstance(targets, jax.Array) else np
    ignored = held.min <= ignore_index <= held.max and targets == targets.dtype.type(ignore_index)
    fitting = numpy.clip(targets, max(held.min, INT32.min + 1), min(held.max, INT32.max)).astype(np.int32)
    return numpy.where(ignored, np.int32(INT32.min), fitting), INT32.min


def resolved(impl: Impl, dtype, gpu: Gpu | None) -> Impl:
    """impl, but "chunked" for "auto" if the kernels cannot run for this type or on this machine's GPU."""
    if impl not in ("auto", "cce"):
        return impl
    typed, runs = dtype.name in contract.KERNEL_TYPES, gpu is None or gpu.supported
    if impl == "auto":
        return "auto" if typed and runs else "chunked"
    if not typed:
        allowed = ", ".join(contract.KERNEL_TYPES)
        raise TypeError(f"impl='cce' takes {allowed}; e is {dtype}, which 'chunked' and 'reference' take")
    if not has_triton():
        raise NotImplementedError(
            "impl='cce' needs Triton, which this jaxlib lacks (jaxlib for Windows has none; in WSL2 use jaxlib for "
            "Linux): use impl='chunked', or leave impl out"
        )
    if gpu is not None and not gpu.supported:
        raise NotImplementedError(
            f"impl='cce' needs an NVIDIA GPU of compute capability 8.0 or more, this one is {gpu.compute_capability}; "
            "impl='chunked' runs on it"
        )
    return impl
