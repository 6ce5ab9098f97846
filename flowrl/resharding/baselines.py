"""Other ways of moving weights, each in the best simple form that we know, to measure flowrl's against.

They gather whole tensors on every rank, from the trainer's own layout, and hand them to the engine's own loader. All
take the same inputs, so a process can run one after another on the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.families import Parameter, stage_layers, stage_parameters
from flowrl.resharding.ranks import ParallelSizes, TrainPlace

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True)
class Trained:
    """The trainer as a baseline sees it, on one rank.

    `places` are all ranks' by rank. `tables[pp][tp]` lists the parameters of that place, in one order and under one set
    of names for all tensor-parallel ranks; `local` are this rank's by name. `pp_group` and `tp_group` hold this rank's
    partners, ascending along their axis.
    """

    places: tuple[TrainPlace, ...]
    tables: tuple[tuple[tuple[Parameter, ...], ...], ...]
    local: Mapping[str, torch.Tensor]
    pp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    tied: bool

    @property
    def at(self) -> TrainPlace:
        return self.places[dist.get_rank()]

    @property
    def example(self) -> torch.Tensor:
        """Any parameter: all have its dtype and device."""
        return next(iter(self.local.values()))

    def stage(self, pp: int) -> list[tuple[Parameter, ...]]:
        """For each parameter of a stage its forms on the tensor-parallel ranks; a second copy of a tied embedding is
        left out."""
        forms = list(zip(*self.tables[pp], strict=True))
        return [form for form in forms if not (self.tied and form[0].name == "output_layer.weight")]


def parameter_tables(shape: ModelShape, sizes: ParallelSizes) -> tuple[tuple[tuple[Parameter, ...], ...], ...]:
    """[pp][tp] -> the parameters of that place."""
    stages = stage_layers(shape.num_layers, sizes.pp)
    return tuple(
        tuple(
            stage_parameters(shape, tp=sizes.tp, tp_rank=tp, layers=layers, first=pp == 0, last=pp == sizes.pp - 1)
            for tp in range(sizes.tp)
        )
        for pp, layers in enumerate(stages)
    )


@dataclass
class Clock:
    """Seconds by stage of one move; work that a GPU has queued belongs to the stage that queued it."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """The time since the last lap belongs to `stage`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now


def whole_tensors(form: Sequence[Parameter], shards: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors of one parameter, from its shards on all tensor-parallel ranks (one for replicated ones)."""
    pieces = [(piece, shard) for parameter, shard in zip(form, shards, strict=False) for piece in parameter.pieces]
    sizes: dict[str, list[int]] = {}
    for piece, _ in pieces:
        ends = [stop for _, stop in piece.source]
        sizes[piece.tensor] = [max(pair) for pair in zip(ends, sizes.get(piece.tensor, ends), strict=True)]
    if len(pieces) == 1 and len(sizes) == 1:
        piece, shard = pieces[0]
        return [(piece.tensor, _view(shard, piece.target))]
    whole = {name: torch.empty(size, dtype=shards[0].dtype, device=shards[0].device) for name, size in sizes.items()}
    for piece, shard in pieces:
        _view(whole[piece.tensor], piece.source).copy_(_view(shard, piece.target))
    return list(whole.items())


def _view(tensor: torch.Tensor, box: Sequence[tuple[int, int]]) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


class PerTensorGather:
    """Each parameter by itself: broadcast along the pipeline, gathered over tensor-parallel ranks, loaded."""

    name = "per_tensor_gather"

    def __init__(self, trained: Trained, load_weights: Loader) -> None:
        self._trained, self._load = trained, load_weights

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Seconds by stage on this rank. Collective."""
        trained = self._trained
        clock = Clock(trained.example.device)
        stages, ranks = len(trained.tables), dist.get_process_group_ranks(trained.pp_group)
        tp_size = len(trained.tables[0])
        for pp in range(stages):
            for form in trained.stage(pp):
                parameter = form[trained.at.tp]
                if trained.at.pp == pp:
                    shard = trained.local[parameter.name].detach()
                else:
                    shard = torch.empty(parameter.shape, dtype=trained.example.dtype, device=trained.example.device)
                if stages > 1:
                    dist.broadcast(shard, src=ranks[pp], group=trained.pp_group)
                    clock.lap("pp")
                shards = [shard]
                if tp_size > 1 and not parameter.replicated:
                    shards = [torch.empty_like(shard) for _ in range(tp_size)]
                    dist.all_gather(shards, shard, group=trained.tp_group)
                    clock.lap("tp")
                self._load(whole_tensors(form, shards))
                clock.lap("install")
        return clock.seconds


def cut_forms(forms: Sequence[tuple[Parameter, ...]], max_elements: int) -> list[list[tuple[Parameter, ...]]]:
    """Neighbouring parameters together up to `max_elements` over all their shards; a larger one stands alone."""
    buckets: list[list[tuple[Parameter, ...]]] = []
    size = 0
    for form in forms:
        elements = sum(prod(parameter.shape) for parameter in form)
        if not buckets or size + elements > max_elements:
            buckets.append([])
            size = 0
        buckets[-1].append(form)
        size += elements
    return buckets


def _pack(trained: Trained, bucket: Sequence[tuple[Parameter, ...]], padded: int = 0) -> torch.Tensor:
    """This rank's shards of a bucket, flat, followed by padding up to `padded` elements."""
    parts = [trained.local[form[trained.at.tp].name].detach().reshape(-1) for form in bucket]
    missing = padded - sum(part.numel() for part in parts)
    if missing > 0:
        parts.append(trained.example.new_zeros(missing))
    return torch.cat(parts)


def _unpack(bucket: Sequence[tuple[Parameter, ...]], flat: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Whole tensors of a bucket from the packed shards of all tensor-parallel ranks."""
    found, offset = [], 0
    for form in bucket:
        count = prod(form[0].shape)
        used = flat[:1] if form[0].replicated else flat
        shards = [shard[offset : offset + count].view(form[0].shape) for shard in used]
        found += whole_tensors(form, shards)
        offset += count
    return found


class BucketedGather:
    """Many parameters at a time: packed, broadcast along the pipeline, gathered over tensor-parallel ranks, loaded.

    A bucket has at most `bucket_bytes` of whole tensors.
    """

    name = "bucketed_gather"

    def __init__(self, trained: Trained, load_weights: Loader, bucket_bytes: int) -> None:
        self._trained, self._load = trained, load_weights
        limit = bucket_bytes // trained.example.element_size()
        self._buckets = [
            (pp, bucket) for pp in range(len(trained.tables)) for bucket in cut_forms(trained.stage(pp), limit)
        ]

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Seconds by stage on this rank. Collective."""
        trained, tp_size = self._trained, len(self._trained.tables[0])
        clock = Clock(trained.example.device)
        ranks = dist.get_process_group_ranks(trained.pp_group)
        for pp, bucket in self._buckets:
            count = sum(prod(form[0].shape) for form in bucket)
            if trained.at.pp == pp:
                packed = _pack(trained, bucket)
                clock.lap("pack")
            else:
                packed = trained.example.new_empty(count)
            if len(trained.tables) > 1:
                dist.broadcast(packed, src=ranks[pp], group=trained.pp_group)
                clock.lap("pp")
            flat = [packed]
            if tp_size > 1:
                gathered = packed.new_empty(tp_size * count)
                dist.all_gather_into_tensor(gathered, packed, group=trained.tp_group)
                flat = list(gathered.view(tp_size, count))
                clock.lap("tp")
            self._load(_unpack(bucket, flat))
            clock.lap("install")
        return clock.seconds


class GatherAll:
    """One gather over all ranks: each contributes its own part of its own stage's parameters, replicas sharing a shard.

    Bucket n has the n-th parameters of every stage. Stages list large parameters first, so that embedding and head
    travel together and little is padding. A bucket has at most `bucket_bytes` of whole tensors, or one parameter of
    every stage.
    """

    name = "gather_all"

    def __init__(self, trained: Trained, load_weights: Loader, bucket_bytes: int) -> None:
        self._trained, self._load = trained, load_weights
        limit = bucket_bytes // trained.example.element_size() // len(trained.tables)
        self._replicas = 1 + max(self._replica(place) for place in trained.places)
        stages = [
            cut_forms(sorted(trained.stage(pp), key=lambda form: -prod(form[0].shape)), limit)
            for pp in range(len(trained.tables))
        ]
        count = max(map(len, stages))
        self._buckets = list(zip(*(stage + [[]] * (count - len(stage)) for stage in stages), strict=True))

    def _replica(self, place: TrainPlace) -> int:
        sizes = 1 + max(other.cp for other in self._trained.places)
        return place.dp * sizes + place.cp

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Seconds by stage on this rank. Collective."""
        trained, world = self._trained, len(self._trained.places)
        clock = Clock(trained.example.device)
        for bucket in self._buckets:
            counts = [sum(prod(form[0].shape) for form in part) for part in bucket]
            share = -(-max(counts) // self._replicas)
            packed = _pack(trained, bucket[trained.at.pp], share * self._replicas)
            mine = packed.view(self._replicas, share)[self._replica(trained.at)].contiguous()
            clock.lap("pack")
            gathered = packed.new_empty(world * share)
            dist.all_gather_into_tensor(gathered, mine)
            clock.lap("gather")
            self._load(self._whole(bucket, list(gathered.view(world, share))))
            clock.lap("install")
        return clock.seconds

    def _whole(self, bucket: Sequence[Any], shares: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        parts: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        for place, share in zip(self._trained.places, shares, strict=True):
            parts.setdefault((place.pp, place.tp), {})[self._replica(place)] = share
        found = []
        for pp, forms in enumerate(bucket):
            flat = []
            for tp in range(len(self._trained.tables[0])):
                of_replica = [share for _, share in sorted(parts[pp, tp].items())]
                flat.append(of_replica[0] if len(of_replica) == 1 else torch.cat(of_replica))
            found += _unpack(forms, flat)
        return found
