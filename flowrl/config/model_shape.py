"""What flowrl must know of a model before anything heavy is imported, read from its `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config.paths import user_path

MOE_ARCHITECTURES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")
ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *MOE_ARCHITECTURES,
)  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """Architecture facts of a Hugging Face folder. Sizes are elements; `kv_heads` divides `heads`.

    A dense model has `num_experts` 0 and `ffn_size` columns in its feed-forward; in a mixture every layer has
    `num_experts` of `expert_ffn_size` columns, and a token visits `experts_per_token` of them. Their weights are a
    softmax over the chosen ones (`norm_topk_prob`) or the chosen part of a softmax over all.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_positions: int
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; tied embeddings count once."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.qkv_bias:
            attention += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.qk_norm:
            attention += 2 * self.head_dim
        layer = attention + self.ffn_parameters + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def active_ffn_size(self) -> int:
        """Feed-forward columns that one token passes through in a layer."""
        return self.experts_per_token * self.expert_ffn_size if self.num_experts else self.ffn_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer, without their router."""
        return self.num_experts * 3 * self.hidden_size * self.expert_ffn_size

    @property
    def ffn_parameters(self) -> int:
        """Parameters of one layer's feed-forward: all experts and their router in a mixture."""
        if self.num_experts:
            return self.expert_parameters + self.num_experts * self.hidden_size
        return 3 * self.hidden_size * self.ffn_size


BUILTIN = {
    "builtin:tiny": ModelShape(
        architecture="LlamaForCausalLM", num_layers=2, hidden_size=64, ffn_size=192, heads=4, kv_heads=2, head_dim=32,
        vocab_size=50, tied=False, norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None, max_positions=128, qkv_bias=False,
        qk_norm=False, sliding_window=None, eos_token_ids=(1,),
    ),
}  # fmt: skip
"""Shapes of the built-in models, which need not exist yet when a configuration is checked."""


def shape_of(path: str) -> ModelShape:
    """The shape of `model.path`: a built-in name or a folder. Errors: as `read_model_shape`."""
    if path.startswith("builtin:"):
        if path not in BUILTIN:
            raise ValueError(f"{path} is not a built-in model; known: {', '.join(BUILTIN)}")
        return BUILTIN[path]
    return read_model_shape(path)


def read_model_shape(folder: str | Path) -> ModelShape:
    """The shape of the model in `folder`.

    Errors: `ValueError` naming the folder where there is no readable `config.json`, where the architecture is not
    known (the known ones are listed), or where a setting is one that flowrl would not compute exactly.
    """
    folder = user_path(folder)
    try:
        raw = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(
            f"model folder {folder} has no config.json; give a Hugging Face folder or builtin:tiny"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    names = raw.get("architectures") or ["(none)"]
    if names[0] not in ARCHITECTURES:
        raise ValueError(f"architecture {names[0]} of {folder} is not known; known: {', '.join(ARCHITECTURES)}")
    try:
        shape = _shape(names[0], raw, folder)
    except KeyError as missing:
        raise ValueError(f"{folder / 'config.json'} lacks {missing}, which {names[0]} needs") from None
    except TypeError as error:
        raise ValueError(f"{folder / 'config.json'} has a value of the wrong type: {error}") from None
    return shape


_SIZES = (
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def _check_sizes(raw: dict[str, Any], folder: Path) -> None:
    for name in _SIZES:
        if type(raw[name]) is not int or raw[name] < 1:
            raise ValueError(f"{folder / 'config.json'}: {name}={raw[name]!r} is not an integer of at least 1")


def _shape(architecture: str, raw: dict[str, Any], folder: Path) -> ModelShape:
    _check_sizes(raw, folder)
    heads = int(raw["num_attention_heads"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{folder}: {heads} attention heads are not a multiple of {kv_heads} key/value heads")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{folder}: hidden_act={raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        raise ValueError(f"{folder}: quantization_config is not supported; give a folder of plain weights")
    if raw.get("mlp_bias"):
        raise ValueError(f"{folder}: mlp_bias=true is not supported")
    qwen2 = architecture == "Qwen2ForCausalLM"
    if not qwen2 and raw.get("attention_bias"):
        raise ValueError(f"{folder}: attention_bias=true is supported for Qwen2 only")
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{folder}: RoPE scaling {kind!r} is not supported; supported: default, linear, llama3")
    eos = raw.get("eos_token_id")
    windowed = architecture in ("MistralForCausalLM", "MixtralForCausalLM") or raw.get("use_sliding_window")
    window = raw.get("sliding_window") if windowed else None
    return ModelShape(
        architecture=architecture,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=int(raw["hidden_size"]),
        ffn_size=int(raw["intermediate_size"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        vocab_size=int(raw["vocab_size"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=None if kind == "default" else {**scaling, "rope_type": kind},
        max_positions=int(raw["max_position_embeddings"]),
        qkv_bias=qwen2,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        sliding_window=window,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        **(_experts(architecture, raw, folder) if architecture in MOE_ARCHITECTURES else {}),
    )


def _experts(architecture: str, raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a mixture of experts. Errors: `ValueError` for what would not be computed exactly."""
    # transformers 5 writes num_local_experts for both families.
    count = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]
    mixtral = architecture == "MixtralForCausalLM"
    per_token, normalised = int(raw["num_experts_per_tok"]), bool(mixtral or raw.get("norm_topk_prob", False))
    refused = {
        "mlp_only_layers": raw.get("mlp_only_layers") or None,
        "decoder_sparse_step": None if raw.get("decoder_sparse_step", 1) == 1 else raw["decoder_sparse_step"],
        "shared_expert_intermediate_size": raw.get("shared_expert_intermediate_size") or None,
        "scoring_func": None if raw.get("scoring_func", "softmax") == "softmax" else raw["scoring_func"],
        "router_jitter_noise": raw.get("router_jitter_noise") or None,
    }
    for key, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{folder}: {key}={value!r} is not supported; supported are mixtures whose every layer routes each token by "
                "softmax to equal experts, without shared ones and without noise"
            )
    if not 0 < per_token <= int(count):
        raise ValueError(f"{folder}: num_experts_per_tok={per_token} must be 1 to the {count} experts of a layer")
    if per_token == 1 and normalised:
        raise ValueError(
            f"{folder}: num_experts_per_tok=1 with normalised weights gives every token weight 1 and the router no "
            "gradient; it is not supported"
        )
    return {
        "num_experts": int(count),
        "experts_per_token": per_token,
        "expert_ffn_size": int(raw["intermediate_size"] if mixtral else raw["moe_intermediate_size"]),
        "norm_topk_prob": normalised,
    }
