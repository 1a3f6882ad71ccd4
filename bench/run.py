"""All methods on one set of inputs: each checked against float64, then timed, then dropped before the next."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from bench import errors, memory
from bench.calls import Call, floor, step
from bench.data import Inputs
from bench.measure import steady
from bench.methods import METHODS
from bench.report import Row, first_line


class Results(NamedTuple):
    rows: list[Row]
    missing: list[Row]  # methods whose package is not here, or that time was over for: method and reason
    failed: list[Row]  # methods that could not do this shape: also shape and test_data


def measure(
    inputs: Inputs, data: str, names: Sequence[str], rounds: int, until: float = math.inf
) -> Iterator[tuple[str, Results]]:
    """One row a method; what comes next with what there is so far, and at the end once more with the floor of all.

    A method that is missing or fails costs its own row alone. None is begun after `until`, by time.monotonic.
    """
    e, c, _ = inputs
    common = {"shape": [*e.shape, c.shape[0]], "dtype": e.dtype.name, "test_data": data}
    results = Results([], [], [])
    yield "float64", results
    expected = errors.expected(*inputs)
    yield "compiling", results
    programs = _compiled(names, inputs) if time.monotonic() < until else {}
    matmuls = floor(e, c)
    floors = [_floor(matmuls.values(), rounds)]
    for name in names:
        yield name, results
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
            row = {**found, "op_mem_mb": memory.peak(call), "runtime_ms": steady(call, rounds)}
            results.rows.append({**common, "method": name, **row})
        except Exception as error:
            results.failed.append({**common, "method": name, "reason": first_line(error)})
        call = None
        memory.release()
        _relate(results.rows, floors)
    floors.append(_floor(matmuls.values(), rounds))  # again, so that the floor is of the clocks of all of the run
    _relate(results.rows, floors)
    yield "", results


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


def _floor(matmuls: Iterable[Call], rounds: int) -> float:
    """Milliseconds of the bare matmuls."""
    return sum(steady(call, rounds) for call in matmuls)


def _relate(rows: list[Row], floors: list[float]) -> None:
    """Each row's floor, and its ratio to it."""
    for row in rows:
        row["floor_ms"] = float(np.mean(floors))
        row["ratio"] = row["runtime_ms"] / row["floor_ms"]


def gradients(row: Row) -> float:
    """MiB of the gradients of e and c, which every method returns."""
    (tokens, width, vocabulary), size = row["shape"], 4 if row["dtype"] == "float32" else 2
    return size * width * (tokens + vocabulary) / 2**20
