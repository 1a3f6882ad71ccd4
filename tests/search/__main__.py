"""Random calls of every public function against float64: `python -m tests.search --cases 300 --seed 0`.

Draws calls (tests/search/calls.py) and their data (tests/search/data.py), runs them through their transformation on
what is there (a GPU, or else Pallas' interpreter) and holds all results and every gradient to bounds that are derived
from rounding alone (tests/search/truth.py, tests/search/bounds.py). tests/search/refusals.py says which calls must be
refused. A failure is printed with the options that repeat it, `--shapes W --seed S --only K`, then as the simplest call
that still fails, a literal to make a named test of: `assert not failures(Call(…))`.

    python -m tests.search --shapes jax --cases 3000 --processes 2            JAX on one device
    python -m tests.search --shapes sharded --cases 600 --processes 2         JAX on 8 devices
    python -m tests.search --shapes torch --cases 3000 --processes 2          PyTorch in one process
    python -m tests.search --shapes processes --cases 300                     PyTorch in 2 and 4 processes
    python -m tests.search --nightly --seconds 3600 --processes 2             these four, with a new seed, and inductor
    python -m tests.search --cases 1000 --processes 12 --out FILE             on a GPU, both packages

Calls are drawn and compiled three at a time, with one program and different data.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

from tests.search.calls import SHARED, WHERE, kinds, pairs
from tests.search.processes import Drawn, Report, examined, gpus, in_processes, prepare


def main() -> int:
    options = _options()
    where = options.shapes or ("gpu" if gpus() else "jax")
    drawn = Drawn(options.seed, where, options.inductor)
    if options.only is not None and len(options.only) == 1:
        (number,) = options.only
        prepare(where)
        found = examined(drawn, number, options.shrink)
        print(drawn.call(number), *found.wrong, f"error over bound: {found.ratios}", sep="\n")
        if found.wrong:
            print(f"simplest call that fails:\n{found.simplest}")
        return bool(found.wrong)
    out = open(options.out, "w") if options.out else None  # noqa: SIM115

    def say(text: str) -> None:
        for file in (sys.stdout, *([out] if out else [])):
            print(text, file=file, flush=True)

    say(f"python -m tests.search {' '.join(sys.argv[1:])}")
    if options.nightly:
        seed = options.seed or date.today().toordinal()
        every = [Drawn(seed, where, True) for where in ("jax", "sharded", "torch", "processes")]
        results = [_searched(options, one, say, options.seconds and options.seconds / len(every)) for one in every]
    else:
        results = [_searched(options, drawn, say, options.seconds)]
    if out:
        out.close()
    return int(not all(results))


def _searched(options: argparse.Namespace, drawn: Drawn, say: Callable[[str], None], seconds: float | None) -> bool:
    """Whether there were calls, and all were right."""
    summary, start = Summary(drawn, say), time.monotonic()
    until = start + seconds if seconds else float("inf")
    if options.processes == 1 and not options.nightly:
        prepare(drawn.where)
        for number in options.only or range(options.first, options.first + options.cases):
            if time.monotonic() > until:
                break
            summary.add(examined(drawn, number, options.shrink))
    else:  # each kind of call needs devices of its own
        in_processes(options, drawn, until, summary.add)
    summary.end(time.monotonic() - start)
    return bool(summary.calls and not summary.failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.search", description="Random calls against float64.")
    parser.add_argument("--cases", type=int, default=300, help="calls, three of each program (300)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first call (0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="calls by their numbers; of one all is printed")
    parser.add_argument("--processes", type=int, default=1, help="processes that run calls, spread over all GPUs (1)")
    parser.add_argument("--seconds", type=float, help="after so many, start no more calls")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to look for a simpler failing call (60)")
    parser.add_argument("--shapes", choices=WHERE, help="which calls; default: gpu where there is one, else jax")
    parser.add_argument("--inductor", action="store_true", help="torch.compile with inductor, not aot_eager")
    parser.add_argument("--nightly", action="store_true", help="calls of all kinds without a GPU; the seed is the day")
    parser.add_argument("--out", type=Path, help="a file for what is printed")
    return parser.parse_args()


class Summary:
    """Counts calls, and prints failures as they come and all counts at the end."""

    def __init__(self, drawn: Drawn, say: Callable[[str], None]):
        self.drawn, self.say = drawn, say
        self.calls, self.refused, self.failed = 0, 0, []
        self.pairs: Counter[tuple] = Counter()
        self.programs: set[int] = set()
        self.counts: dict[str, Counter] = {}
        self.worst: dict[tuple[str, str], tuple[float, int]] = {}

    def add(self, of: Report) -> None:
        self.calls += 1
        self.refused += of.refused
        self.programs.add(of.number // SHARED)
        call = self.drawn.call(of.number)
        program, data = call.program, call.data
        self.pairs.update((program.package, *pair) for pair in pairs(program))
        found = {"package": program.package, "engine": of.engine} | kinds(program)
        found |= {"data": data.kind, "offset": f"{data.offset:g}", "ignored": data.ignored, "teacher": data.teacher}
        for name, value in found.items():
            self.counts.setdefault(name, Counter())[value] += 1
        for name, ratio in of.ratios.items():
            key = name, program.dtype
            self.worst[key] = max(self.worst.get(key, (0.0, of.number)), (ratio, of.number))
        if of.wrong:
            self.failed.append(of.number)
            how = f"--shapes {self.drawn.where} --seed {self.drawn.seed}{' --inductor' * self.drawn.inductor}"
            self.say(f"FAILED {how} --only {of.number} ({of.engine})\n  {call}")
            self.say("\n".join(f"  {line}" for line in of.wrong) + f"\n  simplest: {of.simplest}")

    def end(self, seconds: float) -> None:
        where, calls = self.drawn.where, f"{self.calls} calls of {len(self.programs)} programs"
        self.say(f"{where}: {calls} in {seconds:.0f} s, {self.refused} of them refused, {len(self.failed)} failed")
        seldom = sum(n < 5 for n in self.pairs.values())
        self.say(f"  {len(self.pairs)} pairs of values of two dimensions, {seldom} of them less than 5 times")
        for name, counts in self.counts.items():
            self.say(f"  {name}: " + ", ".join(f"{n} {value or 'none'}" for value, n in counts.most_common()))
        self.say("  largest error over its bound, and the call's number:")
        for (name, dtype), (ratio, number) in sorted(self.worst.items()):
            self.say(f"    {name} {dtype}: {ratio:.3f} ({number})")
        if self.failed:
            self.say(f"  failed: --shapes {where} --seed {self.drawn.seed} --only {' '.join(map(str, self.failed))}")


if __name__ == "__main__":
    sys.exit(main())
