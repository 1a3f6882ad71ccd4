"""Seconds of a process' first training step, as a user waits for it: `python -m bench.first_step`.

Each row is a process of its own. "cold" finds nothing on disk, "warm" what the row before left there: cce_torch keeps
compiled programs by itself, for cce_jax JAX's own cache is switched on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# The other checkout's process runs this file too, with that checkout's packages.
WORKER = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name='step')['worker']()"


def worker() -> None:
    """Prints the seconds of each part of the step of the package and the shape that the arguments name."""
    package, shape = sys.argv[1:]
    since, seconds = time.perf_counter(), {}
    for part in {"cce_torch": of_torch, "cce_jax": of_jax}[package](*map(int, shape.split("x"))):
        now = time.perf_counter()
        seconds[part], since = now - since, now
    print("took " + json.dumps(seconds))


def of_torch(tokens: int, width: int, vocabulary: int) -> Iterator[str]:
    """The name of each part, when it is done."""
    import torch

    e, c = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for rows in (tokens, vocabulary))
    c = (c * width**-0.5).requires_grad_()
    e.requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.synchronize()
    yield "torch"
    import cce_torch

    yield "import"
    loss = cce_torch.linear_cross_entropy(e, c, targets)
    torch.cuda.synchronize()
    yield "forward"
    loss.backward()
    torch.cuda.synchronize()
    yield "backward"


def of_jax(tokens: int, width: int, vocabulary: int) -> Iterator[str]:
    import jax
    import jax.numpy as jnp

    e, c = (jax.random.normal(jax.random.key(rows), (rows, width), jnp.bfloat16) for rows in (tokens, vocabulary))
    targets = jax.random.randint(jax.random.key(0), (tokens,), 0, vocabulary)
    jax.block_until_ready((e, c, targets))
    yield "jax"
    import cce_jax

    yield "import"
    step = jax.jit(jax.value_and_grad(cce_jax.linear_cross_entropy, (0, 1)))
    for part in ("forward and backward", "second step"):
        jax.block_until_ready(step(e, c, targets))
        yield part


def main() -> None:
    from bench import report
    from bench.trees import HERE, environment_of

    parser = argparse.ArgumentParser("python -m bench.first_step", description=__doc__)
    parser.add_argument("--shape", default="8192x2304x256000", metavar="NxDxV")
    parser.add_argument("--other", type=Path, help="another checkout, measured after this one")
    parser.add_argument("--out", type=Path, default=Path("out/first-step.json"))
    asked, rows = parser.parse_args(), []
    trees = {"this": HERE} | ({"other": asked.other.resolve()} if asked.other else {})
    caches = {"cce_torch": "CCE_TORCH_CACHE", "cce_jax": "JAX_COMPILATION_CACHE_DIR"}
    for tree, package in ((x, y) for x in trees for y in caches):
        with tempfile.TemporaryDirectory() as cache:
            for disk in ("cold", "warm"):
                environment = {**environment_of(trees[tree]), caches[package]: cache}
                run = [sys.executable, "-c", WORKER, package, asked.shape]
                said = subprocess.check_output(run, env=environment, cwd=trees[tree], text=True)
                files = [file.stat().st_size for file in Path(cache).rglob("*") if file.is_file()]
                row = {"tree": tree, "package": package, "disk": disk, "files": len(files), "bytes": sum(files)}
                rows.append(row | {"seconds": json.loads(said.rpartition("took ")[2])})
                print(rows[-1], flush=True)
                report.write(asked.out, shape=asked.shape, rows=rows)


if __name__ == "__main__":
    main()
