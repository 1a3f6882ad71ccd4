"""How exact log-probabilities are with and without a head in float32: `python -m bench.float32_head`. Writes OUT.json.

Log-probabilities of the targets from bfloat16 e and c, against float64 from the same numbers. Three ways: ours; logits
that are rounded to bfloat16, then log_softmax in float32; and e and c converted to float32 before the matmul, which is
what people do who cast their head. It runs on any machine.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import report
from bench.data import DATA, Inputs, Shape
from cce_jax import linear_log_probs

SHAPE = Shape(1024, 1024, 32768)
BLOCK = 256  # tokens whose float64 logits exist at a time
COLUMNS = {"data": "", "way": "", "max": ".1e", "mean": ".1e", "largest_ratio": ".5f"}


def of_logits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """(N,), in the type of logits."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]


def ours(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    found = linear_log_probs(e, c, targets).log_probs
    assert found is not None
    return found


def bfloat16_logits(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    # Without reduce_precision XLA may leave out the rounding to bfloat16 and its inverse.
    logits = jax.lax.reduce_precision(jnp.matmul(e, c.T, preferred_element_type=jnp.float32), 8, 7)
    return of_logits(logits, targets)


def float32_head(e: jax.Array, c: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.matmul(e.astype(jnp.float32), c.T.astype(jnp.float32), precision="highest")
    return of_logits(logits, targets)


WAYS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "ours": ours,
    "bfloat16 logits": bfloat16_logits,
    "float32 head": float32_head,
}


def truth(arrays: Inputs) -> np.ndarray:
    """(N,) in float64, a block of tokens at a time."""
    with jax.enable_x64(True):
        e, c, targets = arrays[0].astype(jnp.float64), arrays[1].astype(jnp.float64), arrays[2]
        blocks = [slice(i, i + BLOCK) for i in range(0, len(e), BLOCK)]
        return np.concatenate([np.asarray(of_logits(e[i] @ c.T, targets[i])) for i in blocks])


def rows_of(data: str, shape: Shape) -> list[report.Row]:
    """An error is |log p − truth| in nats. largest_ratio: exp of the largest error, as an importance ratio has it."""
    arrays = DATA[data](shape)
    exact, rows = truth(arrays), []
    for way, f in WAYS.items():
        errors = np.abs(np.asarray(jax.jit(f)(*arrays), np.float64) - exact)
        found = {"max": float(errors.max()), "mean": float(errors.mean()), "largest_ratio": float(np.exp(errors.max()))}
        rows.append({"shape": list(shape), "data": data, "way": way} | found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.float32_head", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, default=SHAPE)
    parser.add_argument("--data", choices=DATA, nargs="+", default=list(DATA))
    parser.add_argument("--out", type=Path, default=Path("out/float32-head.json"))
    asked = parser.parse_args()
    rows = [row for data in asked.data for row in rows_of(data, asked.shape)]
    report.write(asked.out, rows=rows)
    print(report.size(asked.shape), report.table(rows, **COLUMNS), sep="\n")


if __name__ == "__main__":
    main()
