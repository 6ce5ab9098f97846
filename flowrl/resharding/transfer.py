"""Moving weights from the trainer's parameters into the engine's, in place, and proving that they arrived.

Every rank makes the same plan (see `plan`) without talking, and replays its own part at every move: what it holds and
needs itself it copies; what it lacks arrives stage by stage in buckets of bounded size, each one exchange of exact
parts among the ranks of its group. While a bucket travels the one before is installed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.dtypes import side_dtype, wire_dtype
from flowrl.resharding.families import Box, hf_tensors
from flowrl.resharding.layouts import Layouts
from flowrl.resharding.plan import MovePlan, plan_move
from flowrl.resharding.process_groups import process_group
from flowrl.resharding.proof import prove
from flowrl.resharding.recorder import Recording, place_of
from flowrl.resharding.steps import Regions, Slot, Step, check_sides, make_counts, make_steps
from flowrl.resharding.waiting import give_up, wait_for

BUCKET_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Most bytes of a bucket, what a rank sends and receives in it together, by device type."""


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

    `received_bytes`: receive buffers given to torch.distributed. `bound_bytes`: the fewest that any plan could receive
    here. `peak_extra_bytes`: the largest sum of temporary buffers alive at once. `stage_seconds`: until the last bucket
    of a stage was installed, by stage; `local` is what needed no other rank.
    """

    received_bytes: int
    bound_bytes: int
    peak_extra_bytes: int
    num_collectives: int
    seconds: float
    stage_seconds: Mapping[str, float]


@dataclass
class _Traffic:
    """Counted while a move runs."""

    received: int = 0
    alive: int = 0
    peak: int = 0
    collectives: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Travelling:
    """A bucket on its way; `extra` are the bytes of its buffers."""

    step: Step
    incoming: torch.Tensor
    outgoing: torch.Tensor
    extra: int
    work: Any


class Transfer:
    """The way from a trainer's weights to an engine's, over all ranks of the default group.

    `recording` says what this rank's engine keeps where in `parameters`, `held` is what this rank's trainer holds; later
    moves must give the same boxes. Made on all ranks at once.

    Errors: `ValueError` where the model cannot be cut into the layouts, trainer or engine differ from the plan, or a
    dtype is not one that moves (`dtypes.side_dtype`).
    """

    def __init__(
        self,
        recording: Recording,
        parameters: Mapping[str, torch.Tensor],
        shape: ModelShape,
        layouts: Layouts,
        held: Sequence[Held],
        *,
        bucket_bytes: int | None = None,
    ) -> None:
        self._recording = recording
        self._places = [place_of(region, parameters[region.parameter]) for region in recording.regions]
        self._shapes = {tensor.name: tensor.shape for tensor in hf_tensors(shape)}
        self._device = self._places[0].device
        self._rank = dist.get_rank()
        self._keys = [(region.name, region.box) for region in held]
        held_dtype = side_dtype("the trainer holds", ((region.name, region.tensor.dtype) for region in held))
        self._wire_dtype = wire_dtype(held_dtype, recording.dtype)
        self.plan = plan_move(
            shape,
            layouts.train,
            layouts.rollout,
            layouts.places,
            element_bytes=self._wire_dtype.itemsize,
            bucket_bytes=bucket_bytes or BUCKET_BYTES[self._device.type],
        )
        kept_keys = [(region.tensor, region.box) for region in recording.regions]
        here, there = Regions(self._keys), Regions(kept_keys)
        check_sides(self.plan, self._rank, here, there)
        self._steps = make_steps(self.plan, self._rank, here, there)
        self._counts = make_counts(self.plan, self._rank, here, kept_keys)
        self._groups = _make_groups(self.plan)

    def _views(self, held: Sequence[Held]) -> list[torch.Tensor]:
        if [(region.name, region.box) for region in held] != self._keys:
            raise ValueError("the trainer holds other parts of the weights than when the transfer was planned")
        return [region.tensor.detach() for region in held]

    @torch.no_grad()
    def move(self, held: Sequence[Held]) -> MoveReport:
        """Write the trainer's weights into the engine's parameters. Collective.

        Error: `RuntimeError` naming rank, stage and bucket on all ranks within seconds when one of them has died.
        """
        start = time.perf_counter()
        views, traffic = self._views(held), _Traffic()
        self._copy_own(views)
        traffic.seconds["local"] = time.perf_counter() - start
        before: _Travelling | None = None
        for step in self._steps.steps:
            if before is not None and before.step.stage != step.stage:
                # What the next stage hands on may have come with this bucket.
                self._finish(before, traffic)
                before = None
            travelling = self._send(step, views, traffic)
            if before is not None:
                self._finish(before, traffic)
            before = travelling
        if before is not None:
            self._finish(before, traffic)
        self._meet()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return MoveReport(
            traffic.received,
            self.plan.bound[self._rank],
            traffic.peak,
            traffic.collectives,
            time.perf_counter() - start,
            traffic.seconds,
        )

    def _copy_own(self, views: Sequence[torch.Tensor]) -> None:
        for copy in self._steps.copies:
            self._places[copy.region][copy.target].copy_(views[copy.held][copy.source])

    def _send(self, step: Step, views: Sequence[torch.Tensor], traffic: _Traffic) -> _Travelling:
        """Pack a bucket and set it on its way."""
        start = time.perf_counter()
        outgoing = torch.empty(sum(step.sent), dtype=self._wire_dtype, device=self._device)
        target = self._direct(step)
        incoming = (
            torch.empty(sum(step.received), dtype=self._wire_dtype, device=self._device) if target is None else target
        )
        extra = outgoing.nbytes + (incoming.nbytes if target is None else 0)
        _pack(outgoing, step.packs, views)
        _pack(outgoing, step.relays, self._places)
        traffic.received += incoming.nbytes
        traffic.collectives += 1
        traffic.alive += extra
        traffic.peak = max(traffic.peak, traffic.alive)
        try:
            work = dist.all_to_all_single(
                incoming, outgoing, list(step.received), list(step.sent), self._groups[step.group], async_op=True
            )
        except RuntimeError as error:
            raise _broken(self._what(step), error) from error
        _add(traffic.seconds, step.stage, time.perf_counter() - start)
        return _Travelling(step, incoming, outgoing, extra, work)

    def _direct(self, step: Step) -> torch.Tensor | None:
        """Where the whole bucket is one run of elements of the engine: these, to be received in place."""
        if len(step.installs) != 1:
            return None
        slot = step.installs[0]
        place = self._places[slot.region][slot.there]
        whole = place.numel() == sum(step.received) and place.is_contiguous() and place.dtype == self._wire_dtype
        return place.view(-1) if whole else None

    def _finish(self, travelling: _Travelling, traffic: _Traffic) -> None:
        """Wait for a bucket and install it."""
        start = time.perf_counter()
        step, incoming = travelling.step, travelling.incoming
        try:
            wait_for(travelling.work, self._device)
        except RuntimeError as error:
            raise _broken(self._what(step), error) from error
        for slot in step.installs:
            place = self._places[slot.region][slot.there]
            if place.data_ptr() != incoming.data_ptr():
                place.copy_(_part(incoming, slot))
        traffic.alive -= travelling.extra
        _add(traffic.seconds, step.stage, time.perf_counter() - start)

    def _what(self, step: Step) -> str:
        ranks = ", ".join(map(str, step.group))
        return f"rank {self._rank}: the exchange of bucket {step.number} of stage {step.stage} among ranks {ranks}"

    def _meet(self) -> None:
        """Wait until the move is over on all ranks: nobody goes on alone after a failure elsewhere."""
        try:
            arrived = dist.all_reduce(torch.zeros(1, device=self._device), async_op=True)
            wait_for(arrived, self._device)
        except RuntimeError as error:
            raise _broken(f"rank {self._rank}: the end of the move", error) from error

    @torch.no_grad()
    def verify(self, held: Sequence[Held]) -> int:
        """Compare checksums of the trainer's weights with those of everything the engine keeps; returns extra bytes.

        Collective. Error: as `proof.prove`.
        """
        here = [(name, view) for (name, _), view in zip(self._keys, self._views(held), strict=True)]
        there = list(zip(self._recording.regions, self._places, strict=True))
        return prove(self._counts, self._shapes, here, there, self._recording.dtype)


def _make_groups(plan: MovePlan) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Groups of all stages, made in one order on all ranks; a group of all ranks is there already."""
    everyone = dist.group.WORLD
    assert everyone is not None
    found = {tuple(range(dist.get_world_size())): everyone}
    for group in (group.ranks for stage in plan.stages for group in stage.groups):
        if group not in found:
            found[group] = process_group(group)
    return found


def _broken(what: str, error: RuntimeError) -> RuntimeError:
    """The error of this rank, told to the others too."""
    message = f"{what} failed, because a rank has died or given up: {error}"
    give_up(message)
    return RuntimeError(message)


def _part(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    size = 1
    for length in slot.shape:
        size *= length
    return buffer[slot.offset : slot.offset + size].view(slot.shape)[slot.inside]


def _pack(buffer: torch.Tensor, slots: Iterable[Slot], sources: Sequence[torch.Tensor]) -> None:
    for slot in slots:
        _part(buffer, slot).copy_(sources[slot.region][slot.there])


def _add(seconds: dict[str, float], stage: str, more: float) -> None:
    seconds[stage] = seconds.get(stage, 0.0) + more
