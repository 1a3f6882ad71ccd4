"""Time this checkout beside another one of the project, in one run, taking turns: `python -m bench.trees OTHER`.

Each checkout runs in a process of its own on the same GPU, and one of them works at a time. What is printed and kept is
the time of this one over that of the other.

    steady    forward and backward of cce_jax and cce_torch, at the heads and budgets that are asked for
    host      what a small call from PyTorch costs the host, in microseconds: the least of several pairs of processes: a
              process may be slower than the next for as long as it lives, by as much as a factor of two
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HEADS = {"gemma2-2b": (8192, 2304, 256000), "llama3-8b": (8192, 4096, 128256), "gist": (32768, 768, 128256)}
BUDGETS = ("", "2NV")
BURST = 5  # calls of a turn, the first not counted
PAIRS = 5  # of processes, for the host's time
HERE = Path(__file__).resolve().parent.parent


def worker() -> None:
    """Runs what each line of the input names, and prints how long it took."""
    import time

    import jax
    import torch

    from bench.data import Shape, trained

    made: dict[str, Any] = {}

    def prepared(what: dict[str, Any]):
        import cce_jax
        import cce_torch

        tokens, width, vocabulary = what["shape"]
        e, c, targets = trained(Shape(tokens, width, vocabulary))
        options = dict(what["options"])
        if what["budget"] == "2NV":
            options["memory_budget"] = 2 * tokens * vocabulary
        if what["package"] == "cce_jax":

            def loss(e, c):
                return cce_jax.linear_cross_entropy(e, c, targets, **options)

            step = jax.jit(jax.value_and_grad(loss, (0, 1)))
            return lambda: jax.block_until_ready(step(e, c))
        on_gpu = [torch.from_dlpack(x).clone() for x in (e, c, targets)]
        leaves = [x.requires_grad_() for x in on_gpu[:2]]

        def step_of_torch() -> None:
            cce_torch.linear_cross_entropy(leaves[0], leaves[1], on_gpu[2].long(), **options).backward()
            for x in leaves:
                x.grad = None
            torch.cuda.synchronize()

        return step_of_torch

    def host(backward: bool) -> float:
        """Microseconds of the host for a small call, in a loop of its own."""
        import cce_torch

        e = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
        c = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
        targets = torch.randint(0, 512, (64,), device="cuda")
        times = []
        for _ in range(300):
            start = time.perf_counter()
            loss = cce_torch.linear_cross_entropy(e, c, targets)
            if backward:
                loss.backward()
            times.append(time.perf_counter() - start)
            e.grad = c.grad = None
            torch.cuda.synchronize()
        return float(np.median(times[50:])) * 1e6

    for line in sys.stdin:
        what = json.loads(line)
        if what["kind"] == "host":
            answer = [host(what["backward"])]
        else:
            if what["name"] not in made:
                made.clear()
                made[what["name"]] = prepared(what)
                for _ in range(3):
                    made[what["name"]]()
            answer = []
            for _ in range(BURST):
                start = time.perf_counter()
                made[what["name"]]()
                answer.append((time.perf_counter() - start) * 1e3)
            answer = answer[1:]
        print("took " + json.dumps(answer), flush=True)


class Checkout:
    def __init__(self, folder: Path) -> None:
        paths = [str(folder), str(folder / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-c", WORKER.format(path=str(HERE / "bench" / "trees.py"))]
        self.process = subprocess.Popen(command, env=environment, cwd=folder, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)  # fmt: skip

    def times(self, what: dict[str, Any]) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("took "):
                return json.loads(line[5:])
        raise RuntimeError(f"a checkout's process ended: {what}")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


WORKER = "import runpy; runpy.run_path({path!r}, run_name='trees')['worker']()"


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.trees", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("other", type=Path, help="the other checkout's folder")
    parser.add_argument("--head", choices=HEADS, nargs="+", default=list(HEADS))
    parser.add_argument("--package", choices=["cce_jax", "cce_torch"], nargs="+", default=["cce_jax", "cce_torch"])
    parser.add_argument("--softcap", type=float, default=None)
    parser.add_argument("--host", action="store_true", help="the host's time alone")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (10)")
    parser.add_argument("--out", type=Path, default=Path("out/trees.json"))
    asked = parser.parse_args()
    from bench.report import environment

    options = {} if asked.softcap is None else {"softcap": asked.softcap}
    rows = []
    kept = {**environment(), "rows": rows}
    asked.out.parent.mkdir(parents=True, exist_ok=True)

    def both() -> dict[str, Checkout]:
        return {"this": Checkout(HERE), "other": Checkout(asked.other.resolve())}

    def add(row: dict[str, Any], this: float, other: float) -> None:
        rows.append({**row, "this": this, "other": other, "ratio": this / other})
        print(rows[-1], flush=True)
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")

    checkouts = both()
    for head in [] if asked.host else asked.head:
        for package in asked.package:
            for budget in BUDGETS:
                row = {"head": head, "package": package, "budget": budget or "default", **options}
                what = {"kind": "steady", "name": repr(row), "shape": HEADS[head], "package": package,
                        "budget": budget, "options": options}  # fmt: skip
                found: dict[str, list[float]] = {name: [] for name in checkouts}
                for _ in range(asked.rounds):
                    for name, checkout in checkouts.items():
                        found[name] += checkout.times(what)
                add(row, *(float(np.median(found[name])) for name in ("this", "other")))
    for checkout in checkouts.values():
        checkout.end()

    least: dict[bool, dict[str, float]] = {backward: {} for backward in (False, True)}
    for _ in range(PAIRS):
        checkouts = both()
        for backward, times in least.items():
            for name, checkout in checkouts.items():
                (took,) = checkout.times({"kind": "host", "backward": backward})
                times[name] = min(took, times.get(name, took))
        for checkout in checkouts.values():
            checkout.end()
    for backward, times in least.items():
        add({"host": "forward and backward" if backward else "forward"}, **times)


if __name__ == "__main__":
    main()
