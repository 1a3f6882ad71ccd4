"""What numbers per token cost: `python -m bench.log_probs`. Writes OUT.json.

Forward: linear_log_probs relative to the loss without gradients. Forward and backward: with a cotangent for each token,
and losses of one's own relative to the built-in loss at the same budget. Times are over the three bare matmuls of a
step, in one run. "queued" and "queued_of_loss" are the same ratios where the host waits only after every fourth call.
Then other packages take turns with a few of ours.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import memory, report, rivals
from bench.calls import MATMULS, Call, compiled, floor, start_jax, step, tensors
from bench.data import Inputs, Shape, trained
from bench.in_time import prepared, timed
from cce_jax import LogProbs, linear_cross_entropy, linear_log_probs, linear_token_loss
from cce_jax.losses import TokenNumbers

SHAPES = Shape(8192, 4096, 131072), Shape(4096, 4096, 151936)
IDS, TOP = 128, 64
BONUS = 0.01  # what an entropy counts for
COLUMNS = {"call": "", "runtime_ms": ".2f", "ratio": ".3f", "of_loss": ".3f"}
COLUMNS |= {"queued": ".3f", "queued_of_loss": ".3f", "peak_mb": ".0f"}
FORWARD, LOSS, ALL_LOSS = "forward of the loss", "the loss", "the loss, logits' bytes"
COMPARED = FORWARD, "log_probs, entropy", LOSS, "log_probs and entropy of a vector", "token loss"


class Given(NamedTuple):
    """What is computed from: arrays, and a budget that holds the logits' bytes."""

    shape: Shape
    inputs: Inputs
    weight: jax.Array  # (N,), the cotangent of log_probs; of GRPO the advantage
    old: jax.Array  # (N,), log-probabilities of the policy that drew the targets
    ids: jax.Array  # (N, IDS)
    everything: int


def given(shape: Shape) -> Given:
    inputs, draw, tokens = trained(shape), np.random.default_rng(0), shape.tokens
    weight, old = (jnp.asarray(draw.normal(size=tokens), jnp.float32) for _ in range(2))
    ids = jnp.asarray(draw.integers(shape.vocabulary, size=(tokens, IDS)), jnp.int32)
    return Given(shape, inputs, weight, old - 8, ids, 2 * tokens * shape.vocabulary + 2**30)


def policy(numbers: TokenNumbers, old: jax.Array, advantage: jax.Array) -> jax.Array:
    """GRPO's clip and an entropy bonus."""
    assert numbers.log_probs is not None
    ratio = jnp.exp(numbers.log_probs - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -gain if numbers.entropy is None else -gain - BONUS * numbers.entropy


def forwards(x: Given) -> dict[str, Callable]:
    return {
        FORWARD: linear_cross_entropy,
        "log_probs": linear_log_probs,
        "log_probs, entropy": partial(linear_log_probs, entropy=True),
        f"log_probs, top {TOP}": partial(linear_log_probs, top_k=min(TOP, x.shape.vocabulary)),
        f"log_probs, {IDS} given ids": partial(linear_log_probs, ids=x.ids),
    }


def steps(x: Given) -> dict[str, Callable]:
    """Value and gradients."""
    weight, everything = x.weight, x.everything

    def of_numbers(e, c, targets, entropy, **options):
        found = linear_log_probs(e, c, targets, entropy=entropy, **options)
        assert found.log_probs is not None
        bonus = 0.0 if found.entropy is None else BONUS * found.entropy
        return jnp.sum(weight * (found.log_probs + bonus))

    def token_loss(e, c, targets, **options):
        return linear_token_loss(e, c, targets, policy, x.old, weight, **options)

    losses = {
        LOSS: linear_cross_entropy,
        ALL_LOSS: partial(linear_cross_entropy, memory_budget=everything),
        "the loss for each token": lambda *x: jnp.sum(weight * linear_cross_entropy(*x, reduction="none")),
        "log_probs of a vector": partial(of_numbers, entropy=False),
        "log_probs and entropy of a vector": partial(of_numbers, entropy=True),
        "log_probs and entropy, logits' bytes": partial(of_numbers, entropy=True, memory_budget=everything),
        "token loss": token_loss,
        "token loss with an entropy bonus": partial(token_loss, entropy=True),
        "token loss with an entropy bonus, logits' bytes": partial(token_loss, entropy=True, memory_budget=everything),
    }
    return {name: jax.value_and_grad(loss, (0, 1)) for name, loss in losses.items()}


def in_jax(x: Given, names: Collection[str] | None = None) -> dict[str, Call]:
    """Those of these names, or all; compiled at the same time."""
    programs = {name: f for name, f in (forwards(x) | steps(x)).items() if names is None or name in names}
    with ThreadPoolExecutor(12) as pool:
        return dict(zip(programs, pool.map(lambda f: compiled(f, *x.inputs), programs.values()), strict=True))


def in_torch(x: Given) -> dict[str, Callable[[], Call]]:
    """The same in PyTorch: the losses, and the numbers with a cotangent for each token."""

    def loss(**options: Any) -> Call:
        from cce_torch import linear_cross_entropy

        return step("torch", partial(linear_cross_entropy, **options), *x.inputs)

    def of_numbers(**options: Any) -> Call:
        from cce_torch import linear_log_probs

        (weight,) = tensors(x.weight)

        def loss(*inputs):
            found: Any = linear_log_probs(*inputs, entropy=True, **options)
            return (weight * (found.log_probs + BONUS * found.entropy)).sum()

        return step("torch", loss, *x.inputs)

    def token_loss(compile_fn: bool = False, **options: Any) -> Call:
        import torch

        import cce_torch
        from bench.torch_losses import policy

        if not hasattr(cce_torch, "linear_token_loss"):
            raise ImportError("cce_torch has no linear_token_loss")
        of_token = partial(cce_torch.linear_token_loss, **options)  # type: ignore[attr-defined]
        old, advantage = tensors(x.old, x.weight)
        fn = torch.compile(policy) if compile_fn else policy
        return step("torch", lambda *inputs: of_token(*inputs, fn, old, advantage), *x.inputs)

    budget = {"memory_budget": x.everything}
    calls = {
        LOSS: loss,
        ALL_LOSS: partial(loss, **budget),
        "log_probs and entropy of a vector": of_numbers,
        "log_probs and entropy, logits' bytes": partial(of_numbers, **budget),
        "token loss": token_loss,
        "token loss with an entropy bonus": partial(token_loss, entropy=True),
        "token loss with an entropy bonus, compiled": partial(token_loss, compile_fn=True, entropy=True),
        "token loss with an entropy bonus, logits' bytes": partial(token_loss, entropy=True, **budget),
    }
    return {f"PyTorch: {name}": make for name, make in calls.items()}


def others(x: Given, packages: Sequence[str]) -> dict[str, Callable[[], Call]]:
    """Other packages' numbers without gradients, with a cotangent for each token, and GRPO without an entropy bonus."""
    vectors = x.weight, BONUS * x.weight
    makes = {}
    chosen = {name: load for name, load in rivals.NUMBERS.items() if name.startswith(tuple(packages))}
    for name, load in chosen.items():
        makes[f"{name}: log_probs, entropy"] = lambda load=load: rivals.forward(load(), *x.inputs)
        makes[f"{name}: log_probs and entropy of a vector"] = lambda load=load: rivals.step(load(), *x.inputs, *vectors)
        if name in rivals.POLICIES:
            of_policy = rivals.POLICIES[name]
            makes[f"{name}: token loss"] = lambda load=of_policy: rivals.loss_step(load(), *x.inputs, x.old, x.weight)
    return makes


def base(name: str) -> str:
    """What a call is relative to: the loss in the same framework with the same budget. Of others: our loss in JAX."""
    framework = "PyTorch: " if name.startswith("PyTorch: ") else ""
    call = name.split(": ")[-1]
    if call == FORWARD or call.startswith("log_probs,") or call == "log_probs":
        return FORWARD
    return framework + (ALL_LOSS if "logits' bytes" in call else LOSS)


def from_ours(ours: LogProbs) -> Callable[[Any], report.Row]:
    """How far the numbers that others find are from ours: the largest difference of each, in nats."""

    def check(result: Any) -> report.Row:
        found = result[0] if isinstance(result[0], list) else result
        if found[0].dim() == 0:
            return {}  # a loss
        pairs = zip(("log_probs", "entropy"), found, strict=True)
        return {
            f"{name}_error": float(np.abs(np.asarray(getattr(ours, name)) - x.float().cpu().numpy()).max())
            for name, x in pairs
        }

    return check


def rows(x: Given, times: dict[str, float], queued: dict[str, float], found: dict[str, report.Row]) -> list[report.Row]:
    made = []
    for name, row in found.items():
        if name in times:
            (ratio, of_loss), (of_queued, queued_of_loss) = relative(name, times), relative(name, queued)
            row = {"runtime_ms": times[name], "ratio": ratio, "of_loss": of_loss, "queued": of_queued} | row
            made.append({"shape": list(x.shape), "call": name, "queued_of_loss": queued_of_loss} | row)
    return made


def relative(name: str, times: dict[str, float]) -> tuple[float | None, float | None]:
    """A call's time over the three bare matmuls, and over `base`; None: not timed."""
    if name not in times:
        return None, None
    of_loss = times[name] / times[base(name)] if base(name) in times else None
    return times[name] / sum(times[x] for x in MATMULS), of_loss


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.log_probs", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=SHAPES)
    parser.add_argument("--no-torch", action="store_true", help="leave out our calls from PyTorch")
    parser.add_argument("--others-only", action="store_true", help="leave out the turns of ours alone")
    parser.add_argument("--package", nargs="+", default=[""], help="with which names of other packages begin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140, help="for other packages, at all shapes; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("out/log_probs.json"))
    asked = parser.parse_args()
    start_jax()
    results: dict[str, list[report.Row]] = {"rows": [], "others": [], "missing": []}

    def add(kind: str, x: Given, times: dict, queued: dict, found: dict[str, report.Row], missing: dict) -> None:
        made = rows(x, times, queued, found)
        results[kind] += made
        results["missing"] += [{"shape": list(x.shape), "call": n, "reason": why} for n, why in missing.items()]
        report.write(asked.out, **results)
        print(
            f"\n{report.size(x.shape)}",
            report.table(made, **COLUMNS) if made else "",
            *missing.items(),
            sep="\n",
            flush=True,
        )

    measured = []
    for shape in asked.shape:
        x = given(shape)
        calls, bare = in_jax(x, COMPARED if asked.others_only else None), floor(*x.inputs[:2])
        peaks = {name: {"peak_mb": memory.peak(call)} for name, call in calls.items()}
        if not asked.others_only:
            more = prepared(in_torch(x) if not asked.no_torch else {}, asked.rounds)
            times, queued = (timed(bare | calls, more, asked.rounds, way) for way in (False, True))
            add("rows", x, times, queued, peaks | more.rows, more.missing)
        kept = {name: calls[name] for name in COMPARED}
        measured.append((x, bare | kept, {name: peaks[name] for name in kept}))
    # After ours are written, for an error of other kernels can take the GPU from this process.
    for x, calls, peaks in measured if asked.seconds else ():
        try:
            check = from_ours(calls["log_probs, entropy"]())
            more = prepared(others(x, asked.package), asked.rounds, asked.seconds / len(measured), check)
            add("others", x, timed(calls, more, asked.rounds), {}, peaks | more.rows, more.missing)
        except Exception as error:
            add("others", x, {}, {}, {}, {"others": report.first_line(error)})


if __name__ == "__main__":
    main()
