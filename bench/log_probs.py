"""What numbers per token cost: `python -m bench.log_probs`. Writes OUT.json.

Forward: linear_log_probs beside the loss without gradients. Forward and backward: with a cotangent for each token, and
losses of one's own beside the built-in loss. Times are over the three bare matmuls of a step, in one run.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import report
from bench.calls import Call, floor
from bench.data import Shape, trained
from bench.measure import in_turns
from cce_jax import linear_cross_entropy, linear_log_probs, linear_token_loss
from cce_jax.losses import TokenNumbers

SHAPES = Shape(8192, 4096, 131072), Shape(4096, 4096, 151936)
IDS = 128
COLUMNS = {"call": "", "runtime_ms": ".2f", "ratio": ".3f", "of_loss": ".3f"}


def policy(numbers: TokenNumbers, old: jax.Array, advantage: jax.Array) -> jax.Array:
    """GRPO's clip and an entropy bonus."""
    assert numbers.log_probs is not None
    ratio = jnp.exp(numbers.log_probs - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -gain if numbers.entropy is None else -gain - 0.01 * numbers.entropy


def forwards(ids: Any) -> dict[str, Callable]:
    return {
        "forward of the loss": linear_cross_entropy,
        "log_probs": linear_log_probs,
        "log_probs, entropy": partial(linear_log_probs, entropy=True),
        f"log_probs, {IDS} given ids": partial(linear_log_probs, ids=ids),
    }


def steps(weight: jax.Array, old: jax.Array, advantage: jax.Array, everything: int) -> dict[str, Callable]:
    """Value and gradients. The first is what the next are compared with."""

    def of_numbers(e, c, targets, entropy, **options):
        found = linear_log_probs(e, c, targets, entropy=entropy, **options)
        assert found.log_probs is not None
        bonus = 0.0 if found.entropy is None else 0.01 * found.entropy
        return jnp.sum(weight * (found.log_probs + bonus))

    def token_loss(e, c, targets, **options):
        return linear_token_loss(e, c, targets, policy, old, advantage, **options)

    losses = {
        "the loss": linear_cross_entropy,
        "the loss for each token": lambda *x: jnp.sum(weight * linear_cross_entropy(*x, reduction="none")),
        "log_probs of a vector": partial(of_numbers, entropy=False),
        "log_probs and entropy of a vector": partial(of_numbers, entropy=True),
        "log_probs and entropy, logits' bytes": partial(of_numbers, entropy=True, memory_budget=everything),
        "token loss": token_loss,
        "token loss with an entropy bonus": partial(token_loss, entropy=True),
    }
    return {name: jax.value_and_grad(loss, (0, 1)) for name, loss in losses.items()}


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.log_probs", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/log_probs.json"))
    asked = parser.parse_args()
    rows: list[report.Row] = []
    for shape in asked.shape:
        arrays, draw = trained(shape), np.random.default_rng(0)
        tokens = shape.tokens
        weight, old = (jnp.asarray(draw.normal(size=tokens), jnp.float32) for _ in range(2))
        ids = jnp.asarray(draw.integers(shape.vocabulary, size=(tokens, IDS)), jnp.int32)
        everything = 2 * tokens * shape.vocabulary + 2**30
        programs = forwards(ids) | steps(weight, old - 8, weight, everything)
        lowered = {name: jax.jit(f).lower(*arrays) for name, f in programs.items()}
        with ThreadPoolExecutor(12) as pool:
            compiled = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
        calls = {name: Call(partial(f, *arrays), jax.block_until_ready) for name, f in compiled.items()}
        bare = floor(*arrays[:2])
        found = in_turns(bare | calls, asked.rounds)
        of_shape: list[report.Row] = []
        for name in calls:
            base = "forward of the loss" if name in forwards(ids) else "the loss"
            times = {"runtime_ms": found[name], "ratio": found[name] / sum(found[x] for x in bare)}
            of_shape.append({"shape": list(shape), "call": name, **times, "of_loss": found[name] / found[base]})
        rows += of_shape
        report.write(asked.out, rows=rows)
        print(f"\n{report.size(shape)}", report.table(of_shape, **COLUMNS), sep="\n", flush=True)
        del calls, bare, compiled, programs, lowered


if __name__ == "__main__":
    main()
