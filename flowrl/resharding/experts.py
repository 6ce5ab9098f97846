"""The parts of a model with experts in every layer, apart from each other: attention and the rest, and experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flowrl.config.model_shape import ModelShape
from flowrl.resharding import families
from flowrl.resharding.families import ExpertShard, Parameter

DENSE_MLP = (".mlp.linear_fc1.", ".mlp.linear_fc2.")


def local_experts(shape: ModelShape, ep: int, ep_rank: int) -> range:
    """Global numbers of the experts that a rank holds."""
    return ExpertShard(ep=ep, ep_rank=ep_rank).experts(shape.num_experts)


def attention_parameters(
    shape: ModelShape, *, tp: int, tp_rank: int, layers: range, first: bool, last: bool, head: bool = True
) -> Iterator[Parameter]:
    """What a stage holds beside its feed-forward parts: attention, norms, embedding and head."""
    for parameter in families.stage_parameters(
        attention_shape(shape, tp), tp=tp, tp_rank=tp_rank, layers=layers, first=first, last=last, head=head
    ):
        if not any(name in parameter.name for name in DENSE_MLP):
            yield parameter


def attention_shape(shape: ModelShape, tp: int = 1) -> ModelShape:
    """A dense shape whose feed-forward part any `tp` divides, for what experts leave unchanged."""
    return replace(shape, ffn_size=tp, num_experts=0)
