"""All methods on one set of inputs: each checked against float64, then timed, then dropped before the next."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench import calls_jax, errors, memory
from bench.calls import Call
from bench.data import Inputs
from bench.measure import REGIMES, times
from bench.methods import METHODS

Row = dict[str, Any]
Tick = Callable[[str], object]  # told what comes next


class Results(NamedTuple):
    rows: list[Row]
    missing: list[Row]  # methods whose package is not here, or that time was over for: method and reason
    failed: list[Row]  # methods that could not do this shape: also shape and test_data


def measure(
    inputs: Inputs, data: str, names: Sequence[str], kinds: Collection[str], rounds: int, tick: Tick,
    until: float = math.inf,
) -> Iterator[Results]:  # fmt: skip
    """One row a method and kind; what there is so far, after each method and once more with the floor of all the run.

    A method that is missing or fails costs its own rows alone. None is begun after `until`, by time.monotonic.
    """
    e, c, _ = inputs
    shape = [*e.shape, c.shape[0]]
    common = {"shape": shape, "dtype": e.dtype.name, "test_data": data}
    results = Results([], [], [])
    tick("float64")
    expected = errors.expected(*inputs)
    tick("floor")
    floors = [_floor(inputs, rounds)]
    for name in names:
        tick(name)
        if time.monotonic() > until:
            results.missing.append({"method": name, "reason": "the time for methods was over"})
            continue
        try:
            loss = METHODS[name].load()
        except Exception as error:  # also a package that is there but cannot be imported on this machine
            results.missing.append({"method": name, "reason": first_line(error)})
            continue
        try:
            rows = _method(name, loss, inputs, kinds, rounds, expected)
            results.rows.extend({**common, "method": name, **row} for row in rows)
        except Exception as error:
            results.failed.append({**common, "method": name, "reason": first_line(error)})
        memory.release()
        _relate(results.rows, floors)
        yield results
    floors.append(_floor(inputs, rounds))  # again, so that the floor is of the clocks of all of the run
    _relate(results.rows, floors)
    yield results


def _method(name: str, loss: Callable, inputs: Inputs, kinds: Collection[str], rounds: int, expected) -> list[Row]:
    framework = METHODS[name].framework
    calls = calls_of(framework, loss, inputs, {*kinds, "loss-fw-bw"})
    found = errors.of_result(framework, calls["loss-fw-bw"](), expected, inputs[0].dtype)
    return [{"kind": kind, **found, **_memory(call), **_times(call, rounds)}
            for kind, call in calls.items() if kind in kinds]  # fmt: skip


def calls_of(framework: str, loss: Callable, inputs: Inputs, kinds: Collection[str]) -> dict[str, Call]:
    if framework == "jax":
        return calls_jax.kinds(loss, *inputs, kinds)
    from bench import calls_torch

    e, c, targets = calls_torch.tensors(*inputs)
    return calls_torch.kinds(loss, e, c, targets.long(), kinds)


def _memory(call: Call) -> Row:
    """op_mem_mb of the kind, and of which pool. XLA says what a compiled program takes; of other calls of JAX, those
    from PyTorch, the pool has to tell."""
    call()  # compiles, chooses, autotunes
    torch_mb, jax_mb = memory.of_torch(call), memory.of_jax(call)
    row: Row = {"torch_pool_mb": torch_mb, "jax_pool_mb": jax_mb}
    if call.scratch is not None and call.output is not None:
        row["scratch_mib"] = call.scratch / memory.MIB
        return row | {"op_mem_mb": (call.scratch + call.output) / memory.MIB}
    return row | {"op_mem_mb": torch_mb + jax_mb}


def _times(call: Call, rounds: int) -> Row:
    found = times(call, rounds)
    return {"runtime_ms": found["steady"], "runtime_ms_spaced": found["spaced"]}


def _floor(inputs: Inputs, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each bare matmul, by regime."""
    return {name: times(call, rounds) for name, call in calls_jax.floor(*inputs[:2]).items()}


def _relate(rows: list[Row], floors: list[dict[str, dict[str, float]]]) -> None:
    """Each row's floor, and its ratio to it. The ratio of a kind is to the matmuls that the kind needs."""
    for row in rows:
        for regime, suffix in zip(REGIMES, ("", "_spaced"), strict=True):
            needed = calls_jax.FLOOR_OF[row["kind"]]
            least = float(np.mean([sum(floor[matmul][regime] for matmul in needed) for floor in floors]))
            row[f"floor_ms{suffix}"] = least
            row[f"ratio{suffix}"] = row[f"runtime_ms{suffix}"] / least


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"
