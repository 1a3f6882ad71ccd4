"""Passes over shards of the vocabulary, one after another on one device, against float64 of all columns.

Drawn calls (tests/search) split the vocabulary over devices and processes, and tests/devices/in_forward.py has chunks.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_kernels import blocks
from cce_kernels.device import INTERPRETER, local_gpu
from cce_kernels.head import Head
from cce_kernels.mean import over_runs
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Numbers, Wanted, WantedNumbers
from cce_kernels.plan import Plan, plan_of
from cce_kernels.request import Request

ALL = 2**40  # bytes: all exponentials are saved
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}


class Problem(NamedTuple):
    inputs: Inputs
    cotangents: Cotangents
    head: Head
    vocabulary: int


def problem(
    tokens=40,
    width=32,
    vocabulary=229,
    dtype="bfloat16",
    *,
    head=None,
    bias=False,
    weighted=False,
    mean=False,
    temperature=False,
    size=1.0,
    seed=0,
    ignored=0.2,
) -> Problem:
    rng, head = np.random.default_rng(seed), head or Head()
    e = (size * rng.standard_normal((tokens, width))).astype(jnp.dtype(dtype))
    c = (rng.standard_normal((vocabulary, width)) / width**0.5).astype(jnp.dtype(dtype))
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    targets[rng.uniform(size=tokens) < ignored] = -1
    targets[1] = vocabulary  # names no column
    b = rng.standard_normal(vocabulary).astype(jnp.dtype(dtype)) if bias else None
    weights = rng.uniform(size=vocabulary).astype(np.float32) if weighted else None
    of = rng.uniform(0.5, 1.5, (4, tokens)).astype(np.float32)
    inverse = rng.uniform(0.5, 2, tokens).astype(np.float32) if temperature else None
    return Problem(
        Inputs(e, c if head.vocab_axis == 0 else c.T, b, targets, weights, None, inverse),  # type: ignore[arg-type]
        Cotangents(of[0], -of[1], of[2] / vocabulary if weighted else None, of[3] if mean else None),
        head,
        vocabulary,
    )


def truth(x: Problem) -> dict[str, np.ndarray]:
    e, c, bias, targets, weights, _, inverse, *_ = (None if y is None else np.float64(y) for y in x.inputs)
    c = c if x.head.vocab_axis == 0 else c.T
    raw = e @ c.T + (0 if bias is None else bias)
    capped = raw if x.head.softcap is None else x.head.softcap * np.tanh(raw / x.head.softcap)
    inverse = 1.0 if inverse is None else inverse[:, None]
    slope = inverse * (1.0 if x.head.softcap is None else 1 - (capped / x.head.softcap) ** 2)
    z = capped * inverse
    lse, kept = np.logaddexp.reduce(z, axis=1), targets >= 0
    is_target = targets[:, None] == np.arange(x.vocabulary)
    p = np.exp(z - lse[:, None])
    mean = (p * z).sum(1)
    dz = x.cotangents.lse[:, None] * p + x.cotangents.target[:, None] * is_target
    if x.cotangents.mean is not None:
        dz += x.cotangents.mean[:, None] * p * (1 + z - mean[:, None])
    if weights is not None:
        dz += x.cotangents.sum[:, None] * weights
    dz = np.where(kept[:, None], dz * slope, 0)
    dc = dz.T @ e
    found = {
        "lse": lse[kept],
        "target": (z * is_target).sum(1)[kept],
        "e": dz @ c,
        "bias": dz.sum(0),
        "c": dc if x.head.vocab_axis == 0 else dc.T,
    }
    found |= {} if x.cotangents.mean is None else {"mean": mean[kept]}
    return found if weights is None else found | {"sum": ((lse[:, None] - z) @ weights)[kept]}


def shards_of(x: Problem, bounds, plan: Callable[[Request], Plan]) -> list[tuple[Inputs, Plan]]:
    """The inputs and the plan of each shard of columns, bounds[k] to bounds[k + 1]."""
    inputs, axis = x.inputs, x.head.vocab_axis
    wanted = Wanted(True, True, inputs.bias is not None)
    targets, shards = np.asarray(inputs.targets), []
    for start, stop in pairwise(bounds):
        local = np.where((targets >= start) & (targets < stop), targets - start, stop - start)
        part = (slice(start, stop), slice(None))[:: 1 - 2 * axis]
        given = Inputs(
            inputs.e,
            inputs.c[part],
            None if inputs.bias is None else inputs.bias[start:stop],
            np.where(targets < 0, -1, local).astype(np.int32),
            None if inputs.weights is None else inputs.weights[start:stop],
            None,
            inputs.inverse_temperature,
        )
        request = Request(
            *inputs.e.shape,
            stop - start,
            str(inputs.e.dtype),
            x.head,
            wanted.bias,
            wanted,
            0,
            wide_de=True,
            numbers=WantedNumbers(inputs.weights is not None, x.cotangents.mean is not None),
            with_temperature=inputs.inverse_temperature is not None,
        )
        shards.append((jax.tree.map(jnp.asarray, given), plan(request)))
    return shards


def reference_of(x: Problem, shards: list[tuple[Inputs, Plan]]) -> jax.Array:
    reference = sum(blocks.target(*shard) for shard in shards)
    return jnp.where(x.inputs.targets == x.vocabulary, -FLOAT32_MAX, reference)


def over_shards(x: Problem, bounds, impl, gpu, memory_budget: int) -> dict[str, np.ndarray]:
    """The same from one pass over each shard."""
    inputs, axis, targets = x.inputs, x.head.vocab_axis, np.asarray(x.inputs.targets)
    shards = shards_of(x, bounds, lambda request: plan_of(replace(request, memory_budget=memory_budget), gpu, impl))
    reference = reference_of(x, shards)
    passes = [blocks.numbers(*shard, reference) for shard in shards]
    kept = targets >= 0
    whole = of_all([numbers for numbers, _ in passes], shards)
    found = [
        blocks.gradients(given, whole.relative_to(numbers.reference), saved, x.cotangents, plan)[0]
        for (given, plan), (numbers, saved) in zip(shards, passes, strict=True)
    ]
    assert all(gradients.e.dtype == np.float32 for gradients in found)
    result = of_kept(whole, kept, inputs.weights) | {
        "e": sum(of.e for of in found),
        "c": np.concatenate([of.c for of in found], axis),
    }
    if inputs.bias is not None:
        result["bias"] = np.concatenate([gradients.bias for gradients in found])
    return result


def of_kept(numbers: Numbers, kept: np.ndarray, weights: Any) -> dict[str, np.ndarray]:
    """lse, target and mean of the kept tokens, not relative to a reference; and as `sum` that of w_v·(lse − z_v)."""
    reference = np.float64(numbers.reference)
    found = {"lse": reference + np.float64(numbers.log_mass), "target": np.float64(numbers.target)}
    if numbers.sum is not None:
        found["sum"] = np.sum(np.float64(weights)) * np.float64(numbers.log_mass) - np.float64(numbers.sum)
    if numbers.mean is not None:
        found["mean"] = np.float64(numbers.mean) + reference
    return {name: np.float32(x)[kept] for name, x in found.items()}


def of_all(numbers: list[Numbers], shards: list[tuple[Inputs, Plan]]) -> Numbers:
    """The numbers of all columns, from those of each shard."""
    each = jax.tree.map(lambda *of_shards: jnp.stack(of_shards), *numbers)
    weights = None if each.sum is None else jnp.stack([jnp.sum(given.weights) for given, _ in shards])[:, None]
    return over_runs(each, weights)


def check(x: Problem, bounds, impl, gpu, memory_budget: int) -> None:
    exact = truth(x)
    for name, value in over_shards(x, bounds, impl, gpu, memory_budget).items():
        value, true = np.float64(value), exact[name]
        # The kernels round saved exponentials, r·e or dz, and the result.
        allowed = 2.0**-19 if name in ("lse", "target", "sum", "mean") else 3 * ROUNDING[str(x.inputs.e.dtype)]
        assert np.linalg.norm(value - true) <= allowed * np.linalg.norm(true), name


KERNELS, XLA = ("cce", INTERPRETER), ("chunked", None)


@pytest.mark.parametrize(
    ("x", "engine", "memory_budget"),
    [
        (problem(bias=True), KERNELS, ALL),
        (problem(mean=True, temperature=True), KERNELS, 0),
        (problem(mean=True, size=5.0), KERNELS, ALL),
        (problem(mean=True, weighted=True, dtype="float32", head=Head(5.0, 1)), XLA, 0),
    ],
    ids=["saved", "the mean", "the mean, saved", "float32"],
)
def test_shards_of_several_sizes(x, engine, memory_budget):
    check(x, (0, 41, 229), *engine, memory_budget)


def test_a_shard_whose_exponentials_underflow_has_no_share():
    """The targets' logits are 200 above every logit of the second shard: its log-sum-exp is -inf, its gradients 0."""
    x = problem(dtype="bfloat16", vocabulary=64, ignored=0.0)
    c = np.zeros_like(x.inputs.c)
    c[:32, 0] = 200
    e = np.zeros_like(x.inputs.e)
    e[:, 0] = 1
    x = x._replace(inputs=x.inputs._replace(e=e, c=c, targets=np.arange(40, dtype=np.int32) % 32))
    for memory_budget in (0, ALL):
        check(x, (0, 32, 64), *KERNELS, memory_budget)


def test_nothing_is_rescued_because_its_target_lies_elsewhere(monkeypatch):
    """`recomputed` writes nothing: no sum is inf. `saved_again` neither: every reference is a target's logit."""
    x = problem(ignored=0.0, size=0.1)
    targets = x.inputs.targets % 229
    reference = jnp.full(40, 0.0)
    local = x.inputs._replace(c=x.inputs.c[:100], targets=jnp.where(targets < 100, targets, 100))
    request = Request(40, 32, 100, "bfloat16", x.head, False, Wanted(True, True, False), ALL)
    plan = plan_of(request, INTERPRETER, "cce")
    engine, seen = type(plan.forward.rescue.engine), []  # type: ignore[union-attr]
    rescued, saved_again = engine.rescued, engine.saved_again
    monkeypatch.setattr(engine, "rescued", lambda *x: (seen.append(x[-1]), rescued(*x))[1])
    monkeypatch.setattr(engine, "saved_again", lambda *x: (seen.append(x[-2]), saved_again(*x))[1])
    blocks.numbers(local, plan, reference)
    before, others = seen
    assert np.isfinite(before.log_mass).all()
    assert not others.any()


@pytest.mark.gpu
@pytest.mark.parametrize("memory_budget", [0, ALL])
@pytest.mark.parametrize("options", [{}, {"head": Head(softcap=20.0, vocab_axis=1)}, {"bias": True}], ids=str)
def test_shards_on_a_gpu(memory_budget, options):
    """Both engines of kernels: Hopper's where there is no bias."""
    check(problem(704, 256, 4096, size=2.0, **options), (0, 1024, 1152, 4096), "cce", local_gpu(), memory_budget)
