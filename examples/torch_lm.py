"""The language model of train_lm.py and its training loop, in PyTorch, with linear cross-entropy.

train_lm.py runs it beside its own two runs, from the same weights (`load_flax`) and on the same batches.

What to take from it into a training script of your own:
  1. The head is a `LinearCrossEntropyHead`. With targets it gives the loss, without the logits (`LanguageModel`).
  2. With shift=1 position i predicts token i + 1: the tokens are their own targets, and `hidden` is not sliced.
  3. On several devices FSDP wraps the model, whose forward computes the loss; the rows of the embedding, which is the
     head's matrix too, can be split over a mesh axis of their own (`split`).
"""

import math
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from tqdm import tqdm

from cce_torch import LinearCrossEntropyHead, VocabParallelStyle, linear_cross_entropy


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
    """A pre-norm decoder, from tokens (B, T) to the mean loss of predicting the next ones.

    Parameters and the residual stream are float32; matmuls, and the loss's inputs, are of type `dtype`.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = LinearCrossEntropyHead(width, vocabulary, bias=False, shift=1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.head(self.hidden(tokens), tokens)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The final hidden states, (B, T, D)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x).to(self.dtype)


def split(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Splits all parameters over the mesh axis "data" (FSDP2), and the embedding's rows over "tensor"."""
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model, mesh["tensor"], {"tokens": rows, "head": VocabParallelStyle()})
        model.head.weight = model.tokens.weight
    if "data" in names:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(
    model: LanguageModel, batches: Tensor, learning_rate: float, name: str, mesh: DeviceMesh | None = None
) -> tuple[np.ndarray, float]:
    """The loss at each step, and tokens per second without the first step, which compiles the kernels.

    mesh: the devices over which the model was split. Each process then gets all batches, and computes its part of them.
    """
    warmup, end = len(batches) // 10 + 1, len(batches) + 1

    def schedule(step: int) -> float:
        return step / warmup if step < warmup else (1 + math.cos(math.pi * (step - warmup) / (end - warmup))) / 2

    parts, part = 1, 0
    if mesh is not None and "data" in (mesh.mesh_dim_names or ()):
        parts, part = mesh["data"].size(), mesh["data"].get_local_rank()
    foreach = None if mesh is None else False  # its operations take no parameters of several meshes at once
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.1, foreach=foreach)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses, times = [], []
    others = dist.is_initialized() and dist.get_rank() > 0
    for tokens in (progress := tqdm(batches, desc=name, unit="step", disable=others)):
        value = model(tokens.chunk(parts)[part])
        optimizer.zero_grad()
        value.backward()
        # clip_grad_norm_, but with a norm that is exact on CPUs too: PyTorch's float32 one is off by up to 1e-3 there.
        squares = [_whole(x.grad.square().sum()) for x in model.parameters() if x.grad is not None]
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.stack(squares).sum().sqrt(), foreach)
        optimizer.step()
        scheduler.step()
        mean = _whole(value.detach()).clone()
        if mesh is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
        times.append(time.perf_counter())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return np.array(losses), batches[1:].numel() / max(times[-1] - times[0], 1e-9)


def temporary_mib(model: LanguageModel, tokens: Tensor) -> float:
    """Memory that the loss and its gradients take of PyTorch's besides inputs and outputs; NaN where it cannot tell."""
    if not tokens.is_cuda:
        return math.nan
    with torch.autocast("cuda", model.dtype, enabled=model.dtype != torch.float32):
        hidden = model.hidden(tokens).detach().requires_grad_()
    embedding = model.tokens.weight.detach().to(hidden.dtype).requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, embedding, tokens, shift=1).backward()
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
