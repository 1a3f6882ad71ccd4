"""The weighted sum of a token's logits, Σ_v w_v·z_v, and what its cotangent adds to the gradients: without the logits.

Where no softcap is set, logits are linear in e. With f_i = scale · τ_i,

    Σ_v w_v·z_iv = f_i·(e_i·c̄ + b̄)        c̄ = Σ_v w_v·c_v        b̄ = Σ_v w_v·b_v

so c is read once, and a token costs D multiplications. A cotangent s_i of the sum adds matrices of rank one to the
gradients:

    de_i += s_i·f_i·c̄        dc_v += w_v·q,  q = Σ_i s_i·f_i·e_i        dbias_v += w_v·Σ_i s_i·f_i

Where the forward pass forms the gradients, q is left to the backward pass, which adds w_v·q to dc before it rounds it:
near p = ε/V of label smoothing's ε the two parts cancel. Where the backward pass forms dz, dz has the term s_i·w_v.
With a softcap the sum is taken over the logits, by XLA (engines/xla/statistics.py).

All of it is computed in float32, even where float32 matmuls use TF32. A weight of 0 leaves out its class, even if the
bias of that class is −inf. The sum is relative to the token's reference: Σ_v w_v·(z_v − ρ). Where a kernel sums the
exponentials, it is moved by what their matmul has lost, as logits of given ids are (cce_kernels/given_ids.py).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from cce_kernels import given_ids
from cce_kernels.device import Gpu
from cce_kernels.numbers import Cotangents, Inputs, Numbers
from cce_kernels.request import Request


class Weighted(NamedTuple):
    """What c, bias and the weights are over the vocabulary, or a shard of it, at least float32."""

    c: jax.Array  # (D,): c̄
    bias: jax.Array  # (): b̄, 0 where there is no bias
    weight: jax.Array  # (): Σ_v w_v


def weighted(inputs: Inputs, request: Request) -> Weighted | None:
    """None where the call asks for no sum, or for one that is not linear."""
    if not request.sum_is_linear:
        return None
    axis, wide, weights = request.head.vocab_axis, request.sum_dtype, inputs.weights

    def over_vocabulary(x: jax.Array, axis: int) -> jax.Array:
        x = x.astype(wide)
        if weights is not None:
            each = weights.reshape([-1 if k == axis else 1 for k in range(x.ndim)])
            x = jnp.where(each == 0, 0, each * x)
        return _summed(x, axis)

    bias = jnp.zeros((), wide) if inputs.bias is None else over_vocabulary(inputs.bias, 0)
    weight = jnp.asarray(request.vocabulary, wide) if weights is None else jnp.sum(weights)
    return Weighted(over_vocabulary(inputs.c, axis), bias, weight)


def _summed(x: jax.Array, axis: int) -> jax.Array:
    """The sum of x over the vocabulary, in runs of about √V: a CPU adds one term after the other, and a sum of V equal
    terms would be off by up to V/4 roundings.
    """
    size = x.shape[axis]
    run = 1 << (size.bit_length() + 1) // 2
    whole = size - size % run
    runs, rest = jnp.split(x, [whole], axis)
    parts = jnp.sum(runs.reshape(*x.shape[:axis], whole // run, run, *x.shape[axis + 1 :]), axis=axis + 1)
    return jnp.sum(jnp.concatenate([parts, jnp.sum(rest, axis=axis, keepdims=True)], axis), axis=axis)


def of_tokens(
    inputs: Inputs, numbers: Numbers, of: Weighted, request: Request, gpu: Gpu | None, moves: bool
) -> jax.Array:
    """Σ_v w_v·(z_v − ρ), (N,); 0 where a token is ignored. moves: whether it is moved by what a kernel has lost."""
    live = inputs.targets >= 0
    e = jnp.where(live[:, None], inputs.e, 0).astype(of.c.dtype)
    found, factor = jnp.sum(e * of.c, axis=1) + of.bias, inputs.factor
    found = found if factor is None else found * factor
    further = -numbers.reference
    if moves and request.itemsize == 2:
        at_target = given_ids.products(inputs._replace(ids=inputs.targets[:, None]), request, gpu)[:, 0]
        further += given_ids.lost(numbers, at_target)
    return jnp.where(live, found + further * of.weight, 0)


def of_raw(of: Cotangents, inputs: Inputs) -> jax.Array:
    """s_i·f_i, (N,): the cotangent of e_i·c̄ + b̄; 0 where a token is ignored."""
    assert of.sum is not None
    found = of.sum if inputs.factor is None else of.sum * inputs.factor
    return jnp.where(inputs.targets >= 0, found, 0)


def of_vocabulary(x: jax.Array, weights: jax.Array | None, axis: int) -> jax.Array:
    """w_v·x, where x is (D,) or (); `axis` is that of the vocabulary. It broadcasts against dc, or dbias."""
    if weights is None:
        return x if x.ndim == 0 or axis == 0 else x[:, None]
    if x.ndim == 0:
        return weights * x
    return weights[:, None] * x if axis == 0 else x[:, None] * weights
