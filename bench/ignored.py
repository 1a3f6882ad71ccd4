"""What ignored tokens cost: `python -m bench.ignored`, on an NVIDIA GPU.

Forward and backward in both packages with a share of the tokens ignored, at random or in runs, relative to none. Prints
and writes as JSON. The program is the same for every share: how many tokens are kept only the device knows.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.bridge import timed
from bench.data import SHAPES, trained
from bench.losses_jax import budget
from bench.report import environment
from cce_jax import linear_cross_entropy

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.95)
RUN = 256  # tokens


def ignoring(targets: jax.Array, share: float, runs: bool) -> jax.Array:
    """targets with that share ignored: each token by itself, or runs of RUN tokens."""
    drawn = np.random.default_rng(0).permutation(targets.size // RUN if runs else targets.size)
    ignored = drawn < share * drawn.size
    return jnp.where(np.repeat(ignored, RUN) if runs else ignored, -100, targets)


def calls(memory: str) -> dict[str, Callable[..., Any]]:
    """By package: (e, c, targets) -> a call and what waits for its result."""
    import torch

    import cce_torch

    def in_jax(e, c, targets):
        options = budget(memory, *e.shape, c.shape[0])  # type: ignore
        run = jax.jit(jax.value_and_grad(lambda e, c, t: linear_cross_entropy(e, c, t, **options), (0, 1)))  # type: ignore
        return (lambda: run(e, c, targets)), jax.block_until_ready

    def in_torch(e, c, targets):
        options = budget(memory, *e.shape, c.shape[0])  # type: ignore
        e, c = (torch.from_dlpack(x).clone().requires_grad_() for x in (e, c))
        targets = torch.from_dlpack(targets).long()
        loss = lambda: cce_torch.linear_cross_entropy(e, c, targets, **options)  # type: ignore  # noqa: E731
        return (lambda: torch.autograd.grad(loss(), (e, c))), lambda _: torch.cuda.synchronize()

    return {"cce_jax": in_jax, "cce_torch": in_torch}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.ignored", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["gemma2-2b", "llama3-8b"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/ignored.json"))
    asked = parser.parse_args()
    jax.config.update("jax_pjrt_client_create_options", {"preallocate": False})
    rows, table = [], Table("shape", "method", "budget", "ignored", "in runs", "ms", "/ none ignored")
    for name in asked.shape:
        e, c, targets = trained(SHAPES[name])
        for memory in ("", "all"):
            for package, make in calls(memory).items():
                none = np.nan
                for share, runs in [(s, False) for s in SHARES] + [(0.75, True)]:
                    run, wait = make(e, c, ignoring(targets, share, runs))
                    spent = [timed(run, wait) for _ in range(asked.rounds + 3)][3:]
                    ms = float(np.median(spent))
                    none = none if share else ms
                    rows.append({"shape": name, "method": package, "budget": memory or "default", "ignored": share,
                                 "runs": runs, "runtime_ms": ms, "ratio": ms / none})  # fmt: skip
                    table.add_row(name, package, memory or "default", f"{share:.2f}", str(runs), f"{ms:.2f}",
                                  f"{ms / none:.3f}")  # fmt: skip
    Console(width=110).print(table)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
