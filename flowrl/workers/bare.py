"""Models without roles: a trainer's real shards for any numbering of ranks, with weights that the caller writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-untyped]

from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import EngineConfig, TrainLayout
from flowrl.resharding.buffer import hold_together
from flowrl.resharding.ranks import ParallelSizes, RankPlace
from flowrl.workers import cuda_on_cpu
from flowrl.workers.groups import process_groups
from flowrl.workers.model import DTYPES, build_model, transformer_config
from flowrl.workers.weights import HeldRegion, ModelWeights, expert_shard, global_name


@dataclass(frozen=True)
class BareModel:
    """A Megatron-core model's part on this rank: its parameters by global name, and what they hold."""

    model: Any
    parameters: Mapping[str, torch.nn.Parameter]
    weights: ModelWeights
    groups: ProcessGroupCollection

    def held_regions(self) -> list[HeldRegion]:
        return self.weights.held_regions()


def build_bare(
    shape: ModelShape, sizes: ParallelSizes, places: Sequence[RankPlace], *, dtype: str, device: torch.device
) -> BareModel:
    """The part of this rank, weights undefined. Collective."""
    layout = TrainLayout(tp=sizes.tp, pp=sizes.pp, vpp=1, first_stage_layers=None, cp=1, ep=sizes.ep, etp=sizes.etp)
    config = EngineConfig(layout=layout, dtype=dtype, tokens_per_microbatch=1)  # type: ignore[arg-type]
    at = places[dist.get_rank()].train
    assert at is not None, "every rank trains"
    with cuda_on_cpu.active():
        made = process_groups(places)
        model = build_model(shape, transformer_config(shape, config), made, head=True, seed=0)
        model.to(device=device, dtype=DTYPES[dtype]).requires_grad_(False)
        hold_together(dict(model.named_parameters()))
    _mark_gated(model)
    first = model.decoder.layers[0].layer_number - 1, expert_shard(layout, at).experts(shape.num_experts).start
    parameters = {global_name(name, *first): parameter for name, parameter in model.named_parameters()}
    weights = ModelWeights(shape, layout, places, parameters, head=True)
    return BareModel(model, parameters, weights, made)


def _mark_gated(model: Any) -> None:
    """Say that a shard of the gated projection has two halves, as Megatron-core marks it where it draws the weights."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.linear_fc1.weight"):
            parameter.partition_stride = 2


class Arena:
    """One piece of memory that the parameters of several models use by turns: all see the same values in it."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(num_elements, dtype=dtype, device=device)

    def hold(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        """Point parameters at the arena, one after another; their own memory is given back."""
        offset = 0
        for parameter in parameters:
            count = parameter.numel()
            parameter.data = self.memory[offset : offset + count].view(parameter.shape)
            offset += count


def num_elements(model: torch.nn.Module) -> int:
    """Elements of all parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
