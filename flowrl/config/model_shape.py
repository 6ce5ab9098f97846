"""What flowrl must know of a model before anything heavy is imported, read from its `config.json`."""

from __future__ import annotations

import json
import math
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
    except OSError as error:
        raise ValueError(f"model folder {folder}: config.json cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{folder / 'config.json'} is not an object of settings, but {type(raw).__name__}")
    names = raw.get("architectures") or ["(none)"]
    if not isinstance(names, list) or names[0] not in ARCHITECTURES:
        names = names if isinstance(names, list) else [repr(names)]
        raise ValueError(f"architecture {names[0]} of {folder} is not known; known: {', '.join(ARCHITECTURES)}")
    try:
        shape = _shape(names[0], raw, folder)
        _check_rope(shape, folder)
    except KeyError as missing:
        raise ValueError(f"{folder / 'config.json'} lacks {missing}, which {names[0]} needs") from None
    except TypeError as error:
        raise ValueError(f"{folder / 'config.json'} has a value of the wrong type: {error}") from None
    return shape


class _Settings:
    """`config.json` by field, with errors that name file and field. A field that is null counts as left out."""

    def __init__(self, raw: dict[str, Any], folder: Path) -> None:
        self._raw, self._file = raw, folder / "config.json"

    def _wrong(self, name: str, wanted: str) -> ValueError:
        return ValueError(f"{self._file}: {name}={self._raw[name]!r} is not {wanted}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Without a default the field must be there. Errors: `KeyError`, `ValueError`."""
        if default is not None and self._raw.get(name) is None:
            return default
        if type(self._raw[name]) is not int or self._raw[name] < 1:
            raise self._wrong(name, "an integer of at least 1")
        return int(self._raw[name])

    def flag(self, name: str) -> bool:
        """False where it is left out. Error: `ValueError`."""
        value = self._raw.get(name)
        if not isinstance(value, (bool, type(None))):
            raise self._wrong(name, "true or false")
        return bool(value)

    def number(self, name: str, default: float) -> float:
        """Error: `ValueError`."""
        value = self._raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self._wrong(name, "a number above 0")
        return float(value)

    def table(self, name: str) -> dict[str, Any]:
        """Empty where it is left out. Error: `ValueError`."""
        value = self._raw.get(name)
        if not isinstance(value, (dict, type(None))):
            raise self._wrong(name, "an object of settings")
        return value or {}

    def ids(self, name: str) -> tuple[int, ...]:
        """One, a list of them, or none. Error: `ValueError`."""
        value = self._raw.get(name)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in found):
            raise self._wrong(name, "an id, or a list of ids, from 0 on")
        return tuple(found)


_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _check_rope(shape: ModelShape, folder: Path) -> None:
    """Errors: `KeyError` for a number that is not there, `ValueError` for what is none."""
    if shape.rope_scaling is not None:
        settings = _Settings(shape.rope_scaling, folder)
        for name in _ROPE_NUMBERS[shape.rope_scaling["rope_type"]]:
            shape.rope_scaling[name]
            settings.number(name, 1.0)


def _shape(architecture: str, raw: dict[str, Any], folder: Path) -> ModelShape:
    settings = _Settings(raw, folder)
    heads = settings.integer("num_attention_heads")
    kv_heads = settings.integer("num_key_value_heads", heads)
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
    rope = settings.table("rope_parameters")
    scaling = settings.table("rope_scaling") or {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"{folder}: RoPE scaling {kind!r} is not supported; supported: default, linear, llama3")
    windowed = architecture in ("MistralForCausalLM", "MixtralForCausalLM") or settings.flag("use_sliding_window")
    window = settings.integer("sliding_window") if windowed and raw.get("sliding_window") is not None else None
    hidden_size = settings.integer("hidden_size")
    return ModelShape(
        architecture=architecture,
        num_layers=settings.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=settings.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=settings.integer("head_dim", max(1, hidden_size // heads)),
        vocab_size=settings.integer("vocab_size"),
        tied=settings.flag("tie_word_embeddings"),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope_theta=_Settings(rope, folder).number("rope_theta", settings.number("rope_theta", 10000.0)),
        rope_scaling=None if kind == "default" else {**scaling, "rope_type": kind},
        max_positions=settings.integer("max_position_embeddings"),
        qkv_bias=qwen2,
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        sliding_window=window,
        eos_token_ids=settings.ids("eos_token_id"),
        **(_experts(architecture, raw, folder) if architecture in MOE_ARCHITECTURES else {}),
    )


def _experts(architecture: str, raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a mixture of experts. Errors: `ValueError` for what would not be computed exactly."""
    # transformers 5 writes num_local_experts for both families.
    settings = _Settings(raw, folder)
    count = settings.integer("num_local_experts" if "num_local_experts" in raw else "num_experts")
    mixtral = architecture == "MixtralForCausalLM"
    per_token, normalised = settings.integer("num_experts_per_tok"), mixtral or settings.flag("norm_topk_prob")
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
    if per_token > count:
        raise ValueError(f"{folder}: num_experts_per_tok={per_token} must be 1 to the {count} experts of a layer")
    if per_token == 1 and normalised:
        raise ValueError(
            f"{folder}: num_experts_per_tok=1 with normalised weights gives every token weight 1 and the router no "
            "gradient; it is not supported"
        )
    return {
        "num_experts": count,
        "experts_per_token": per_token,
        "expert_ffn_size": settings.integer("intermediate_size" if mixtral else "moe_intermediate_size"),
        "norm_topk_prob": normalised,
    }
