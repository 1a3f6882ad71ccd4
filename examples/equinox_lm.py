"""A small language model in Equinox with linear cross-entropy: tied and untied heads, micro-batches, weights.

    pip install ".[examples]"
    python examples/equinox_lm.py      # 20 seconds on two CPU cores

What to take from it into a training script of your own:
  1. The model returns hidden states (T, D), not logits. jax.vmap makes (B, T, D) of them, and the loss takes the whole
     batch: under vmap it would form the gradient of the head for each sequence.
  2. The weight of an eqx.nn.Linear is (V, D), as is a tied head, the embedding's weight: vocab_axis stays 0.
  3. Parameters are float32. Activations and matmuls are bfloat16, as the model computes with a copy in bfloat16.
  4. num_items is counted over all micro-batches. Then the sum of their gradients is the gradient of one large batch.
  5. token_weight weighs each token's loss. Here spaces, of which Python code has many, count a tenth.
"""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from cce_jax import linear_cross_entropy

VOCABULARY, WIDTH, HEADS, CONTEXT = 256, 64, 4, 64  # the tokens are bytes
DTYPE = jnp.bfloat16  # of activations and matmuls


class LanguageModel(eqx.Module):
    """One transformer block. It maps tokens (T,) to hidden states (T, D)."""

    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]
    head: eqx.nn.Linear | None  # None: tied to the embedding

    def __init__(self, tied: bool, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        self.embed = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)))
        self.positions = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[1], (CONTEXT, WIDTH)))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[2])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[3])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[4])
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(3)]
        self.head = None if tied else eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=keys[5])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens) + self.positions.weight[: len(tokens)]
        y = jax.vmap(self.norms[0])(x)
        x += self.attention(y, y, y, mask=jnp.tri(len(tokens), dtype=bool))
        x += jax.vmap(lambda x: self.down(jax.nn.gelu(self.up(self.norms[1](x)))))(x)
        return jax.vmap(self.norms[2])(x)


def loss_of(model: LanguageModel, tokens, token_weight, num_items) -> jax.Array:
    """The loss of tokens (B, T): position i predicts token i + 1."""
    model = jax.tree.map(lambda x: x.astype(DTYPE) if eqx.is_inexact_array(x) else x, model)
    hidden = jax.vmap(model)(tokens)
    head = model.embed if model.head is None else model.head
    return linear_cross_entropy(hidden, head.weight, tokens, shift=1, token_weight=token_weight, num_items=num_items)


def gradient_of(model: LanguageModel, tokens, token_weight) -> tuple[jax.Array, optax.Updates]:
    """The loss and its gradient, summed over micro-batches: tokens and token_weight are (micro-batches, B, T)."""
    num_items = token_weight[..., 1:].sum()  # of all micro-batches; no token predicts the first of a sequence

    def add(total: tuple, micro_batch: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        found = eqx.filter_value_and_grad(loss_of)(model, *micro_batch, num_items)
        return jax.tree.map(jnp.add, total, found), None

    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
    return jax.lax.scan(add, zero, (tokens, token_weight))[0]


def main(steps: int = 100) -> None:
    text = np.frombuffer(inspect.getsource(inspect).encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, text.size - CONTEXT, (steps, 4, 8, 1))  # 4 micro-batches of 8
    batches = text[starts + np.arange(CONTEXT)]
    optimizer = optax.adamw(3e-3)

    @eqx.filter_jit
    def train_step(model: LanguageModel, state: optax.OptState, *batch: jax.Array) -> tuple:
        loss, gradient = gradient_of(model, *batch)
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    for tied in (True, False):
        model = LanguageModel(tied, jax.random.key(0))
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        for tokens in (progress := tqdm(batches, desc="tied head" if tied else "untied head", unit="step")):
            model, state, loss = train_step(model, state, tokens, jnp.where(tokens == ord(" "), 0.1, 1.0))
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)


if __name__ == "__main__":
    main()
