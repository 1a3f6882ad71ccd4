"""A small language model in Flax Linen with linear cross-entropy: tied and untied heads, micro-batches, weights.

    pip install ".[examples]"
    python examples/flax_linen.py      # 20 seconds on two CPU cores

What to take from it into a training script of your own:
  1. The model returns hidden states (B, T, D), not logits. The method `logits` is for generation; `init` calls it, so
     that the head has parameters.
  2. The kernel of an nn.Dense is (D, V), so vocab_axis=1. A tied head is the embedding, (V, D).
  3. Parameters are float32; activations and matmuls are bfloat16.
  4. num_items is counted over all micro-batches. Then the sum of their gradients is the gradient of one large batch.
  5. token_weight weighs each token's loss. Here spaces, of which Python code has many, count a tenth.
"""

import inspect
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from cce_jax import linear_cross_entropy

VOCABULARY, WIDTH, HEADS, CONTEXT = 256, 64, 4, 64  # the tokens are bytes


class LanguageModel(nn.Module):
    """One transformer block. It maps tokens (B, T) to hidden states (B, T, D)."""

    tied: bool
    dtype: Any = jnp.bfloat16

    def setup(self) -> None:
        self.embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        self.positions = nn.Embed(CONTEXT, WIDTH, dtype=self.dtype)
        self.attention = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype, use_bias=False)
        self.up, self.down = nn.Dense(4 * WIDTH, dtype=self.dtype), nn.Dense(WIDTH, dtype=self.dtype)
        self.norms = [nn.LayerNorm(dtype=self.dtype) for _ in range(3)]
        if not self.tied:
            self.head = nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        x += self.attention(self.norms[0](x), mask=nn.make_causal_mask(tokens))
        x += self.down(nn.gelu(self.up(self.norms[1](x))))
        return self.norms[2](x)

    def logits(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self(tokens)) if self.tied else self.head(self(tokens))


def loss_of(model: LanguageModel, params: dict, tokens, token_weight, num_items) -> jax.Array:
    """The loss of tokens (B, T): position i predicts token i + 1."""
    hidden = model.apply({"params": params}, tokens)
    c, vocab_axis = (params["embed"]["embedding"], 0) if model.tied else (params["head"]["kernel"], 1)
    return linear_cross_entropy(
        hidden, c, tokens, vocab_axis=vocab_axis, shift=1, token_weight=token_weight, num_items=num_items
    )


def gradient_of(model: LanguageModel, params: dict, tokens, token_weight) -> tuple[jax.Array, dict]:
    """The loss and its gradient, summed over micro-batches: tokens and token_weight are (micro-batches, B, T)."""
    num_items = token_weight[..., 1:].sum()  # of all micro-batches; no token predicts the first of a sequence

    def add(total: tuple, micro_batch: tuple) -> tuple[tuple, None]:
        found = jax.value_and_grad(loss_of, argnums=1)(model, params, *micro_batch, num_items)
        return jax.tree.map(jnp.add, total, found), None

    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zero, (tokens, token_weight))[0]


def main(steps: int = 100) -> None:
    text = np.frombuffer(inspect.getsource(inspect).encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, text.size - CONTEXT, (steps, 4, 8, 1))  # 4 micro-batches of 8
    batches = text[starts + np.arange(CONTEXT)]
    optimizer = optax.adamw(3e-3)

    @partial(jax.jit, static_argnums=0)
    def train_step(model: LanguageModel, params: dict, state: optax.OptState, *batch: jax.Array) -> tuple:
        loss, gradient = gradient_of(model, params, *batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    for tied in (True, False):
        model = LanguageModel(tied)
        params = model.init(jax.random.key(0), batches[0, 0], method="logits")["params"]
        state = optimizer.init(params)
        for tokens in (progress := tqdm(batches, desc="tied head" if tied else "untied head", unit="step")):
            params, state, loss = train_step(model, params, state, tokens, jnp.where(tokens == ord(" "), 0.1, 1.0))
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)


if __name__ == "__main__":
    main()
