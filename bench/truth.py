"""The mean loss and its gradients in float64, a block of tokens at a time, and how far a result is from them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 1024  # tokens: a block of float64 logits is 2 GB at a vocabulary of 256000

ON_DEVICE = 0.1  # of its memory, up to which the truth stays there: a copy from the host takes longer than a method
Array = jax.Array | np.ndarray


class Truth(NamedTuple):
    """Gradients on the device where they are a small part of its memory, else on the host, out of the methods' way."""

    loss: float
    de: Array
    dc: Array


# XLA would time dozens of float64 matmuls to choose one, for longer than all of them take here.
@partial(jax.jit, donate_argnums=0, compiler_options={"xla_gpu_autotune_level": 0})
def _add_block(dc: jax.Array, e: jax.Array, c: jax.Array, targets: jax.Array, tokens: int):
    z = e @ c.T
    lse = jax.nn.logsumexp(z, axis=1)
    rows = jnp.arange(e.shape[0])
    loss = jnp.sum(lse - z[rows, targets])
    dz = jnp.exp(z - lse[:, None]).at[rows, targets].add(-1.0) / tokens
    return dc + dz.T @ e, dz @ c, loss


def mean_loss(e: jax.Array, c: jax.Array, targets: jax.Array) -> Truth:
    with jax.enable_x64(True):
        tokens, wide = e.shape[0], c.astype(jnp.float64)
        stays = 8 * (e.size + c.size) < ON_DEVICE * (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        numbers: Any = jnp if stays else np
        dc, de, loss = jnp.zeros(c.shape, jnp.float64), [], 0.0
        for i in range(0, tokens, BLOCK):
            block = e[i : i + BLOCK].astype(jnp.float64)
            dc, de_block, part = _add_block(dc, block, wide, targets[i : i + BLOCK], tokens)
            de.append(numbers.asarray(de_block))
            loss += float(part)
        return Truth(loss / tokens, numbers.concatenate(de), numbers.asarray(dc))


class OfStudent(NamedTuple):
    """A divergence from a teacher, the mean over tokens, and the gradient of the student's e."""

    loss: float
    de: Array


@partial(jax.jit, static_argnames="beta", compiler_options={"xla_gpu_autotune_level": 0})
def _divergence_block(e: jax.Array, c: jax.Array, teacher_e: jax.Array, teacher_c: jax.Array, beta: float):
    """The sum over a block of tokens, and de."""
    t = jax.nn.log_softmax(teacher_e @ teacher_c.T)

    def divergence(z: jax.Array) -> jax.Array:
        def kl(p: jax.Array, q: jax.Array) -> jax.Array:
            return jnp.sum(jnp.exp(p) * (p - q))

        s = jax.nn.log_softmax(z)
        if beta in (0, 1):
            return kl(s, t) if beta else kl(t, s)
        m = jnp.logaddexp(t + np.log(beta), s + np.log(1 - beta))
        return beta * kl(t, m) + (1 - beta) * kl(s, m)

    loss, dz = jax.value_and_grad(divergence)(e @ c.T)
    return loss, dz @ c


def mean_divergence(e: jax.Array, c: jax.Array, teacher_e: jax.Array, teacher_c: jax.Array, beta: float) -> OfStudent:
    """beta: 0 for the forward KL divergence, 1 for the reverse one, between them that of Jensen and Shannon."""
    with jax.enable_x64(True):
        tokens, wide, teacher_wide = e.shape[0], c.astype(jnp.float64), teacher_c.astype(jnp.float64)
        de, loss = [], 0.0
        for i in range(0, tokens, BLOCK):
            rows, of_teacher = (x[i : i + BLOCK].astype(jnp.float64) for x in (e, teacher_e))
            part, de_block = _divergence_block(rows, wide, of_teacher, teacher_wide, beta)
            de.append(de_block / tokens)
            loss += float(part)
        return OfStudent(loss / tokens, jnp.concatenate(de))


@jax.jit
def _squares(actual: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.square(actual.astype(jnp.float64) - want)), jnp.sum(jnp.square(want))


def relative_error(actual, truth: Array) -> float:
    """‖actual − truth‖ / ‖truth‖, in float64, a slab of rows at a time."""
    slabs = [slice(i, i + 16384) for i in range(0, truth.shape[0], 16384)]
    with jax.enable_x64(True):
        sums = np.sum([_squares(actual[s], truth[s]) for s in slabs], axis=0)
    return float(np.sqrt(sums[0] / sums[1]))


def rounding_error(truth: Array, dtype) -> float:
    """The least error that a gradient of this type can have: that of rounding the true one."""
    with jax.enable_x64(True):
        return relative_error(truth.astype(dtype), truth)
