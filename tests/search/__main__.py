"""Random calls of linear_cross_entropy against float64: `python -m tests.search --cases 300 --seed 0`.

Draws calls (tests/search/calls.py) and their data (tests/search/data.py), runs them on what is there (a GPU, or else
Pallas' interpreter) and holds loss, lse and every gradient to bounds that are derived from rounding alone
(tests/search/truth.py, tests/search/bounds.py). A failure is printed with the options that repeat it, `--seed S --only
K`, then as the simplest call that still fails, a literal to make a named test of: `assert not failures(Call(…))`.

On a GPU: `python -m tests.search --cases 3000 --seed 0 --processes 12 --out bench/results/search.txt`. Calls are drawn
and compiled four at a time, with one program and different data.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.search.calls import SHARED, draw
from tests.search.processes import Report, examined, gpus, in_processes, prepare


def main() -> int:
    options = _options()
    where = options.shapes or ("gpu" if gpus() else "small")
    if options.only is not None:
        prepare()
        found = examined(options.seed, options.only, where, options.shrink)
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
        prepare()
        for number in range(options.first, options.first + options.cases):
            if time.monotonic() > until:
                break
            summary.add(examined(options.seed, number, where, options.shrink))
    else:
        in_processes(options, where, until, summary.add)
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
        kinds = {"package": program.package, "engine": of.engine, "type": program.dtype + ", c float32" * program.mixed}
        kinds |= {"reduction": program.reduction, "layout": ("(V, D)", "(D, V)")[program.vocab_axis]}
        kinds |= {"data": data.kind, "ignored": data.ignored, "gradients": ", ".join(program.wanted) or "none"}
        kinds |= {"differentiated": program.objective, "gradient_tolerance": f"{program.gradient_tolerance:.2g}"}
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


if __name__ == "__main__":
    sys.exit(main())
