"""What ignored tokens cost: `python -m bench.ignored`, on an NVIDIA GPU. Prints and writes as JSON.

Forward and backward with a share of the tokens ignored, at random or in runs, relative to none. The program is the same
for every share: only the device knows how many tokens are kept.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import report
from bench.calls import Call, step
from bench.data import HEADS, SHAPES, Shape, trained
from bench.losses import BUDGETS, ours
from bench.measure import steady
from cce_torch.on_jax import jax_devices

RUN = 256  # tokens
COLUMNS = {"package": "", "budget": "", "ignored": ".2f", "runs": "", "runtime_ms": ".2f", "ratio": ".3f"}


def ignoring(targets: jax.Array, share: float, runs: bool) -> jax.Array:
    """targets with that share ignored: each token by itself, or runs of RUN tokens."""
    drawn = np.random.default_rng(0).permutation(targets.size // RUN if runs else targets.size)
    ignored = drawn < share * drawn.size
    return jnp.where(np.repeat(ignored, RUN) if runs else ignored, -100, targets)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.ignored", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=[SHAPES[x] for x in HEADS[:2]])
    parser.add_argument("--budget", choices=BUDGETS, nargs="+", default=["", "all"])
    parser.add_argument("--package", choices=["cce_jax", "cce_torch"], nargs="+", default=["cce_jax", "cce_torch"])
    parser.add_argument("--share", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.95])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/ignored.json"))
    asked = parser.parse_args()
    jax_devices.start()  # before JAX's backend, which would leave PyTorch too little memory
    rows: list[report.Row] = []
    for shape in asked.shape:
        e, c, targets = trained(shape)
        for memory, package in ((x, y) for x in asked.budget for y in asked.package):
            loss, none = ours(package, memory), np.nan
            program = jax.jit(jax.value_and_grad(loss, (0, 1)))  # compiled once, whatever is ignored
            for share, runs in [(0.0, False), *((x, False) for x in asked.share), (0.75, True)]:
                given = e, c, ignoring(targets, share, runs)
                in_jax = Call(partial(program, *given), jax.block_until_ready)
                ms = steady(in_jax if package == "cce_jax" else step("torch", loss, *given), asked.rounds)
                none = none if share else ms
                row = {"shape": list(shape), "package": package, "budget": memory or "default", "ignored": share}
                rows.append({**row, "runs": runs, "runtime_ms": ms, "ratio": ms / none})
            report.write(asked.out, rows=rows)
        of_shape = [row for row in rows if row["shape"] == list(shape)]
        print(f"\n{report.size(shape)}", report.table(of_shape, **COLUMNS), sep="\n")


if __name__ == "__main__":
    main()
