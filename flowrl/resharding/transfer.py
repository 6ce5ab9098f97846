"""Moving weights from the trainer's parameters into the engine's, in place, and proving that they arrived.

Every rank makes the same plan (see `plan`) without talking, and replays its own part at every move: what it holds and
needs itself it copies; what it lacks arrives stage by stage in buckets of bounded size, each one exchange of exact
parts among the ranks of its group. While a bucket travels the one before is installed, and a share of what the rank has itself is
copied with every bucket of the first stage: on a GPU collectives have a stream of their own, and all copies share the current one.
Beside a collective they take a part of the GPU, which is three times as fast as links and leaves the collective its speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from flowrl.config.memory import BUCKET_BYTES
from flowrl.config.model_shape import ModelShape
from flowrl.resharding.clock import Clock
from flowrl.resharding.copies import BufferCopies, Copies, in_place, pair_up, shares
from flowrl.resharding.dtypes import side_dtype, wire_dtype
from flowrl.resharding.exchange import start
from flowrl.resharding.families import Box, hf_tensors
from flowrl.resharding.fingerprint import Checksums
from flowrl.resharding.layouts import Layouts
from flowrl.resharding.prepare import prepare
from flowrl.resharding.proof import prove
from flowrl.resharding.recorder import Recording, place_of
from flowrl.resharding.steps import Step
from flowrl.resharding.world import World, default_world

_MOST_BESIDE = 2.5
"""Own copies of up to so many times the bytes of a bucket leave it its speed: with the bucket's own two they end about when it
does. Where there are more, the move waits for them."""


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
    here. `peak_extra_bytes`: the largest sum of temporary buffers alive at once. `packed_bytes`: copied into buffers to
    be sent, not sent from the trainer's own memory. `stage_seconds`: `local` copies; packing and waiting by stage of the
    plan; `install` of all stages; `meet`, until all ranks are done.
    """

    received_bytes: int
    bound_bytes: int
    peak_extra_bytes: int
    num_collectives: int
    packed_bytes: int
    seconds: float
    stage_seconds: Mapping[str, float]


@dataclass
class _Traffic:
    """Counted while a move runs."""

    received: int = 0
    alive: int = 0
    peak: int = 0
    collectives: int = 0
    packed: int = 0


@dataclass(frozen=True)
class _Bucket:
    """A step with its copies into the sent buffer and out of the received one. `source`: the sent part where it is one run of
    the trainer's memory; `target`: where all that arrives is one run of the engine's."""

    step: Step
    packs: BufferCopies
    installs: BufferCopies
    source: torch.Tensor | None
    target: torch.Tensor | None


@dataclass(frozen=True)
class _Travelling:
    """A bucket on its way; `extra` are the bytes of its buffers."""

    bucket: _Bucket
    incoming: torch.Tensor
    outgoing: torch.Tensor
    extra: int
    works: Sequence[Any]


class Transfer:
    """The way from a trainer's weights to an engine's, over all ranks of `world`; None: of the default group.

    `recording` says what this rank's engine keeps where in `parameters`, `held` is what this rank's trainer holds; later
    moves must give the same boxes. A rank without an engine has a recording without regions, one without a trainer
    holds nothing. `held_dtype` is the trainer's, None: as `held`. Made on all ranks at once.

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
        world: World | None = None,
        held_dtype: torch.dtype | None = None,
    ) -> None:
        self._recording = recording
        self._places = [place_of(region, parameters[region.parameter]) for region in recording.regions]
        self._shapes = {tensor.name: tensor.shape for tensor in hf_tensors(shape)}
        self.world = world or default_world(held[0].tensor.device)
        self._device, self._rank = self.world.device, self.world.rank
        self._keys = tuple((region.name, region.box) for region in held)
        if held:
            held_dtype = side_dtype("the trainer holds", ((region.name, region.tensor.dtype) for region in held))
        assert held_dtype is not None, "a rank without a trainer is told its dtype"
        self._wire_dtype = wire_dtype(held_dtype, recording.dtype)
        prepared = prepare(
            shape,
            layouts,
            self._rank,
            self._keys,
            tuple((region.tensor, region.box) for region in recording.regions),
            element_bytes=self._wire_dtype.itemsize,
            bucket_bytes=bucket_bytes or BUCKET_BYTES[self._device.type],
        )
        self.plan, self._steps, self._counts = prepared.plan, prepared.steps, prepared.counts
        self._groups = self.world.groups(group.ranks for stage in self.plan.stages for group in stage.groups)
        self._held: Sequence[Held] | None = None
        self._own: list[Copies] = []
        self._trained = self._sums((), self._counts.cells)
        kept = zip(recording.regions, self._places, strict=True)
        self._kept = self._sums(
            ((number, place, region.box, region.tensor) for number, (region, place) in enumerate(kept)),
            len(self._places),
        )
        self._buckets: list[_Bucket] = []

    def _views(self, held: Sequence[Held]) -> list[torch.Tensor]:
        if tuple((region.name, region.box) for region in held) != self._keys:
            raise ValueError("the trainer holds other parts of the weights than when the transfer was planned")
        return [region.tensor.detach() for region in held]

    def _bind(self, held: Sequence[Held]) -> None:
        """Find the places of all reads and writes, unless they are those of the last move. They are views, so they follow
        storages that move."""
        if held is self._held:
            return
        views = self._views(held)
        self._buckets = [self._bound(step, views) for step in self._steps.steps]
        first = sum(bucket.step.stage == self._buckets[0].step.stage for bucket in self._buckets)
        # No bucket of the first stage reads what the engine has; those of later ones may hand it on.
        copies = [
            (self._places[copy.region][copy.target], views[copy.held][copy.source]) for copy in self._steps.copies
        ]
        self._own = [Copies(share) for share in shares(copies, max(first, 1)) if share]
        mine = ((count, self._keys[count.held][0], views[count.held]) for count in self._counts.mine)
        self._trained = self._sums(
            ((count.cell, view[count.there], count.box, tensor) for count, tensor, view in mine), self._counts.cells
        )
        self._held = held

    def _sums(self, parts: Iterable[tuple[int, torch.Tensor, Box, str]], num_cells: int) -> Checksums:
        """In the engine's type; a part names its tensor."""
        shaped = ((cell, values, box, self._shapes[tensor]) for cell, values, box, tensor in parts)
        return Checksums(shaped, num_cells, self._recording.dtype, self._device)

    def _bound(self, step: Step, views: Sequence[torch.Tensor]) -> _Bucket:
        packs = (*pair_up(step.packs, views), *pair_up(step.relays, self._places))
        installs = pair_up(step.installs, self._places)
        dtype = self._wire_dtype
        source = in_place(packs, step.first_sent, step.sent, dtype)
        target = in_place(installs, 0, sum(step.incoming), dtype)
        into, out_of = BufferCopies(packs, dtype, fills=True), BufferCopies(installs, dtype, fills=False)
        return _Bucket(step, into, out_of, source, target)

    @torch.no_grad()
    def move(self, held: Sequence[Held]) -> MoveReport:
        """Write the trainer's weights into the engine's parameters. Collective.

        Error: `RuntimeError` naming rank, stage and bucket on all ranks within seconds when one of them has died.
        """
        began = time.perf_counter()
        clock, traffic = Clock(self._device), _Traffic()
        self._bind(held)
        before: _Travelling | None = None
        own = iter(self._own)
        if not self._buckets:
            self._copy_own(own, clock)
        for bucket in self._buckets:
            if before is not None and before.bucket.step.stage != bucket.step.stage:
                # What the next stage hands on may have come with this bucket.
                self._finish(before, traffic, clock)
                before = None
            travelling = self._send(bucket, traffic, beside=before is not None)
            clock.lap(bucket.step.stage)
            self._copy_own(own, clock, bucket.step)
            if before is not None:
                self._finish(before, traffic, clock, beside=True)
            before = travelling
        if before is not None:
            self._finish(before, traffic, clock)
        # Nobody goes on alone after a failure elsewhere.
        self.world.all_reduce(torch.zeros(1, device=self._device), "the end of the move")
        clock.lap("meet")
        stages = ("local", *(stage.name for stage in self.plan.stages), "install", "meet")
        stage_seconds = dict.fromkeys(stages, 0.0) | clock.read()
        return MoveReport(
            traffic.received,
            self.plan.bound[self._rank],
            traffic.peak,
            traffic.collectives,
            traffic.packed,
            time.perf_counter() - began,
            stage_seconds,
        )

    def _copy_own(self, own: Iterator[Copies], clock: Clock, beside: Step | None = None) -> None:
        """The next share of what this rank's engine takes from its own trainer, `beside` a bucket that travels."""
        travels = max(beside.sent, beside.received) * self._wire_dtype.itemsize if beside is not None else 0
        for copies in islice(own, 1):
            copies.run(beside_collectives=copies.nbytes <= _MOST_BESIDE * travels)
            clock.lap("local")

    def _send(self, bucket: _Bucket, traffic: _Traffic, *, beside: bool) -> _Travelling:
        """Pack a bucket, `beside` one that travels, and set it on its way."""
        step, made = bucket.step, []
        incoming, outgoing = bucket.target, bucket.source
        if incoming is None:
            # A rank that sends all it has to all others and receives nothing needs no buffer for its own memory.
            own_only = step.to_all and not step.received and outgoing is not None
            incoming = self._buffer(0 if own_only else sum(step.incoming))
            made.append(incoming)
        if outgoing is None:
            buffer = incoming if step.to_all else self._buffer(step.sent)
            bucket.packs.run(buffer, beside_collectives=beside)
            outgoing = buffer[step.first_sent : step.first_sent + step.sent]
            made += [] if step.to_all else [buffer]
            traffic.packed += outgoing.nbytes
        extra = sum(buffer.nbytes for buffer in made)
        traffic.alive += extra
        traffic.peak = max(traffic.peak, traffic.alive)
        try:
            works = start(step, incoming, outgoing, self._groups[step.group])
        except RuntimeError as error:
            raise self.world.broken(self._what(step), error) from error
        traffic.received += step.received * self._wire_dtype.itemsize
        traffic.collectives += len(works)
        return _Travelling(bucket, incoming, outgoing, extra, works)

    def _buffer(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, dtype=self._wire_dtype, device=self._device)

    def _finish(self, travelling: _Travelling, traffic: _Traffic, clock: Clock, *, beside: bool = False) -> None:
        """Wait for a bucket and install it, `beside` the next one."""
        bucket, incoming = travelling.bucket, travelling.incoming
        for work in travelling.works:
            self.world.wait(work, self._what(bucket.step))
        clock.lap(bucket.step.stage)
        if bucket.target is None:
            bucket.installs.run(incoming, beside_collectives=beside)
        traffic.alive -= travelling.extra
        clock.lap("install")

    def _what(self, step: Step) -> str:
        ranks = ", ".join(self.world.names[rank] for rank in step.group)
        return f"the exchange of bucket {step.number} of stage {step.stage} among {ranks}"

    @torch.no_grad()
    def verify(self, held: Sequence[Held]) -> int:
        """Compare checksums of the trainer's weights with those of everything the engine keeps; returns extra bytes.

        Collective. Error: as `proof.prove`.
        """
        self._bind(held)
        return prove(self._counts, self._trained, self._recording.regions, self._kept, self.world)
