"""The public function for JAX: it checks the arguments, shifts the targets and computes the loss."""

from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from cce_jax import arguments, losses, settings
from cce_jax.core import Summands, numbers_of, summed
from cce_jax.devices import knows_cotangents, whole_weights
from cce_jax.losses import Common, Reduction
from cce_jax.plans import Core, Impl
from cce_jax.prepare import Arrays, Asked, inputs_of, needs_whole_sequences, prepared, shifted, unshifted
from cce_kernels import contract
from cce_kernels.numbers import WantedNumbers

Array = Any  # or an object with `__jax_array__`; a type checker also finds that Linen's `apply` may return a tuple


class Options(TypedDict, total=False):
    """The keyword arguments of linear_cross_entropy but return_lse, which decides the type of the result."""

    bias: Array
    ignore_index: int
    softcap: float | None
    reduction: Reduction
    shift: bool | int
    logit_scale: float | None
    class_weight: Array
    label_smoothing: float
    z_loss: float
    token_weight: Array
    num_items: Array
    vocab_axis: Literal[0, 1]
    impl: Impl
    memory_budget: float | Literal["all"] | None
    precision: jax.lax.PrecisionLike
    check_targets: bool
    gradient_tolerance: float
    sharding: tuple[jax.sharding.PartitionSpec, jax.sharding.PartitionSpec] | None


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
    gradient_tolerance: float = 0.0,
    sharding: tuple[jax.sharding.PartitionSpec, jax.sharding.PartitionSpec] | None = None,
    **unknown: Any,
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

    The gradient is that of Cut Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009) without its filter: exact, unless
    gradient_tolerance is given. The loss, and with `return_lse` lse too, can be differentiated once in e, c, bias and
    token_weight with any impl.

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
        interpreter runs them, for tests). "chunked": XLA's matmuls in windows of the vocabulary, on any device.
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
      gradient_tolerance: a number τ in [0, 1). With 0 the gradients are exact. With more, the products that form those
        of e and c may leave out blocks of the vocabulary with small probabilities, which saves time. Of each token's
        cotangents of the logits they leave out at most τ of the sum of magnitudes, whatever the loss consists of, and
        never the target's. There is no bound for a single row of the gradient of c: that of a rare token may consist of
        small probabilities alone. Only the kernels for Hopper GPUs leave out anything, in bfloat16, where the forward
        pass forms the gradients; every other call is exact, with impl "chunked" and "reference" too. The loss, lse and
        the gradients of bias and token_weight are always exact. docs/options.md says more.
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
      TypeError: an array has a wrong type, or an option is unknown.
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
    if unknown:
        raise contract.unknown_options("linear_cross_entropy", unknown, {*Options.__annotations__, "return_lse"})
    contract.choice("reduction", reduction, contract.REDUCTIONS)
    contract.choice("return_lse", return_lse, (False, True))
    arguments.known(label_smoothing=label_smoothing, z_loss=z_loss, gradient_tolerance=gradient_tolerance)
    label_smoothing = contract.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    z_loss = contract.number("z_loss", z_loss)
    tolerance = contract.gradient_tolerance(gradient_tolerance)
    options = losses.Loss(reduction, smooths=label_smoothing > 0, has_z_loss=z_loss != 0)
    given_options = ignore_index, softcap, shift, logit_scale, vocab_axis, impl, memory_budget, precision
    asked = Asked("linear_cross_entropy", *given_options, check_targets, sharding)
    given = Arrays(e, c, bias, targets, class_weight, token_weight, num_items)
    numbers = WantedNumbers(sum=options.smooths)
    given, core = prepared(given, asked, reduction, numbers=numbers, gradient_tolerance=tolerance)
    contract.finite("z_loss", z_loss, given.e.dtype.name)
    if reduction == "none" or return_lse:
        needs_whole_sequences(core, "reduction='none' or return_lse")
    with settings.defaults():
        given = given._replace(
            label_smoothing=label_smoothing if options.smooths else None, z_loss=z_loss if options.has_z_loss else None
        )
        loss, numbers = loss_of(given, core, options)
    return (loss, numbers.lse) if return_lse else loss


@partial(jax.jit, static_argnames=("core", "options"))
def loss_of(given: Arrays, core: Core, options: losses.Loss) -> tuple[jax.Array, losses.TokenNumbers]:
    """The loss, and the numbers of each token, of which only lse has a derivative."""
    layout, inputs, vocabulary = core.layout, inputs_of(given, core), core.vocabulary(given.c)
    of_tokens = shifted(given.token_weight, 0, core), *given.arguments
    of_tokens = tuple(layout.laid_out(x, layout.spec_of_tokens) for x in of_tokens)
    whole, wide = whole_weights(inputs.weights, layout), jnp.promote_types(given.e.dtype, jnp.float32)
    terms = losses.terms(inputs.targets, whole, of_tokens[0], vocabulary, wide, layout.out_sharding)
    terms = terms._replace(arguments=of_tokens[1:])
    common = Common(given.label_smoothing, given.z_loss, whole if options.smooths else None)
    one_sum = core.impl != "reference" and options.reduction != "none" and inputs.targets.size
    if one_sum and knows_cotangents(inputs, of_tokens, layout):
        value, numbers = summed(Summands(inputs, terms, common), core, options)
        loss = losses.reduced(value, terms, given.num_items, options, layout.summed)
    else:
        found, _ = numbers_of(inputs, core)
        loss, numbers = losses.loss(found, terms, common, given.num_items, options, vocabulary, layout.summed)
    if options.reduction == "none":
        loss = unshifted(loss, core)
    return loss, jax.tree.map(lambda x: unshifted(x, core), numbers)
