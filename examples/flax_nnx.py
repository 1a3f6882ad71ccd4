"""A small language model in Flax NNX with linear cross-entropy: tied and untied heads, micro-batches, weights.

    pip install ".[examples]"
    python examples/flax_nnx.py      # 20 seconds on two CPU cores

What to take from it into a training script of your own:
  1. The model returns hidden states (B, T, D), not logits. The loss takes them and the head's parameter as it is: an
     nnx.Param is an array to linear_cross_entropy.
  2. An untied head is an nnx.Linear. Its kernel is (D, V), so vocab_axis=1. A tied head is the embedding, (V, D).
  3. Parameters are float32; activations and matmuls are bfloat16.
  4. num_items is counted over all micro-batches. Then the sum of their gradients is the gradient of one large batch.
  5. token_weight weighs each token's loss. Here spaces, of which Python code has many, count a tenth.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from cce_jax import linear_cross_entropy

VOCABULARY, WIDTH, HEADS, CONTEXT = 256, 64, 4, 64  # the tokens are bytes


class LanguageModel(nnx.Module):
    """One transformer block. It maps tokens (B, T) to hidden states (B, T, D)."""

    def __init__(self, tied: bool, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, dtype=dtype, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs) for _ in range(3)])
        self.head = None if tied else nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        x += self.attention(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
        x += self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.norms[2](x)


def loss_of(model: LanguageModel, tokens, token_weight, num_items) -> jax.Array:
    """The loss of tokens (B, T): position i predicts token i + 1."""
    hidden = model(tokens)
    c, vocab_axis = (model.embed.embedding, 0) if model.head is None else (model.head.kernel, 1)
    return linear_cross_entropy(
        hidden, c, tokens, vocab_axis=vocab_axis, shift=1, token_weight=token_weight, num_items=num_items
    )


def gradient_of(model: LanguageModel, tokens, token_weight) -> tuple[jax.Array, nnx.State]:
    """The loss and its gradient, summed over micro-batches: tokens and token_weight are (micro-batches, B, T)."""
    num_items = token_weight[..., 1:].sum()  # of all micro-batches; no token predicts the first of a sequence
    definition, params = nnx.split(model)

    def loss_of_params(params: nnx.State, tokens, token_weight) -> jax.Array:
        return loss_of(nnx.merge(definition, params), tokens, token_weight, num_items)

    def add(total: tuple, micro_batch: tuple) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of_params)(params, *micro_batch)), None

    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zero, (tokens, token_weight))[0]


@nnx.jit
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, tokens, token_weight) -> jax.Array:
    loss, gradient = gradient_of(model, tokens, token_weight)
    optimizer.update(model, gradient)
    return loss


def main(steps: int = 100) -> None:
    text = np.frombuffer(inspect.getsource(inspect).encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, text.size - CONTEXT, (steps, 4, 8, 1))  # 4 micro-batches of 8
    batches = text[starts + np.arange(CONTEXT)]
    for tied in (True, False):
        model = LanguageModel(tied, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        for tokens in (progress := tqdm(batches, desc="tied head" if tied else "untied head", unit="step")):
            loss = train_step(model, optimizer, tokens, jnp.where(tokens == ord(" "), 0.1, 1.0))
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)


if __name__ == "__main__":
    main()
