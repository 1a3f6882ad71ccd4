"""Distillation from hidden states: how far a student's distributions are from a teacher's, without either's logits."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from cce_jax import arguments, losses, passes, prepare, settings
from cce_jax.divergence_core import Common, Summands, Terms, divergences
from cce_jax.options import Array
from cce_jax.plans import Impl
from cce_jax.prepare import Arrays, Asked, Static, inverted, prepared
from cce_jax.sharding import Layout
from cce_kernels import contract
from cce_kernels.divergence import Divergence, Side
from cce_kernels.divergence_terms import Kind
from cce_kernels.numbers import Inputs

NAME = "linear_divergence"


def linear_divergence(
    e: Array,
    c: Array,
    teacher_e: Array,
    teacher_c: Array,
    *,
    divergence: Kind = "forward_kl",
    beta: float = 0.5,
    temperature: Array = 1.0,
    token_weight: Array = None,
    reduction: losses.Reduction = "mean",
    num_items: Array = None,
    bias: Array = None,
    teacher_bias: Array = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_logit_scale: float | None = None,
    vocab_axis: Literal[0, 1] = 0,
    teacher_vocab_axis: Literal[0, 1] = 0,
    return_entropy: bool = False,
    impl: Impl = "auto",
    memory_budget: float | Literal["all"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    sharding: tuple[jax.sharding.PartitionSpec, jax.sharding.PartitionSpec] | None = None,
) -> Any:
    """The divergence of a student's distributions from a teacher's, from hidden states, without holding the logits.

    Equivalent to the following, with exact gradients, for s and t and their logarithms over the vocabulary:

        z = logit_scale * (e @ c.T + bias)                      # float32, (..., V)
        z = softcap * tanh(z / softcap)                         # if softcap
        s = softmax(z / temperature)
        t = ...                                                 # the same of the teacher's arguments
        m = beta * t + (1 - beta) * s
        total = sum(t * log(t / s))                             # forward_kl, KL(t‖s)
        total = sum(s * log(s / t))                             # reverse_kl, KL(s‖t)
        total = beta * sum(t * log(t / m)) + (1 - beta) * sum(s * log(s / m))                      # jsd
        total = where(token_weight == 0, 0, token_weight * total)
        loss = sum(total) / num_items                           # for reduction="mean"

    There is no factor temperature²: multiply by it if your recipe does. Gradients go to e, c and bias alone. The
    teacher is constant: each of its arrays passes through jax.lax.stop_gradient, and so do token_weight and
    temperature. The loss can be differentiated once, in reverse mode; with impl="reference" in both modes and any
    number of times.

    For "mean" and "sum" the forward pass forms the gradients, in chunks of tokens: three matmuls of the student and one
    of the teacher. For "none" the backward pass computes both logits again (docs/distillation.md).

    Args:
      e, c, bias: the student's, as for `linear_cross_entropy`; so are all options that are not named here.
      teacher_e: the teacher's embeddings, (..., D'), with e's shape but for the last axis. D' and its type may differ.
      teacher_c: the teacher's classifier: (V, D'), or (D', V) with teacher_vocab_axis=1, of c's vocabulary. It has the
        type of teacher_e, or is float32 beside 16 bits.
      divergence: "forward_kl", "reverse_kl" or "jsd".
      beta: of "jsd" the teacher's share of the mixture, above 0 and below 1. The others do not use it.
      temperature: a positive number, or an array of positive numbers that broadcasts to the shape of e without its last
        axis. It divides the logits of both after the softcap. A new value compiles nothing.
      token_weight: a weight for each token, such as a mask, of e's shape without the last axis. A token of weight 0 is
        left out: nothing in its rows of e and teacher_e, not even a NaN, reaches a result.
      reduction: "mean", "sum", or "none" for token_weight times the divergence of each token.
      num_items: the number that "mean" divides by, or a scalar array; by default the sum of token_weight. Where it is
        0, the loss and its gradients are 0.
      teacher_bias: (V,), of teacher_c's type.
      teacher_softcap, teacher_logit_scale, teacher_vocab_axis: of the teacher, as softcap, logit_scale and vocab_axis
        are of the student.
      return_entropy: return (loss, entropy). entropy is that of the student at the temperature, in nats, of e's shape
        without the last axis. It has no gradient, and is 0 where the weight is 0.
      impl: as for `linear_cross_entropy`. XLA computes both logits with all of them. In bfloat16 the kernels multiply
        the student's gradients.
      sharding: as for `linear_cross_entropy`, for e and c. teacher_e is split as e is. Each device takes all of
        teacher_c. A mesh axis may split the tokens, and c too if it splits the tokens: c is then gathered. An axis that
        splits the vocabulary of c alone is not supported.

    Returns:
      The divergence in nats, float32 (float64 for float64 inputs): a scalar; for reduction="none" an array of e's shape
      without the last axis. With return_entropy (loss, entropy).

    Raises:
      ValueError: shapes do not fit, the vocabularies differ, or an option is out of its range.
      TypeError: an array has a wrong type.
      NotImplementedError: the GPU cannot run impl="cce", devices split the vocabulary of c, or XLA would have to split
        the kernels over devices.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from cce_jax import linear_divergence
      >>> key = jax.random.key(0)
      >>> e, c = jax.random.normal(key, (2, 16, 64)), jax.random.normal(key, (1000, 64))                 # the student's
      >>> teacher_e, teacher_c = jax.random.normal(key, (2, 16, 96)), jax.random.normal(key, (1000, 96))
      >>> answer = jnp.arange(16) >= 5                                      # the first five tokens are the prompt
      >>> def loss(e, c):
      ...     weight = jnp.broadcast_to(answer, (2, 16))
      ...     return linear_divergence(e, c, teacher_e, teacher_c, divergence="reverse_kl", token_weight=weight)
      >>> value, (of_e, of_c) = jax.value_and_grad(loss, (0, 1))(e, c)
      >>> value.shape, of_e.shape, of_c.shape
      ((), (2, 16, 64), (1000, 64))
    """
    contract.choice("divergence", divergence, contract.DIVERGENCES)
    contract.choice("reduction", reduction, contract.REDUCTIONS)
    contract.choice("return_entropy", return_entropy, (False, True))
    arguments.known(beta=beta)
    share = contract.beta(beta, divergence)
    targets = np.zeros(np.shape(e)[:-1], np.int32)
    asked = Asked(NAME, -100, softcap, 0, logit_scale, vocab_axis, impl, memory_budget, precision, False, sharding)
    given, call = prepared(Arrays(e, c, bias, targets, None, None, num_items), asked)
    items = arguments.num_items(given.num_items, reduction, given.e.dtype)
    weight = arguments.weight(token_weight, given.e, NAME)
    temperature = arguments.temperature(temperature, given.e, NAME)
    of_teacher = Asked(
        NAME, -100, teacher_softcap, 0, teacher_logit_scale, teacher_vocab_axis, impl, None, precision, False, None
    )
    teacher, head = prepare.teacher(Arrays(teacher_e, teacher_c, teacher_bias, None, None, None, None), of_teacher)
    shape = given.c.shape if call.layout is None else call.layout.whole_shape(given.c, vocab_axis)
    contract.pair(given.e.shape, shape, teacher.e.shape, teacher.c.shape, (vocab_axis, teacher_vocab_axis))
    core = replace(call.core, teacher_width=teacher.e.shape[-1])
    of = replace(call, core=core, layout=_whole_on_each_device(call, given.c))
    how = Divergence(divergence, head, bool(return_entropy))
    with settings.defaults():
        given = given._replace(num_items=items, token_weight=weight, temperature=temperature)
        side = Side(teacher.e, teacher.c, teacher.bias, teacher.scale)
        loss, entropy = _divergence(given, side, None if share is None else (share, 1 - share), of, how, reduction)
    return (loss, entropy) if return_entropy else loss


def _whole_on_each_device(call: Static, c: Any) -> Layout | None:
    """The layout of the call, in which each device has all columns. NotImplementedError if there is none."""
    if call.layout is None:
        return None
    layout = call.layout.gathering_c()
    if layout.size(layout.columns) > 1:
        raise NotImplementedError(
            f"linear_divergence: the mesh axes {layout.columns} split the vocabulary of c {c.shape} and not "
            "the tokens of e; only axes that split the tokens may split c. Replicate c over these axes"
        )
    if call.core.impl == "reference" and layout.mapped:
        raise NotImplementedError(
            "linear_divergence with impl='reference' takes no sharding and no Explicit axes: use impl='chunked'"
        )
    return layout


@partial(jax.jit, static_argnames=("of", "how", "reduction"))
def _divergence(
    given: Arrays, teacher: Side, shares: Any, of: Static, how: Divergence, reduction: losses.Reduction
) -> tuple[jax.Array, jax.Array | None]:
    core, layout = of.core, of.layout
    (e, c, bias), wide = given[:3], jnp.promote_types(given.e.dtype, jnp.float32)
    weight, inverse = given.token_weight, given.temperature
    weight = jnp.ones(e.shape[:-1], wide) if weight is None else jax.lax.stop_gradient(jnp.asarray(weight, wide))
    inverse = None if inverse is None else jnp.broadcast_to(inverted(inverse, e.dtype), e.shape[:-1])
    teacher = passes.in_type_of_e(jax.tree.map(jax.lax.stop_gradient, teacher))
    summed, over = reduction != "none", ()
    inputs = Inputs(e, c, bias, jnp.zeros(weight.shape, jnp.int32), None, given.scale, inverse)
    inputs = prepare.laid_out(inputs, core, layout)
    if layout is not None:
        over, weight = layout.summed, layout.laid_out(weight, layout.spec_of_tokens)
        teacher = teacher._replace(e=layout.laid_out(teacher.e, layout.spec_of_e))
        of_c, of_bias = (layout.laid_out(x, jax.sharding.PartitionSpec()) for x in (teacher.c, teacher.bias))
        teacher = teacher._replace(c=of_c, bias=of_bias)
    if not weight.size:
        return jnp.sum(weight) if summed else weight, weight if how.entropy else None
    shares = None if shares is None else jnp.stack([jnp.asarray(x, wide) for x in shares])
    common = Common(teacher.c, teacher.bias, teacher.scale, shares)
    summands = Summands(inputs, Terms(weight, teacher.e), common).weighted(weight)
    value, numbers = divergences(summands, core, how, layout, summed)
    if not summed:
        return jnp.where(weight == 0, 0, weight * value), numbers.entropy
    terms = losses.Terms(summands.inputs.targets, None, weight)
    loss = losses.reduced(value, terms, given.num_items, losses.Loss(reduction), over)
    return loss, numbers.entropy
