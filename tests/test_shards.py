"""Passes over shards of the vocabulary, one after another on one device, against float64 of all columns."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cce_kernels import backward, forward
from cce_kernels.block_floats import steps_shape
from cce_kernels.call import Call
from cce_kernels.device import INTERPRETER, local_gpu
from cce_kernels.head import Head
from cce_kernels.in_forward import Chunk, add_dc, finish, gradients_of, numbers_of
from cce_kernels.mean import over_runs
from cce_kernels.numbers import FLOAT32_MAX, Cotangents, Inputs, Statistics, Wanted
from cce_kernels.plan import Chunks, Plan, plan_of
from cce_kernels.residuals import Residuals
from cce_kernels.tokens import Kept
from tests.core_numbers import of_kept

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


def shards_of(x: Problem, bounds, plan: Callable[[Call], Plan]) -> list[tuple[Inputs, Plan]]:
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
        call = Call(
            *inputs.e.shape,
            stop - start,
            str(inputs.e.dtype),
            x.head,
            wanted.bias,
            inputs.weights is not None,
            wanted,
            0,
            wide_de=True,
            with_mean=x.cotangents.mean is not None,
            with_temperature=inputs.inverse_temperature is not None,
        )
        shards.append((jax.tree.map(jnp.asarray, given), plan(call)))
    return shards


def reference_of(x: Problem, shards: list[tuple[Inputs, Plan]]) -> jax.Array:
    reference = sum(forward.target(*shard) for shard in shards)
    return jnp.where(x.inputs.targets == x.vocabulary, -FLOAT32_MAX, reference)


def over_shards(x: Problem, bounds, impl, gpu, memory_budget: int) -> dict[str, np.ndarray]:
    """The same from one pass over each shard."""
    inputs, axis, targets = x.inputs, x.head.vocab_axis, np.asarray(x.inputs.targets)
    shards = shards_of(x, bounds, lambda call: plan_of(replace(call, memory_budget=memory_budget), gpu, impl))
    reference = reference_of(x, shards)
    passes = [forward.statistics(*shard, reference) for shard in shards]
    kept = targets >= 0
    whole = of_all([numbers for numbers, _ in passes], shards)
    found = [
        backward.gradients(given, whole.relative_to(numbers.reference), saved, x.cotangents, plan)[0]
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


def of_all(numbers: list[Statistics], shards: list[tuple[Inputs, Plan]]) -> Statistics:
    """The numbers of all columns, from those of each shard."""
    each = jax.tree.map(lambda *of_shards: jnp.stack(of_shards), *numbers)
    reference = jnp.max(each.reference, axis=0)
    further = each.reference - reference
    total, log_mass = None, each.log_mass + further
    if each.sum is not None:
        weight = jnp.stack([jnp.sum(given.weights) for given, _ in shards])[:, None]
        total = jnp.sum(each.sum + further * weight, axis=0)
    mean = None if each.mean is None else over_runs(log_mass, each.mean + further)
    return Statistics(jax.nn.logsumexp(log_mass, axis=0), reference, jnp.sum(each.target, axis=0), total, mean)


def in_chunks(x: Problem, bounds, impl, gpu, size: int) -> dict[str, np.ndarray]:
    """The same where the shards exchange the numbers of each chunk of so many tokens, between its two halves."""
    inputs, axis, dtype = x.inputs, x.head.vocab_axis, x.inputs.e.dtype
    in_16_bits, tokens = dtype.itemsize == 2, len(inputs.targets)
    whole = -(-tokens // size) - in_16_bits
    chunks = Chunks(whole, size if whole else 0, size * in_16_bits, 256)
    shards = shards_of(x, bounds, lambda call: plan_of(replace(call, one_factor=True), gpu, impl, 0, chunks=chunks))
    reference, kept = reference_of(x, shards), Kept.of(jnp.asarray(inputs.targets), chunks.rows)
    sums: list[Any] = [
        (
            jnp.zeros(own.c.shape, jnp.int16 if in_16_bits else dtype),
            jnp.zeros(steps_shape(plan.call.vocabulary, plan.call.width, 256)) if in_16_bits else None,
            0.0,
        )
        for own, plan in shards
    ]
    numbers, de, dc = [], [], []
    for start in range(0, chunks.rows, size):
        order = kept.order[start : start + size]
        count = jnp.clip(kept.count - start, 0, size)
        given = [
            Chunk.of(own._replace(**{k: y[order] for k, y in own.of_tokens.items()}), reference[order], count)
            for own, _ in shards
        ]
        of_own = [numbers_of(chunk, plan) for chunk, (_, plan) in zip(given, shards, strict=True)]
        numbers.append(of_all([own for own, _ in of_own], shards))
        of, parts = jax.tree.map(lambda y, order=order: jnp.asarray(y)[order], x.cotangents), []
        for k, (chunk, (own, columns), (_, plan)) in enumerate(zip(given, of_own, shards, strict=True)):
            part, left, dbias = gradients_of(chunk, columns, own, numbers[-1], of, plan)
            parts.append(part)
            total, steps, bias = sums[k]
            if steps is None:
                total, _ = add_dc(total, None, left, plan)
            elif start + size < chunks.rows:
                total, steps = add_dc(jax.lax.bitcast_convert_type(total, dtype), steps, left, plan)
                total = jax.lax.bitcast_convert_type(total, jnp.int16)
            else:
                begun = Residuals(dc=total, steps=steps, last=left)
                dc.append(finish(begun, jnp.float32(1), own.target > 0, plan).c)
            sums[k] = total, steps, bias + dbias if inputs.bias is not None else 0.0
        de.append(sum(part.values for part in parts))
    live = np.asarray(inputs.targets) >= 0
    restored = jax.tree.map(lambda *parts: kept.restored(jnp.concatenate(parts)), *numbers)
    result = of_kept(restored, live, inputs.weights) | {
        "e": kept.restored(jnp.concatenate(de)),
        "c": np.concatenate(dc or [total for total, _, _ in sums], axis),
    }
    if inputs.bias is not None:
        result["bias"] = np.concatenate([bias for _, _, bias in sums])
    return result


def check(x: Problem, bounds, impl, gpu, memory_budget: int) -> None:
    held(x, over_shards(x, bounds, impl, gpu, memory_budget))


def held(x: Problem, found: dict[str, np.ndarray]) -> None:
    exact = truth(x)
    for name, value in found.items():
        value, true = np.float64(value), exact[name]
        # The kernels round saved exponentials, r·e or dz, and the result.
        allowed = 2.0**-19 if name in ("lse", "target", "sum", "mean") else 3 * ROUNDING[str(x.inputs.e.dtype)]
        assert np.linalg.norm(value - true) <= allowed * np.linalg.norm(true), name


ENGINES = [("cce", INTERPRETER), ("chunked", None)]


@st.composite
def problems(draw, sizes) -> tuple:
    """A problem, where its shards begin and end, and who computes it."""
    vocabulary = draw(st.integers(2, 300))
    head = Head(draw(st.sampled_from([None, 5.0])), draw(st.integers(0, 1)))
    dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]))
    bias, weighted, seed = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 99))
    size, ignored = draw(st.sampled_from(sizes)), draw(st.sampled_from([0.0, 0.5, 0.9]))
    engine = draw(st.sampled_from(ENGINES))
    mean, temperature = draw(st.booleans()), draw(st.booleans())
    x = problem(
        draw(st.integers(2, 60)),
        16,
        vocabulary,
        dtype,
        head=head,
        bias=bias,
        weighted=weighted,
        mean=mean,
        temperature=temperature,
        size=size,
        seed=seed,
        ignored=ignored,
    )
    bounds = sorted({0, vocabulary, *draw(st.lists(st.integers(1, vocabulary), max_size=3))})
    return x, bounds, *engine


@settings(max_examples=4)
@given(problems([0.1, 1.0, 5.0]), st.sampled_from([0, ALL, ALL]))
@example((problem(bias=True), (0, 41, 229), *ENGINES[0]), ALL)
@example((problem(mean=True, temperature=True), (0, 41, 229), *ENGINES[0]), 0)
@example((problem(mean=True, dtype="float32"), (0, 41, 229), *ENGINES[1]), 0)
def test_any_shards(drawn, memory_budget):
    check(*drawn, memory_budget)


@settings(max_examples=2)
@given(problems([1.0]), st.sampled_from([16, 32]))
@example((problem(mean=True, temperature=True, dtype="float32"), (0, 41, 229), *ENGINES[1]), 16)
@example((problem(temperature=True, head=Head(5.0)), (0, 41, 229), *ENGINES[0]), 16)
def test_any_shards_in_chunks(drawn, size):
    held(drawn[0], in_chunks(*drawn, size))


def test_a_shard_whose_exponentials_underflow_has_no_share():
    """The targets' logits are 200 above every logit of the second shard: its log-sum-exp is -inf, its gradients 0."""
    x = problem(dtype="bfloat16", vocabulary=64, ignored=0.0)
    c = np.zeros_like(x.inputs.c)
    c[:32, 0] = 200
    e = np.zeros_like(x.inputs.e)
    e[:, 0] = 1
    x = x._replace(inputs=x.inputs._replace(e=e, c=c, targets=np.arange(40, dtype=np.int32) % 32))
    for memory_budget in (0, ALL):
        check(x, (0, 32, 64), "cce", INTERPRETER, memory_budget)


def test_nothing_is_rescued_because_its_target_lies_elsewhere(monkeypatch):
    """`recomputed` writes nothing: no sum is inf. `saved_again` neither: every reference is a target's logit."""
    x = problem(ignored=0.0, size=0.1)
    targets = x.inputs.targets % 229
    reference = jnp.full(40, 0.0)
    local = x.inputs._replace(c=x.inputs.c[:100], targets=jnp.where(targets < 100, targets, 100))
    call = Call(40, 32, 100, "bfloat16", x.head, False, False, Wanted(True, True, False), ALL)
    plan = plan_of(call, INTERPRETER, "cce")
    engine, seen = type(plan.forward.rescue.engine), []  # type: ignore[union-attr]
    recomputed, saved_again = engine.recomputed, engine.saved_again
    monkeypatch.setattr(engine, "recomputed", lambda *x: (seen.append(x[-1]), recomputed(*x))[1])
    monkeypatch.setattr(engine, "saved_again", lambda *x: (seen.append(x[-2]), saved_again(*x))[1])
    forward.statistics(local, plan, reference)
    before, others = seen
    assert np.isfinite(before.log_mass).all()
    assert not others.any()


@pytest.mark.gpu
@pytest.mark.parametrize("memory_budget", [0, ALL])
@pytest.mark.parametrize("options", [{}, {"head": Head(softcap=20.0, vocab_axis=1)}, {"bias": True}], ids=str)
def test_shards_on_a_gpu(memory_budget, options):
    """Both engines of kernels: Hopper's where there is no bias."""
    check(problem(704, 256, 4096, size=2.0, **options), (0, 1024, 1152, 4096), "cce", local_gpu(), memory_budget)
