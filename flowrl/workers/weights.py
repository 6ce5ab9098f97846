"""The weights of one role in Hugging Face terms: what this rank holds, filling it, and gathering whole tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import TrainLayout
from flowrl.resharding.families import (
    EMBEDDING,
    HEAD,
    Box,
    ExpertShard,
    HFTensor,
    Parameter,
    Piece,
    box_size,
    stage_parameters,
    train_stage_layers,
)
from flowrl.resharding.layouts import train_sizes
from flowrl.resharding.ranks import RankPlace, TrainPlace
from flowrl.workers.hf_weights import HFFolder

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class HeldRegion:
    """`tensor` is the view of this rank's parameter `parameter` (global name) that holds `box` of Hugging Face tensor
    `name`; it has the box's shape. The same box may be held by several ranks, and twice by one (tied embeddings)."""

    name: str
    box: Box
    parameter: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class _Source:
    """A piece of a Hugging Face tensor and the rank that provides it."""

    rank: int
    parameter: str
    piece: Piece


def global_parameters(chunks: Iterable[Any], first_expert: int) -> dict[str, torch.nn.Parameter]:
    """Parameters of a rank's model chunks, with layers and experts numbered over the whole model."""
    found = {}
    for chunk in chunks:
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            found[_global_name(name, layers, first_expert)] = parameter
    return found


def _global_name(local: str, layers: Sequence[int], first_expert: int) -> str:
    name = LAYER.sub(lambda match: f"decoder.layers.{layers[int(match[1])]}.", local)
    return EXPERT.sub(lambda match: f".local_experts.{first_expert + int(match[1])}.", name)


def expert_shard(layout: TrainLayout, at: TrainPlace) -> ExpertShard:
    """What the rank at this place holds of the experts."""
    return ExpertShard(ep=layout.ep, ep_rank=at.ep, etp=layout.etp, etp_rank=at.etp)


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


class _Views:
    """Views of parameters. Thousands of them are asked for at every move, so it costs one look at each and no more."""

    def __init__(self, tensors: Sequence[torch.Tensor], regions: list[HeldRegion]) -> None:
        self.regions = regions
        self._tensors, self._pointers = tensors, [tensor.data_ptr() for tensor in tensors]
        self._storages = list(
            {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values()
        )
        self._memory = [storage.data_ptr() for storage in self._storages]

    def pointers(self) -> list[int]:
        """Addresses that parameters have while they share the views' storages, wherever those are now."""
        memory = [storage.data_ptr() for storage in self._storages]
        if memory != self._memory:
            self._memory, self._pointers = memory, [tensor.data_ptr() for tensor in self._tensors]
        return self._pointers


class ModelWeights:
    """Weights of a model on this rank.

    `parameters` are the local Megatron parameters by global name; `places` are those of all ranks in `layout`.
    Errors: `ValueError` where Megatron's parameters and the family table disagree in a name or a shape.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: TrainLayout,
        places: Sequence[RankPlace],
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        head: bool,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self._stages = train_stage_layers(shape.num_layers, train_sizes(layout))
        self._parameters = dict(parameters)
        self._views = _Views([], [])
        self._head = head
        self._places = [place.train for place in places if place.train is not None]
        self._table = self.stage(self._places[dist.get_rank()])
        expected = {parameter.name: parameter.shape for parameter in self._table}
        actual = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        if expected != actual:
            raise ValueError(_difference(expected, actual))

    def stage(self, at: TrainPlace) -> tuple[Parameter, ...]:
        """What a rank at this place holds."""
        return stage_parameters(
            self.shape,
            tp=self.layout.tp,
            tp_rank=at.tp,
            layers=self._stages[at.pp],
            first=at.pp == 0,
            last=at.pp == self.layout.pp - 1,
            head=self._head,
            shard=expert_shard(self.layout, at),
        )

    @torch.no_grad()
    def load(self, folder: HFFolder) -> None:
        """Fill this rank's parameters with exactly the boxes they hold; padding of the vocabulary becomes 0."""
        for parameter in self._table:
            local = self._parameters[parameter.name]
            local.zero_()
            for piece in parameter.pieces:
                _view(local, piece.target).copy_(folder.read(piece.tensor, piece.source))

    def held_regions(self) -> list[HeldRegion]:
        """Every box of a Hugging Face tensor that this rank holds, as a view of its parameter.

        Views are made once, and anew where parameters were pointed at other memory; they follow a storage that moves.
        """
        if list(map(torch.Tensor.data_ptr, self._parameters.values())) != self._views.pointers():
            regions = [
                HeldRegion(piece.tensor, piece.source, parameter.name, _view(local.data, piece.target))
                for parameter, local in ((row, self._parameters[row.name]) for row in self._table)
                for piece in parameter.pieces
            ]
            self._views = _Views([parameter.data for parameter in self._parameters.values()], regions)
        return self._views.regions

    def stages(self) -> Iterator[tuple[int, TrainPlace, tuple[Parameter, ...]]]:
        """The first rank of those that hold the same, its place, and what it holds."""
        seen: set[tuple[int, ...]] = set()
        for rank, at in enumerate(self._places):
            if (shard := (at.pp, at.tp, at.ep, at.etp)) not in seen:
                seen.add(shard)
                yield rank, at, self.stage(at)

    def _sources(self) -> dict[str, list[_Source]]:
        """For each Hugging Face tensor, pieces that cover it exactly once: each from the first rank that holds it."""
        sources: dict[str, list[_Source]] = {}
        found: set[tuple[str, Box]] = set()
        for rank, _, parameters in self.stages():
            for parameter in parameters:
                for piece in parameter.pieces:
                    if (piece.tensor, piece.source) not in found:
                        found.add((piece.tensor, piece.source))
                        sources.setdefault(piece.tensor, []).append(_Source(rank, parameter.name, piece))
        return sources

    def gather(
        self, tensors: tuple[HFTensor, ...], bucket_bytes: int, *, reader: int | None = None
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whole tensors in buckets of about `bucket_bytes`, in the given order.

        Collective over all ranks. With `reader` (a rank) only that rank gets values; otherwise every rank gets them.
        """
        element = next(iter(self._parameters.values()))
        sources = self._sources()
        for bucket in _buckets(tensors, bucket_bytes, element.element_size()):
            whole = self._gather_bucket(bucket, sources, reader)
            if reader is None or reader == dist.get_rank():
                yield [(tensor.name, whole[tensor.name]) for tensor in bucket]

    @torch.no_grad()
    def _gather_bucket(
        self,
        bucket: list[HFTensor],
        sources: dict[str, list[_Source]],
        reader: int | None,
    ) -> dict[str, torch.Tensor]:
        me = dist.get_rank()
        element = next(iter(self._parameters.values()))
        by_owner: dict[int, list[tuple[str, _Source]]] = {}
        for tensor in bucket:
            # A tied head that the folder spelled out is the embedding under a second name.
            origin = EMBEDDING if tensor.name == HEAD and self.shape.tied else tensor.name
            for source in sources[origin]:
                by_owner.setdefault(source.rank, []).append((tensor.name, source))
        reads = reader is None or reader == me
        whole = (
            {t.name: torch.empty(t.shape, dtype=element.dtype, device=element.device) for t in bucket} if reads else {}
        )
        for owner, pieces in sorted(by_owner.items()):
            if not reads and owner != me:
                continue
            if owner == me:
                parts = [_view(self._parameters[s.parameter].data, s.piece.target).reshape(-1) for _, s in pieces]
                packed = torch.cat(parts)
            else:
                numel = sum(_numel(source.piece.source) for _, source in pieces)
                packed = torch.empty(numel, dtype=element.dtype, device=element.device)
            self._transfer(packed, owner, reader)
            offset = 0
            for name, source in pieces if reads else []:
                numel = _numel(source.piece.source)
                part = packed[offset : offset + numel].view(box_size(source.piece.source))
                _view(whole[name], source.piece.source).copy_(part)
                offset += numel
        return whole

    def _transfer(self, packed: torch.Tensor, owner: int, reader: int | None) -> None:
        me = dist.get_rank()
        if reader is None:
            dist.broadcast(packed, src=owner)
        elif owner == me != reader:
            dist.send(packed, dst=reader)
        elif reader == me != owner:
            dist.recv(packed, src=owner)


def _difference(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong where Megatron-core's parameters are not those of the family table."""
    kinds = {
        "Megatron-core has, and the family's table lacks": [name for name in actual if name not in expected],
        "the table has, and Megatron-core lacks": [name for name in expected if name not in actual],
        "of another shape": [
            f"{name} {list(actual[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in actual and actual[name] != shape
        ],
    }
    found = [f"{len(names)} {kind}: {', '.join(names[:5])}" for kind, names in kinds.items() if names]
    return (
        f"{'; '.join(found)}. A parameter that the table does not know would be neither loaded nor moved: describe it in "
        f"flowrl/resharding/families.py, or use the Megatron-core that flowrl was written for"
    )


def _numel(box: Box) -> int:
    return int(torch.Size(box_size(box)).numel())


def _buckets(tensors: tuple[HFTensor, ...], bucket_bytes: int, element_bytes: int) -> Iterator[list[HFTensor]]:
    """Neighbouring tensors together until they exceed the limit; one that is larger stands alone."""
    bucket: list[HFTensor] = []
    size = 0
    for tensor in tensors:
        tensor_bytes = int(torch.Size(tensor.shape).numel()) * element_bytes
        if bucket and size + tensor_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor_bytes
    if bucket:
        yield bucket
