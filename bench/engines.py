"""Time each kind of call with each `impl`, to see whether plans take the fastest engine: `python -m bench.engines`.

"cce" is the kernels, "chunked" XLA's matmuls, "reference" full logits; `engine` and `gradients` are what "auto" takes.
A plan's order of engines (cce_kernels/engines/__init__.py, `engines`) follows what this finds.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench import report
from bench.calls import compiled
from bench.data import Shape, trained
from bench.measure import steady
from cce_jax import explain, linear_cross_entropy
from cce_kernels.device import local_gpu

GEMMA = Shape(8192, 2304, 256000)
IMPLS = ("auto", "cce", "chunked", "reference")
COLUMNS = {"kind": "", "shape": "", "engine": "", "gradients": "", **dict.fromkeys(IMPLS, ".2f"), "held_mb": ".0f"}


class Kind(NamedTuple):
    """A kind of call, forward and backward."""

    name: str
    shape: Shape
    dtype: str = "bfloat16"
    bias: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


KINDS = [
    Kind("float32, highest", Shape(4096, 4096, 128256), "float32", options={"precision": "highest"}),
    Kind("float32, tf32", Shape(4096, 2304, 128256), "float32", options={"precision": "tensorfloat32"}),
    Kind("float16", GEMMA, "float16"),
    Kind("bias", GEMMA, bias=True),
    Kind("label smoothing", GEMMA, options={"label_smoothing": 0.1}),
    Kind("ragged V", Shape(8192, 768, 50257)),
    Kind("64 tokens", Shape(64, 2304, 256000)),
    Kind("200 tokens", Shape(200, 4096, 128256)),
    Kind("narrow D", Shape(8192, 64, 128256)),
    Kind("small V", Shape(32768, 1024, 1024)),
]


def timed(kind: Kind, rounds: int) -> report.Row:
    """Milliseconds by impl, the reason where there are none, and what "auto" does."""
    e, c, targets = trained(kind.shape, jnp.dtype(kind.dtype))
    bias = jnp.zeros(kind.shape.vocabulary, e.dtype) if kind.bias else None
    wanted = ("e", "c", "bias") if kind.bias else ("e", "c")
    taken = explain(e, c, bias=bias, gradients_of=wanted, **kind.options)
    row: report.Row = {"kind": kind.name, "shape": report.size(kind.shape), "dtype": kind.dtype}
    row |= {"engine": taken.engine, "gradients": taken.gradients, "failed": {}}
    for impl in IMPLS:

        def loss(e, c, bias, impl: Any = impl):
            return linear_cross_entropy(e, c, targets, bias=bias, impl=impl, **kind.options)

        try:
            call = compiled(jax.value_and_grad(loss, (0, 1, 2) if kind.bias else (0, 1)), e, c, bias)
            row[impl] = steady(call, rounds)
            if impl == "auto":
                row["held_mb"] = (call.scratch or 0) / 2**20
        except Exception as error:
            row["failed"][impl] = report.first_line(error)
    return row


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.engines", description=__doc__)
    parser.add_argument("--kind", nargs="+", help="parts of names (all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/engines.json"))
    asked = parser.parse_args()
    if local_gpu() is None:
        parser.error("measuring needs a GPU")
    rows = []
    for kind in KINDS:
        if not asked.kind or any(part in kind.name for part in asked.kind):
            rows.append(timed(kind, asked.rounds))
            print(rows[-1], flush=True)
            report.write(asked.out, rows=rows)
    print(report.table(rows, **COLUMNS))


if __name__ == "__main__":
    main()
