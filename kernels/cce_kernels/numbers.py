"""What goes into the core, comes out of it and goes back: by name. One more number per token is one more field here.

N tokens, width D, vocabulary V; cce_jax/core.py defines every number.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax


class Inputs(NamedTuple):
    """The arrays of a call."""

    e: jax.Array  # (N, D): bfloat16, float16 or float32; float64 in plain XLA
    c: jax.Array  # (V, D), or (D, V) if head.vocab_axis is 1; of e's type
    bias: jax.Array | None  # (V,), of e's type
    targets: jax.Array  # (N,) int32; negative: the token is ignored; V or more: it names no column
    weights: jax.Array | None = None  # (V,) float32, of the weighted sum; None: 1
    scale: jax.Array | None = None  # (1,) at least float32, of the logits; None: 1


class Statistics(NamedTuple):
    """The core's numbers of each token, (N,), at least float32; arbitrary where a token is ignored."""

    lse: jax.Array
    target: jax.Array
    sum: jax.Array | None  # None: not asked for


class Cotangents(NamedTuple):
    """The cotangents of Statistics: a, t̂ and s."""

    lse: jax.Array
    target: jax.Array
    sum: jax.Array | None


@dataclass(frozen=True)
class Wanted:
    """Which gradients a call needs; the others cost nothing."""

    e: bool
    c: bool
    bias: bool


class Gradients(NamedTuple):
    """Of e (N, D), c and bias (V,); None where not wanted."""

    e: jax.Array | None
    c: jax.Array | None
    bias: jax.Array | None
