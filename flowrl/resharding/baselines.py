"""Other ways of moving weights, each in the best simple form that we know, to measure flowrl's against.

They gather whole tensors on every rank, from the trainer's own layout, and hand them to the engine's own loader. All
take the same inputs, so a process can run one after another on the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.clock import Clock
from flowrl.resharding.families import ExpertShard, Parameter, stage_layers, stage_parameters
from flowrl.resharding.ranks import ParallelSizes, TrainPlace

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True)
class Form:
    """One parameter of a stage: `parts[m]` is what member m of a gathering group holds of it.

    Members are tensor-parallel ranks, for experts (ep, etp) places in this order: each has an expert of its own in the
    same position, or a slice of one.
    """

    parts: tuple[Parameter, ...]
    expert: bool

    @property
    def replicated(self) -> bool:
        return self.parts[0].replicated

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part of any member: all are alike."""
        return self.parts[0].shape

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Trained:
    """The trainer as a baseline sees it, on one rank.

    `places` are all ranks' by rank. `stages[pp]` lists the parameters of a stage; `local` are this rank's by name.
    `pp_group`, `tp_group` and `expert_group` (ep x etp) hold this rank's partners.
    """

    places: tuple[TrainPlace, ...]
    sizes: ParallelSizes
    stages: tuple[tuple[Form, ...], ...]
    local: Mapping[str, torch.Tensor]
    pp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup

    @property
    def at(self) -> TrainPlace:
        return self.places[dist.get_rank()]

    @property
    def example(self) -> torch.Tensor:
        """Any parameter: all have its dtype and device."""
        return next(iter(self.local.values()))

    def member(self, at: TrainPlace, expert: bool) -> int:
        """Which part of a form a rank holds."""
        return at.ep * self.sizes.etp + at.etp if expert else at.tp

    def replica(self, at: TrainPlace, expert: bool) -> int:
        """Number of a rank among those that hold the same part."""
        return at.edp if expert else at.dp * self.sizes.cp + at.cp

    def mine(self, form: Form) -> torch.Tensor:
        """This rank's part, where it is on the stage."""
        return self.local[form.parts[self.member(self.at, form.expert)].name].detach()

    def group(self, expert: bool) -> tuple[dist.ProcessGroup, list[int]]:
        """The gathering group, and which part each of its ranks holds."""
        group = self.expert_group if expert else self.tp_group
        return group, [self.member(self.places[rank], expert) for rank in dist.get_process_group_ranks(group)]

    def stage_ranks(self) -> list[int]:
        """The rank of this rank's pipeline on each stage."""
        ranks = {self.places[rank].pp: rank for rank in dist.get_process_group_ranks(self.pp_group)}
        return [ranks[pp] for pp in range(len(self.stages))]


def parameter_forms(shape: ModelShape, sizes: ParallelSizes) -> tuple[tuple[Form, ...], ...]:
    """[pp] -> the parameters of that stage; a second copy of a tied embedding is left out."""
    return tuple(
        tuple(
            _stage_forms(shape, sizes, pp, layers, expert=False) + _stage_forms(shape, sizes, pp, layers, expert=True)
        )
        for pp, layers in enumerate(stage_layers(shape.num_layers, sizes.pp))
    )


def _stage_forms(shape: ModelShape, sizes: ParallelSizes, pp: int, layers: range, *, expert: bool) -> list[Form]:
    places = [(0, ep, etp) for ep in range(sizes.ep) for etp in range(sizes.etp)] if expert else [
        (tp, 0, 0) for tp in range(sizes.tp)
    ]  # fmt: skip
    tables = [
        stage_parameters(
            shape,
            tp=sizes.tp,
            tp_rank=tp,
            layers=layers,
            first=pp == 0,
            last=pp == sizes.pp - 1,
            shard=ExpertShard(sizes.ep, ep, sizes.etp, etp),
        )
        for tp, ep, etp in places
    ]
    forms = [Form(parts, expert) for parts in zip(*tables, strict=True)]
    second = {"output_layer.weight"} if shape.tied else set()
    return [
        form for form in forms if (".experts." in form.parts[0].name) == expert and form.parts[0].name not in second
    ]


def whole_tensors(parts: Sequence[Parameter], shards: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors that these parts, held as `shards`, make up."""
    pieces = [(piece, shard) for part, shard in zip(parts, shards, strict=True) for piece in part.pieces]
    sizes: dict[str, list[int]] = {}
    for piece, _ in pieces:
        ends = [stop for _, stop in piece.source]
        sizes[piece.tensor] = [max(pair) for pair in zip(ends, sizes.get(piece.tensor, ends), strict=True)]
    if len(pieces) == len(sizes):
        return [(piece.tensor, _view(shard, piece.target)) for piece, shard in pieces]
    whole = {name: torch.empty(size, dtype=shards[0].dtype, device=shards[0].device) for name, size in sizes.items()}
    for piece, shard in pieces:
        _view(whole[piece.tensor], piece.source).copy_(_view(shard, piece.target))
    return list(whole.items())


def _view(tensor: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


class PerTensorGather:
    """Each parameter by itself: broadcast along the pipeline, gathered over the ranks that share it, loaded."""

    name = "per_tensor_gather"

    def __init__(self, trained: Trained, load_weights: Loader) -> None:
        self._trained, self._load = trained, load_weights

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Seconds by stage on this rank. Collective."""
        trained, example = self._trained, self._trained.example
        clock, ranks = Clock(example.device), trained.stage_ranks()
        for pp, forms in enumerate(trained.stages):
            for form in forms:
                shard = trained.mine(form) if trained.at.pp == pp else example.new_empty(form.shape)
                if len(ranks) > 1:
                    dist.broadcast(shard, src=ranks[pp], group=trained.pp_group)
                    clock.lap("pp")
                group, members = trained.group(form.expert)
                parts, shards = [form.parts[0]], [shard]
                if len(members) > 1 and not form.replicated:
                    parts = [form.parts[member] for member in members]
                    shards = [torch.empty_like(shard) for _ in members]
                    dist.all_gather(shards, shard, group=group)
                    clock.lap("ep" if form.expert else "tp")
                self._load(whole_tensors(parts, shards))
                clock.lap("install")
        return clock.read()


def cut_forms(forms: Sequence[Form], max_elements: int) -> list[list[Form]]:
    """Neighbouring parameters together up to `max_elements` over all their parts; a larger one stands alone. Experts
    and other parameters are never in one bucket."""
    buckets: list[list[Form]] = []
    size = 0
    for form in forms:
        elements = form.numel * len(form.parts)
        if not buckets or size + elements > max_elements or buckets[-1][0].expert != form.expert:
            buckets.append([])
            size = 0
        buckets[-1].append(form)
        size += elements
    return buckets


def _pack(trained: Trained, bucket: Sequence[Form], padded: int = 0) -> torch.Tensor:
    """This rank's parts of a bucket, flat, followed by padding up to `padded` elements."""
    parts = [trained.mine(form).reshape(-1) for form in bucket]
    missing = padded - sum(part.numel() for part in parts)
    if missing > 0:
        parts.append(trained.example.new_zeros(missing))
    return torch.cat(parts)


def _unpack(
    bucket: Sequence[Form], members: Sequence[int], flat: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Whole tensors of a bucket from the packed parts of these members."""
    found, offset = [], 0
    for form in bucket:
        used = 1 if form.replicated else len(members)
        shards = [shard[offset : offset + form.numel].view(form.shape) for shard in flat[:used]]
        found += whole_tensors([form.parts[member] for member in members[:used]], shards)
        offset += form.numel
    return found


class BucketedGather:
    """Many parameters at a time: packed, broadcast along the pipeline, gathered over the ranks that share them, loaded.

    A bucket has at most `bucket_bytes` of whole tensors.
    """

    name = "bucketed_gather"

    def __init__(self, trained: Trained, load_weights: Loader, bucket_bytes: int) -> None:
        self._trained, self._load = trained, load_weights
        limit = bucket_bytes // trained.example.element_size()
        self._buckets = [(pp, bucket) for pp, forms in enumerate(trained.stages) for bucket in cut_forms(forms, limit)]

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Seconds by stage on this rank. Collective."""
        trained, clock = self._trained, Clock(self._trained.example.device)
        ranks = trained.stage_ranks()
        for pp, bucket in self._buckets:
            count, expert = sum(form.numel for form in bucket), bucket[0].expert
            if trained.at.pp == pp:
                packed = _pack(trained, bucket)
                clock.lap("pack")
            else:
                packed = trained.example.new_empty(count)
            if len(ranks) > 1:
                dist.broadcast(packed, src=ranks[pp], group=trained.pp_group)
                clock.lap("pp")
            group, members = trained.group(expert)
            flat = [packed]
            if len(members) > 1:
                gathered = packed.new_empty(len(members) * count)
                dist.all_gather_into_tensor(gathered, packed, group=group)
                flat = list(gathered.view(len(members), count))
                clock.lap("ep" if expert else "tp")
            self._load(_unpack(bucket, members, flat))
            clock.lap("install")
        return clock.read()


class GatherAll:
    """One gather over all ranks: each contributes its own part of its own stage's parameters, replicas sharing a part.

    Bucket n has the n-th parameters of every stage. Stages list large parameters first, so that embedding and head
    travel together and little is padding. A bucket has at most `bucket_bytes` of whole tensors, or one parameter of
    every stage.
    """

    name = "gather_all"

    def __init__(self, trained: Trained, load_weights: Loader, bucket_bytes: int) -> None:
        self._trained, self._load = trained, load_weights
        limit = bucket_bytes // trained.example.element_size() // len(trained.stages)
        self._buckets: list[tuple[bool, list[list[Form]]]] = []
        for expert in (False, True):
            stages = [self._cut(forms, expert, limit) for forms in trained.stages]
            count = max(map(len, stages))
            padded = [stage + [[]] * (count - len(stage)) for stage in stages]
            self._buckets += [(expert, list(bucket)) for bucket in zip(*padded, strict=True)]

    def _cut(self, forms: Sequence[Form], expert: bool, limit: int) -> list[list[Form]]:
        wanted = [form for form in forms if form.expert == expert]
        return cut_forms(sorted(wanted, key=lambda form: -form.numel), limit)

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Seconds by stage on this rank. Collective."""
        trained, world = self._trained, len(self._trained.places)
        clock = Clock(trained.example.device)
        for expert, bucket in self._buckets:
            replicas = 1 + max(trained.replica(place, expert) for place in trained.places)
            share = -(-max(sum(form.numel for form in forms) for forms in bucket) // replicas)
            packed = _pack(trained, bucket[trained.at.pp], share * replicas)
            mine = packed.view(replicas, share)[trained.replica(trained.at, expert)].contiguous()
            clock.lap("pack")
            gathered = packed.new_empty(world * share)
            dist.all_gather_into_tensor(gathered, mine)
            clock.lap("gather")
            self._load(self._whole(expert, bucket, list(gathered.view(world, share))))
            clock.lap("install")
        return clock.read()

    def _whole(
        self, expert: bool, bucket: Sequence[Sequence[Form]], shares: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        trained = self._trained
        parts: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        for place, share in zip(trained.places, shares, strict=True):
            parts.setdefault((place.pp, trained.member(place, expert)), {})[trained.replica(place, expert)] = share
        members = sorted({member for _, member in parts})
        found = []
        for pp, forms in enumerate(bucket):
            flat = []
            for member in members:
                of_replica = [share for _, share in sorted(parts[pp, member].items())]
                flat.append(of_replica[0] if len(of_replica) == 1 else torch.cat(of_replica))
            found += _unpack(forms, members, flat)
        return found
