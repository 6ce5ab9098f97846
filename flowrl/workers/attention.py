"""Causal attention for Megatron-core over PyTorch's fused kernel, on CPU and CUDA alike."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region  # type: ignore[import-untyped]
from megatron.core.transformer.attention import SelfAttention  # type: ignore[import-untyped]
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(torch.nn.Module):
    """Megatron-core's `core_attention`: softmax(q k^T / sqrt(d)) v over earlier positions, for right-padded rows."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None = None, **_: Any
    ) -> torch.Tensor:
        """query: [s, b, heads, d], key and value: [s, b, kv_heads, d] -> [s, b, heads * d]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        ratio = q.shape[1] // k.shape[1]
        if ratio > 1:
            # Not every kernel takes fewer key/value heads than query heads, and those that do are not in every torch.
            k, v = k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class GroupedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention that also works with more tensor-parallel ranks than key/value heads.

    Megatron-core gathers the projections there through its global groups, which flowrl leaves uninitialised; this class
    does the same with the role's own group.
    """

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states: [s, b, h] -> query [s, b, heads / tp, d], key and value [s, b, 1, d]."""
        tp, kv_heads = self.tp_group.size(), self.config.num_query_groups
        if kv_heads >= tp:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        fused, _ = self.linear_qkv(hidden_states)
        # The backward pass of this gather sums what all ranks of a key/value head contribute.
        fused = all_gather_last_dim_from_tensor_parallel_region(fused, group=self.tp_group)
        sharing = tp // kv_heads
        head, part = divmod(self.tp_group.rank(), sharing)
        size = self.hidden_size_per_attention_head
        group = fused.unflatten(-1, (kv_heads, -1, size))[:, :, head]
        num_queries = (group.shape[2] - 2) // sharing
        query = group[:, :, part * num_queries : (part + 1) * num_queries]
        key, value = group[:, :, -2:-1], group[:, :, -1:]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value
