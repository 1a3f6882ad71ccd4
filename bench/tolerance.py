"""What gradient_tolerance costs and saves: `python -m bench.tolerance`, on a Hopper GPU. Prints and writes as JSON.

Forward and backward over the three bare matmuls of the same run, the shares of the exponentials' blocks that are
multiplied, and how far the gradients are from the exact call's. Data: trained-like, whose ids are in order of frequency
("own") or in order of this call's mean probabilities ("sorted"); and like a fresh model's ("flat").
"""

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from bench import report
from bench.calls import Call, floor
from bench.data import HEADS, SHAPES, Inputs, Shape, flat, trained
from bench.measure import in_turns
from bench.sparsity.inputs import by_probability, ordered
from cce_jax import linear_cross_entropy
from cce_jax.plans import Core, plan_for
from cce_kernels import blocks
from cce_kernels.device import local_gpu
from cce_kernels.head import Head
from cce_kernels.numbers import Inputs as Arrays
from cce_kernels.numbers import Wanted

TOLERANCES = {"exact": 0.0, "2⁻⁹": 2.0**-9, "2⁻⁷": 2.0**-7, "2⁻⁵": 2.0**-5}
DATA = "own", "sorted", "flat"
COLUMNS = {"data": "", "tolerance": "", "kept_de": ".3f", "kept_dc": ".3f", "ratio": ".3f", "de": ".1e", "dc": ".1e"}
CHUNK = 1024  # tokens of which the mean probabilities are computed at a time
MEASURED = 4  # chunks of a call


def given(shape: Shape, data: str) -> Inputs:
    e, c, targets = (flat if data == "flat" else trained)(shape)
    if data == "sorted":
        e, c, targets = ordered((e, c, targets), by_probability(e, c, CHUNK))
    return e, c, targets


def step(shape: Shape, tolerance: float) -> jax.stages.Lowered:
    tokens, width, vocabulary = shape
    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((tokens, width), (vocabulary, width))]
    loss = partial(linear_cross_entropy, gradient_tolerance=tolerance)
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32))


def kept_shares(shape: Shape, tolerance: float) -> jax.stages.Lowered:
    """A program: e, c, targets of one chunk of the call -> the shares of blocks that are kept for de and for dc."""
    tokens, width, vocabulary = shape
    core = Core(Head(), "auto", None, local_gpu(), gradient_tolerance=tolerance)
    whole = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((tokens, width), (vocabulary, width))]
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    plan = plan_for(Arrays(*whole, None, targets), core, Wanted(True, True, False), one_factor=True)  # type: ignore[arg-type]
    assert plan.in_forward is not None
    size = plan.in_forward.chunks.size

    def shares(e, c, targets):
        inputs = Arrays(e, c, None, targets)
        reference = jnp.einsum("nd,nd->n", e, c[targets], preferred_element_type=jnp.float32)
        block = blocks.Block.of(inputs, reference, jnp.full(1, size, jnp.int32))
        kept = blocks.numbers_of(block, plan)[1].blocks
        assert kept is not None
        return jnp.mean(kept.de), jnp.mean(kept.dc)

    of_chunk = jax.ShapeDtypeStruct((size, width), jnp.bfloat16), whole[1], jax.ShapeDtypeStruct((size,), jnp.int32)
    return jax.jit(shares).lower(*of_chunk)


def mean_shares(program: Callable, arrays: Inputs) -> list[float]:
    """The means over the first MEASURED chunks. program: of `kept_shares`."""
    e, c, targets = arrays
    size = program.in_avals[0][0].shape[0]  # type: ignore[attr-defined]
    starts = range(0, len(e) - size + 1, size)[:MEASURED]
    return jnp.mean(jnp.array([program(e[i : i + size], c, targets[i : i + size]) for i in starts]), axis=0).tolist()


def errors(found: tuple, exact: tuple) -> Iterator[float]:
    for x, y in zip(found, exact, strict=True):
        of = (jnp.linalg.norm(z.astype(jnp.float32)) for z in (x - y, y))
        yield float(next(of) / next(of))


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.tolerance", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=[SHAPES[x] for x in HEADS])
    parser.add_argument("--data", choices=DATA, nargs="+", default=DATA)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("out/tolerance.json"))
    asked = parser.parse_args()
    lowered = {(shape, x): step(shape, x) for shape in asked.shape for x in TOLERANCES.values()}
    lowered |= {(shape, x, "kept"): kept_shares(shape, x) for shape in asked.shape for x in TOLERANCES.values() if x}
    with ThreadPoolExecutor(12) as pool:
        programs = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
    rows: list[report.Row] = []
    for shape, data in ((shape, data) for shape in asked.shape for data in asked.data):
        arrays = given(shape, data)
        calls = {
            name: Call(partial(programs[shape, x], *arrays), jax.block_until_ready) for name, x in TOLERANCES.items()
        }
        bare = floor(*arrays[:2])
        of_floor = in_turns(bare | calls, asked.rounds)
        exact, of_data = calls["exact"]()[1], []
        for name, tolerance in TOLERANCES.items():
            row = {"shape": list(shape), "data": data, "tolerance": name, "runtime_ms": of_floor[name]}
            row["ratio"] = of_floor[name] / sum(of_floor[x] for x in bare)
            row |= dict(zip(("de", "dc"), errors(calls[name]()[1], exact), strict=True))
            shares = mean_shares(programs[shape, tolerance, "kept"], arrays) if tolerance else (1.0, 1.0)
            of_data.append(row | dict(zip(("kept_de", "kept_dc"), shares, strict=True)))
        rows += of_data
        report.write(asked.out, rows=rows)
        print(f"\n{report.size(shape)}", report.table(of_data, **COLUMNS), sep="\n", flush=True)
        del calls, bare, exact, arrays


if __name__ == "__main__":
    main()
