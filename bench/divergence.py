"""What a divergence from a teacher costs: `python -m bench.divergence`. Writes OUT.json.

The loss with the gradients of the student's e and c, ours with a budget of 1 GiB. Then other packages take turns with
ours. Times are over four bare matmuls, the student's three and the teacher's logits, in the same turns. "queued"
is the same ratio where the host waits only after every fourth call. Errors are relative to float64.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bench import report, rivals
from bench import truth as float64
from bench.calls import Call, compiled, floor, product, start_jax
from bench.data import Shape, trained
from bench.in_time import Check, Prepared, prepared, timed

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # e, c, and the teacher's
SHAPES = Shape(8192, 4096, 131072), Shape(4096, 4096, 151936)
BUDGET = 2**30
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # as Liger and TRL name them
TEACHER = "teacher's z"
COLUMNS = {"call": "", "runtime_ms": ".2f", "ratio": ".3f", "queued": ".3f", "peak_mb": ".0f"}
COLUMNS |= {"loss_error": ".1e", "de_error": ".1e"}


def given(shape: Shape, teacher_width: int) -> Arrays:
    """The teacher has nearly the student's logits, from another head."""
    e, c, _ = trained(shape)
    teacher_e, teacher_c, _ = trained(shape._replace(width=teacher_width), of_head=1)
    return e, c, teacher_e, teacher_c


def ours(divergence: str, arrays: Arrays) -> dict[str, Callable[[], Call]]:
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


def others(beta: float, arrays: Arrays, packages: Sequence[str]) -> dict[str, Callable[[], Call]]:
    def make(load: Callable[[float], rivals.Divergence]) -> Call:
        return rivals.loss_step(load(beta), *arrays)

    return {name: partial(make, load) for name, load in rivals.DIVERGENCES.items() if name.startswith(tuple(packages))}


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


class Job(NamedTuple):
    """A divergence at a shape."""

    common: report.Row
    arrays: Arrays
    bare: dict[str, Call]
    check: Check


def jobs(asked: argparse.Namespace) -> Iterator[Job]:
    for shape in asked.shape:
        arrays = given(shape, asked.teacher_width)
        bare = floor(*arrays[:2]) | {TEACHER: compiled(product, *arrays[2:])}
        for divergence in asked.divergence:
            common = {"shape": list(shape), "teacher_width": asked.teacher_width, "divergence": divergence}
            yield Job(common, arrays, bare, against(float64.mean_divergence(*arrays, BETAS[divergence])))


def rows(job: Job, found: Prepared, rounds: int, queued: bool) -> list[report.Row]:
    times = timed(job.bare, found, rounds)
    of_floor = over(job.bare, times)
    of_queued = over(job.bare, timed(job.bare, found, rounds, queued=True)) if queued else {}
    made = []
    for name, row in found.rows.items():
        if name in times:
            row = {"runtime_ms": times[name], "ratio": of_floor[name], "queued": of_queued.get(name)} | row
            made.append(job.common | {"call": name} | row)
    return made


def over(bare: dict[str, Call], times: dict[str, float]) -> dict[str, float]:
    """The times over the sum of the bare matmuls'."""
    floor_ms = sum(times[name] for name in bare)
    return {name: ms / floor_ms for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.divergence", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=SHAPES)
    parser.add_argument("--teacher-width", type=int, default=4096)
    parser.add_argument("--divergence", choices=BETAS, nargs="+", default=list(BETAS))
    parser.add_argument("--others-only", action="store_true", help="leave out the turns of ours alone")
    parser.add_argument("--package", nargs="+", default=[""], help="with which names of other packages begin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140, help="for other packages, in all; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("out/divergence.json"))
    asked = parser.parse_args()
    start_jax()
    results: dict[str, list[report.Row]] = {"rows": [], "others": [], "missing": []}

    def add(kind: str, job: Job, found: Prepared) -> None:
        made = rows(job, found, asked.rounds, kind == "rows") if found.calls else []
        results[kind] += made
        results["missing"] += [job.common | {"call": x, "reason": why} for x, why in found.missing.items()]
        report.write(asked.out, **results)
        title = f"\n{report.size(job.common['shape'])}, {job.common['divergence']}"
        print(title, report.table(made, **COLUMNS) if made else "", *found.missing.items(), sep="\n", flush=True)

    measured = []
    for job in jobs(asked):
        found = prepared(ours(job.common["divergence"], job.arrays), asked.rounds, check=job.check)
        if not asked.others_only:
            add("rows", job, found)
        measured.append((job, found))
    # After ours are written, for an error of other kernels can take the GPU from this process.
    for job, found in measured if asked.seconds else ():
        beta, seconds = BETAS[job.common["divergence"]], asked.seconds / len(measured)
        try:
            more = prepared(others(beta, job.arrays, asked.package), asked.rounds, seconds, job.check)
            add("others", job, more._replace(calls=found.calls | more.calls, rows=found.rows | more.rows))
        except Exception as error:
            add("others", job, Prepared({}, {}, {"others": report.first_line(error)}))


if __name__ == "__main__":
    main()
