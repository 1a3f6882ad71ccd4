"""How a call would run, without running it."""

from collections.abc import Collection
from functools import partial
from typing import Any, Literal

import jax

from cce_jax import arguments, losses, plans
from cce_jax.api import linear_cross_entropy
from cce_jax.prepare import may_chunk
from cce_kernels import contract
from cce_kernels.device import local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs, WantedNumbers
from cce_kernels.plan import Explanation


def explain(
    e: Any,
    c: Any,
    *,
    bias: Any = None,
    softcap: float | None = None,
    reduction: losses.Reduction = "mean",
    label_smoothing: float = 0.0,
    vocab_axis: Literal[0, 1] = 0,
    impl: plans.Impl = "auto",
    memory_budget: float | Literal["all"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    gradients_of: Collection[str] = ("e", "c"),
    gradient_tolerance: float = 0.0,
) -> Explanation:
    """How `linear_cross_entropy(e, c, ...)` runs on this machine, on one device: print it, or read its fields.

    Args:
      e, c, bias: the arrays of the call, or jax.ShapeDtypeStruct of their shapes (..., D), (V, D) or (D, V), and (V,).
      softcap, reduction, label_smoothing, vocab_axis, impl, memory_budget, precision, gradient_tolerance: as for
        `linear_cross_entropy`. The other options change nothing of what is told here.
      gradients_of: of which of "e", "c" and "bias" the gradient is asked for; () for evaluation.

    Returns:
      An Explanation: the engine, why faster engines refuse the call or this machine, how the gradients are formed, in
      which chunks of tokens, the bytes held, and the predicted time. `logging.getLogger("cce_kernels")` has the same in
      one line, at the level INFO, when a call is first planned; there no engine is named that refuses the machine.

    Raises:
      ValueError: impl is "reference", which plans nothing; or the call raises one.
      TypeError: the call raises one.

    >>> import jax, cce_jax
    >>> e, c = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((500, 32), "float32")
    >>> cce_jax.explain(e, c, impl="chunked", gradients_of=()).engine
    'xla'
    """
    contract.choice("impl", impl, [x for x in contract.IMPLS if x != "reference"])
    e, c = (arguments.array(name, x, "linear_cross_entropy") for name, x in (("e", e), ("c", c)))
    options = dict(softcap=softcap, reduction=reduction, label_smoothing=label_smoothing, vocab_axis=vocab_axis)
    options |= dict(memory_budget=memory_budget, precision=precision, gradient_tolerance=gradient_tolerance)
    call = partial(linear_cross_entropy, impl="reference", **options)
    targets = jax.ShapeDtypeStruct(e.shape[:-1], "int32")
    jax.eval_shape(lambda e, c, targets, bias: call(e, c, targets, bias=bias), e, c, targets, bias)  # raises its errors
    smooths = label_smoothing > 0
    gpu = local_gpu()
    core = plans.Core(
        Head(contract.softcap(softcap), vocab_axis, precision),
        arguments.resolved(impl, e.dtype, None if impl == "auto" else gpu),  # the engines say why they refuse this GPU
        contract.memory_budget(memory_budget),
        gpu,
        wide_dc=c.dtype != e.dtype,
        gradient_tolerance=contract.gradient_tolerance(gradient_tolerance),
        numbers=WantedNumbers(sum=smooths),
        may_chunk=may_chunk(gpu),
    )
    tokens = jax.ShapeDtypeStruct((e.size // max(e.shape[-1], 1), e.shape[-1]), e.dtype)
    return plans.explanation(Inputs(tokens, c, bias, None), core, reduction, gradients_of)  # type: ignore[arg-type]
