"""A Megatron-core GPT model of a given shape on this rank's place in a layout, without weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state  # type: ignore[import-untyped]
from megatron.core.models.gpt import GPTModel  # type: ignore[import-untyped]
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-untyped]
from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-untyped]
from megatron.core.tensor_parallel import (  # type: ignore[import-untyped]
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-untyped]

from flowrl.config.layout import stage_chunks
from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import EngineConfig, TrainLayout
from flowrl.resharding.families import check_expert_parallel, padded_vocab_size
from flowrl.workers.attention import CausalAttention, GroupedSelfAttention
from flowrl.workers.megatron_private import cure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(shape: ModelShape, config: EngineConfig) -> TransformerConfig:
    """Megatron-core's settings. Dropout is off whatever the model's config says: log-probs must repeat exactly."""
    layout, dtype = config.layout, DTYPES[config.dtype]
    check_expert_parallel(shape, layout.ep, layout.etp)
    recompute: dict[str, Any] = {}
    if config.recompute:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        **_pipeline(shape, layout),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Every weight is read from the model folder, so none is drawn first.
        perform_initialization=False,
        # Losses come as weighted sums over the whole mini-batch: nothing may divide by replicas or micro-batches.
        calculate_per_token_loss=True,
        # Micro-batches differ in length. Megatron-core demands this dispatcher with it, for dense models too.
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # The fused kernels of these live in apex and Transformer Engine, which flowrl does without.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=torch.cuda.is_available(),
        bias_dropout_fusion=torch.cuda.is_available(),
        **recompute,
        **(_mixture(shape, layout) if shape.num_experts else {}),
    )


def _pipeline(shape: ModelShape, layout: TrainLayout) -> dict[str, Any]:
    """Settings of the pipeline's stages and of what their ranks exchange."""
    if layout.pp == 1:
        return {}
    stages = stage_chunks(shape.num_layers, layout.pp, layout.vpp, layout.first_stage_layers)
    uneven = layout.first_stage_layers is None and shape.num_layers % layout.pp
    return {
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": len(stages[-1][0]) if uneven else None,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        # Of two interleaved stages each is the other's neighbour on both sides, and with Megatron-core's batched exchange
        # gradients are silently wrong (0.16.1); with single sends and receives they are right.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }


def _mixture(shape: ModelShape, layout: TrainLayout) -> dict[str, Any]:
    """Settings of a mixture of experts: routing as the families define it, and no loss but the role's own."""
    return {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.expert_ffn_size,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen experts is softmax over all, chosen and normalised.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Megatron-core trains experts beside tensor parallelism in this form only.
        "sequence_parallel": layout.tp > 1,
    }


def build_chunks(
    shape: ModelShape, settings: TransformerConfig, groups: ProcessGroupCollection, *, head: bool, seed: int
) -> list[GPTModel]:
    """The chunks of the pipeline stage that this rank holds, one where stages are not interleaved; weights undefined.
    `head` is False for a critic, whose output layer is replaced and must not be tied to the embedding.

    Collective over the model's groups where embeddings are tied across stages.
    """
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # The one piece of global state that the layers use; the rest stays uninitialised.
        parallel_state._set_global_memory_buffer()
    if not get_cuda_rng_tracker().get_states():
        # Once in a process: what a role takes over from a checkpoint is not lost when another is made after it.
        model_parallel_cuda_manual_seed(
            seed, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank(),
            force_reset_rng=True,
        )  # fmt: skip
    cure()
    vpp = settings.virtual_pipeline_model_parallel_size
    if vpp is None:
        return [_build_chunk(shape, settings, groups, head, None)]
    return [_build_chunk(shape, settings, groups, head, number) for number in range(vpp)]


def _build_chunk(
    shape: ModelShape, settings: TransformerConfig, groups: ProcessGroupCollection, head: bool, vp_stage: int | None
) -> GPTModel:
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
    )
    spec.submodules.self_attention.module = GroupedSelfAttention
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    vpp = settings.virtual_pipeline_model_parallel_size
    model = GPTModel(
        settings,
        spec,
        vocab_size=padded_vocab_size(shape.vocab_size, settings.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=groups.pp.rank() == 0 and vp_stage in (None, 0),
        post_process=groups.pp.rank() == groups.pp.size() - 1 and (vp_stage is None or vp_stage == vpp - 1),
        share_embeddings_and_output_weights=shape.tied and head,
        # The attention applies rotary embeddings itself.
        position_embedding_type="none",
        pg_collection=groups,
        vp_stage=vp_stage,
    )
    _mark_split_weights(model)
    return model


def _mark_split_weights(model: GPTModel) -> None:
    """Tell Megatron-core which weights are shards. It does so itself only where it draws initial values, and takes
    unmarked ones for copies, which gradient norms count once. Experts have replicas of their own, also where ep is 1
    and Megatron-core would sum their gradients over those of the other weights."""
    split_dims = {ColumnParallelLinear: 0, RowParallelLinear: 1, VocabParallelEmbedding: 0}
    for module in model.modules():
        dim = split_dims.get(type(module))
        if dim is not None and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)
            if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.is_expert:
                module.weight.allreduce = False


def rotary_frequencies(shape: ModelShape) -> torch.Tensor:
    """Angle per position of each pair of a head's elements, [d / 2] float32, radians; stretched as the model's config says.

    Errors: as `llama3_frequencies`.
    """
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    scaling = shape.rope_scaling or {}
    if scaling.get("rope_type") == "linear":
        return frequencies / float(scaling["factor"])
    if scaling.get("rope_type") == "llama3":
        return llama3_frequencies(frequencies, scaling, shape.max_positions)
    return frequencies


def llama3_frequencies(frequencies: torch.Tensor, scaling: dict[str, Any], max_positions: int) -> torch.Tensor:
    """Rotary frequencies [d / 2] stretched as Llama 3.1 does: long wavelengths by `factor`, short ones not, a smooth
    passage between.

    Errors: `ValueError` where the model's config lacks one of the settings.
    """
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key not in scaling]
    if missing:
        raise ValueError(f"llama3 RoPE scaling lacks {', '.join(missing)} in the model's config.json")
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or max_positions
    turns = original * frequencies / (2 * math.pi)
    passage = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    stretched: torch.Tensor = (1 - passage) * frequencies / factor + passage * frequencies
    return stretched
