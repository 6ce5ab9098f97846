"""Named model shapes for planning and measuring without a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl.config.model_shape import ModelShape, read_model_shape
from flowrl.config.paths import is_folder


@dataclass(frozen=True)
class LatentShape(ModelShape):
    """Multi-head latent attention, shared experts and dense first layers (DeepSeek-V3 technical report, section 2).

    `head_dim` is that of the value; queries and keys have `nope_dim + rope_dim` per head.
    """

    num_dense_layers: int = 0
    shared_ffn_size: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0

    @property
    def num_parameters(self) -> int:
        h, heads = self.hidden_size, self.heads
        attention = h * (self.query_rank + self.kv_rank + self.rope_dim) + self.query_rank + self.kv_rank
        attention += heads * self.query_rank * (self.nope_dim + self.rope_dim)
        attention += heads * self.kv_rank * (self.nope_dim + self.head_dim) + heads * self.head_dim * h
        experts = self.num_experts * (3 * h * self.expert_ffn_size + h + 1) + 3 * h * self.shared_ffn_size
        sparse = self.num_layers - self.num_dense_layers
        layers = (
            self.num_layers * (attention + 2 * h) + self.num_dense_layers * 3 * h * self.ffn_size + sparse * experts
        )
        return layers + self.vocab_size * h * (1 if self.tied else 2) + h


def _shape(
    architecture: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **other: Any
) -> ModelShape:
    values: dict[str, Any] = dict(
        head_dim=128, tied=False, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_positions=4096, qkv_bias=False,
        qk_norm=architecture.startswith("Qwen3"), sliding_window=None, eos_token_ids=(),
    )  # fmt: skip
    return ModelShape(architecture, layers, hidden, ffn, heads, kv_heads, vocab_size=vocab, **(values | other))


def _experts(number: int, per_token: int, ffn_size: int) -> dict[str, int]:
    return dict(num_experts=number, experts_per_token=per_token, expert_ffn_size=ffn_size)


_DEEPSEEK = LatentShape(
    "DeepseekV3ForCausalLM", num_layers=61, hidden_size=7168, ffn_size=18432, heads=128, kv_heads=128, head_dim=128,
    vocab_size=129280, tied=False, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_positions=163840, qkv_bias=False,
    qk_norm=False, sliding_window=None, eos_token_ids=(), num_experts=256, experts_per_token=8, expert_ffn_size=2048,
    num_dense_layers=3, shared_ffn_size=2048, query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64,
)  # fmt: skip

LLAMA, QWEN3_MOE, QWEN2 = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM"
_QWEN2: dict[str, Any] = dict(qkv_bias=True, norm_eps=1e-6, rope_theta=1e6, max_positions=32768)
SHAPES: dict[str, ModelShape] = {
    "llama-7b": _shape(LLAMA, 32, 4096, 11008, 32, 32, 32000),
    "llama-13b": _shape(LLAMA, 40, 5120, 13824, 40, 40, 32000),
    "llama-70b": _shape(LLAMA, 80, 8192, 28672, 64, 8, 128256, rope_theta=5e5, max_positions=8192),
    "qwen3-30b-a3b": _shape(
        QWEN3_MOE, 48, 2048, 6144, 32, 4, 151936, rope_theta=1e6, max_positions=40960, **_experts(128, 8, 768)
    ),
    "qwen3-235b-a22b": _shape(
        QWEN3_MOE, 94, 4096, 12288, 64, 4, 151936, rope_theta=1e6, max_positions=40960, **_experts(128, 8, 1536)
    ),
    "deepseek-v3": _DEEPSEEK,
    "qwen2.5-0.5b": _shape(QWEN2, 24, 896, 4864, 14, 2, 151936, head_dim=64, tied=True, **_QWEN2),
    "qwen2.5-1.5b": _shape(QWEN2, 28, 1536, 8960, 12, 2, 151936, tied=True, **_QWEN2),
    "qwen2.5-7b": _shape(QWEN2, 28, 3584, 18944, 28, 4, 152064, **_QWEN2),
    "llama-1b": _shape(LLAMA, 16, 2048, 8192, 32, 8, 32000, head_dim=64),
    "llama-tiny": _shape(LLAMA, 4, 64, 192, 8, 4, 160, head_dim=8, max_positions=128),
    "qwen3-moe-1b": _shape(QWEN3_MOE, 16, 1024, 3072, 16, 4, 32000, head_dim=64, **_experts(32, 4, 512)),
    "qwen3-moe-tiny": _shape(QWEN3_MOE, 4, 64, 192, 8, 4, 160, head_dim=8, max_positions=128, **_experts(8, 2, 32)),
    "mixtral-tiny": _shape(
        "MixtralForCausalLM", 4, 64, 64, 8, 4, 160, head_dim=8, max_positions=128, **_experts(8, 2, 64)
    ),
}
"""llama-7b and llama-13b have Llama-2 dimensions, llama-70b those of Llama-3; `-1b` and `-tiny` are small enough to run."""


def planned_shape(model: str) -> ModelShape:
    """The shape called `model`, or of the Hugging Face folder `model`. Errors: `ValueError` listing the names."""
    if model in SHAPES:
        return SHAPES[model]
    if not is_folder(model):
        raise ValueError(f"model={model} is neither a folder nor a named shape; named are: {', '.join(SHAPES)}")
    return read_model_shape(model)
