"""The plan of a move: what every rank receives and sends in every stage, and each rank's part of it in buckets.

A stage is carried out in groups of ranks between which nothing travels. In a group with n buckets, bucket i carries
the i-th n-th (to whole rows) of what every pair of ranks exchanges, so n follows from sums over pairs and all members
agree on it without talking. So is the form of a group's exchange: where all that a rank sends goes to all others, it is
packed once and not once per peer. No form brings a byte that its receiver does not need.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.families import Box
from flowrl.resharding.plan.routes import STAGES, Router, Shipment, components
from flowrl.resharding.plan.tables import model_table
from flowrl.resharding.plan.units import Unit, bits, make_units
from flowrl.resharding.ranks import ParallelSizes, RankPlace

BUCKET_BYTES = 256 << 20
Form = Literal["broadcast", "all_gather", "all_to_all", "point_to_point"]
TO_ALL: frozenset[Form] = frozenset({"broadcast", "all_gather"})
"""Forms in which a rank sends the same to all others."""


@dataclass(frozen=True)
class StageGroup:
    """Ranks that exchange something in a stage, ascending, the form of it and the number of buckets.

    `broadcast`: all comes from one rank and goes to all others. `all_gather`: so it is from several ranks, each with a
    part of any size. `point_to_point`: pairs are irregular. Else `all_to_all` of exact parts.
    """

    ranks: tuple[int, ...]
    form: Form
    num_buckets: int


@dataclass(frozen=True)
class Stage:
    """One stage; `received` and `sent` are bytes per rank, the `_network` ones those that cross nodes.

    `largest_bucket`: bytes of the buffers of a rank's largest bucket, what it receives and what it packs.
    """

    name: str
    shipments: tuple[Shipment, ...]
    groups: tuple[StageGroup, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    received_network: tuple[int, ...]
    sent_network: tuple[int, ...]
    largest_bucket: tuple[int, ...]

    @property
    def forms(self) -> tuple[Form, ...]:
        """Forms of its groups, each once."""
        return tuple(dict.fromkeys(group.form for group in self.groups))


class Piece(NamedTuple):
    """`box` of a tensor. `relayed`: the sender does not hold it in training, it received it in an earlier stage and
    reads it where its engine keeps it."""

    tensor: str
    box: Box
    relayed: bool


class Parcel(NamedTuple):
    """What travels between this rank and `peer` in a bucket, in this order on both sides."""

    peer: int
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return sum(_elements(piece.box) for piece in self.pieces)


@dataclass(frozen=True)
class Bucket:
    """A rank's part in bucket `number` of a stage, among the ranks `group`; parcels by peer, ascending."""

    stage: str
    form: Form
    group: tuple[int, ...]
    number: int
    receives: tuple[Parcel, ...]
    sends: tuple[Parcel, ...]

    @property
    def packed(self) -> tuple[Parcel, ...]:
        """Parcels that the sent buffer holds: one, where all peers get the same."""
        return self.sends[:1] if self.form in TO_ALL else self.sends


@dataclass(frozen=True)
class RankSchedule:
    """Everything one rank does: `local` are pieces that it holds and needs itself; then the buckets, in this order."""

    local: tuple[Piece, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class MovePlan:
    """A move of a model's weights over all ranks. `bound` is the fewest bytes that each rank must receive, `import_bound`
    the fewest that must enter each node."""

    places: tuple[RankPlace, ...]
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    bound: tuple[int, ...]
    import_bound: tuple[int, ...]
    element_bytes: int
    bucket_bytes: int
    gpus_per_node: int

    @property
    def world(self) -> int:
        return len(self.places)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Bytes that each rank receives."""
        return tuple(sum(stage.received[rank] for stage in self.stages) for rank in range(self.world))

    @property
    def imported(self) -> int:
        """Bytes that enter nodes from outside, over all nodes."""
        return sum(sum(stage.received_network) for stage in self.stages)

    def num_buckets(self, rank: int) -> int:
        """Buckets that a rank takes part in: its collectives."""
        return sum(group.num_buckets for stage in self.stages for group in stage.groups if rank in group.ranks)

    def peak_extra(self, rank: int) -> int:
        """Most bytes of buckets alive at once: one travels (what it receives and packs) while the next is packed or
        the one before installed."""
        sizes: list[int] = []
        for stage in self.stages:
            for group in stage.groups:
                if rank in group.ranks:
                    sizes += [stage.largest_bucket[rank]] * min(2, group.num_buckets)
        return max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=False)), default=0)

    def held(self, rank: int) -> dict[str, list[Box]]:
        """Boxes that a rank's trainer holds of what engines need, by tensor."""
        return self._boxes(unit for unit in self.units if unit.holders >> rank & 1)

    def needed(self, rank: int) -> dict[str, list[Box]]:
        """Boxes that a rank's engine keeps, by tensor."""
        return self._boxes(unit for unit in self.units if unit.needers >> rank & 1)

    def _boxes(self, units: Iterable[Unit]) -> dict[str, list[Box]]:
        boxes: dict[str, list[Box]] = {}
        for _, tensor, box in sorted(piece for unit in units for piece in unit.pieces()):
            boxes.setdefault(tensor, []).append(box)
        return boxes

    def schedule(self, rank: int) -> RankSchedule:
        """A rank's part of the plan, piece by piece."""
        with _collector_paused():
            return self._schedule(rank)

    def _schedule(self, rank: int) -> RankSchedule:
        own = [unit for unit in self.units if unit.holders & unit.needers & 1 << rank]
        local = tuple(Piece(tensor, box, False) for _, tensor, box in sorted(p for unit in own for p in unit.pieces()))
        buckets: list[Bucket] = []
        for stage in self.stages:
            buckets += _stage_buckets(stage, self.units, rank)
        return RankSchedule(local, tuple(buckets))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Hundreds of thousands of tuples without cycles follow; walking them again and again would be most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_move(
    shape: ModelShape,
    train: ParallelSizes,
    rollout: ParallelSizes,
    places: Sequence[RankPlace],
    *,
    element_bytes: int = 2,
    bucket_bytes: int = BUCKET_BYTES,
    gpus_per_node: int = 8,
) -> MovePlan:
    """The plan for a model on ranks at these places. `element_bytes` is the width on the wire: the narrower side's.

    Errors: `ValueError` where the model cannot be cut like this, with the numbers, or a needed element is held nowhere.
    """
    with _collector_paused():
        units = make_units(places, model_table(shape, train, rollout))
        routing = Router(places, gpus_per_node).route(units)
        stages = [
            _stage(name, routing.shipments[name], units, len(places), element_bytes, bucket_bytes, gpus_per_node)
            for name in STAGES
            if routing.shipments[name]
        ]
    return MovePlan(
        tuple(places),
        tuple(units),
        tuple(stages),
        bound_bytes(units, len(places), element_bytes),
        tuple(elements * element_bytes for elements in routing.import_bound),
        element_bytes,
        bucket_bytes,
        gpus_per_node,
    )


def bound_bytes(units: Sequence[Unit], world: int, element_bytes: int) -> tuple[int, ...]:
    """Bytes of {elements that a rank needs} minus {elements that it holds}, by rank."""
    bound = [0] * world
    for unit in units:
        for rank in bits(unit.missing):
            bound[rank] += unit.elements * element_bytes
    return tuple(bound)


def _stage(
    name: str,
    shipments: Sequence[Shipment],
    units: Sequence[Unit],
    world: int,
    element_bytes: int,
    bucket_bytes: int,
    gpus_per_node: int,
) -> Stage:
    received, sent, received_network, sent_network = ([0] * world for _ in range(4))
    rows: dict[tuple[int, int], int] = {}
    for number, source, target in shipments:
        size = units[number].elements * element_bytes
        received[target] += size
        sent[source] += size
        if source // gpus_per_node != target // gpus_per_node:
            received_network[target] += size
            sent_network[source] += size
        row = units[number].max_row_elements * element_bytes
        rows[source, target] = max(row, rows.get((source, target), 0))
    groups, largest = [], [0] * world
    for ranks, own in _by_group(shipments, world):
        form: Form = "point_to_point" if name == "p2p" else _form(own, len(ranks))
        packed, slack = _buffers(own, form, rows, sent)
        moved = {rank: received[rank] + packed[rank] for rank in ranks}
        count = max(_num_buckets(moved[rank], slack[rank], bucket_bytes) for rank in ranks)
        groups.append(StageGroup(ranks, form, count))
        for rank in ranks:
            size = moved[rank]
            largest[rank] = size if count == 1 else min(size, -(-size // count) + slack[rank])
    traffic = (tuple(received), tuple(sent), tuple(received_network), tuple(sent_network))
    return Stage(name, tuple(shipments), tuple(groups), *traffic, tuple(largest))


def _by_group(shipments: Sequence[Shipment], world: int) -> list[tuple[tuple[int, ...], list[Shipment]]]:
    """Groups of ranks with what travels in them."""
    found: list[tuple[tuple[int, ...], list[Shipment]]] = [(ranks, []) for ranks in components(shipments, world)]
    inside = {rank: own for ranks, own in found for rank in ranks}
    for shipment in shipments:
        inside[shipment.source].append(shipment)
    return found


def _form(shipments: Sequence[Shipment], size: int) -> Form:
    """Of the exchange in a group of `size` ranks."""
    targets: dict[tuple[int, int], int] = {}
    for number, source, _ in shipments:
        targets[number, source] = targets.get((number, source), 0) + 1
    if any(count < size - 1 for count in targets.values()):
        return "all_to_all"
    return "all_gather" if len({source for _, source in targets}) > 1 else "broadcast"


def _buffers(
    shipments: Sequence[Shipment], form: Form, rows: Mapping[tuple[int, int], int], sent: Sequence[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """By rank of a group: bytes that it packs, and those by which a bucket may exceed its share, because the part of
    every pair is cut between rows, of which the longest has `rows` bytes."""
    peers: dict[int, set[int]] = {}
    for _, source, target in shipments:
        peers.setdefault(source, set()).add(target)
        peers.setdefault(target, set())
    packed, slack = {}, dict.fromkeys(peers, 0)
    for source, targets in peers.items():
        packed[source] = sent[source] // len(targets) if targets and form in TO_ALL else sent[source]
        lengths = [rows[source, target] for target in targets]
        slack[source] += max(lengths, default=0) if form in TO_ALL else sum(lengths)
        for target, length in zip(targets, lengths, strict=True):
            slack[target] += length
    return packed, slack


def _num_buckets(moved: int, slack: int, bucket_bytes: int) -> int:
    """Fewest buckets of at most `bucket_bytes`. A pair's part is cut between rows: each pair may exceed its share by one."""
    return 1 if moved <= bucket_bytes else -(-moved // max(bucket_bytes - slack, bucket_bytes // 8, 1))


def _stage_buckets(stage: Stage, units: Sequence[Unit], rank: int) -> Iterator[Bucket]:
    group = next((group for group in stage.groups if rank in group.ranks), None)
    if group is None:
        return
    count = group.num_buckets
    incoming: dict[int, list[int]] = {}
    outgoing: dict[int, list[int]] = {}
    for number, source, target in stage.shipments:
        if target == rank:
            incoming.setdefault(source, []).append(number)
        elif source == rank:
            outgoing.setdefault(target, []).append(number)
    receives = {peer: _cut(_pieces(units, numbers, peer), count) for peer, numbers in sorted(incoming.items())}
    sends: dict[int, list[tuple[Piece, ...]]] = {}
    for peer, numbers in sorted(outgoing.items()):
        same = next(iter(sends.values()), None) if group.form in TO_ALL else None
        sends[peer] = same or _cut(_pieces(units, numbers, rank), count)
    for number in range(count):
        yield Bucket(
            stage.name,
            group.form,
            group.ranks,
            number,
            tuple(Parcel(peer, parts[number]) for peer, parts in receives.items() if parts[number]),
            tuple(Parcel(peer, parts[number]) for peer, parts in sends.items() if parts[number]),
        )


def _pieces(units: Sequence[Unit], numbers: Iterable[int], source: int) -> list[Piece]:
    """In the order of the sender's memory; what it received itself comes last."""
    keyed = [
        (not unit.holders >> source & 1, *piece)
        for unit in (units[number] for number in numbers)
        for piece in unit.pieces()
    ]
    return [Piece(tensor, box, relayed) for relayed, _, tensor, box in sorted(keyed)]


def _elements(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def _cut(pieces: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """The pieces, in order, in `count` runs of nearly equal size; a piece is cut between rows of its first dim."""
    if count == 1:
        return [tuple(pieces)]
    ends, total = [], 0
    for piece in pieces:
        total += _elements(piece.box)
        ends.append(total)
    runs: list[tuple[Piece, ...]] = []
    start, first = 0, 0
    for number in range(1, count + 1):
        target = total * number // count
        stop = bisect_right(ends, target)
        rows = (
            (target - (ends[stop - 1] if stop else 0)) // _elements(pieces[stop].box[1:]) if stop < len(pieces) else 0
        )
        if start == stop:
            run = [_rows(pieces[start], first, rows)] if first < rows else []
        else:
            run = [_rows(pieces[start], first, None) if first else pieces[start], *pieces[start + 1 : stop]]
            if rows:
                run.append(_rows(pieces[stop], 0, rows))
        runs.append(tuple(run))
        start, first = stop, rows
    return runs


def _rows(piece: Piece, first: int, last: int | None) -> Piece:
    """Rows [first, last) of a piece; None: to its end."""
    (low, high), *rest = piece.box
    return Piece(piece.tensor, ((low + first, high if last is None else low + last), *rest), piece.relayed)
