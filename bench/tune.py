"""Time whole calls with other tiles, to fill in the tables of tiles: `python -m bench.tune`, on an NVIDIA GPU.

Each entry of a table is replaced by a candidate while a call is traced, and the call then takes turns with the call as
it is shipped. `ratio` is the candidate's time over the shipped one's. What is found goes by hand into triton/tiles.py
and hopper/tiles.py in cce_kernels/engines: nothing is tuned at run time.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from bench import report
from bench.calls import Call, compiled
from bench.data import HEADS, SHAPES, Inputs, Shape, trained
from bench.losses import BUDGETS, budget
from bench.measure import in_turns
from cce_jax import linear_cross_entropy
from cce_kernels.device import local_gpu
from cce_kernels.engines import hopper, triton
from cce_kernels.engines.hopper.tiles import PairTiles
from cce_kernels.engines.triton.tiles import TileConfig
from cce_kernels.plan import choose


def listed(kind: type, text: str) -> list[Any]:
    return [kind(*map(int, tiles.split(","))) for tiles in text.split()]


PAIRS = listed(PairTiles, "256,4,2,0 256,4,2,2 256,4,1,2 256,3,2,2 192,4,3,0 192,4,3,2 128,5,2,0 128,5,2,2")
SIXTEEN_BIT = listed(TileConfig, "128,256,64,8,3 128,256,64,8,4 128,256,128,8,2 256,128,64,8,3")
SIXTEEN_BIT += listed(TileConfig, "128,128,64,8,3 128,128,64,8,4 128,128,64,4,3 64,256,64,4,3")
COLUMNS = {"kernel": "", "tiles": "", "ms": ".3f", "ratio": ".3f", "failed": ""}


class Candidate(NamedTuple):
    """Other tiles for one kernel, and the entry of a module of tiles that then has them."""

    engine: str
    kernel: str  # the entry, and of what in it
    tiles: PairTiles | TileConfig
    changed: Any

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Plans that are made meanwhile have these tiles."""
        module = {"hopper": hopper.tiles, "triton": triton.tiles}[self.engine]
        with mock.patch.object(module, self.kernel.split()[0], self.changed):
            _forget()
            yield
        _forget()


def _forget() -> None:
    choose.plan_of.cache_clear()
    jax.clear_caches()


def candidates(engine: str, capability: str) -> Iterator[Candidate]:
    if engine == "hopper":
        shipped = hopper.tiles
        others = [x for x in PAIRS if x != shipped.LOGITS and x.columns != 192]  # Triton's kernels take 2ⁿ
        yield from (Candidate(engine, "LOGITS", x, x) for x in others)
        for entry in ("DE", "DC"):
            yield from (Candidate(engine, entry, x, (x,)) for x in PAIRS)
        for columns, tiles in shipped.SUMMED.items():
            for x in (replace(tiles, lead=2 - tiles.lead), replace(tiles, stages=tiles.stages - 1)):
                yield Candidate(engine, f"SUMMED {columns}", x, {**shipped.SUMMED, columns: x})
    else:
        table, key = triton.tiles.TABLE, (capability, 2)
        for role, shipped in table[key]._asdict().items():
            for x in SIXTEEN_BIT:
                if x != shipped:
                    yield Candidate(engine, f"TABLE {role}", x, {**table, key: table[key]._replace(**{role: x})})


def call_of(engine: str, memory: str, inputs: Inputs) -> Call:
    """Loss and gradients. Triton's kernels serve a bias, which those for Hopper refuse."""
    e, c, targets = inputs
    bias = jnp.zeros(c.shape[0], c.dtype) if engine == "triton" else None
    options = budget(memory, e.shape[0], c.shape[0])

    def loss(e, c):
        return linear_cross_entropy(e, c, targets, bias=bias, impl="cce", **options)

    return compiled(jax.value_and_grad(loss, (0, 1)), e, c)


def row_of(candidate: Candidate, shipped: Call, memory: str, inputs: Inputs, rounds: int) -> report.Row:
    row = {"engine": candidate.engine, "kernel": candidate.kernel, "tiles": str(astuple(candidate.tiles))}
    try:
        with candidate.in_place():
            call = call_of(candidate.engine, memory, inputs)
        found = in_turns({"shipped": shipped, "ms": call}, rounds)
        return row | found | {"ratio": found["ms"] / found["shipped"]}
    except Exception as error:  # tiles that do not fit, or that the kernel refuses
        return row | {"failed": report.first_line(error)[:80]}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.tune", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=[SHAPES[x] for x in HEADS])
    parser.add_argument("--engine", choices=["hopper", "triton"], nargs="+", default=["hopper", "triton"])
    parser.add_argument("--budget", choices=BUDGETS, nargs="+", default=["", "2NV"])
    parser.add_argument("--kernel", nargs="+", help='parts of names, as "LOGITS" or "dz" (all)')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/tune.json"))
    asked = parser.parse_args()
    gpu = local_gpu()
    if gpu is None:
        parser.error("measuring needs a GPU")
    rows: list[report.Row] = []
    for shape in asked.shape:
        inputs = trained(shape)
        for engine, memory in ((x, y) for x in asked.engine for y in asked.budget):
            shipped, found = call_of(engine, memory, inputs), []
            for candidate in candidates(engine, gpu.compute_capability):
                if not asked.kernel or any(x in candidate.kernel for x in asked.kernel):
                    row = row_of(candidate, shipped, memory, inputs, asked.rounds)
                    found.append({"shape": list(shape), "budget": memory or "default", **row})
                    report.write(asked.out, rows=rows + found)
            rows += found
            print(f"\n{report.size(shape)}, {engine}, {memory or 'default'}", report.table(found, **COLUMNS), sep="\n")


if __name__ == "__main__":
    main()
