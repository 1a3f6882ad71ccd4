"""What ignored tokens cost: `python -m bench.ignored`, on an NVIDIA GPU.

Forward and backward in both packages with a share of the tokens ignored, at random or in runs, relative to none; and
what it costs to look for them where there are none. Prints and writes as JSON. The program is the same for every share:
how many tokens are kept only the device knows.
"""

import argparse
import json
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.calls import Call, step
from bench.data import SHAPES, Inputs, trained
from bench.measure import in_turns, steady
from bench.methods import BUDGETS, METHODS
from bench.report import environment
from cce_kernels.plan import choose
from cce_torch import bridge

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.95)
RUN = 256  # tokens
EVERY_CALL_HAS_FEWER = 2**40  # tokens


def ignoring(targets: jax.Array, share: float, runs: bool) -> jax.Array:
    """targets with that share ignored: each token by itself, or runs of RUN tokens."""
    drawn = np.random.default_rng(0).permutation(targets.size // RUN if runs else targets.size)
    ignored = drawn < share * drawn.size
    return jnp.where(np.repeat(ignored, RUN) if runs else ignored, -100, targets)


def call_of(package: str, memory: str, inputs: Inputs) -> Call:
    """Forward and backward of cce_jax or cce_torch with the budget of that name."""
    method = METHODS[f"{package} {memory}".strip()]
    return step(method.framework, method.load(), *inputs)


def forget() -> None:
    """The plans and the programs of calls that were traced before."""
    choose.plan_of.cache_clear()
    jax.clear_caches()


def cost_of_looking(memory: str, inputs: Inputs, rounds: int) -> float:
    """cce_jax with no token ignored, relative to kernels that take none to be."""
    looking = call_of("cce_jax", memory, inputs)
    forget()
    with patch.object(choose, "MANY", EVERY_CALL_HAS_FEWER):
        blind = call_of("cce_jax", memory, inputs)
    forget()
    times = in_turns({"looking": looking, "blind": blind}, 4 * rounds)  # to tell differences of a percent
    return times["looking"] / times["blind"]


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.ignored", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["gemma2-2b", "llama3-8b"])
    parser.add_argument("--budget", choices=BUDGETS, nargs="+", default=["", "2NV", "all"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/ignored.json"))
    asked = parser.parse_args()
    bridge.start()  # before JAX's backend, which would leave PyTorch too little memory
    rows, looking, table = [], [], Table("shape", "method", "budget", "ignored", "in runs", "ms", "/ none ignored")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for name in asked.shape:
        e, c, targets = trained(SHAPES[name])
        for memory in asked.budget:
            ratio = cost_of_looking(memory, (e, c, targets), asked.rounds)
            looking.append({"shape": name, "budget": memory or "default", "ratio": ratio})
            for package in ("cce_jax", "cce_torch"):
                none = np.nan
                for share, runs in [(s, False) for s in SHARES] + [(0.75, True)]:
                    ms = steady(call_of(package, memory, (e, c, ignoring(targets, share, runs))), asked.rounds)
                    none = none if share else ms
                    rows.append({"shape": name, "method": package, "budget": memory or "default", "ignored": share,
                                 "runs": runs, "runtime_ms": ms, "ratio": ms / none})  # fmt: skip
                    table.add_row(name, package, memory or "default", f"{share:.2f}", str(runs), f"{ms:.2f}",
                                  f"{ms / none:.3f}")  # fmt: skip
            asked.out.write_text(json.dumps({**environment(), "looking": looking, "rows": rows}, indent=1) + "\n")
    Console(width=110).print(table, *(f"none ignored / none looked for: {x}" for x in looking), sep="\n")


if __name__ == "__main__":
    main()
