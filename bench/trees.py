"""Time this checkout and another one of the project, in turns in one run: `python -m bench.trees OTHER`.

Each checkout runs in a process of its own on the same GPU, and one of them works at a time. What is printed and kept is
the time of a call of this one over that of the other, for each row of rows().
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 0.2  # of a turn, and no less than LEAST calls, of which the first is not counted
LEAST = 5
HERE = Path(__file__).resolve().parent.parent
# The other checkout's process runs this file too, with that checkout's packages.
WORKER = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name='trees')['worker']()"

GEMMA, LLAMA, GIST = "8192x2304x256000", "8192x4096x128256", "32768x768x128256"
BUDGETS = {"default": {}, "300 MiB": {"memory_budget": 300 * 2**20}, "1.2e9": {"memory_budget": 1_200_000_000}}
BUDGETS |= {"all": {"memory_budget": "all"}}
LOSS, LOG_PROBS, DIVERGENCE = "linear_cross_entropy", "linear_log_probs", "linear_divergence"
Row = dict[str, Any]


def rows() -> Iterator[Row]:
    """Forward and backward, unless `wanted` says otherwise: "ec" gradients of e and c, "" none."""

    def row(name: str, shape: str, function: str = LOSS, package: str = "cce_jax", **more: Any) -> Row:
        alike = {"name": name, "shape": shape, "function": function, "package": package, "wanted": "ec", "options": {}}
        return alike | {"dtype": "bfloat16", "hopper": True} | more

    for shape, package, budget in product((GEMMA, LLAMA, GIST), ("cce_jax", "cce_torch"), BUDGETS):
        if package == "cce_jax" or budget in ("default", "all"):
            yield row(budget, shape, package=package, options=BUDGETS[budget])
    vectors = {"reduction": "none"}
    for shape in (GEMMA, GIST):
        for budget, options in BUDGETS.items():
            yield row(f"vector, {budget}", shape, options=options | vectors)
        yield row("softcap", shape, options={"softcap": 30.0})
        yield row("tolerance", shape, options={"gradient_tolerance": 2**-7})
        yield row("log-probabilities", shape, LOG_PROBS, options={"entropy": True})
    for wanted in ("e", "c", ""):
        yield row({"": "evaluation"}.get(wanted, f"{wanted} alone"), GEMMA, wanted=wanted)
    yield row("vector, e alone", GEMMA, wanted="e", options=vectors)
    yield row("log-probabilities", GEMMA, LOG_PROBS, "cce_torch", options={"entropy": True})
    yield row("evaluation", GEMMA, package="cce_torch", wanted="")
    yield row("scale", GEMMA, options={"logit_scale": 2.0})
    for shape, package in ((GEMMA, "cce_jax"), (LLAMA, "cce_jax"), (GIST, "cce_jax"), (GEMMA, "cce_torch")):
        yield row("label smoothing", shape, package=package, options={"label_smoothing": 0.1})
    yield row("divergence", LLAMA, DIVERGENCE)
    yield row("divergence", LLAMA, DIVERGENCE, "cce_torch")
    yield row("divergence, vector", LLAMA, DIVERGENCE, options=vectors)
    for precision in ("highest", "tensorfloat32"):
        yield row(f"float32, {precision}", "4096x2304x128256", dtype="float32", options={"precision": precision})
    yield row("float16", LLAMA, dtype="float16")
    for name, shape, options in (("default", GEMMA, {}), ("all", GEMMA, BUDGETS["all"]), ("default", GIST, {})):
        yield row(f"Triton, {name}", shape, hopper=False, options=options)
    yield row("Triton, vector", GEMMA, hopper=False, options=vectors)
    yield row("Triton, 64 tokens", "64x768x50257", hopper=False)
    for tokens, dtype in product((1, 64, 255), ("bfloat16", "float16")):
        yield row(f"{tokens} tokens, {dtype}", f"{tokens}x768x50257", dtype=dtype)
    yield row("host", "64x64x512", package="cce_torch")


def worker() -> None:
    """Runs what each line of the input names, and prints how many milliseconds it took."""
    line, call = "", None
    for asked in sys.stdin:
        if asked != line:
            line, call = asked, None  # drops the call before, so that this one has its memory
            try:
                call = step(**json.loads(asked))
                for _ in range(3):
                    call()
            except Exception as error:
                call = None
                print(f"failed: {asked.strip()}: {error!r}", file=sys.stderr, flush=True)
        times, since = [], time.perf_counter()
        while call and (len(times) < LEAST or time.perf_counter() < since + SECONDS):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        print("took " + json.dumps(times[1:] or [float("nan")]), flush=True)


@cache
def arrays(shape: str, dtype: str, of_head: int = 0) -> Any:
    from jax.numpy import dtype as of_name

    from bench.data import Shape, trained

    return trained(Shape.parse(shape), of_name(dtype), of_head=of_head)


@cache
def tensors(shape: str, dtype: str, of_head: int = 0) -> Any:
    import torch

    found = [torch.from_dlpack(x).clone() for x in arrays(shape, dtype, of_head)]
    return [x if x.is_floating_point() else x.long() for x in found]


def step(
    shape: str, package: str, function: str, options: dict[str, Any], wanted: str, dtype: str, hopper: bool, name: str
) -> Callable[[], object]:
    """A call that waits for its results."""
    import jax

    if not hopper:
        from cce_kernels.engines.hopper import HOPPER

        for module in [x for key, x in sys.modules.items() if key.startswith("cce_kernels.plan")]:
            if HOPPER in getattr(module, "KERNELS", ()):
                module.KERNELS = tuple(x for x in module.KERNELS if x is not HOPPER)  # type: ignore[attr-defined]
    of = arrays if package == "cce_jax" else tensors
    e, c, targets = of(shape, dtype)
    others = of(shape, dtype, of_head=1)[:2] if function == DIVERGENCE else [targets]
    differentiated = tuple("ec".index(x) for x in wanted)
    if package == "cce_jax":
        import cce_jax

        value = partial(loss, getattr(cce_jax, function), options, jax.numpy.linspace(0.5, 1.5, len(e)))
        program = jax.jit(jax.value_and_grad(value, differentiated) if wanted else value)
        return lambda: jax.block_until_ready(program(e, c, *others))
    import torch

    import cce_torch

    weights = torch.linspace(0.5, 1.5, len(e), device=e.device)
    given = [x.detach().requires_grad_(k in differentiated) for k, x in enumerate((e, c))]

    def run() -> None:
        found = loss(getattr(cce_torch, function), options, weights, *given, *others)
        if wanted:
            torch.autograd.grad(found, [given[k] for k in differentiated])
        torch.cuda.synchronize()

    return run


def loss(function: Callable[..., Any], options: dict[str, Any], weights: Any, *given: Any) -> Any:
    """One number, of cotangents that differ from token to token where the function returns a number for each."""
    found = function(*given, **options)
    if hasattr(found, "log_probs"):
        return (weights * (found.log_probs + 0.01 * found.entropy)).sum()
    return (weights * found).sum() if options.get("reduction") == "none" else found


def environment_of(folder: Path) -> dict[str, str]:
    """Of a process that imports the packages of this checkout."""
    paths = [str(folder), str(folder / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Checkout:
    def __init__(self, folder: Path) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        process = subprocess.Popen([sys.executable, "-c", WORKER], env=environment_of(folder), cwd=folder, **pipes)
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.asks, self.answers = process, process.stdin, process.stdout

    def times(self, row: Row) -> list[float]:
        print(json.dumps(row), file=self.asks)
        for line in self.answers:
            if line.startswith("took "):
                return json.loads(line[5:])
        raise RuntimeError(f"a checkout's process ended: {row}")

    def end(self) -> None:
        self.asks.close()
        self.process.wait()


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from bench import report

    parser = argparse.ArgumentParser("python -m bench.trees", description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout's folder")
    parser.add_argument("--this", type=Path, default=HERE, help="this checkout's folder (the one of this file)")
    parser.add_argument("--row", nargs="+", default=[""], help='regular expressions of "NAME SHAPE PACKAGE" (all rows)')
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/trees.json"))
    asked = parser.parse_args()
    folders, found = [x.resolve() for x in (asked.this, asked.other)], []

    def is_asked(row: Row) -> bool:
        return any(re.search(part, "{name} {shape} {package}".format(**row)) for part in asked.row)

    # Rows of one shape lie side by side, so that a process holds the arrays of one.
    taken = sorted(filter(is_asked, rows()), key=itemgetter("hopper", "shape", "package", "dtype"))
    for _, alike in groupby(taken, itemgetter("hopper", "shape")):
        checkouts = [Checkout(folder) for folder in folders]
        for row in alike:
            for checkout in checkouts:  # compiles; by itself, as XLA times its matmuls to choose among them
                checkout.times(row)
            turns = [[np.median(checkout.times(row)) for checkout in checkouts] for _ in range(asked.rounds)]
            this, other = np.median(turns, axis=0).tolist()
            if np.isnan(this + other):
                continue
            found.append({**row, "this": this, "other": other, "ratio": this / other})
            print(
                "{name:24} {shape:18} {package:10} {this:8.3f} {other:8.3f} {ratio:.4f}".format(**found[-1]), flush=True
            )
            report.write(asked.out, rows=found)
        for checkout in checkouts:
            checkout.end()


if __name__ == "__main__":
    main()
