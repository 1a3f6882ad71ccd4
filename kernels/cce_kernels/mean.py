"""The mean of a token's logits under its own softmax: how it is computed, and what its cotangent adds to dz.

    mean = Σ_v p_v (z_v − ρ)        P_v = exp(z_v − ρ)        m = log Σ_v P_v        p_v = P_v·exp(−m)
    entropy = −Σ_v p_v log p_v = m − mean

with the token's reference ρ (numbers.Numbers). The means of runs of the vocabulary do not add, as sums do. The share
of run r in the softmax is exp(m_r − m), so

    mean = Σ_r exp(m_r − m) · mean_r

With the cotangents a of m and μ of mean,

    dz_v = p_v·(a + μ·(1 + log P_v − mean)) = P_v·(a" + μ"·log P_v)    a" = (a + μ − μ·mean)·exp(−m)    μ" = μ·exp(−m)

log P_v is known where P_v is, and has a small rounding error even where logits are large. Without a mean a" is
a·exp(−m): dz needs no lse, whose rounding would multiply all p_v of the token.

Saved exponentials P (cce_kernels/exponentials.py) are rounded to bfloat16, so that log P has an absolute error of up to
2⁻⁹. With m and mean of the exact logits, a confident token's dz would be all error: 900 times that of rounding dz
where one logit is 30 above the others' mean. So both are computed again, from P:

    S = Σ_v P_v        M = Σ_v P_v·log P_v / S        dz_v = (P_v / S)·(a + μ·(1 + log P_v − M))

This is the exact dz of logits log P_v, each within 2⁻⁹ of the token's own: dz sums to what it should, and a large
P_v has no error that small ones do not share. Measured with V = 8192 for the entropy: 1.0 to 1.9 times the error of
rounding dz for normal logits of deviation 1 to 5, and where one logit is 10 to 30 above the others'. Where all logits
are about equal the entropy's dz vanishes, and an error of 2⁻⁹·p_v is left: 10 times that of rounding dz for deviation
0.1, 100 times for 0.01.
"""

from typing import Any

import jax
import jax.numpy as jnp

from cce_kernels.numbers import Cotangents, Numbers, WantedNumbers


def sums_of(z: jax.Array, peak: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Σ exp(z − peak) and Σ exp(z − peak)·(z − peak), (N,). z: (N, V); peak: (N,), finite.

    A term of exp(z − peak) = 0 is 0, whatever z is.
    """
    z = z - peak[:, None]
    mass = jnp.exp(z)
    return jnp.sum(mass, axis=1), jnp.sum(mass * jnp.where(mass == 0, 0, z), axis=1)


def weighted_sum_of(z: jax.Array, peak: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Σ_v w_v·(z_v − peak), (N,), of logits (N, V). A term of weight 0 is 0, whatever z is."""
    z = z - peak[:, None]
    return jnp.sum(z if weights is None else jnp.where(weights == 0, 0, weights * z), axis=1)


def finite(peak: jax.Array) -> jax.Array:
    """peak, or 0 where that is not finite."""
    return jnp.where(jnp.isfinite(peak), peak, 0)


def quotient(moment: jax.Array, mass: jax.Array) -> jax.Array:
    """The mean from the sums; 0 where all logits are −inf."""
    return moment / jnp.where(mass == 0, 1, mass)


def numbers_of(z: jax.Array, target: Any, peak: jax.Array, wanted: WantedNumbers) -> Numbers:
    """The numbers of logits (N, V) that are held, relative to peak, without the sum. target: its logit, (N,)."""
    mass, moment = sums_of(z, peak)
    return Numbers(jnp.log(mass), peak, target, mean=quotient(moment, mass) if wanted.mean else None)


def over_runs(each: Numbers, weights: Any = 0) -> Numbers:
    """The numbers of the whole vocabulary, (N,), from those of its runs, (runs, N) each.

    They are relative to the largest reference. A target's logit is 0 in all runs but one.
    weights: Σ_v w_v of each run, (runs, N). Without given ids.
    """
    reference = jnp.max(each.reference, axis=0)
    further = each.reference - reference
    log_mass, total, mean = each.log_mass + further, None, None
    if each.sum is not None:
        total = jnp.sum(each.sum + further * weights, axis=0)
    if each.mean is not None:
        share = jnp.exp(log_mass - finite(jnp.max(log_mass, axis=0)))
        mean = quotient(jnp.sum(share * (each.mean + further), axis=0), jnp.sum(share, axis=0))
    return Numbers(jax.nn.logsumexp(log_mass, axis=0), reference, jnp.sum(each.target, axis=0), total, mean)


def of_exponentials(mass: jax.Array, moment: jax.Array) -> Numbers:
    """The numbers of the logits log P, relative to 0, from Σ_v P_v and Σ_v P_v·log P_v. Their target is arbitrary."""
    return Numbers(jnp.log(mass), jnp.zeros_like(mass), mass, None, moment / mass)


def relative(of: Cotangents, numbers: Numbers, live: jax.Array) -> Cotangents:
    """The cotangents with a" and μ" in place of a and μ, for Head.cotangent; all 0 where a token is not live.

    numbers: over the whole vocabulary, relative to the reference of P.
    """
    share = jnp.exp(-numbers.log_mass)
    a, mean = of.lse, None
    if of.mean is not None:
        assert numbers.mean is not None
        a, mean = a + of.mean - of.mean * numbers.mean, of.mean * share
    return jax.tree.map(lambda x: cleared(x, live), of._replace(lse=a * share, mean=mean))


def cleared(x: jax.Array, live: jax.Array) -> jax.Array:
    """x, (N, ...), with 0 where a token is not live."""
    return jnp.where(live.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
