"""The language model in JAX (Flax), and its loss.

What to take from it into a training script of your own:
  1. The model returns hidden states, not logits (`LanguageModel`).
  2. The loss takes them and the head's (V, D) matrix, here the token embedding (`linear_loss`).
  3. With shift=1 position i predicts token i + 1: the tokens are their own targets, and `hidden` is not sliced.
  4. The matrix may be float32 where the hidden states are bfloat16: its gradient then is float32, without rounding.
  5. num_items is the number of targets of the whole batch: the losses of its parts then add up to its mean.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from cce_jax import linear_cross_entropy

from .settings import Settings


class LanguageModel(nn.Module):
    """A pre-norm decoder, from tokens (B, T) to hidden states (B, T, D): the head's matmul is left to the loss.

    It has no biases but LayerNorm's: Flax rounds a bfloat16 product before it adds one, and the sum again, PyTorch the
    sum alone, and in a bfloat16 model of 8 layers that parts the curves of the two frameworks by 0.05 nats.
    """

    settings: Settings
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        width, dtype = self.settings.width, jnp.dtype(self.settings.dtype)
        embed = partial(nn.Embed, features=width, embedding_init=nn.initializers.normal(0.02))
        x = embed(self.vocabulary, name="tokens")(tokens)
        x += embed(self.settings.context, name="positions")(jnp.arange(tokens.shape[-1]))
        dense = partial(nn.Dense, use_bias=False, dtype=dtype)
        attend = partial(nn.MultiHeadDotProductAttention, use_bias=False, dtype=dtype, force_fp32_for_softmax=True)
        for _ in range(self.settings.layers):
            x += attend(width // 64)(nn.LayerNorm(dtype=dtype)(x), mask=nn.make_causal_mask(tokens))
            y = dense(4 * width)(nn.LayerNorm(dtype=dtype)(x))
            x += dense(width)(nn.gelu(y))
        return nn.LayerNorm(dtype=dtype)(x)


def linear_loss(hidden: jax.Array, embedding: jax.Array, tokens: jax.Array, **options) -> jax.Array:
    return linear_cross_entropy(hidden, embedding, tokens, shift=1, **options)


def full_logits_loss(hidden: jax.Array, embedding: jax.Array, tokens: jax.Array, num_items: float) -> jax.Array:
    embedding = embedding.astype(hidden.dtype)
    logits = jnp.matmul(hidden[:, :-1], embedding.T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).sum() / num_items
