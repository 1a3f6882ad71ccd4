"""Distillation from hidden states: how far a student's distributions are from a teacher's, without either's logits."""

from typing import Any, Literal

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch import arguments, divergence_ops
from cce_torch.arguments import OF_TORCH, Options, Prepared, flat
from cce_torch.call import Call, Distillation, DivergenceCall, Operands
from cce_torch.in_torch import reference
from cce_torch.operators import as_factors
from cce_torch.options import Impl, Reduction

NAME = "linear_divergence"
Kind = Literal["forward_kl", "reverse_kl", "jsd"]


@arguments.traced
def linear_divergence(
    e: Tensor,
    c: Tensor,
    teacher_e: Tensor,
    teacher_c: Tensor,
    *,
    divergence: Kind = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_logit_scale: float | None = None,
    vocab_axis: Literal[0, 1] = 0,
    teacher_vocab_axis: Literal[0, 1] = 0,
    return_entropy: bool = False,
    impl: Impl = "auto",
    memory_budget: float | Literal["all"] | None = None,
    precision: Literal["highest", "high", "medium"] | None = None,
) -> Any:
    """The divergence of a student's distributions from a teacher's, from hidden states, without holding the logits.

    Equivalent to the following, with exact gradients, for s and t and their logarithms over the vocabulary:

        z = logit_scale * (e.float() @ c.float().T + bias)      # (..., V)
        z = softcap * tanh(z / softcap)                         # if softcap
        s = softmax(z / temperature[..., None])
        t = ...                                                 # the same of the teacher's arguments
        m = beta * t + (1 - beta) * s
        total = sum(t * log(t / s))                             # forward_kl, KL(t‖s)
        total = sum(s * log(s / t))                             # reverse_kl, KL(s‖t)
        total = beta * sum(t * log(t / m)) + (1 - beta) * sum(s * log(s / m))                      # jsd
        total = where(token_weight == 0, 0, token_weight * total)
        loss = sum(total) / num_items                           # for reduction="mean"

    There is no factor temperature²: multiply by it if your recipe does. e, c and bias get gradients, once, with any
    impl. The teacher is constant: a tensor of the teacher that requires a gradient is accepted, and gets none.

    For "mean" and "sum" the forward pass forms the gradients, in chunks of tokens: three matmuls of the student and one
    of the teacher. For "none" the backward pass computes both logits again (docs/distillation.md).

    Args:
      e, c, bias: the student's, as in `linear_cross_entropy`; so are all options that are not named here.
      teacher_e: the teacher's embeddings, (..., D'), with e's shape but for the last axis. D' and its type may differ.
      teacher_c: the teacher's classifier: (V, D'), or (D', V) with teacher_vocab_axis=1, of c's vocabulary. It has the
        type of teacher_e, or is float32 beside 16 bits.
      divergence: "forward_kl", "reverse_kl" or "jsd".
      beta: of "jsd" the teacher's share of the mixture, above 0 and below 1. The others do not use it.
      temperature: a positive number, or a tensor that broadcasts to the shape of e without its last axis. It divides
        the logits of both after the softcap, and gets no gradient. Values of a tensor are not checked. A new value
        compiles nothing.
      token_weight: a weight for each token, such as a mask, of e's shape without the last axis. It gets no gradient. A
        token of weight 0 is left out: nothing in its rows of e and teacher_e, not even a NaN, reaches a result.
      reduction: "mean", "sum", or "none" for token_weight times the divergence of each token.
      num_items: the number that "mean" divides by, or a tensor of one element; by default the sum of token_weight.
        Where it is 0, the loss and its gradients are 0.
      teacher_bias: (V,), of teacher_c's type.
      teacher_softcap, teacher_logit_scale, teacher_vocab_axis: of the teacher, as softcap, logit_scale and vocab_axis
        are of the student.
      return_entropy: return (loss, entropy). entropy is that of the student at the temperature, in nats, of e's shape
        without the last axis. It has no gradient, and is 0 where the weight is 0.
      impl: as in `linear_cross_entropy`. "torch_compile" runs in PyTorch alone, in chunks of tokens as well. Both
        logits are computed outside the kernels with all of them.

    Returns:
      The divergence in nats, float32 (float64 for float64 inputs): a scalar; for reduction="none" a tensor of e's shape
      without the last axis. With return_entropy (loss, entropy).

    Raises:
      ValueError: shapes or devices do not fit, the vocabularies differ, or an option is out of its range.
      TypeError: a tensor has a wrong type, or temperature or token_weight requires a gradient.
      NotImplementedError: the impl does not run on this device.

    Examples:
      >>> import torch
      >>> from cce_torch import linear_divergence
      >>> hidden = torch.randn(2, 16, 64, requires_grad=True)                 # the student's
      >>> head = torch.randn(1000, 64, requires_grad=True)
      >>> of_teacher, head_of_teacher = torch.randn(2, 16, 96), torch.randn(1000, 96)
      >>> answer = (torch.arange(16) >= 5).expand(2, 16)                      # the first five tokens are the prompt
      >>> loss = linear_divergence(hidden, head, of_teacher, head_of_teacher, divergence="jsd", token_weight=answer)
      >>> loss.backward()
      >>> loss.shape, hidden.grad.shape
      (torch.Size([]), torch.Size([2, 16, 64]))
    """
    contract.choice("divergence", divergence, contract.DIVERGENCES)
    contract.choice("return_entropy", return_entropy, (False, True))
    share = contract.beta(beta, divergence)
    student = dict(e=e, c=c, bias=bias)
    teacher = dict(e=teacher_e, c=teacher_c, bias=teacher_bias)
    others = dict(temperature=temperature, token_weight=token_weight, num_items=num_items)
    every = student | {f"teacher_{name}": x for name, x in teacher.items()} | others
    arguments.refuse_dtensors({name: x for name, x in every.items() if isinstance(x, Tensor)}, NAME)
    axes = vocab_axis, teacher_vocab_axis
    options = Options(reduction, impl, vocab_axis, precision, logit_scale, softcap, memory_budget=memory_budget)
    x = _side(student, options, num_items)
    with contract.named():
        options = Options(reduction, impl, teacher_vocab_axis, precision, teacher_logit_scale, teacher_softcap)
        y = _side(teacher, options)
    contract.pair(tuple(e.shape), tuple(c.shape), tuple(teacher_e.shape), tuple(teacher_c.shape), axes)
    arguments.check_device("teacher_e", y.e, x.e)
    inverse = arguments.inverse_temperature(temperature, x, NAME)
    weight = arguments.weight_of_tokens(token_weight, x, NAME)
    factor = _factor(reduction, None if token_weight is None else weight, x)
    impl = next((z.impl for z in (x, y) if z.impl in OF_TORCH), x.impl)  # "auto": either may be float64
    caps = x.options.softcap, y.options.softcap
    how = DivergenceCall(*caps, x.options.memory_budget, divergence, precision, impl, return_entropy)
    numbers = 0.5 if share is None else share, x.options.logit_scale, y.options.logit_scale
    if impl == "reference":
        loss, entropy = _reference(x, y, weight, inverse, (divergence, numbers[0]))
        loss = torch.where(weight == 0, 0, weight * loss)
        loss = loss if reduction == "none" else torch.where(factor == 0, 0, factor * loss.sum())
    else:
        own, fixed = ((flat(z.e, 1), z.c, z.bias) for z in (x, y))
        fixed = (None if z is None else z.detach() for z in fixed)
        given = Distillation(*own, *fixed, weight, inverse, as_factors(numbers), factor)  # type: ignore[arg-type]
        loss, entropy = divergence_ops.loss(given, how, reduction == "none")
    loss = x.unshifted(loss) if reduction == "none" else loss
    return (loss, x.unshifted(entropy)) if return_entropy else loss


def _side(given: dict[str, Any], options: Options, num_items: Any = None) -> Prepared:
    """A student or a teacher, checked. given: e, c and bias."""
    e, options = given["e"], arguments.checked(options)
    arguments.check_tensor("e", e, NAME)
    given["targets"] = e.new_empty(e.shape[:-1], dtype=torch.int64)  # its shape alone is read
    return arguments.prepared(NAME, given, options, num_items)


def _factor(reduction: str, weight: Tensor | None, of: Prepared) -> Tensor:
    """By what the sum over the tokens is multiplied, (). weight: None for 1."""
    if reduction != "mean":
        return arguments.scalar(1.0, of.e)
    if of.num_items is None and weight is None:
        return arguments.scalar(1 / max(of.targets.numel(), 1), of.e)
    items = weight.sum() if of.num_items is None else of.num_items  # type: ignore[union-attr]
    return torch.where(items == 0, 0, 1 / items)  # has no gradient, so 1 / 0 does no harm


def _reference(
    x: Prepared, y: Prepared, weight: Tensor, inverse: Tensor | None, measure: tuple[str, float]
) -> tuple[Tensor, Tensor]:
    """The divergences and the entropies, (N,), from the full logits. PyTorch differentiates the former."""
    kept = torch.where(weight != 0, 0, -1)

    def logits(side: Prepared) -> Tensor:
        operands = Operands(flat(side.e, 1), side.c, side.bias, kept, None, inverse)
        return reference.logits(operands, Call(side.options.softcap), side.options.logit_scale)

    with torch.no_grad():
        of_teacher = logits(y)
    return reference.divergences((logits(x), of_teacher), weight, measure)
