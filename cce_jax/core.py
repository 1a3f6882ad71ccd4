"""Three numbers per token and their derivative: the only derivative in this project that is written by hand.

With N tokens, width D and vocabulary V, embeddings e (N, D), classifier c (V, D), bias b (V,), targets t (N,) and
weights w (V,), let the logits be

    z_iv = softcap(scale · (e_i·c_v + b_v)),        softcap(y) = κ·tanh(y / κ),  or y where no softcap κ is set.

The core returns, in float32,

    lse_i    = log Σ_v exp z_iv                                                                              (1)
    target_i = z_i,t_i                                                                                       (2)
    sum_i    = Σ_v w_v z_iv                                                                                  (3)

Every loss is plain arithmetic on these (cce_jax/api.py), differentiated by JAX. What reaches the core are their
cotangents a_i, t̂_i and s_i. The partial derivatives of (1)-(3) with respect to one logit are

    ∂lse_i/∂z_iv = exp(z_iv) / Σ_u exp(z_iu) = exp(z_iv − lse_i) = p_iv                                      (4)
    ∂target_i/∂z_iv = [v = t_i]           ∂sum_i/∂z_iv = w_v                                                 (5)

so by the chain rule, with y_iv = scale · (e_i·c_v + b_v) and ∂z/∂y = 1 − tanh²(y/κ) = 1 − (z/κ)²,

    dz_iv = (a_i·p_iv + t̂_i·[v = t_i] + s_i·w_v) · scale · (1 − (z_iv/κ)²)                                   (6)

is the cotangent of the raw product e_i·c_v + b_v, and, that product being bilinear,

    de_i = Σ_v dz_iv c_v           dc_v = Σ_i dz_iv e_i           db_v = Σ_i dz_iv.                          (7)

(4) is why nothing of size (N, V) is kept: p is recovered from the logits, which are computed again, and the saved
lse. So the residuals are the inputs and 2·N numbers. The columns v are independent in (6) and (7), so they are taken a
group at a time (cce_kernels/groups.py), and a group's logits live only in one reused buffer. Where the memory budget
allows it, exponentials of some or all tokens are residuals too (cce_kernels/saved.py).

A token whose target is negative is ignored: its three numbers are arbitrary, it takes no part in (7), and nothing in
its row of e, not even a NaN, reaches a gradient. A target of V or more picks no logit: (2) is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cce_jax import chunked, reference
from cce_kernels import backward, budget, forward
from cce_kernels.config import local_gpu
from cce_kernels.groups import Wanted
from cce_kernels.logits import Head, vocabulary_size
from cce_kernels.saved import saved_shape
from cce_kernels.tiles import for_hopper, gathered

Impl = Literal["auto", "cce", "chunked", "reference"]


class Statistics(NamedTuple):
    """The core's three numbers, each (N,), float32 (float64 for float64 inputs)."""

    lse: jax.Array
    target: jax.Array
    sum: jax.Array | None


@dataclass(frozen=True)
class Core:
    """The static part of a call of the core."""

    head: Head
    with_sum: bool
    impl: Impl
    memory_budget: int


def statistics(e, c, bias, targets, weights, core: Core) -> Statistics:
    """Equations (1)-(3), differentiable in e, c and bias.

    e: (N, D); c: (V, D), or (D, V) if head.vocab_axis is 1; bias: (V,) or None; targets: (N,) int32;
    weights: (V,) or None for 1, used by the sum alone. The sum is None unless with_sum.
    """
    if core.impl == "reference":
        numbers = reference.statistics(e, c, bias, targets, weights, head=core.head, with_sum=core.with_sum)
        return Statistics(*numbers)
    return _statistics(core, e, c, bias, targets, weights)


def saved_tokens(
    shape: tuple[int, int], c_shape: tuple[int, int], dtype, with_bias: bool, core: Core, wanted: Wanted
) -> int:
    """Of how many tokens `forward_pass` is to save the exponentials for `gradients`.

    shape and dtype: those of e; wanted: the gradients that will be asked for.
    """
    if core.impl == "chunked":
        return 0
    gpu = local_gpu()
    if core.impl == "auto" and gpu is None:
        return 0
    e, c = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(c_shape, dtype)
    on_hopper = gpu is not None and for_hopper(gathered(e), c, with_bias or None, core.with_sum, gpu, interpret=False)
    return budget.saved_tokens(*shape, c_shape[core.head.vocab_axis], dtype, core.head, core.with_sum, wanted,
                               on_hopper, core.memory_budget)  # fmt: skip


def forward_pass(
    e, c, bias, targets, weights, core: Core, *, for_gradients: bool, saved_tokens: int = 0
) -> tuple[Statistics, jax.Array | None]:
    """Equations (1)-(3), and what is saved for `gradients`: saved_shape(saved_tokens, V) of e's type, or None.

    for_gradients: whether those will follow, whose scratch is then there for this too.
    """

    def plain(e, *arrays):
        numbers = chunked.statistics(e, *arrays, head=core.head, with_sum=core.with_sum,
                                     memory_budget=core.memory_budget)  # fmt: skip
        shape = saved_shape(saved_tokens, vocabulary_size(c, core.head))
        return *numbers, lax.empty(shape, e.dtype) if saved_tokens else None

    kernels = partial(forward.statistics, head=core.head, with_sum=core.with_sum, may_copy=for_gradients,
                      saved_tokens=saved_tokens)  # fmt: skip
    *numbers, saved = _on_platform(core.impl, kernels, plain)(e, c, bias, targets, weights)
    return Statistics(*numbers), saved


def gradients(e, c, bias, targets, weights, numbers: Statistics, saved, cotangents, core: Core, wanted: Wanted):
    """Equations (6) and (7): de, dc and dbias in the types of e, c and bias, None where not wanted; and saved.

    numbers and saved: what `forward_pass` returned; cotangents: (2 or 3, N), a_i, t̂_i and, with a sum, s_i. saved may
    have been overwritten, in a way that another call of this does not see.
    """

    def plain(e, c, bias, targets, weights, lse, target, saved, cotangents):
        found = chunked.gradients(e, c, bias, targets, weights, lse, cotangents, head=core.head, wanted=wanted,
                                  memory_budget=core.memory_budget)  # fmt: skip
        return *found, saved

    kernels = partial(backward.gradients, head=core.head, wanted=wanted, memory_budget=core.memory_budget)
    run = _on_platform(core.impl, kernels, plain)
    return run(e, c, bias, targets, weights, numbers.lse, numbers.target, saved, cotangents)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(core: Core, e, c, bias, targets, weights) -> Statistics:
    return forward_pass(e, c, bias, targets, weights, core, for_gradients=False)[0]


def _statistics_fwd(core: Core, e, c, bias, targets, weights):
    wanted = Wanted(e=e.perturbed, c=c.perturbed, bias=bias is not None and bias.perturbed)
    e, c, bias, targets, weights = jax.tree.map(
        lambda x: x.value, (e, c, bias, targets, weights), is_leaf=lambda x: hasattr(x, "perturbed")
    )
    to_save = saved_tokens(e.shape, c.shape, e.dtype, bias is not None, core, wanted)
    run = _first_order_only(partial(forward_pass, core=core, for_gradients=True, saved_tokens=to_save))
    out, saved = run(e, c, bias, targets, weights)
    return out, (_as_shape(wanted), e, c, bias, targets, weights, out, saved)


def _statistics_bwd(core: Core, residuals, cotangents):
    shape_of_wanted, *arrays, numbers, saved = residuals
    of_statistics = [x for x in cotangents if x is not None]
    stacked = jnp.stack([jnp.zeros_like(numbers.lse) if _is_symbolic_zero(x) else x for x in of_statistics])
    run = _first_order_only(partial(gradients, core=core, wanted=_from_shape(shape_of_wanted)))
    de, dc, db, _ = run(*arrays, numbers, saved, stacked)
    return de, dc, db, None, None


_statistics.defvjp(_statistics_fwd, _statistics_bwd, symbolic_zeros=True)


def _as_shape(wanted: Wanted) -> jax.Array:
    """wanted as the shape of an array, which is all of it that matters.

    JAX keeps a traced forward rule for each pattern of differentiated inputs, but one residual tree for all of them:
    the last. Static facts in that tree would so reach the wrong backward rule; those in a leaf's shape do not.
    """
    return jnp.zeros((1 + wanted.e, 1 + wanted.c, 1 + wanted.bias), bool)


def _from_shape(x: jax.Array) -> Wanted:
    return Wanted(*(n == 2 for n in x.shape))


def _is_symbolic_zero(x) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _on_platform(impl: Impl, kernels: Callable, plain: Callable) -> Callable:
    """The function that runs impl, its choice of kernel, interpreter or plain XLA made for the platform lowered to."""
    if impl == "chunked":
        return plain
    compiled, interpreted = partial(kernels, interpret=False), partial(kernels, interpret=True)
    return partial(lax.platform_dependent, cuda=compiled, default=interpreted if impl == "cce" else plain)


def _first_order_only(function: Callable) -> Callable:
    """function, with a clear error where JAX would differentiate it: a second derivative of the loss."""

    @jax.custom_jvp
    def guarded(*arrays):
        return function(*arrays)

    @guarded.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            "linear_cross_entropy has first derivatives only with impl='cce', 'chunked' and 'auto'; "
            "impl='reference' has forward-mode and higher-order derivatives, and holds the full logits"
        )

    return guarded
