"""Small causal language models of transformers with random weights, and a step of their training."""

from typing import Any

import pytest
import torch
import transformers

from cce_torch.in_torch import compiled

B, T, V = 2, 12, 97

# Small sizes, and numbers that decide the logits, by the names that configs have for them.
SMALL: dict[str, Any] = {
    "vocab_size": V,
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size", "emb_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "d_ff", "dff"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("logits_scaling", "final_logit_softcapping", "output_logit_soft_cap", "lm_head_multiplier"), 2.5),
    "logit_scale": 0.4,
    "initializer_range": 0.1,  # the logits reach the softcaps
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}

# The sections of a head's rotary embedding, for the time, the height and the width of a token of an image.
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}

# What the names above leave inconsistent or large, by the class of the config.
MORE: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "BltConfig": {"encoder_hash_byte_group_vocab": V},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4},
    "Dots3NoteConfig": {"num_key_value_heads": 4},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 8},
    "Gemma4TextConfig": {"vocab_size_per_layer_input": V},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "KimiLinearConfig": {"num_experts_per_token": 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"expert_ffn_hidden_size": 32},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 4},
    "PaddleOCRTextConfig": MROPE,
    "Qwen2_5OmniTextConfig": MROPE,
    "Qwen2_5_VLTextConfig": MROPE,
    "Qwen2VLTextConfig": MROPE,
    "Qwen2VLVisionConfig": {"depth": 2, "embed_dim": 32},
    "ReformerConfig": {"axial_pos_embds": False, "attention_head_size": 8},
    "XmodConfig": {"default_language": "en_XX"},
    "ZayaConfig": {"num_experts_per_tok": 1},
}


@pytest.fixture(autouse=True, scope="module")
def uncompiled():
    """For all tests of a file that imports this: impl="torch_compile" runs uncompiled, as compiling takes longest."""
    compiled._uncompilable.add("cpu")
    yield
    compiled._uncompilable.discard("cpu")


def small_config(config_class: Any, **changes: Any) -> Any:
    """A config of the class with small sizes, and without dropout."""
    default = config_class()
    names = default.to_dict()
    values = {k: x for k, x in SMALL.items() if k in names and (names[k] is not None or k.endswith("_token_id"))}
    if "qk_rope_head_dim" in names:  # such a head has no other head_dim, and as many keys as queries
        values.pop("head_dim", None)
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name in config_class.sub_configs:
        if isinstance(names.get(name), dict):
            values[name] = small_config(type(getattr(default, name))).to_dict()
    values |= {k: 0.0 for k, x in names.items() if ("dropout" in k or k.endswith("pdrop")) and isinstance(x, float)}
    return config_class(**{**values, **MORE.get(config_class.__name__, {}), **changes})


def small_model(config: Any, model_class: Any = None) -> Any:
    """A model with random weights, the same at each call, in training mode."""
    torch.manual_seed(0)
    return (model_class or transformers.AutoModelForCausalLM.from_config)(config).train()


def batch(rows: int = B) -> dict[str, torch.Tensor]:
    """Tokens, and labels of which the first rows ignore different numbers."""
    tokens = torch.randint(3, V, (rows, T), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for row in range(rows - 1):
        labels[row, : 3 + 2 * row] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients by the names of the parameters."""
    model.zero_grad()
    torch.manual_seed(2)
    loss = model(**inputs)[0]
    loss.sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def assert_same_step(found: Any, plain: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    """The loss and all gradients, which are returned, are those of the other model."""
    loss, gradients = step(found, **inputs)
    expected, references = step(plain, **inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, references)
    return gradients
