"""What is measured: hidden states, a classifier and targets, under several orders of the vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import data
from bench.data import Inputs, Shape
from bench.training.__main__ import SETTINGS, prepare
from examples.lm.jax_trainer import Trainer
from examples.lm.settings import Settings

# As it is; at random; by the mean probability over other tokens; and over the same tokens that are measured.
ORDERS = ("own", "random", "sorted", "sorted for the call")
TEXT_BYTES = 60_000_000


class Model(NamedTuple):
    """The model of examples/lm at some steps of its training."""

    settings: Settings
    stages: tuple[int, ...]
    tokens: int  # that are measured


MODELS = {
    "large": Model(SETTINGS, (0, 300, 2000), 8192),
    "small": Model(Settings(192, 3, 128, 32768, batch=4, learning_rate=2e-3), (0, 100, 600), 2048),
}


class Case(NamedTuple):
    name: str
    given: Inputs  # those that are measured
    other: jax.Array  # hidden states of other tokens: their mean probabilities order the vocabulary


def of_head(name: str) -> Case:
    """bench.data.trained: ids are in order of frequency."""
    shape = Shape.parse(name)
    tokens = min(shape.tokens, 8192)
    e, c, targets = data.trained(shape._replace(tokens=2 * tokens))
    return Case(name, (e[:tokens], c, targets[:tokens]), e[tokens:])


def of_example(model: Model, stages: Sequence[int], folder: Path) -> Iterator[Case]:
    """A training on Python sources, and text that is held out. The names have the loss of the measured tokens."""
    settings = replace(model.settings, steps=stages[-1])
    folder.mkdir(parents=True, exist_ok=True)
    text = prepare(settings, TEXT_BYTES, folder)
    trainer = Trainer(settings, text.vocabulary)
    hidden = jax.jit(lambda params, batch: trainer.model.apply({"params": params}, batch))
    half = -(-model.tokens // (settings.context - 1))
    held_out = np.concatenate(text.validation(settings, -(-2 * half // settings.batch)))
    if len(held_out) < 2 * half:
        raise ValueError(f"{len(held_out)} sequences are held out, which is fewer than {2 * half}: give more text")
    measured, other = held_out[:half], held_out[half : 2 * half]
    for step in range(stages[-1] + 1):
        if step in stages:
            params = trainer.state["params"]
            states = [hidden(params, x)[:, :-1].reshape(-1, settings.width)[: model.tokens] for x in (measured, other)]
            e, of_others, c = (jnp.asarray(x, jnp.bfloat16) for x in (*states, params["tokens"]["embedding"]))
            name = f"step {step}, loss {trainer.evaluate([measured]):.2f}"
            yield Case(name, (e, c, jnp.asarray(measured[:, 1:].ravel()[: model.tokens])), of_others)
        if step < stages[-1]:
            trainer.step(text.batch(settings, step))


@jax.jit
def mean_probabilities(e: jax.Array, c: jax.Array) -> jax.Array:
    z = jnp.einsum("nd,vd->nv", e, c, preferred_element_type=jnp.float32)
    return jax.nn.softmax(z, axis=1).sum(0)


def by_probability(e: jax.Array, c: jax.Array, chunk: int) -> jax.Array:
    """The order of the vocabulary by its mean probability over these tokens, the likeliest first."""
    parts = [e[i : i + chunk] for i in range(0, len(e), chunk)]
    return jnp.argsort(-sum(map(partial(mean_probabilities, c=c), parts), jnp.zeros(len(c))))


def orders(case: Case, chunk: int) -> dict[str, jax.Array]:
    """Orders of the vocabulary, by name in ORDERS."""
    e, c, _ = case.given
    random = jnp.asarray(np.random.default_rng(0).permutation(len(c)))
    sorted_ones = by_probability(case.other, c, chunk), by_probability(e, c, chunk)
    return dict(zip(ORDERS, (jnp.arange(len(c)), random, *sorted_ones), strict=True))


@jax.jit
def ordered(given: Inputs, order: jax.Array) -> Inputs:
    e, c, targets = given
    return e, c[order], jnp.argsort(order)[targets]
