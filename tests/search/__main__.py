"""Random calls of linear_cross_entropy against float64: `python -m tests.search --cases 300 --seed 0`.

Draws calls (tests/search/calls.py) and their data (tests/search/data.py), runs them on what is there (a GPU, or else
Pallas' interpreter) and holds loss, lse and every gradient to bounds that are derived from rounding alone
(tests/search/truth.py, tests/search/bounds.py). A failure is printed with the options that repeat it, `--seed S --only
K`, then as the simplest call that still fails, a literal to make a named test of: `assert not failures(Call(…))`.

On a GPU: `python -m tests.search --cases 3000 --seed 0 --processes 12 --out bench/results/search.txt`. Calls are drawn
and compiled four at a time, with one program and different data.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.search.calls import SHARED, draw

PROGRAMS_HELD = 8  # compiled programs that a process holds at a time


class Report(NamedTuple):
    """What came of a call."""

    number: int
    engine: str
    ratios: dict[str, float]  # error over bound of each result
    wrong: list[str]
    simplest: str  # the shrunk call, where it failed


def main() -> int:
    options = _options()
    where = options.shapes or ("gpu" if _gpus() else "small")
    if options.only is not None:
        _prepare()
        found = _examined(options.seed, options.only, where, options.shrink)
        call = draw(options.seed, options.only, where)
        print(call, *found.wrong, f"error over bound: {found.ratios}", sep="\n")
        if found.wrong:
            print(f"simplest call that fails:\n{found.simplest}")
        return bool(found.wrong)
    out = open(options.out, "w") if options.out else None  # noqa: SIM115

    def say(text: str) -> None:
        for file in (sys.stdout, *([out] if out else [])):
            print(text, file=file, flush=True)

    say(f"python -m tests.search {' '.join(sys.argv[1:])}")
    summary = Summary(options.seed, where, say)
    start = time.monotonic()
    until = start + options.seconds if options.seconds else float("inf")
    if options.processes == 1:
        _prepare()
        for number in range(options.first, options.first + options.cases):
            if time.monotonic() > until:
                break
            summary.add(_examined(options.seed, number, where, options.shrink))
    else:
        _in_processes(options, where, until, summary.add)
    summary.end(time.monotonic() - start)
    if out:
        out.close()
    return bool(summary.failed or not summary.calls)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.search", description="Random calls against float64.")
    parser.add_argument("--cases", type=int, default=300, help="calls, four of each program (300)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first call (0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one call, by its number")
    parser.add_argument("--processes", type=int, default=1, help="processes that run calls, spread over all GPUs (1)")
    parser.add_argument("--seconds", type=float, help="after so many, start no more calls")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to look for a simpler failing call (60)")
    parser.add_argument("--shapes", choices=("small", "gpu"), help="default: gpu where there is one")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    return parser.parse_args()


class Summary:
    """Counts calls, and prints failures as they come and all counts at the end."""

    def __init__(self, seed: int, where: str, say: Callable[[str], None]):
        self.seed, self.where, self.say = seed, where, say
        self.calls, self.failed = 0, []
        self.programs: set[int] = set()
        self.counts: dict[str, Counter] = {}
        self.worst: dict[tuple[str, str], tuple[float, int]] = {}

    def add(self, of: Report) -> None:
        self.calls += 1
        self.programs.add(of.number // SHARED)
        program, data = (call := draw(self.seed, of.number, self.where)).program, call.data
        kinds = {"package": program.package, "engine": of.engine, "type": program.dtype, "reduction": program.reduction,
                 "layout": ("(V, D)", "(D, V)")[program.vocab_axis], "data": data.kind, "ignored": data.ignored,
                 "gradients": ", ".join(program.wanted) or "none", "differentiated": program.objective}  # fmt: skip
        for name, value in kinds.items():
            self.counts.setdefault(name, Counter())[value] += 1
        for name, ratio in of.ratios.items():
            key = name, program.dtype
            self.worst[key] = max(self.worst.get(key, (0.0, of.number)), (ratio, of.number))
        if of.wrong:
            self.failed.append(of.number)
            self.say(f"FAILED --seed {self.seed} --only {of.number} ({of.engine})\n  {call}")
            self.say("\n".join(f"  {line}" for line in of.wrong) + f"\n  simplest: {of.simplest}")

    def end(self, seconds: float) -> None:
        self.say(f"{self.calls} calls of {len(self.programs)} programs in {seconds:.0f} s, {len(self.failed)} failed")
        for name, counts in self.counts.items():
            self.say(f"  {name}: " + ", ".join(f"{n} {value}" for value, n in counts.most_common()))
        self.say("  largest error over its bound, and the call's number:")
        for (name, dtype), (ratio, number) in sorted(self.worst.items()):
            self.say(f"    {name} {dtype}: {ratio:.3f} ({number})")
        if self.failed:
            self.say(f"  failed: --seed {self.seed} --only {', '.join(map(str, self.failed))}")


def _prepare() -> None:
    """On a CPU most of the time is LLVM's: without costly optimisations, as in tests/conftest.py."""
    if not _gpus() and platform.machine() == "x86_64":
        flags = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_max_isa=AVX"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "gpu":
        jax.config.update("jax_disable_most_optimizations", True)


def _examined(seed: int, number: int, where: str, shrink: float) -> Report:
    """Runs a call, and shrinks it if it fails."""
    from tests.search.run import engine, examine, failures
    from tests.search.shrink import shrunk

    call = draw(seed, number, where)
    ratios: dict[str, float] = {}
    try:
        results = examine(call)
        ratios = {x.name: x.ratio for x in results}
        wrong = [x.words for x in results if not x.ratio <= 1]
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"[:1000]]
    simplest = ""
    if wrong and shrink > 0:
        simplest = repr(shrunk(call, lambda simpler: bool(failures(simpler)), shrink))
    return Report(number, engine(call.program), ratios, wrong, simplest)


def _worker(pipe: Connection, seed: int, where: str, shrink: float) -> None:
    """Examines the calls whose numbers come through the pipe. A GPU that failed once may fail all that follow."""
    _prepare()
    import jax

    from tests.search import run

    numbers = iter(pipe.recv, None)
    for count, number in enumerate(numbers, 1):
        pipe.send(_examined(seed, number, where, shrink))
        if count % (PROGRAMS_HELD * SHARED) == 0:
            run.forget()
            jax.clear_caches()


class _Process:
    """A worker, and the call that it is at."""

    def __init__(self, number: int, options: argparse.Namespace, where: str):
        gpus = _gpus()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_worker, args=(theirs, options.seed, where, options.shrink), daemon=True)
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


def _in_processes(options: argparse.Namespace, where: str, until: float, add: Callable[[Report], None]) -> None:
    """Each worker takes the calls of one program after the other; one that dies is a failure, and is replaced."""
    programs = iter(range(options.first // SHARED, -(-(options.first + options.cases) // SHARED)))
    queues: list[list[int]] = [[] for _ in range(options.processes)]

    def next_call(k: int) -> int | None:
        if time.monotonic() > until:
            return None
        if not queues[k] and (program := next(programs, None)) is not None:
            numbers = range(program * SHARED, program * SHARED + SHARED)
            queues[k] = [n for n in numbers if options.first <= n < options.first + options.cases]
        return queues[k].pop(0) if queues[k] else None

    workers: dict[Any, tuple[int, _Process]] = {}

    def start(k: int) -> None:
        if (call := next_call(k)) is not None:
            worker = _Process(k, options, where)
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
                        Report(worker.at, "unknown", {}, [f"the process ended with exit code {code}"], "not looked for")
                    )
                start(k)
                continue
            add(report)
            call = next_call(k)
            worker.give(call)
            if call is None:
                del workers[pipe]
                worker.process.join()


def _gpus() -> list[str]:
    """The GPUs to use, by their numbers, without starting JAX on any."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(i) for i in range(len(listed.splitlines()))]


if __name__ == "__main__":
    sys.exit(main())
