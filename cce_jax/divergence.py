"""Distillation from hidden states: how far a student's distributions are from a teacher's, without either's logits.

The task of the core; cce_kernels/divergence.py derives what it computes:

    S = Σ_i weight_i · total_i        where its cotangent arrives, the gradients are that factor times what the forward
                                      pass formed
    total_i                           the backward pass computes the logits again, with the cotangents as weights

Both are functions of the student's e, c and bias alone. The teacher and the weights have no gradient.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cce_jax import arguments, losses, passes, prepare, reference, settings
from cce_jax.api import Array
from cce_jax.core import Summands, Task, run
from cce_jax.plans import Core, Impl, on_platform
from cce_jax.prepare import Arrays, Asked, inverted, prepared
from cce_kernels import contract
from cce_kernels import divergence as kernels
from cce_kernels.divergence import Divergence, Divergences, Given, Side
from cce_kernels.divergence_terms import Kind
from cce_kernels.numbers import Gradients, Inputs, Wanted
from cce_kernels.plan.residuals import Residuals

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
    e = arguments.array("e", e, NAME)
    targets = prepare.any_targets(e)
    asked = Asked(NAME, -100, softcap, 0, logit_scale, vocab_axis, impl, memory_budget, precision, False, sharding)
    given, core = prepared(Arrays(e, c, bias, targets, num_items=num_items), asked, reduction)
    weight = arguments.weight(token_weight, given.e, NAME)
    temperature = arguments.temperature(temperature, given.e, NAME)
    of_teacher = asked._replace(softcap=teacher_softcap, logit_scale=teacher_logit_scale, vocab_axis=teacher_vocab_axis)
    teacher, head = prepare.teacher(Arrays(teacher_e, teacher_c, teacher_bias), of_teacher)
    shape = list(core.layout.whole_width(given.c, vocab_axis))
    shape[vocab_axis] = core.vocabulary(given.c)
    contract.pair(given.e.shape, tuple(shape), teacher.e.shape, teacher.c.shape, (vocab_axis, teacher_vocab_axis))
    core = _whole_on_each_device(replace(core, teacher_width=teacher.e.shape[-1]), given.c)
    how = Divergence(divergence, head, bool(return_entropy))
    with settings.defaults():
        given = given._replace(token_weight=weight, temperature=temperature)
        side = Side(teacher.e, teacher.c, teacher.bias, teacher.scale)
        shares = None if share is None else (share, 1 - share)
        loss, entropy = _divergence(given, side, shares, core, how, reduction)
    return (loss, entropy) if return_entropy else loss


def _whole_on_each_device(core: Core, c: Any) -> Core:
    """core, with a layout in which each device has all columns. NotImplementedError if there is none."""
    layout = core.layout.gathering_c()
    if layout.size(layout.columns) > 1:
        raise NotImplementedError(
            f"linear_divergence: the mesh axes {layout.columns} split the vocabulary of c {c.shape} and not "
            "the tokens of e; only axes that split the tokens may split c. Replicate c over these axes"
        )
    if core.impl == "reference" and (layout.mapped or layout.gathered):
        raise NotImplementedError(
            "linear_divergence with impl='reference' runs on one device, or where jax.shard_map has split no array but "
            "those of tokens: use impl='chunked'"
        )
    return replace(core, layout=layout)


@partial(jax.jit, static_argnames=("core", "how", "reduction"))
def _divergence(
    given: Arrays, teacher: Side, shares: Any, core: Core, how: Divergence, reduction: losses.Reduction
) -> tuple[jax.Array, jax.Array | None]:
    (e, c, bias), layout, wide = given[:3], core.layout, jnp.promote_types(given.e.dtype, jnp.float32)
    weight, inverse = given.token_weight, given.temperature
    weight = jnp.ones(e.shape[:-1], wide) if weight is None else jax.lax.stop_gradient(jnp.asarray(weight, wide))
    inverse = None if inverse is None else jnp.broadcast_to(inverted(inverse, e.dtype), e.shape[:-1])
    teacher = passes.in_type_of_e(jax.tree.map(jax.lax.stop_gradient, teacher))
    inputs = Inputs(e, c, bias, jnp.zeros(weight.shape, jnp.int32), None, given.scale, inverse)
    inputs, summed = prepare.laid_out(inputs, core), reduction != "none"
    weight, teacher_e = (layout.laid_out(x, layout.spec_of_tokens) for x in (weight, teacher.e))
    of_c, of_bias = (layout.laid_out(x, jax.sharding.PartitionSpec()) for x in (teacher.c, teacher.bias))
    if not weight.size:
        return jnp.sum(weight) if summed else weight, weight if how.entropy else None
    shares = None if shares is None else jnp.stack([jnp.asarray(x, wide) for x in shares])
    common = Side(None, of_c, of_bias, teacher.scale), shares  # type: ignore[arg-type]
    of = _weighted(Summands(inputs, losses.Terms(inputs.targets, None, weight, (teacher_e,)), common), weight)
    if core.impl == "reference":
        total, entropy = reference.divergences(_given(of), core.head, how)
        value = jnp.sum(weight * total)
    else:
        found: Any = run(_Divergence(how, summed), core, of)
        value, total, entropy = found
    entropy = None if entropy is None else jax.lax.stop_gradient(entropy)
    if not summed:
        return jnp.where(weight == 0, 0, weight * total), entropy
    return losses.reduced(value, of.terms, given.num_items, losses.Loss(reduction), layout.summed), entropy


def _weighted(of: Summands, weight: jax.Array) -> Summands:
    """The same with other weights. A token of weight 0 is left out: its target is negative, that of the others is 0."""
    targets = jnp.where(weight == 0, -1, 0).astype(jnp.int32)
    terms = of.terms._replace(columns=targets, weight=weight)
    return of._replace(inputs=of.inputs._replace(targets=targets), terms=terms)


def _given(of: Summands) -> Given:
    """of.terms.arguments has the teacher's e, and of.common its other arrays and the shares."""
    (e, c, bias, _, _, scale, inverse, _), (*_, weight, (teacher_e,)), (teacher, shares) = of
    return Given(Side(e, c, bias, scale), teacher._replace(e=teacher_e), weight, inverse, shares)


@dataclass(frozen=True)
class _Divergence(Task):
    """S if `summed`, else total; and the entropy of each token, without a gradient."""

    how: Divergence
    summed: bool

    def forward(self, of: Summands, core: Core, wanted: Wanted | None) -> tuple[jax.Array, Any, Residuals]:
        (total, entropy), left = _begin(of, core, self.how, wanted if self.summed else None)
        return total, entropy, left

    def kept(self, of: Summands) -> Summands:
        """Where the gradients are formed, the teacher is not needed any more."""
        return of._replace(terms=of.terms._replace(arguments=()), common=None) if self.summed else of

    def backward(self, of: Summands, left: Any, cotangents: tuple, core: Core, wanted: Wanted) -> Gradients:
        of_value, of_total, _ = cotangents
        if self.summed:
            return passes.finish(of.inputs, left, of_value, core, wanted)
        of = _weighted(of, jnp.where(of.inputs.targets >= 0, of_total, 0))
        _, residuals = _begin(of, core, replace(self.how, entropy=False), wanted)
        return passes.finish(of.inputs, residuals, jnp.ones((), of.terms.weight.dtype), core, wanted)


def _begin(of: Summands, core: Core, how: Divergence, wanted: Wanted | None) -> tuple[Divergences, Residuals]:
    """divergence.begin of cce_kernels, on one device. e: (N, D)."""

    def begin(plan: Any, inputs: Inputs, terms: Any, common: Any) -> tuple[Divergences, Residuals]:
        return kernels.begin(_given(Summands(inputs, terms, common)), how, plan)

    return on_platform(begin, of.inputs, core, wanted, "in forward", one_factor=True)(*of)
