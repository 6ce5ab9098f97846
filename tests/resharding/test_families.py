"""The family table as pure arithmetic: what ranks hold, put together, is the model."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.config.model_shape import MOE_ARCHITECTURES, ModelShape
from flowrl.resharding.families import (
    ExpertShard,
    Parameter,
    box_size,
    check_expert_parallel,
    check_tensor_parallel,
    hf_tensors,
    padded_vocab_size,
    stage_parameters,
    train_stage_layers,
)
from flowrl.resharding.ranks import ParallelSizes


def shape_of(
    heads: int,
    kv_heads: int,
    *,
    layers: int = 2,
    vocab: int = 131,
    tied: bool = False,
    bias: bool = False,
    norm: bool = False,
) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=8,
        ffn_size=32,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=4,
        vocab_size=vocab,
        tied=tied,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_positions=64,
        qkv_bias=bias,
        qk_norm=norm,
        sliding_window=None,
        eos_token_ids=(),
    )


def held(shape: ModelShape, tp: int, pp: int) -> dict[tuple[int, int], tuple[Parameter, ...]]:
    stages = train_stage_layers(shape.num_layers, ParallelSizes(pp=pp))
    return {
        (stage, rank): stage_parameters(
            shape, tp=tp, tp_rank=rank, layers=stages[stage], first=stage == 0, last=stage == pp - 1
        )
        for stage in range(pp)
        for rank in range(tp)
    }


def slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    vocab=st.sampled_from([64, 131, 200]),
    tied=st.booleans(),
    bias=st.booleans(),
    norm=st.booleans(),
)
def test_ranks_hold_every_element_exactly_once_beside_declared_copies(
    heads: int, kv_heads: int, tp: int, pp: int, vocab: int, tied: bool, bias: bool, norm: bool
) -> None:
    """PAR-05: padding of the vocabulary belongs to no tensor. PAR-04: fewer key/value heads than ranks."""
    shape = shape_of(heads, kv_heads, vocab=vocab, tied=tied, bias=bias, norm=norm)
    counts = {tensor.name: torch.zeros(tensor.shape, dtype=torch.int64) for tensor in hf_tensors(shape)}
    for (_, rank), parameters in held(shape, tp, pp).items():
        for parameter in parameters:
            local = torch.zeros(parameter.shape, dtype=torch.int64)
            for piece in parameter.pieces:
                assert box_size(piece.source) == box_size(piece.target)
                local[slices(piece.target)] += 1
                copy = (parameter.replicated and rank > 0) or (tied and parameter.name == "output_layer.weight")
                counts[piece.tensor][slices(piece.source)] += 0 if copy else 1
            assert int(local.max()) <= 1
            if "embedding" not in parameter.name and "output_layer" not in parameter.name:
                assert bool((local == 1).all()), parameter.name
    for name, count in counts.items():
        assert bool((count == 1).all()), name


@settings(max_examples=40, deadline=None)
@given(
    architecture=st.sampled_from(MOE_ARCHITECTURES),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
)
def test_ranks_hold_every_element_of_every_expert_exactly_once(architecture: str, ep: int, etp: int, pp: int) -> None:
    """PAR-08: every expert once, under its own number, whatever the split; the router whole on every rank."""
    shape = replace(shape_of(4, 2), architecture=architecture, num_experts=8, experts_per_token=2, expert_ffn_size=12)
    counts = {tensor.name: torch.zeros(tensor.shape, dtype=torch.int64) for tensor in hf_tensors(shape)}
    assert len(counts) == 3 + shape.num_layers * (7 + 3 * 8)
    assert sum(count.numel() for count in counts.values()) == shape.num_parameters
    stages = train_stage_layers(shape.num_layers, ParallelSizes(pp=pp))
    for stage, rank, part in itertools.product(range(pp), range(ep), range(etp)):
        shard = ExpertShard(ep=ep, ep_rank=rank, etp=etp, etp_rank=part)
        ends = {"first": stage == 0, "last": stage == pp - 1}
        for parameter in stage_parameters(shape, tp=1, tp_rank=0, layers=stages[stage], **ends, shard=shard):
            held = sum(math.prod(box_size(piece.target)) for piece in parameter.pieces)
            assert held == math.prod(parameter.shape) or "embedding" in parameter.name or "output" in parameter.name
            expert = ".local_experts." in parameter.name
            for piece in parameter.pieces:
                if expert:
                    assert parameter.name.split(".")[6] == piece.tensor.split(".")[5]
                if expert or (rank == part == 0):
                    counts[piece.tensor][slices(piece.source)] += 1
    for name, count in counts.items():
        assert bool((count == 1).all()), name


def test_experts_that_do_not_divide_are_refused_with_numbers() -> None:
    """PAR-01."""
    shape = replace(shape_of(4, 2), num_experts=6, experts_per_token=2, expert_ffn_size=10)
    check_expert_parallel(shape, 3, 5)
    for (ep, etp), message in {(4, 1): "ep=4 does not divide .* 6 experts", (1, 4): "etp=4 does not .* 10"}.items():
        with pytest.raises(ValueError, match=message):
            check_expert_parallel(shape, ep, etp)
    with pytest.raises(ValueError, match="ep=2, etp=1: LlamaForCausalLM has no experts"):
        check_expert_parallel(shape_of(4, 2), 2, 1)


def test_fused_query_key_value_rows_are_grouped_by_key_value_head() -> None:
    """Heads 4, key/value heads 2, head size 4: [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    shape = shape_of(4, 2)
    parameter = next(p for p in held(shape, 1, 1)[0, 0] if p.name.endswith("layers.0.self_attention.linear_qkv.weight"))
    rows = [(p.tensor.split(".")[-2][0], p.source[0], p.target[0]) for p in parameter.pieces]
    assert rows == [
        ("q", (0, 8), (0, 8)),
        ("k", (0, 4), (8, 12)),
        ("v", (0, 4), (12, 16)),
        ("q", (8, 16), (16, 24)),
        ("k", (4, 8), (24, 28)),
        ("v", (4, 8), (28, 32)),
    ]


def test_gate_and_up_shares_of_a_rank_are_stacked() -> None:
    parameter = next(p for p in held(shape_of(4, 2), 2, 1)[0, 1] if p.name == "decoder.layers.1.mlp.linear_fc1.weight")
    assert parameter.shape == (32, 8)
    assert [(p.tensor.split(".")[-2], p.source[0], p.target[0]) for p in parameter.pieces] == [
        ("gate_proj", (16, 32), (0, 16)),
        ("up_proj", (16, 32), (16, 32)),
    ]


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(131, 1, 192), (131, 2, 192), (131, 3, 192), (64, 1, 64), (65, 5, 320)]
)
def test_vocabulary_is_padded_to_a_multiple_of_64_and_the_ranks(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab, tp) == padded


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), itertools.chain([(4, 2, 3), (12, 4, 6), (4, 2, 8)]))
def test_tensor_parallel_sizes_that_megatron_cannot_split_are_refused_with_numbers(
    heads: int, kv_heads: int, tp: int
) -> None:
    """PAR-01, PAR-04."""
    with pytest.raises(ValueError, match=f"tp={tp}"):
        check_tensor_parallel(shape_of(heads, kv_heads), tp)
