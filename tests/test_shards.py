"""Passes over shards of the vocabulary, one after another on one device, held to float64 as drawn calls are.

Drawn calls (tests/search) split the vocabulary over devices and processes, and tests/devices/in_forward.py has chunks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cce_kernels import blocks
from cce_kernels.device import INTERPRETER, Gpu, local_gpu
from cce_kernels.head import Head
from cce_kernels.mean import over_runs
from cce_kernels.numbers import Cotangents, Inputs, Wanted, WantedNumbers
from cce_kernels.plan import plan_of
from cce_kernels.request import Request
from tests.search.bounds import checks
from tests.search.calls import LOG_PROBS, Call, Data, Program
from tests.search.data import drawn_arrays
from tests.search.truth import truth

ALL = 2**40  # bytes: all exponentials are saved
OF_SHARDS = Program(function=LOG_PROBS, split="vocabulary", width=32, dtype="bfloat16", objective=("log_probs", "lse"))
OF_SHARDS = replace(OF_SHARDS, memory_budget=ALL)
OF_MEAN = replace(OF_SHARDS, entropy=True, objective=("log_probs", "lse", "entropy"))


def shard_of(p: Program, given: dict[str, Any], start: int, stop: int) -> Inputs:
    """The inputs of a shard: targets of other columns are named by the number after its last."""
    c, targets, bias, heat = given["c"][start:stop], given["targets"], given["bias"], given["temperature"]
    local = jnp.where((targets >= start) & (targets < stop), targets - start, stop - start)
    return Inputs(
        given["e"],
        c if p.vocab_axis == 0 else c.T,
        None if bias is None else bias[start:stop],
        jnp.where(targets < 0, -1, local),
        None,
        None,
        None if heat is None else 1 / heat,
    )


def arrays_of(p: Program, given: Any) -> dict[str, Any]:
    targets = np.where(given.targets == p.ignore_index, -1, given.targets)
    of = {"e": given.e, "c": given.c, "bias": given.optional.get("bias"), "targets": targets}
    return jax.tree.map(jnp.asarray, of | {"temperature": given.temperature, "of": given.cotangents})


def over_shards(p: Program, bounds: Sequence[int], gpu: Gpu | None, given: dict[str, Any]) -> dict[str, jax.Array]:
    """The results and gradients of linear_log_probs, from one pass over each shard of columns and one back."""
    wanted, head = Wanted(True, True, "bias" in p.arrays), Head(p.softcap, p.vocab_axis)
    shards = []
    for start, stop in pairwise(bounds):
        request = Request(*given["e"].shape, stop - start, p.dtype, head, wanted.bias, wanted, int(p.memory_budget))
        mean = WantedNumbers(mean=bool(p.entropy))
        request = replace(request, wide_de=True, numbers=mean, with_temperature=p.temperatures)
        shards.append((shard_of(p, given, start, stop), plan_of(request, gpu, p.impl)))  # type: ignore[arg-type]
    reference = sum(blocks.target(*shard) for shard in shards)
    passes = [blocks.numbers(*shard, reference) for shard in shards]
    whole = over_runs(jax.tree.map(lambda *of_shards: jnp.stack(of_shards), *(numbers for numbers, _ in passes)), None)

    of_log_probs, of_lse, of_entropy = (given["of"].get(x, 0) for x in ("log_probs", "lse", "entropy"))
    of = Cotangents(of_lse - of_log_probs + of_entropy, of_log_probs, None, -of_entropy if p.entropy else None)
    each = [
        blocks.gradients(inputs, whole.relative_to(numbers.reference), saved, of, plan)[0]
        for (inputs, plan), (numbers, saved) in zip(shards, passes, strict=True)
    ]
    assert all(gradients.e.dtype == np.float32 for gradients in each)
    found = {"log_probs": whole.log_p(whole.target), "lse": whole.reference + whole.log_mass}
    found |= {"entropy": whole.log_mass - whole.mean} if p.entropy else {}
    found = {name: jnp.where(given["targets"] < 0, 0, x) for name, x in found.items()}
    dc = jnp.concatenate([x.c for x in each], p.vocab_axis)
    found |= {"e": sum(x.e for x in each).astype(given["e"].dtype), "c": dc if p.vocab_axis == 0 else dc.T}
    return found | ({"bias": jnp.concatenate([x.bias for x in each])} if "bias" in p.arrays else {})


def check(p: Program, bounds: Sequence[int], gpu: Gpu | None, *every: Data) -> None:
    run = jax.jit(partial(over_shards, p, bounds, gpu))
    for data in every:
        given = drawn_arrays(Call(p, data))
        found = {name: np.asarray(x) for name, x in run(arrays_of(p, given)).items()}
        assert not [x.words for x in checks(found, truth(given, p), p) if not x.ratio <= 1]


@pytest.mark.parametrize(
    "program",
    [
        replace(OF_SHARDS, arrays=("bias",), wanted=("e", "c", "bias")),
        replace(OF_MEAN, temperatures=True, memory_budget=0),
        OF_MEAN,
        replace(OF_MEAN, impl="chunked", dtype="float32", softcap=5.0, vocab_axis=1, memory_budget=0),
    ],
    ids=["saved", "the mean", "the mean, saved", "float32"],
)
def test_shards_of_several_sizes(program):
    """Also where a shard's exponentials underflow beside those of another: its log-sum-exp is -inf then."""
    underflow = Data(size=12.0, ignored="few"), Data(kind="confident", size=150.0)
    check(program, (0, 41, 229), INTERPRETER if program.impl == "cce" else None, *underflow)


def test_nothing_is_rescued_because_its_target_lies_elsewhere(monkeypatch):
    """`recomputed` writes nothing: no sum is inf. `saved_again` neither: every reference is a target's logit."""
    given = drawn_arrays(Call(OF_SHARDS, Data(size=0.1)))
    request = Request(40, 32, 100, "bfloat16", Head(), False, Wanted(True, True, False), ALL)
    plan = plan_of(request, INTERPRETER, "cce")
    engine, seen = type(plan.forward.rescue.engine), []  # type: ignore[union-attr]
    rescued, saved_again = engine.rescued, engine.saved_again
    monkeypatch.setattr(engine, "rescued", lambda *x: (seen.append(x[-1]), rescued(*x))[1])
    monkeypatch.setattr(engine, "saved_again", lambda *x: (seen.append(x[-2]), saved_again(*x))[1])
    blocks.numbers(shard_of(OF_SHARDS, arrays_of(OF_SHARDS, given), 0, 100), plan, jnp.full(40, 0.0))
    before, others = seen
    assert np.isfinite(before.log_mass).all()
    assert not others.any()


@pytest.mark.gpu
@pytest.mark.parametrize("memory_budget", [0, ALL])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 20.0, "vocab_axis": 1}, {"arrays": ("bias",), "wanted": ("e", "c", "bias")}], ids=str
)
def test_shards_on_a_gpu(memory_budget, options):
    """Both engines of kernels: Hopper's where there is no bias."""
    program = replace(OF_SHARDS, leading=(704,), width=256, vocabulary=4096, memory_budget=memory_budget, **options)
    check(program, (0, 1024, 1152, 4096), local_gpu(), Data(size=2.0, ignored="few"))
