"""Time every engine that can compute a kind of call, to see whether plans take the fastest: `python -m bench.engines`.

    ms          forward and backward, or forward alone where it says so
    held_mb     what XLA reserves beside inputs and results
    * marks     the engine that a plan takes

A plan's order of engines (cce_kernels/plan/choose.py, `engines`) follows what this finds.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from bench.calls import compiled
from bench.data import Shape, trained
from bench.measure import steady
from bench.report import environment
from cce_jax import linear_cross_entropy
from cce_kernels.device import local_gpu
from cce_kernels.engines.hopper import HOPPER
from cce_kernels.engines.triton import TRITON
from cce_kernels.engines.xla import XLA
from cce_kernels.plan import choose

LOGITS = "full logits"


@dataclass(frozen=True)
class Kind:
    """A kind of call."""

    name: str
    shape: Shape
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    gradient: bool = True


GEMMA = Shape(8192, 2304, 256000)
KINDS = [
    Kind("float32, highest", Shape(4096, 4096, 128256), "float32", {"precision": "highest"}),
    Kind("float32, tf32", Shape(4096, 2304, 128256), "float32", {"precision": "tensorfloat32"}),
    Kind("float32, highest, forward", Shape(4096, 4096, 128256), "float32", {"precision": "highest"}, gradient=False),
    Kind("float32, tf32, forward", Shape(4096, 2304, 128256), "float32", {"precision": "tensorfloat32"},
         gradient=False),
    Kind("float16", GEMMA, "float16"),
    Kind("bias", GEMMA, bias=True),
    Kind("label smoothing", GEMMA, options={"label_smoothing": 0.1}),
    Kind("ragged V", Shape(8192, 768, 50257)),
    Kind("ragged V, forward", Shape(8192, 768, 50257), gradient=False),
    Kind("64 tokens", Shape(64, 2304, 256000)),
    Kind("200 tokens", Shape(200, 4096, 128256)),
    Kind("narrow D", Shape(8192, 64, 128256)),
    Kind("small V", Shape(32768, 1024, 1024)),
]  # fmt: skip


@contextmanager
def only(engine) -> Iterator[None]:
    """Every plan takes this engine, and those of whose methods it has need."""
    serving = (XLA,) if engine is XLA else (engine, TRITON, XLA)
    choose.plan_of.cache_clear()
    with mock.patch.object(choose, "engines", return_value=serving):
        yield
    choose.plan_of.cache_clear()


inputs = lru_cache(maxsize=1)(trained)


def program(kind: Kind, impl: Any) -> tuple[Any, Sequence[Any]]:
    e, c, targets = inputs(kind.shape, jnp.dtype(kind.dtype))
    bias = jnp.zeros(kind.shape.vocabulary, e.dtype) if kind.bias else None

    def loss(e, c, bias, targets):
        return linear_cross_entropy(e, c, targets, bias=bias, impl=impl, **kind.options)

    wanted = (0, 1, 2) if kind.bias else (0, 1)
    return (jax.value_and_grad(loss, wanted) if kind.gradient else loss), (e, c, bias, targets)


def timed(kind: Kind, impl: str, rounds: int) -> dict[str, Any]:
    run, arrays = program(kind, impl)
    try:
        jax.clear_caches()
        call = compiled(run, *arrays)
        assert call.scratch is not None
        return {"ms": steady(call, rounds), "held_mb": call.scratch / 2**20}
    except Exception as error:
        return {"failed": str(error).splitlines()[0][:200]}


def taken(kind: Kind) -> str:
    """The engine that a plan takes."""
    from cce_jax import passes

    seen = []
    real = choose.plan_of
    run, arrays = program(kind, "auto")

    def noted(*given):
        seen.append(real(*given))
        return seen[-1]

    jax.clear_caches()
    with mock.patch.object(passes, "plan_of", noted):
        jax.eval_shape(run, *arrays)
    return next(plan.forward.sums.engine.name for plan in seen if plan.gpu is not None)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.engines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kind", nargs="+", help="parts of names (all)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/engines.json"))
    asked = parser.parse_args()
    if local_gpu() is None:
        parser.error("measuring needs a GPU")
    kept: dict[str, Any] = {**environment(), "rows": []}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        if asked.kind and not any(part in kind.name for part in asked.kind):
            continue
        row = {"kind": kind.name, "shape": list(kind.shape), "dtype": kind.dtype, "taken": taken(kind), "engines": {}}
        for engine in (HOPPER, TRITON, XLA):
            with only(engine):
                if taken(kind) == engine.name:
                    row["engines"][engine.name] = timed(kind, "auto", asked.rounds)
        if kind.shape.tokens * kind.shape.vocabulary < 2**31:
            row["engines"][LOGITS] = timed(kind, "reference", asked.rounds)
        kept["rows"].append(row)
        words = ", ".join(
            f"{name}{'*' if name == row['taken'] else ''} {x['ms']:.2f} ms {x['held_mb']:.0f} MiB" if "ms" in x
            else f"{name} failed: {x['failed'][:80]}" for name, x in row["engines"].items()
        )  # fmt: skip
        print(f"{kind.name}, {'x'.join(map(str, kind.shape))}: {words}", flush=True)
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
