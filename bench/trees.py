"""Time this checkout and another one of the project, in turns in one run: `python -m bench.trees OTHER`.

Each checkout runs in a process of its own on the same GPU, and one of them works at a time. What is printed and kept is
the time of forward and backward of this one over that of the other.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

FUNCTIONS = "linear_cross_entropy", "linear_log_probs", "linear_divergence"
BURST = 5  # calls of a turn, the first not counted
HERE = Path(__file__).resolve().parent.parent
# The other checkout's process runs this file too, with that checkout's packages.
WORKER = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name='trees')['worker']()"


def worker() -> None:
    """Runs what each line of the input names, and prints how many milliseconds it took."""
    line, call = "", worker
    for asked in sys.stdin:
        if asked != line:
            call = worker  # drops the call before, so that the next one has its memory
            line, call = asked, step(**json.loads(asked))
            for _ in range(3):
                call()
        times = []
        for _ in range(BURST):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        print("took " + json.dumps(times[1:]), flush=True)


def step(shape: list[int], package: str, function: str, options: dict[str, Any]) -> Callable[[], object]:
    import jax

    from bench.data import Shape, trained

    e, c, *others = trained(Shape(*shape))
    if function == "linear_divergence":
        others = trained(Shape(*shape), of_head=1)[:2]
    if package == "cce_jax":
        import cce_jax

        program = jax.jit(jax.value_and_grad(partial(loss, getattr(cce_jax, function), options), (0, 1)))
        return lambda: jax.block_until_ready(program(e, c, *others))
    import torch

    import cce_torch

    leaves = [torch.from_dlpack(x).clone().requires_grad_() for x in (e, c)]
    beside = [torch.from_dlpack(x).clone() for x in others]
    beside = [x if x.is_floating_point() else x.long() for x in beside]

    def run() -> None:
        torch.autograd.grad(loss(getattr(cce_torch, function), options, *leaves, *beside), leaves)
        torch.cuda.synchronize()

    return run


def loss(function: Callable[..., Any], options: dict[str, Any], *arrays: Any) -> Any:
    found = function(*arrays, **options)
    return found.log_probs.sum() if hasattr(found, "log_probs") else found


class Checkout:
    def __init__(self, folder: Path) -> None:
        paths = [str(folder), str(folder / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        process = subprocess.Popen([sys.executable, "-c", WORKER], env=environment, cwd=folder, **pipes)
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.asks, self.answers = process, process.stdin, process.stdout

    def times(self, what: dict[str, Any]) -> list[float]:
        print(json.dumps(what), file=self.asks)
        for line in self.answers:
            if line.startswith("took "):
                return json.loads(line[5:])
        raise RuntimeError(f"a checkout's process ended: {what}")

    def end(self) -> None:
        self.asks.close()
        self.process.wait()


def main() -> None:
    from bench import report
    from bench.data import HEADS, SHAPES

    parser = argparse.ArgumentParser("python -m bench.trees", description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout's folder")
    parser.add_argument("--head", choices=HEADS, nargs="+", default=HEADS)
    parser.add_argument("--package", choices=["cce_jax", "cce_torch"], nargs="+", default=["cce_jax", "cce_torch"])
    parser.add_argument("--memory-budget", nargs="+", default=["default", "all"], help='"default", "all" or bytes')
    parser.add_argument("--function", choices=FUNCTIONS, default=FUNCTIONS[0])
    parser.add_argument(
        "--option", nargs="+", default=[], metavar="NAME=NUMBER", help="of each call, as logit_scale=2.0"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/trees.json"))
    asked = parser.parse_args()
    rows: list[report.Row] = []
    of_all = {name: json.loads(number) for name, number in (x.split("=") for x in asked.option)}
    budgets = [{} if x == "default" else {"memory_budget": x if x == "all" else int(x)} for x in asked.memory_budget]
    checkouts = [Checkout(folder) for folder in (HERE, asked.other.resolve())]
    for head in asked.head:
        for package, options in ((x, y) for x in asked.package for y in budgets):
            what = {"shape": SHAPES[head], "package": package, "function": asked.function, "options": of_all | options}
            turns = [[checkout.times(what) for checkout in checkouts] for _ in range(asked.rounds)]
            this, other = np.median(turns, axis=(0, 2)).tolist()
            rows.append({"head": head, **what, "this": this, "other": other, "ratio": this / other})
            print(rows[-1], flush=True)
            report.write(asked.out, rows=rows)
    for checkout in checkouts:
        checkout.end()


if __name__ == "__main__":
    main()
