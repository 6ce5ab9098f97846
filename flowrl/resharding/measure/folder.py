"""A Hugging Face folder without weights, for shapes that have a name only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.config.model_shape import ModelShape

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
}


def write_config(folder: Path, shape: ModelShape, dtype: str) -> Path:
    """Write `config.json` for a shape and return the folder. Error: `ValueError` for another architecture."""
    if shape.architecture not in MODEL_TYPES:
        raise ValueError(f"no config of {shape.architecture}; known: {', '.join(MODEL_TYPES)}")
    config: dict[str, Any] = dict(
        architectures=[shape.architecture],
        model_type=MODEL_TYPES[shape.architecture],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=shape.tied,
        hidden_act="silu",
        torch_dtype=dtype,
    )
    if shape.num_experts:
        config |= {"num_experts_per_tok": shape.experts_per_token}
        if shape.architecture == "MixtralForCausalLM":
            config |= {"num_local_experts": shape.num_experts, "intermediate_size": shape.expert_ffn_size}
        else:
            config |= {"num_experts": shape.num_experts, "moe_intermediate_size": shape.expert_ffn_size}
            config |= {"norm_topk_prob": shape.norm_topk_prob, "decoder_sparse_step": 1, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
