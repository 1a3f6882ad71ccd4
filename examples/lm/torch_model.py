"""The language model in PyTorch, which also computes its loss.

What to take from it into a training script of your own:
  1. The head is a `LinearCrossEntropyHead`. With targets it gives the loss, without the logits (`LanguageModel`).
  2. With shift=1 position i predicts token i + 1: the tokens are their own targets, and `hidden` is not sliced.
  3. num_items is the number of targets of the whole batch: the losses of its parts then add up to its mean.
  4. On several devices FSDP wraps the model, whose forward computes the loss; the rows of the embedding, which is the
     head's matrix too, can be split over a mesh axis of their own (`split`).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from cce_torch import LinearCrossEntropyHead, VocabParallelStyle

from .settings import Settings


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
    """A pre-norm decoder, from tokens (B, T) to the loss of predicting the next ones.

    Parameters and the residual stream are float32; matmuls, and the loss's inputs, are of the settings' dtype.
    """

    def __init__(self, settings: Settings, vocabulary: int) -> None:
        super().__init__()
        width = settings.width
        self.dtype = getattr(torch, settings.dtype)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(settings.context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = LinearCrossEntropyHead(width, vocabulary, bias=False, shift=1)
        self.head.weight = self.tokens.weight
        self.apply(_draw)

    def forward(self, tokens: Tensor, num_items: float | None = None) -> Tensor:
        """The mean loss; or its sum over num_items."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.loss(self.hidden(tokens), tokens, num_items)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The final hidden states, (B, T, D)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x).to(self.dtype)

    def loss(self, hidden: Tensor, tokens: Tensor, num_items: float | None) -> Tensor:
        return self.head(hidden, tokens, num_items=num_items)


class FullLogitsModel(LanguageModel):
    """The same model with the loss of all logits, for comparison."""

    def loss(self, hidden: Tensor, tokens: Tensor, num_items: float | None) -> Tensor:
        return full_logits_loss(hidden, self.head.weight, tokens, num_items)


MODELS = {"cce": LanguageModel, "full": FullLogitsModel}


def full_logits_loss(hidden: Tensor, embedding: Tensor, tokens: Tensor, num_items: float | None) -> Tensor:
    """F.cross_entropy of float32 logits.

    A matmul of bfloat16 would round the logits to bfloat16. So bfloat16 inputs are multiplied as float32, which does
    not change them. On a GPU this may use TF32 (the trainer allows it), which holds every bfloat16 number. An addition
    rounds the embedding: a cast would round its gradient too.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        rounded = embedding + (embedding.to(hidden.dtype) - embedding).detach()
        logits = hidden[:, :-1].float() @ rounded.T
    targets = tokens[:, 1:].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return loss / (targets.numel() if num_items is None else num_items)


@torch.no_grad()
def _draw(module: nn.Module) -> None:
    """First weights, of the same variances as those of the model in Flax."""
    if isinstance(module, nn.Embedding):
        module.weight.normal_(std=0.02)
    elif isinstance(module, nn.Linear) and not isinstance(module, LinearCrossEntropyHead):
        module.weight.normal_(std=module.in_features**-0.5)


def split(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Splits all parameters over the mesh axis "data" (FSDP2), and the embedding's rows over "tensor"."""
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        if isinstance(model, FullLogitsModel):
            raise ValueError("full logits cannot be split over the axis tensor: train with the other loss")
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model, mesh["tensor"], {"tokens": rows, "head": VocabParallelStyle()})
        model.head.weight = model.tokens.weight
    if "data" in names:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])


@torch.no_grad()
def load_flax(model: LanguageModel, params: dict) -> None:
    """Copies the parameters of the model in Flax, nested dicts of numpy arrays, into this one."""

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
