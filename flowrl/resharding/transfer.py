"""Moving weights from the trainer's parameters into the engine's, in place, and proving that they arrived.

A rank receives exactly the elements that it needs and does not hold, from ranks that hold them, in buckets of bounded
size: one all-to-all per bucket over the default process group. What it holds itself it copies. The plan is made once
from what every rank holds and needs (see `regions`) and replayed at every move.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flowrl.resharding.families import Box, HFTensor, box_size
from flowrl.resharding.fingerprint import checksum, temporary_bytes
from flowrl.resharding.recorder import Recording, Region, place_of
from flowrl.resharding.regions import (
    Route,
    bound_bytes,
    count_once,
    cut_buckets,
    intersect,
    num_elements,
    plan_routes,
    slices_in,
)

BUCKET_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Most bytes that a rank receives, and sends, at a time, by device type."""


class Held(Protocol):
    """`tensor` is a view, shaped like `box`, of the trainer's parameter that holds `box` of the tensor `name`."""

    @property
    def name(self) -> str: ...

    @property
    def box(self) -> Box: ...

    @property
    def tensor(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class MoveReport:
    """What one move cost this rank.

    `received_bytes`: receive buffers given to torch.distributed, less the rank's own part. `bound_bytes`: the fewest
    that any plan could receive here. `peak_extra_bytes`: the largest sum of temporary buffers alive at once.
    """

    received_bytes: int
    bound_bytes: int
    peak_extra_bytes: int
    num_collectives: int
    seconds: float


@dataclass(frozen=True)
class _Install:
    """Elements `source` of a box that is here go to elements `target` of region number `region`."""

    source: tuple[slice, ...]
    region: int
    target: tuple[slice, ...]


@dataclass(frozen=True)
class _Sent:
    held: int
    slices: tuple[slice, ...]
    peer: int
    size: int


@dataclass(frozen=True)
class _Received:
    shape: tuple[int, ...]
    peer: int
    size: int
    installs: tuple[_Install, ...]


@dataclass(frozen=True)
class _Local:
    held: int
    slices: tuple[slice, ...]
    installs: tuple[_Install, ...]


@dataclass(frozen=True)
class _Bucket:
    """This rank's part in one bucket; sends and receives are grouped by peer, ascending."""

    sends: tuple[_Sent, ...]
    receives: tuple[_Received, ...]
    locals: tuple[_Local, ...]
    travels: bool


@dataclass(frozen=True)
class _Check:
    """Elements `box` that this rank counts, as a slice of one held region, towards engine box number `number`."""

    number: int
    held: int
    slices: tuple[slice, ...]
    box: Box


class Transfer:
    """The way from a trainer's weights to an engine's, over all ranks of the default group.

    `recording` says what this rank's engine keeps where in `parameters`; `tensors` are all tensors of the model. Made
    on all ranks at once. `held` is what this rank's trainer holds; later moves must give the same boxes.

    Errors: `ValueError` where the trainer's ranks together do not hold the model, or no engine rank uses a tensor.
    """

    def __init__(
        self,
        recording: Recording,
        parameters: Mapping[str, torch.Tensor],
        tensors: Sequence[HFTensor],
        held: Sequence[Held],
        *,
        bucket_bytes: int | None = None,
    ) -> None:
        self._recording = recording
        self._places = [place_of(region, parameters[region.parameter]) for region in recording.regions]
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._device = self._places[0].device
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._keys = [(region.name, region.box) for region in held]
        train_dtype = held[0].tensor.dtype if held else recording.dtype
        self._wire_dtype = min(train_dtype, recording.dtype, key=lambda dtype: dtype.itemsize)
        needed, all_held = self._exchange_boxes()
        unused = [name for name in self._shapes if not any(name in boxes for boxes in needed)]
        if unused:
            raise ValueError(f"the engine uses none of {len(unused)} tensors of the model: {', '.join(unused[:5])}")
        size = self._wire_dtype.itemsize
        self.bound_bytes = bound_bytes(needed[self._rank], all_held[self._rank], size)
        routes = plan_routes(needed, all_held)
        limit = BUCKET_BYTES[self._device.type] if bucket_bytes is None else bucket_bytes
        self._buckets = [self._compile(bucket) for bucket in cut_buckets(routes, self._world, size, limit)]
        self._boxes = list(dict.fromkeys((name, box) for part in needed for name in part for box in part[name]))
        self._checks = self._plan_checks(count_once(self._shapes, all_held)[self._rank])

    def _exchange_boxes(self) -> tuple[list[dict[str, list[Box]]], list[dict[str, list[Box]]]]:
        mine: dict[str, list[Box]] = {}
        for name, box in self._keys:
            mine.setdefault(name, []).append(box)
        everyone: list[Any] = [None] * self._world
        dist.all_gather_object(everyone, (self._recording.needed, mine))
        return [needed for needed, _ in everyone], [held for _, held in everyone]

    def _find_held(self, name: str, box: Box) -> tuple[int, tuple[slice, ...]]:
        """Number of a held region that contains `box`, and the box's place in it."""
        for number, (held_name, held_box) in enumerate(self._keys):
            if held_name == name and intersect(held_box, box) == box:
                return number, slices_in(box, held_box)
        raise AssertionError(f"no held region contains {box} of {name}")

    def _installs(self, name: str, box: Box) -> tuple[_Install, ...]:
        """Where the elements `box` go: an element that the engine keeps twice goes to both places."""
        found = []
        for number, region in enumerate(self._recording.regions):
            if region.tensor == name and (common := intersect(region.box, box)) is not None:
                found.append(_Install(slices_in(common, box), number, slices_in(common, region.box)))
        return tuple(found)

    def _compile(self, bucket: Sequence[Route]) -> _Bucket:
        sends: list[_Sent] = []
        receives: list[_Received] = []
        local: list[_Local] = []
        for route in bucket:
            size = num_elements(route.box)
            if route.source == self._rank:
                held, slices = self._find_held(route.tensor, route.box)
                if route.target == self._rank:
                    local.append(_Local(held, slices, self._installs(route.tensor, route.box)))
                else:
                    sends.append(_Sent(held, slices, route.target, size))
            elif route.target == self._rank:
                installs = self._installs(route.tensor, route.box)
                receives.append(_Received(box_size(route.box), route.source, size, installs))
        travels = any(route.source != route.target for route in bucket)
        sends.sort(key=lambda sent: sent.peer)
        receives.sort(key=lambda received: received.peer)
        return _Bucket(tuple(sends), tuple(receives), tuple(local), travels)

    def _plan_checks(self, counted: Mapping[str, Sequence[Box]]) -> list[_Check]:
        checks = []
        for number, (name, box) in enumerate(self._boxes):
            for mine in counted.get(name, ()):
                if (common := intersect(box, mine)) is not None:
                    checks.append(_Check(number, *self._find_held(name, common), common))
        return checks

    def _views(self, held: Sequence[Held]) -> list[torch.Tensor]:
        if [(region.name, region.box) for region in held] != self._keys:
            raise ValueError("the trainer holds other parts of the weights than when the transfer was planned")
        return [region.tensor.detach() for region in held]

    @torch.no_grad()
    def move(self, held: Sequence[Held]) -> MoveReport:
        """Write the trainer's weights into the engine's parameters. Collective."""
        start = time.perf_counter()
        views = self._views(held)
        received = peak = collectives = 0
        for bucket in self._buckets:
            for local in bucket.locals:
                self._install(views[local.held][local.slices], local.installs)
            if not bucket.travels:
                continue
            incoming, outgoing = self._send_and_receive(bucket, views)
            received += incoming.nbytes
            peak = max(peak, incoming.nbytes + outgoing.nbytes)
            collectives += 1
            offset = 0
            for part in bucket.receives:
                self._install(incoming[offset : offset + part.size].view(part.shape), part.installs)
                offset += part.size
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return MoveReport(received, self.bound_bytes, peak, collectives, time.perf_counter() - start)

    def _send_and_receive(self, bucket: _Bucket, views: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(received, sent) flat buffers; parts in the order of the bucket's receives and sends."""
        counts = [0] * self._world
        sizes = [0] * self._world
        for part in bucket.receives:
            counts[part.peer] += part.size
        for sent in bucket.sends:
            sizes[sent.peer] += sent.size
        outgoing = torch.empty(sum(sizes), dtype=self._wire_dtype, device=self._device)
        incoming = torch.empty(sum(counts), dtype=self._wire_dtype, device=self._device)
        offset = 0
        for sent in bucket.sends:
            source = views[sent.held][sent.slices]
            outgoing[offset : offset + sent.size].view(source.shape).copy_(source)
            offset += sent.size
        dist.all_to_all_single(incoming, outgoing, counts, sizes)
        return incoming, outgoing

    def _install(self, values: torch.Tensor, installs: Iterable[_Install]) -> None:
        for install in installs:
            self._places[install.region][install.target].copy_(values[install.source])

    @torch.no_grad()
    def verify(self, held: Sequence[Held]) -> int:
        """Compare checksums of the trainer's weights with those of everything the engine keeps; returns extra bytes.

        Each element counts once on the trainer's side; on the engine's side every copy of every rank is compared, in
        the engine's dtype. Collective.

        Error: on all ranks alike, a `ValueError` that names rank, tensor and box of the first differences.
        """
        views, dtype = self._views(held), self._recording.dtype
        expected = torch.zeros(len(self._boxes), dtype=torch.int64, device=self._device)
        for check in self._checks:
            values = views[check.held][check.slices]
            expected[check.number] += checksum(values, check.box, self._shapes[self._boxes[check.number][0]], dtype)
        dist.all_reduce(expected)
        numbers = {key: number for number, key in enumerate(self._boxes)}
        found = torch.stack(
            [
                checksum(place, region.box, self._shapes[region.tensor], dtype)
                for region, place in zip(self._recording.regions, self._places, strict=True)
            ]
        )
        index = torch.tensor([numbers[region.tensor, region.box] for region in self._recording.regions])
        wrong = (found != expected[index.to(self._device)]).nonzero().flatten().tolist()
        self._agree([self._recording.regions[number] for number in wrong])
        return max(temporary_bytes(place.numel(), place.numel() // max(1, len(place))) for place in self._places)

    def _agree(self, wrong: Sequence[Region]) -> None:
        count = torch.tensor(len(wrong), device=self._device)
        dist.all_reduce(count)
        if not int(count):
            return
        everyone: list[Any] = [None] * self._world
        dist.all_gather_object(
            everyone, [f"{region.tensor} {region.box} in {region.parameter}" for region in wrong[:3]]
        )
        places = [f"rank {rank}: {place}" for rank, there in enumerate(everyone) for place in there]
        raise ValueError(
            f"the engine's weights differ from the trainer's in {int(count)} regions after a transfer; {'; '.join(places)}"
        )
