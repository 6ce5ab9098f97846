"""Megatron's layout of models with multi-head latent attention, shared experts and dense first layers: for planning.

Down-projections and norms of the latent are on every tensor-parallel rank; up-projections are cut by heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.resharding.families import HFTensor, Parameter, Piece
from flowrl.resharding.shapes import LatentShape

CUT: dict[str, int] = {
    "self_attn.q_b_proj.weight": 0,
    "self_attn.kv_b_proj.weight": 0,
    "self_attn.o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
}
"""The dim that tensor parallelism cuts, by the end of a tensor's name; others are whole on every rank. Both sides."""


def check_tensor_parallel(shape: LatentShape, tp: int) -> None:
    """Errors: `ValueError` with the numbers where `tp` does not divide what is cut."""
    sizes = {
        "attention heads": shape.heads,
        "intermediate_size": shape.ffn_size,
        "shared experts": shape.shared_ffn_size,
    }
    for what, size in sizes.items():
        if size % tp:
            raise ValueError(f"tp={tp} does not divide the model's {size} ({what})")


def layer_tensors(shape: LatentShape, layer: int) -> tuple[HFTensor, ...]:
    """Tensors of a layer without its routed experts."""
    h, heads, prefix = shape.hidden_size, shape.heads, f"model.layers.{layer}."
    q, kv = shape.query_rank, shape.kv_rank
    tensors = {
        "input_layernorm.weight": (h,),
        "self_attn.q_a_proj.weight": (q, h),
        "self_attn.q_a_layernorm.weight": (q,),
        "self_attn.q_b_proj.weight": (heads * (shape.nope_dim + shape.rope_dim), q),
        "self_attn.kv_a_proj_with_mqa.weight": (kv + shape.rope_dim, h),
        "self_attn.kv_a_layernorm.weight": (kv,),
        "self_attn.kv_b_proj.weight": (heads * (shape.nope_dim + shape.head_dim), kv),
        "self_attn.o_proj.weight": (h, heads * shape.head_dim),
        "post_attention_layernorm.weight": (h,),
    }
    dense = layer < shape.num_dense_layers
    mlp, ffn = ("mlp.", shape.ffn_size) if dense else ("mlp.shared_experts.", shape.shared_ffn_size)
    if not dense:
        tensors |= {
            "mlp.gate.weight": (shape.num_experts, h),
            "mlp.gate.e_score_correction_bias": (shape.num_experts,),
        }
    tensors |= {
        f"{mlp}gate_proj.weight": (ffn, h),
        f"{mlp}up_proj.weight": (ffn, h),
        f"{mlp}down_proj.weight": (h, ffn),
    }
    return tuple(HFTensor(prefix + name, size) for name, size in tensors.items())


def shard(tensor: HFTensor, tp: int, tp_rank: int) -> tuple[tuple[int, int], ...]:
    """The box that a tensor-parallel rank keeps, in training and in generation alike."""
    box = [(0, size) for size in tensor.shape]
    for name, dim in CUT.items():
        if tensor.name.endswith(name):
            share = tensor.shape[dim] // tp
            box[dim] = (tp_rank * share, (tp_rank + 1) * share)
    return tuple(box)


def layer_parameters(shape: LatentShape, layer: int, *, tp: int, tp_rank: int) -> Iterator[Parameter]:
    """One parameter per tensor of `layer_tensors`, called by the tensor's name: planning needs no other."""
    check_tensor_parallel(shape, tp)
    for tensor in layer_tensors(shape, layer):
        box = shard(tensor, tp, tp_rank)
        size = tuple(stop - start for start, stop in box)
        target = tuple((0, extent) for extent in size)
        yield Parameter(tensor.name, size, (Piece(tensor.name, box, target),), replicated=size == tensor.shape)
