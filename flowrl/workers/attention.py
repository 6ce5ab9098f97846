"""Causal attention for Megatron-core within packed rows, with their rotary embeddings.

Legend: T tokens, H query heads and G key/value heads of this rank, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region  # type: ignore[import-untyped]
from megatron.core.transformer.attention import SelfAttention  # type: ignore[import-untyped]
from torch.nn.functional import scaled_dot_product_attention

from flowrl.workers.packed import Block, PackedRows

FLASH_DTYPES = (torch.float16, torch.bfloat16)
"""Those that the kernel for packed rows takes."""


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, d], each pair of its elements i and i + d / 2 turned by the angles of its position (Su et al. 2021,
    section 3.4.2, with pairs as in Llama)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def prepare(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query: [T, H, d], key and value: [T, G, d] -> query, key, value with rotary embeddings, [T, H, d] each.

    Not every kernel takes fewer key/value heads than query heads, and those that do are not in every torch.
    """
    query, key = turned(query, cosines, sines), turned(key, cosines, sines)
    ratio = query.shape[1] // key.shape[1]
    if ratio > 1:
        key, value = (x[:, :, None].expand(-1, -1, ratio, -1).flatten(1, 2) for x in (key, value))
    return query, key, value


_prepare = torch.compile(prepare) if torch.cuda.is_available() else prepare


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v over earlier positions of the same row; all [T, H, d]."""
    if query.is_cuda and query.dtype in FLASH_DTYPES:
        return _attention_packed(query, key, value, rows)
    return torch.cat([_attention_padded(query, key, value, block) for block in rows.blocks])


def _attention_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    # Not in every torch that runs on a CPU.
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(query, key, value, rows.starts, rows.starts, rows.longest, rows.longest, window_size=(-1, 0))
    assert isinstance(out, torch.Tensor)
    return out


def _attention_padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block) -> torch.Tensor:
    """Of the rows of a block, [its tokens, H, d]."""
    q, k, v = (_pad(x[block.tokens], block) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)
    return out if block.places is None else out.index_select(0, block.places)


def _pad(x: torch.Tensor, block: Block) -> torch.Tensor:
    """x: [tokens, H, d] -> [rows, H, width, d]."""
    if block.places is not None:
        x = x.new_zeros(block.rows * block.width, *x.shape[1:]).index_copy_(0, block.places, x)
    return x.view(block.rows, block.width, *x.shape[1:]).transpose(1, 2)


class CausalAttention(torch.nn.Module):
    """Megatron-core's `core_attention` for packed rows."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedRows,
        **_: Any,
    ) -> torch.Tensor:
        """query: [T, 1, H, d], key and value: [T, 1, G, d] -> [T, 1, H * d]."""
        rows = packed_seq_params
        q, k, v = _prepare(query[:, 0], key[:, 0], value[:, 0], rows.cosines, rows.sines)
        return attention(q, k, v, rows).flatten(1)[:, None]


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
