"""Inputs like a model's, for benchmarks and accuracy checks: never zeros, never logits that are all alike."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CANDIDATES = 64  # distinct likely tokens at each position
LARGEST_LOGIT, DECAY = 19.3, 2.0  # the candidate at rank k has the logit 19.3 − 2·ln k


class Shape(NamedTuple):
    tokens: int
    width: int
    vocabulary: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Of a name in SHAPES, or of NxDxV."""
        return SHAPES[text] if text in SHAPES else cls(*map(int, text.split("x")))


SHAPES = {
    "gemma2-2b": Shape(8192, 2304, 256000),
    "llama3-8b": Shape(8192, 4096, 128256),
    "gist": Shape(32768, 768, 128256),
    "4096x4096x128256": Shape(4096, 4096, 128256),
    "qwen2.5-0.5b": Shape(8192, 896, 151936),
    "16384x2048x248320": Shape(16384, 2048, 248320),
    "16384x5120x151936": Shape(16384, 5120, 151936),
}
HEADS = list(SHAPES)[:3]

QUICK = Shape(256, 64, 4096)
Inputs = tuple[jax.Array, jax.Array, jax.Array]


def classifier(shape: Shape, dtype, seed: int) -> jax.Array:
    """(V, D): random rows of about unit length."""
    c = jax.random.normal(jax.random.key(seed), (shape.vocabulary, shape.width), jnp.bfloat16)
    return (c * shape.width**-0.5).astype(dtype)


def _zipf_rows(shape: Shape, generator: np.random.Generator) -> np.ndarray:
    """(N, CANDIDATES) distinct tokens a row, from a Zipf distribution over the vocabulary."""
    cumulative = np.cumsum(1.0 / np.arange(1, shape.vocabulary + 1))
    rows = np.empty((shape.tokens, CANDIDATES), np.int32)
    for row in rows:
        drawn = np.searchsorted(cumulative, generator.uniform(0, cumulative[-1], 4 * CANDIDATES))
        distinct = np.unique(drawn)
        while distinct.size < CANDIDATES:
            distinct = np.union1d(distinct, generator.integers(0, shape.vocabulary, CANDIDATES))
        row[:] = generator.permutation(distinct)[:CANDIDATES]
    return rows


def trained(shape: Shape, dtype=jnp.bfloat16, seed: int = 0, of_head: int | None = None) -> Inputs:
    """e, c, targets whose softmax is peaked like a trained model's: a few likely tokens, Zipf-distributed.

    of_head: the seed of c, by default seed. Two models that differ in it alone agree on the likely tokens, up to the
    noise of all other logits, as a student and its teacher do.
    """
    generator = np.random.default_rng(seed)
    candidates = _zipf_rows(shape, generator)
    logits = LARGEST_LOGIT - DECAY * np.log(np.arange(1, CANDIDATES + 1))
    probabilities = np.exp(logits - logits.max())
    ranks = generator.choice(CANDIDATES, shape.tokens, p=probabilities / probabilities.sum())
    c = classifier(shape, dtype, seed if of_head is None else of_head)
    weighted = jnp.zeros((shape.tokens, shape.width), jnp.float32)
    for k in range(CANDIDATES):
        weighted += logits[k] * c[candidates[:, k]].astype(jnp.float32)
    return weighted.astype(dtype), c, jnp.asarray(candidates[np.arange(shape.tokens), ranks])


def flat(shape: Shape, dtype=jnp.bfloat16, seed: int = 0) -> Inputs:
    """e, c, targets like a fresh model's: logits of unit variance, targets unrelated to them."""
    embeddings, targets = jax.random.split(jax.random.key(seed + 1))
    e = jax.random.normal(embeddings, (shape.tokens, shape.width), jnp.bfloat16).astype(dtype)
    return e, classifier(shape, dtype, seed), jax.random.randint(targets, (shape.tokens,), 0, shape.vocabulary)


DATA = {"trained": trained, "flat": flat}
