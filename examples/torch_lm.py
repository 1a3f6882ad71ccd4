"""The language model of train_lm.py and its training loop, in PyTorch, with linear cross-entropy.

train_lm.py runs it beside its own two runs, from the same weights (`load_flax`) and on the same batches.

What to take from it into a training script of your own:
  1. The model returns hidden states, not logits (`LanguageModel`).
  2. The loss takes them and the head's (V, D) matrix, here the token embedding, in the same dtype (`loss`).
  3. With shift=1 position i predicts token i + 1: the tokens are their own targets, and `hidden` is not sliced.
"""

import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from cce_torch import linear_cross_entropy


class Block(nn.Module):
    """Causal attention, then a perceptron, each added to its input and normalizing what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        heads = (part(y).unflatten(-1, (-1, 64)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class LanguageModel(nn.Module):
    """A pre-norm decoder, from tokens (B, T) to hidden states (B, T, D): the head's matmul is left to the loss.

    Parameters and the residual stream are float32; matmuls and the hidden states are of type `dtype`.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for block in self.blocks:
                x = block(x)
            return self.norm(x).to(self.dtype)


def loss(hidden: Tensor, embedding: Tensor, tokens: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, embedding.to(hidden.dtype), tokens, shift=1)


def train(model: LanguageModel, batches: Tensor, learning_rate: float, name: str) -> tuple[np.ndarray, float]:
    """The loss at each step, and tokens per second without the first step, which compiles the kernels."""
    warmup, end = len(batches) // 10 + 1, len(batches) + 1

    def schedule(step: int) -> float:
        return step / warmup if step < warmup else (1 + math.cos(math.pi * (step - warmup) / (end - warmup))) / 2

    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses, times = [], []
    for tokens in (progress := tqdm(batches, desc=name, unit="step")):
        value = loss(model(tokens), model.tokens.weight, tokens)
        optimizer.zero_grad()
        value.backward()
        # clip_grad_norm_, but with a norm that is exact on CPUs too: PyTorch's float32 one is off by up to 1e-3 there.
        squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.stack(squares).sum().sqrt())
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
        times.append(time.perf_counter())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return np.array(losses), batches[1:].numel() / max(times[-1] - times[0], 1e-9)


def temporary_mib(model: LanguageModel, tokens: Tensor) -> float:
    """Memory that the loss and its gradients take of PyTorch's besides inputs and outputs; NaN where it cannot tell."""
    if not tokens.is_cuda:
        return math.nan
    hidden = model(tokens).detach().requires_grad_()
    embedding = model.tokens.weight.detach().to(hidden.dtype).requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss(hidden, embedding, tokens).backward()
    return (torch.cuda.max_memory_allocated() - before - hidden.nbytes - embedding.nbytes) / 2**20


@torch.no_grad()
def load_flax(model: LanguageModel, params: dict) -> None:
    """Copy the parameters of train_lm.py's model, nested dicts of numpy arrays, into this one."""

    def copy(layer, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if name == "kernel":  # (in, out), where attention's heads and their channels are axes of their own
                array = array.reshape(layer.in_features, layer.out_features).T
            parameter = layer.bias if name == "bias" else layer.weight
            parameter.copy_(torch.tensor(array).reshape(parameter.shape))

    copy(model.tokens, params["tokens"])
    copy(model.positions, params["positions"])
    for i, block in enumerate(model.blocks):
        copy(block.attention_norm, params[f"LayerNorm_{2 * i}"])
        for part in ("query", "key", "value", "out"):
            copy(getattr(block, part), params[f"MultiHeadDotProductAttention_{i}"][part])
        copy(block.mlp_norm, params[f"LayerNorm_{2 * i + 1}"])
        copy(block.up, params[f"Dense_{2 * i}"])
        copy(block.down, params[f"Dense_{2 * i + 1}"])
    copy(model.norm, params[f"LayerNorm_{2 * len(model.blocks)}"])
