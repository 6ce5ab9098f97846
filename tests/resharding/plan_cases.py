"""Small models, layouts, and a replay of a plan element by element, for the tests of planning."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

from flowrl.config.model_shape import ModelShape
from flowrl.resharding import families
from flowrl.resharding.buffer import hold_together
from flowrl.resharding.families import Box
from flowrl.resharding.needs import rank_needs
from flowrl.resharding.plan import MovePlan
from flowrl.resharding.plan.move import TO_ALL, Parcel
from flowrl.resharding.plan.tables import train_stage_layers
from flowrl.resharding.ranks import ParallelSizes, RankPlace

DENSE = ModelShape(
    "Qwen2ForCausalLM", num_layers=8, hidden_size=6, ffn_size=24, heads=8, kv_heads=2, head_dim=3, vocab_size=131,
    tied=False, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_positions=64, qkv_bias=True, qk_norm=True,
    sliding_window=None, eos_token_ids=(),
)  # fmt: skip
TIED = replace(DENSE, tied=True, num_layers=5, kv_heads=4)
MOE = replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    num_layers=5,
    qkv_bias=False,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=16,
)
MIXTRAL = replace(MOE, architecture="MixtralForCausalLM", qk_norm=False, num_layers=3)


def parameters_of(shape: ModelShape, sizes: ParallelSizes, place: RankPlace) -> list[families.Parameter]:
    """What a training rank holds, in the order of Megatron's models."""
    if place.train is None:
        return []
    at, shard = place.train, families.ExpertShard(sizes.ep, place.train.ep, sizes.etp, place.train.etp)
    found: list[families.Parameter] = []
    parts = [range(0), *(range(layer, layer + 1) for layer in train_stage_layers(shape.num_layers, sizes)[at.pp])]
    for first, last, layers in (
        (at.pp == 0, False, parts[0]),
        *((False, False, layer) for layer in parts[1:]),
        (False, at.pp == sizes.pp - 1, parts[0]),
    ):
        # A tied head is the embedding itself on a single stage, and stage_parameters sees one end at a time here.
        alone = shape.tied and last and at.pp == 0
        common = dict(tp=sizes.tp, tp_rank=at.tp, layers=layers, first=first, last=last, shard=shard)
        found += families.stage_parameters(shape, **common, head=not alone)
    return found


def held_by(shape: ModelShape, sizes: ParallelSizes, place: RankPlace) -> dict[str, list[Box]]:
    """Boxes of a training rank, straight from the tables of Megatron's parameters."""
    boxes = defaultdict(list)
    for parameter in parameters_of(shape, sizes, place):
        for piece in parameter.pieces:
            boxes[piece.tensor].append(piece.source)
    return dict(boxes)


def trained_by(
    shape: ModelShape, sizes: ParallelSizes, place: RankPlace, tensors: dict[str, torch.Tensor]
) -> tuple[list[tuple[str, Box]], list[torch.Tensor]]:
    """Regions of a training rank whose parameters are held together, and their views; values are those of `tensors`."""
    dtype, table = next(iter(tensors.values())).dtype, parameters_of(shape, sizes, place)
    parameters = {
        row.name: torch.nn.Parameter(torch.zeros(row.shape, dtype=dtype), requires_grad=False) for row in table
    }
    hold_together(parameters)
    keys, views = [], []
    for piece, parameter in ((piece, parameters[row.name]) for row in table for piece in row.pieces):
        views.append(parameter.data[index(piece.target)].copy_(tensors[piece.tensor][index(piece.source)]))
        keys.append((piece.tensor, piece.source))
    return keys, views


def needed_by(shape: ModelShape, sizes: ParallelSizes, place: RankPlace) -> dict[str, list[Box]]:
    """Boxes of a generation rank."""
    return {} if place.rollout is None else rank_needs(shape, sizes, place.rollout.tp, place.rollout.pp)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


def masks(boxes: dict[str, list[Box]], shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Which elements of every tensor the boxes have."""
    found = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    for name, there in boxes.items():
        for box in there:
            found[name][index(box)] = True
    return found


def replay(
    plan: MovePlan,
    shapes: dict[str, tuple[int, ...]],
    held: list[dict[str, list[Box]]],
    needed: list[dict[str, list[Box]]],
) -> list[int]:
    """Carries the plan out on sets of elements; returns the elements that each rank received.

    Asserts that senders have what they send, that both ends agree, that nothing arrives twice or unneeded, that buckets
    are within their limit and that every rank ends with what it needs.
    """
    schedules = [plan.schedule(rank) for rank in range(plan.world)]
    trained = [masks(boxes, shapes) for boxes in held]
    wanted = [masks(boxes, shapes) for boxes in needed]
    engine = [masks({}, shapes) for _ in held]
    received = [0] * plan.world
    for rank, schedule in enumerate(schedules):
        for tensor, box, relayed in schedule.local:
            assert not relayed and trained[rank][tensor][index(box)].all()
            assert not engine[rank][tensor][index(box)].any()
            engine[rank][tensor][index(box)] = True
    for stage in plan.stages:
        before = [{name: mask.copy() for name, mask in there.items()} for there in engine]
        posted: dict[tuple[int, int, int], Parcel] = {}
        for rank, schedule in enumerate(schedules):
            for bucket in (bucket for bucket in schedule.buckets if bucket.stage == stage.name):
                assert rank in bucket.group and list(bucket.group) == sorted(bucket.group)
                moved = sum(parcel.elements for parcel in (*bucket.packed, *bucket.receives)) * plan.element_bytes
                assert moved <= stage.largest_bucket[rank]
                assert bucket.form not in TO_ALL or len({parcel.pieces for parcel in bucket.sends}) <= 1
                for parcel in bucket.sends:
                    assert parcel.peer in bucket.group
                    posted[rank, parcel.peer, bucket.number] = parcel
        for rank, schedule in enumerate(schedules):
            for bucket in (bucket for bucket in schedule.buckets if bucket.stage == stage.name):
                for parcel in bucket.receives:
                    assert posted.pop((parcel.peer, rank, bucket.number)).pieces == parcel.pieces
                    for tensor, box, relayed in parcel.pieces:
                        source = before if relayed else trained
                        assert source[parcel.peer][tensor][index(box)].all(), "the sender has not got it"
                        assert wanted[rank][tensor][index(box)].all(), "received and not needed"
                        assert not engine[rank][tensor][index(box)].any(), "received twice"
                        engine[rank][tensor][index(box)] = True
                    received[rank] += parcel.elements
        assert not posted, "sent and not received"
    for rank in range(plan.world):
        for name in shapes:
            assert np.array_equal(engine[rank][name], wanted[rank][name]), (rank, name)
    return received
