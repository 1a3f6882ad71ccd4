"""Examines calls: here, or in processes that run beside each other, one of which may die."""

import argparse
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tests.search.calls import SHARED, Call, draw

PROGRAMS_HELD = 8  # compiled programs that a process holds at a time
DEVICES = "--xla_force_host_platform_device_count=8"


class Drawn(NamedTuple):
    """Which calls are drawn, and where they run."""

    seed: int
    where: str  # of WHERE
    inductor: bool = False  # whether torch.compile takes its usual backend

    def call(self, number: int) -> Call:
        call = draw(self.seed, number, self.where)
        return replace(call, program=replace(call.program, backend="inductor")) if self.inductor else call


class Report(NamedTuple):
    """What came of a call."""

    number: int
    engine: str
    ratios: dict[str, float]  # error over bound of each result
    refused: bool  # as it must be
    wrong: list[str]
    simplest: str  # the shrunk call, where it failed


def prepare(where: str) -> None:
    """On a CPU most of the time is LLVM's: without costly optimisations, as in tests/conftest.py."""
    if not gpus() and platform.machine() == "x86_64":
        flags = "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_max_isa=AVX"
        flags += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    if where == "sharded":
        os.environ["XLA_FLAGS"] = f"{DEVICES} {os.environ.get('XLA_FLAGS', '')}"
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        import torch

        torch.set_num_threads(1)
        jax.config.update("jax_disable_most_optimizations", True)


def examined(drawn: Drawn, number: int, shrink: float) -> Report:
    """Runs a call, and shrinks it if it fails."""
    from tests.search.refusals import refusal
    from tests.search.run import engine, examine, failures
    from tests.search.shrink import shrunk

    call = drawn.call(number)
    ratios: dict[str, float] = {}
    try:
        results = examine(call)
        ratios = {x.name: x.ratio for x in results}
        wrong = [x.words for x in results if not x.ratio <= 1]
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"[:1000]]
    simplest = ""
    if wrong and shrink > 0:
        simplest = repr(shrunk(call, failures, shrink))
    return Report(number, engine(call.program), ratios, refusal(call) is not None, wrong, simplest)


def _worker(pipe: Connection, drawn: Drawn, shrink: float) -> None:
    """Examines the calls whose numbers come through the pipe. A GPU that failed once may fail all that follow."""
    prepare(drawn.where)
    import jax

    from tests.search import run

    numbers = iter(pipe.recv, None)
    for count, number in enumerate(numbers, 1):
        pipe.send(examined(drawn, number, shrink))
        if count % (PROGRAMS_HELD * SHARED) == 0:
            run.forget()
            jax.clear_caches()


class _Process:
    """A worker, and the call that it is at."""

    def __init__(self, number: int, drawn: Drawn, shrink: float):
        found = gpus()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if found:
            os.environ["CUDA_VISIBLE_DEVICES"] = found[number % len(found)]
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_worker, args=(theirs, drawn, shrink))
        self.process.start()
        theirs.close()
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        self.at: int | None = None

    def give(self, call: int | None) -> None:
        self.at = call
        self.pipe.send(call)


def in_processes(options: argparse.Namespace, drawn: Drawn, until: float, add: Callable[[Report], None]) -> None:
    """Each worker takes the calls of one program after the other; one that dies is a failure, and is replaced."""
    calls = options.only or range(options.first, options.first + options.cases)
    programs = groupby(calls, lambda number: number // SHARED)
    queues: list[list[int]] = [[] for _ in range(options.processes)]

    def next_call(k: int) -> int | None:
        if time.monotonic() > until:
            return None
        if not queues[k]:
            _, numbers = next(programs, (None, ()))
            queues[k] = list(numbers)
        return queues[k].pop(0) if queues[k] else None

    workers: dict[Any, tuple[int, _Process]] = {}

    def start(k: int) -> None:
        if (call := next_call(k)) is not None:
            worker = _Process(k, drawn, options.shrink)
            workers[worker.pipe] = k, worker
            worker.give(call)

    for k in range(options.processes):
        start(k)
    while workers:
        for pipe in wait(list(workers)):
            k, worker = workers[pipe]
            try:
                report = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                del workers[pipe]
                worker.process.join()
                if worker.at is not None:
                    code = worker.process.exitcode
                    add(
                        Report(
                            worker.at,
                            "unknown",
                            {},
                            False,
                            [f"the process ended with exit code {code}"],
                            "not looked for",
                        )
                    )
                start(k)
                continue
            add(report)
            call = next_call(k)
            worker.give(call)
            if call is None:
                del workers[pipe]
                worker.process.join()


def gpus() -> list[str]:
    """The GPUs to use, by their numbers, without starting JAX on any."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(i) for i in range(len(listed.splitlines()))]
