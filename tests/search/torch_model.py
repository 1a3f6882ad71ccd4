"""A drawn call as the loss of a patched model of Hugging Face transformers.

The model has no layers and no norm, so that its embeddings are the hidden states: the truth of the loss is its truth.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.func import functional_call

from cce_torch.transformers import cce_patch
from tests.causal_models import small_config


def model_of(width: int, vocabulary: int, bias: bool, softcap: float | None, logit_scale: float | None) -> Any:
    """A model with these logits: of Gemma 2, Cohere or Llama."""
    sizes: dict[str, Any] = {"hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": 0, "head_dim": 8}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
    sizes |= {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if softcap is not None:
        config = small_config(transformers.Gemma2Config, **sizes, final_logit_softcapping=softcap, layer_types=[])
    elif logit_scale is not None:
        config = small_config(transformers.CohereConfig, **sizes, logit_scale=logit_scale)
    else:
        config = small_config(transformers.LlamaConfig, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.model.norm = torch.nn.Identity()
    model.lm_head = torch.nn.Linear(width, vocabulary, bias)
    return model


def loss_of(model: Any, trains: bool, num_items: Any = None, **options: Any) -> Callable[..., Tensor]:
    """The loss of the patched model, of e (B, T, D), c (V, D), targets (B, T) and bias. options: of cce_patch."""
    cce_patch(model, **options).train(trains)
    more = {} if num_items is None else {"num_items_in_batch": num_items}

    def loss(e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
        weights = {"lm_head.weight": c} | ({} if bias is None else {"lm_head.bias": bias})
        return functional_call(model, weights, (), {"inputs_embeds": e, "labels": targets, **more}).loss

    return loss
