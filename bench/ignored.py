"""What ignored tokens cost: `python -m bench.ignored`, on an NVIDIA GPU. Prints and writes as JSON.

Forward and backward with a share of the tokens ignored, at random or in runs, relative to none. The program is the same
for every share: only the device knows how many tokens are kept.
"""

import argparse
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.calls import Call, step
from bench.data import SHAPES, Inputs, trained
from bench.measure import steady
from bench.methods import BUDGETS, METHODS
from bench.report import environment
from cce_torch import bridge

RUN = 256  # tokens


def ignoring(targets: jax.Array, share: float, runs: bool) -> jax.Array:
    """targets with that share ignored: each token by itself, or runs of RUN tokens."""
    drawn = np.random.default_rng(0).permutation(targets.size // RUN if runs else targets.size)
    ignored = drawn < share * drawn.size
    return jnp.where(np.repeat(ignored, RUN) if runs else ignored, -100, targets)


def call_of(package: str, memory: str, inputs: Inputs) -> Call:
    """Forward and backward of cce_jax or cce_torch with the budget of that name."""
    name = f"{package} {memory}".strip()
    if package == "cce_torch":
        return step("torch", METHODS[name].load(), *inputs)
    return Call(partial(_program(name), *inputs), jax.block_until_ready)


@cache
def _program(name: str) -> Callable:
    """Compiled once for each shape, whatever is ignored."""
    return jax.jit(jax.value_and_grad(METHODS[name].load(), (0, 1)))


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.ignored", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["gemma2-2b", "llama3-8b"])
    parser.add_argument("--budget", choices=BUDGETS, nargs="+", default=["", "all"])
    parser.add_argument("--package", choices=["cce_jax", "cce_torch"], nargs="+", default=["cce_jax", "cce_torch"])
    parser.add_argument("--share", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.95])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/ignored.json"))
    asked = parser.parse_args()
    bridge.start()  # before JAX's backend, which would leave PyTorch too little memory
    rows, table = [], Table("shape", "method", "budget", "ignored", "in runs", "ms", "/ none ignored")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for name in asked.shape:
        e, c, targets = trained(SHAPES[name])
        for memory in asked.budget:
            for package in asked.package:
                none = np.nan
                for share, runs in [(0.0, False), *((x, False) for x in asked.share), (0.75, True)]:
                    ms = steady(call_of(package, memory, (e, c, ignoring(targets, share, runs))), asked.rounds)
                    none = none if share else ms
                    row = {"shape": name, "method": package, "budget": memory or "default", "ignored": share}
                    rows.append({**row, "runs": runs, "runtime_ms": ms, "ratio": ms / none})
                    table.add_row(*map(str, row.values()), str(runs), f"{ms:.2f}", f"{ms / none:.3f}")
            asked.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
