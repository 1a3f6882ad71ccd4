"""All methods on one set of inputs: each checked against float64, then timed, then dropped before the next."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from bench import errors, memory
from bench.calls import Call, floor, step
from bench.data import Inputs
from bench.measure import steady
from bench.methods import METHODS

Row = dict[str, Any]
Tick = Callable[[str], object]  # told what comes next


class Results(NamedTuple):
    rows: list[Row]
    missing: list[Row]  # methods whose package is not here, or that time was over for: method and reason
    failed: list[Row]  # methods that could not do this shape: also shape and test_data


def measure(
    inputs: Inputs, data: str, names: Sequence[str], rounds: int, tick: Tick, until: float = math.inf
) -> Iterator[Results]:
    """One row a method; what there is so far, after each method and once more with the floor of all the run.

    A method that is missing or fails costs its own row alone. None is begun after `until`, by time.monotonic.
    """
    e, c, _ = inputs
    common = {"shape": [*e.shape, c.shape[0]], "dtype": e.dtype.name, "test_data": data}
    results = Results([], [], [])
    tick("float64")
    expected = errors.expected(*inputs)
    tick("compiling")
    programs = _compiled(names, inputs) if time.monotonic() < until else {}
    matmuls = floor(e, c)
    floors = [_floor(matmuls, rounds)]
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
            call = programs.pop(name).result() if name in programs else step("torch", loss, *inputs)
            found = errors.of_result(METHODS[name].framework, call(), expected, e.dtype)
            row = {**found, **_memory(call), "runtime_ms": steady(call, rounds)}
            results.rows.append({**common, "method": name, **row})
        except Exception as error:
            results.failed.append({**common, "method": name, "reason": first_line(error)})
        call = None
        memory.release()
        _relate(results.rows, floors)
        yield results
    floors.append(_floor(matmuls, rounds))  # again, so that the floor is of the clocks of all of the run
    _relate(results.rows, floors)
    yield results


def _compiled(names: Sequence[str], inputs: Inputs) -> dict[str, Future[Call]]:
    """The methods of JAX, compiled at the same time: most of what a benchmark of JAX waits for is XLA."""
    with ThreadPoolExecutor() as pool:
        futures = {
            name: pool.submit(lambda method: step("jax", method.load(), *inputs), METHODS[name])
            for name in names
            if METHODS[name].framework == "jax"
        }
        wait(futures.values())
    return futures


def _memory(call: Call) -> Row:
    """op_mem_mb. XLA says what a compiled program takes; of calls from PyTorch the frameworks' pools have to tell."""
    if call.scratch is not None and call.output is not None:
        return {"op_mem_mb": (call.scratch + call.output) / memory.MIB}
    torch_mb, jax_mb = memory.of_torch(call), memory.of_jax(call)
    return {"op_mem_mb": torch_mb + jax_mb, "torch_pool_mb": torch_mb, "jax_pool_mb": jax_mb}


def _floor(matmuls: dict[str, Call], rounds: int) -> float:
    """Milliseconds of the bare matmuls."""
    return sum(steady(call, rounds) for call in matmuls.values())


def _relate(rows: list[Row], floors: list[float]) -> None:
    """Each row's floor, and its ratio to it."""
    for row in rows:
        row["floor_ms"] = float(np.mean(floors))
        row["ratio"] = row["runtime_ms"] / row["floor_ms"]


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"
