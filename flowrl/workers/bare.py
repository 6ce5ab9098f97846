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
from flowrl.resharding.ranks import ParallelSizes, RankPlace, Side, groups
from flowrl.workers import cuda_on_cpu
from flowrl.workers.groups import Coordinates, _group
from flowrl.workers.model import DTYPES, build_model, transformer_config
from flowrl.workers.weights import HeldRegion, ModelWeights, global_name


def group_of(places: Sequence[RankPlace], side: Side, *axes: str) -> dist.ProcessGroup:
    """This rank's group along `axes`. Collective: all ranks make all groups, in one order."""
    rank, found = dist.get_rank(), None
    for ranks in groups(places, side, *axes):
        made = _group(ranks)
        found = made if rank in ranks else found
    assert found is not None, "every rank is in a group along every axis"
    return found


def _ends(places: Sequence[RankPlace]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group of first and last stage, and of the first stage alone; a middle stage gets any."""
    rank = dist.get_rank()
    pipelines = groups(places, "train", "pp")
    ends = [_group(tuple(sorted({ranks[0], ranks[-1]}))) for ranks in pipelines]
    firsts = [_group((ranks[0],)) for ranks in pipelines]
    mine = next(number for number, ranks in enumerate(pipelines) if rank in ranks)
    return ends[mine], firsts[mine]


def train_groups(places: Sequence[RankPlace]) -> ProcessGroupCollection:
    """Megatron-core's groups for ranks numbered as `places` say. Collective."""
    made = ProcessGroupCollection()
    for name, axes in {
        "tp": ("tp",),
        "cp": ("cp",),
        "dp": ("dp",),
        "pp": ("pp",),
        "mp": ("pp", "tp"),
        "tp_cp": ("cp", "tp"),
        "dp_cp": ("dp", "cp"),
        "intra_dp_cp": ("dp", "cp"),
        "tp_dp_cp": ("dp", "cp", "tp"),
        "intra_dist_opt": ("pp", "dp", "cp", "tp"),
    }.items():
        setattr(made, name, group_of(places, "train", *axes))
    for name, axes in {"ep": ("ep",), "expt_tp": ("etp",), "expt_dp": ("edp",), "intra_expt_dp": ("edp",)}.items():
        setattr(made, name, group_of(places, "experts", *axes))
    made.tp_ep, made.tp_ep_pp = group_of(places, "experts", "ep", "etp"), group_of(places, "experts", "pp", "ep", "etp")
    made.embd, made.pos_embd = _ends(places)
    made.inter_dist_opt = made.hcp = None
    return made


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
    layout = TrainLayout(tp=sizes.tp, pp=sizes.pp, vpp=1, first_stage_layers=None, cp=1, ep=1, etp=1)
    config = EngineConfig(layout=layout, dtype=dtype, tokens_per_microbatch=1)  # type: ignore[arg-type]
    at = places[dist.get_rank()].train
    assert at is not None, "every rank trains"
    with cuda_on_cpu.active():
        made = train_groups(places)
        model = build_model(shape, transformer_config(shape, config), made, head=True, seed=0)
        model.to(device=device, dtype=DTYPES[dtype]).requires_grad_(False)
    _mark_gated(model)
    first = model.decoder.layers[0].layer_number - 1
    parameters = {global_name(name, first): parameter for name, parameter in model.named_parameters()}
    place = Coordinates(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp)
    weights = ModelWeights(shape, layout, place, made.mp, parameters, head=True)
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
