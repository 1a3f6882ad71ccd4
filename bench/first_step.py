"""Seconds of a process' first training step, as a user waits for it: `python -m bench.first_step`.

Each row is a process of its own. "cold" finds nothing on disk, "warm" what the row before left there: cce_torch keeps
compiled programs by itself, for cce_jax JAX's own cache is switched on.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
STEP = """
import json, sys, time
start = time.perf_counter()
package, (n, d, v) = sys.argv[1], map(int, sys.argv[2].split("x"))
found = {}
def passed(name):
    global start
    now = time.perf_counter()
    found[name], start = now - start, now
if package == "cce_torch":
    import torch
    e, c = (torch.randn(rows, d, device="cuda", dtype=torch.bfloat16) for rows in (n, v))
    c = (c * d**-0.5).requires_grad_()
    e.requires_grad_()
    targets = torch.randint(v, (n,), device="cuda")
    torch.cuda.synchronize()
    passed("torch")
    import cce_torch
    passed("import")
    loss = cce_torch.linear_cross_entropy(e, c, targets)
    torch.cuda.synchronize()
    passed("forward")
    loss.backward()
    torch.cuda.synchronize()
    passed("backward")
else:
    import jax
    import jax.numpy as jnp
    e, c = (jax.random.normal(jax.random.key(rows), (rows, d), jnp.bfloat16) for rows in (n, v))
    targets = jax.random.randint(jax.random.key(0), (n,), 0, v)
    jax.block_until_ready((e, c, targets))
    passed("jax")
    import cce_jax
    passed("import")
    step = jax.jit(jax.value_and_grad(cce_jax.linear_cross_entropy, (0, 1)))
    jax.block_until_ready(step(e, c, targets))
    passed("forward and backward")
    jax.block_until_ready(step(e, c, targets))
    passed("second step")
print("FOUND" + json.dumps(found))
"""


def main() -> None:
    from bench import report

    parser = argparse.ArgumentParser("python -m bench.first_step", description=__doc__)
    parser.add_argument("--shape", default="8192x2304x256000", metavar="NxDxV")
    parser.add_argument("--other", type=Path, help="another checkout, measured after this one")
    parser.add_argument("--out", type=Path, default=Path("out/first-step.json"))
    asked, rows = parser.parse_args(), []
    for tree, folder in {"this": HERE, "other": asked.other and asked.other.resolve()}.items():
        for package in ("cce_torch", "cce_jax") if folder else ():
            with tempfile.TemporaryDirectory() as cache:
                for kept in ("cold", "warm"):
                    own = {"CCE_TORCH_CACHE": cache} if package == "cce_torch" else {"JAX_COMPILATION_CACHE_DIR": cache}
                    own |= {"PYTHONPATH": f"{folder}:{folder}/kernels:{os.environ.get('PYTHONPATH', '')}"}
                    own |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                    run = [sys.executable, "-c", STEP, package, asked.shape]
                    said = subprocess.run(run, env=os.environ | own, cwd=folder, capture_output=True, text=True)
                    if said.returncode:
                        raise SystemExit(said.stderr)
                    seconds = json.loads(said.stdout.rpartition("FOUND")[2])
                    files = [file.stat().st_size for file in Path(cache).rglob("*") if file.is_file()]
                    row = {"tree": tree, "package": package, "disk": kept, "seconds": seconds}
                    rows.append(row | {"files": len(files), "bytes": sum(files)})
                    print(rows[-1], flush=True)
                    report.write(asked.out, shape=asked.shape, rows=rows)


if __name__ == "__main__":
    main()
