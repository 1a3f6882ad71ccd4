"""What a divergence from a teacher costs: `python -m bench.divergence`. Writes OUT.json.

The loss with the gradients of the student's e and c, ours with a budget of 1 GiB, in turns with other packages'. Times
are over four bare matmuls, the student's three and the teacher's logits, in one run. Errors are relative to float64.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from bench import report, rivals
from bench import truth as float64
from bench.calls import MATMULS, Call, compiled, floor, product, start_jax
from bench.data import Inputs, Shape, trained
from bench.in_time import Check, prepared, timed

SHAPES = Shape(8192, 4096, 131072), Shape(4096, 4096, 151936)
BUDGET = 2**30
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # as Liger and TRL name them
TEACHER = "teacher's z"
COLUMNS = {"divergence": "", "call": "", "runtime_ms": ".2f", "ratio": ".3f", "peak_mb": ".0f"}
COLUMNS |= {"loss_error": ".1e", "de_error": ".1e"}


def given(shape: Shape, teacher_width: int) -> Inputs:
    """e, c, and the teacher's e and c: nearly the student's logits, from another head."""
    teacher = trained(shape._replace(width=teacher_width), of_head=1)
    return (*trained(shape)[:2], *teacher[:2])


def ours(divergence: str, arrays: Inputs) -> dict[str, Callable[[], Call]]:
    options = {"divergence": divergence, "memory_budget": BUDGET}

    def in_jax() -> Call:
        import cce_jax

        loss = partial(_function(cce_jax), **options)
        return compiled(jax.value_and_grad(loss, (0, 1)), *arrays)

    def in_torch() -> Call:
        import cce_torch

        return rivals.loss_step(partial(_function(cce_torch), **options), *arrays)

    return {"cce_jax": in_jax, "cce_torch": in_torch}


def _function(package: Any) -> Callable[..., Any]:
    if not hasattr(package, "linear_divergence"):
        raise ImportError(f"{package.__name__} has no linear_divergence")
    return package.linear_divergence


def others(divergence: str, arrays: Inputs) -> dict[str, Callable[[], Call]]:
    beta = BETAS[divergence]
    return {name: lambda load=load: rivals.loss_step(load(beta), *arrays) for name, load in rivals.DIVERGENCES.items()}


def against(truth: float64.OfStudent) -> Check:
    """The relative errors of the loss and of de."""

    def check(result: Any) -> report.Row:
        loss, (de, _) = result
        if not isinstance(de, jax.Array):
            from bench.calls import arrays

            (de,) = arrays(de)
        error = abs(float(loss) - truth.loss) / abs(truth.loss)
        return {"loss_error": error, "de_error": float64.relative_error(de, truth.de)}

    return check


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.divergence", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=SHAPES)
    parser.add_argument("--teacher-width", type=int, default=4096)
    parser.add_argument("--divergence", choices=BETAS, nargs="+", default=list(BETAS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140, help="for other packages, at all shapes; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("out/divergence.json"))
    asked = parser.parse_args()
    start_jax()
    rows: list[report.Row] = []
    missing: list[report.Row] = []
    seconds = asked.seconds / (len(asked.shape) * len(asked.divergence))
    for shape in asked.shape:
        arrays = given(shape, asked.teacher_width)
        bare = floor(*arrays[:2]) | {TEACHER: compiled(product, *arrays[2:])}
        of_shape: list[report.Row] = []
        for divergence in asked.divergence:
            common = {"shape": list(shape), "teacher_width": asked.teacher_width, "divergence": divergence}
            check = against(float64.mean_divergence(*arrays, BETAS[divergence]))
            found = prepared(ours(divergence, arrays), asked.rounds, math.inf, check)
            of_others = prepared(others(divergence, arrays), asked.rounds, seconds, check)
            for known, more in zip(found, of_others, strict=True):
                known |= more
            times = timed(bare, found, asked.rounds)
            floor_ms = sum(times[name] for name in (*MATMULS, TEACHER))
            of_shape += [
                common | {"call": x, "runtime_ms": times[x], "ratio": times[x] / floor_ms} | found.rows[x]
                for x in found.calls
                if x in times
            ]
            missing += [common | {"call": name, "reason": reason} for name, reason in found.missing.items()]
            report.write(asked.out, rows=rows + of_shape, missing=missing)
        rows += of_shape
        print(f"\n{report.size(shape)}", report.table(of_shape, **COLUMNS), sep="\n", flush=True)
    for x in missing:
        print(f"missing: {x['call']} of {x['divergence']} at {report.size(x['shape'])} ({x['reason']})")


if __name__ == "__main__":
    main()
