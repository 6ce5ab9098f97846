"""A rank's schedule of a plan as reads and writes of tensors: which view goes where in which buffer.

Pure integers. A piece of the plan may lie in several regions of the trainer (heads of several groups) and in several
places of the engine (a key/value head, tied weights).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from flowrl.resharding.families import Box, box_size
from flowrl.resharding.plan import Bucket, MovePlan, Parcel, Piece
from flowrl.resharding.plan.move import TO_ALL, Form
from flowrl.resharding.plan.units import bits
from flowrl.resharding.regions import Boxes, intersect, num_elements, same_elements, slices_in, subtract_all

Slices = tuple[slice, ...]


class Regions:
    """Boxes of tensors on one side of this rank, found by tensor; a box's number is its place in the given order."""

    def __init__(self, keys: Sequence[tuple[str, Box]]) -> None:
        self._found: dict[str, list[tuple[int, Box]]] = {}
        for number, (tensor, box) in enumerate(keys):
            self._found.setdefault(tensor, []).append((number, box))

    @property
    def boxes(self) -> dict[str, list[Box]]:
        return {tensor: [box for _, box in there] for tensor, there in self._found.items()}

    def all_in(self, tensor: str, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """(number, its box, common box) of every region that has elements of `box`."""
        for number, there in self._found.get(tensor, ()):
            if (common := intersect(there, box)) is not None:
                yield number, there, common

    def once_in(self, tensor: str, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """As `all_in`, with every element of `box` once."""
        rest = [box]
        for number, there, common in self.all_in(tensor, box):
            for part in rest:
                if (piece := intersect(part, common)) is not None:
                    yield number, there, piece
            rest = subtract_all(rest, [common])
        assert not rest, f"checked against the plan, and {rest[0]} of {tensor} is in no region"


@dataclass(frozen=True)
class Slot:
    """Elements `there` of region `region` are elements `inside` of a part of a buffer, shaped `shape` from `offset` on."""

    offset: int
    shape: tuple[int, ...]
    inside: Slices
    region: int
    there: Slices


@dataclass(frozen=True)
class Copy:
    """Elements `source` of the trainer's region `held` go to elements `target` of the engine's region `region`."""

    held: int
    source: Slices
    region: int
    target: Slices


@dataclass(frozen=True)
class Step:
    """This rank's part in one bucket, an exchange among `group` in which it has the place `place`.

    `incoming` and `outgoing` are elements of its buffers by place in the group. Where all that a rank sends goes to all
    others there is one buffer, `incoming`, with this rank's own part at its own place. `packs` fill the part that is
    sent from the trainer, `relays` from the engine; `installs` empty the received ones.
    """

    stage: str
    number: int
    form: Form
    group: tuple[int, ...]
    place: int
    incoming: tuple[int, ...]
    outgoing: tuple[int, ...]
    packs: tuple[Slot, ...]
    relays: tuple[Slot, ...]
    installs: tuple[Slot, ...]

    @property
    def to_all(self) -> bool:
        return self.form in TO_ALL

    @property
    def received(self) -> int:
        """Elements from other ranks."""
        return sum(self.incoming) - (self.incoming[self.place] if self.to_all else 0)

    @property
    def sent(self) -> int:
        """Elements packed for other ranks; those for all of them once."""
        return self.incoming[self.place] if self.to_all else sum(self.outgoing)

    @property
    def first_sent(self) -> int:
        """Where in its buffer the sent part begins."""
        return sum(self.incoming[: self.place]) if self.to_all else 0


@dataclass(frozen=True)
class Steps:
    """Everything this rank does in a move."""

    copies: tuple[Copy, ...]
    steps: tuple[Step, ...]


def check_sides(plan: MovePlan, rank: int, held: Regions, kept: Regions) -> None:
    """Error: `ValueError` naming rank and tensor where the trainer holds, or the engine keeps, other elements than the
    plan says."""
    sides = (
        ("trainer holds", plan.held(rank), held.boxes),
        ("engine keeps", plan.needed(rank), kept.boxes),
    )
    for what, planned, actual in sides:
        if (tensor := _first_difference(planned, actual)) is not None:
            raise ValueError(
                f"no move can be planned for this model and these layouts: rank {rank}'s {what} "
                f"{actual.get(tensor, 'nothing')} of {tensor}, where {planned.get(tensor, 'nothing')} was expected"
            )


def _first_difference(planned: Boxes, actual: Boxes) -> str | None:
    for tensor in dict.fromkeys((*planned, *actual)):
        if not same_elements(planned.get(tensor, ()), actual.get(tensor, ())):
            return tensor
    return None


def make_steps(plan: MovePlan, rank: int, held: Regions, kept: Regions) -> Steps:
    """Of a rank whose trainer has the regions `held` and whose engine has `kept`, both as the plan says."""
    schedule = plan.schedule(rank)
    copies = [copy for piece in schedule.local for copy in _copies(piece, held, kept)]
    return Steps(tuple(copies), tuple(_step(bucket, rank, held, kept) for bucket in schedule.buckets))


def _copies(piece: Piece, held: Regions, kept: Regions) -> Iterator[Copy]:
    for number, here, part in held.once_in(piece.tensor, piece.box):
        for region, there, common in kept.all_in(piece.tensor, part):
            yield Copy(number, slices_in(common, here), region, slices_in(common, there))


def _step(bucket: Bucket, rank: int, held: Regions, kept: Regions) -> Step:
    sent, received = _elements(bucket.packed), _elements(bucket.receives)
    to_all, place = bucket.form in TO_ALL, bucket.group.index(rank)
    if to_all:
        received[rank] = sum(sent.values())
    incoming = tuple(received.get(member, 0) for member in bucket.group)
    outgoing = () if to_all else tuple(sent.get(member, 0) for member in bucket.group)
    starts = dict(zip(bucket.group, accumulate(incoming, initial=0), strict=False))
    packs: list[Slot] = []
    relays: list[Slot] = []
    for offset, piece in _offsets(bucket.packed, starts[rank] if to_all else 0):
        slots, regions = (relays, kept) if piece.relayed else (packs, held)
        found = regions.once_in(piece.tensor, piece.box)
        slots += [_slot(offset, piece.box, *there) for there in found]
    installs = [
        _slot(offset, piece.box, *there)
        for parcel in bucket.receives
        for offset, piece in _offsets([parcel], starts[parcel.peer])
        for there in kept.all_in(piece.tensor, piece.box)
    ]
    slots_of_all = tuple(packs), tuple(relays), tuple(installs)
    return Step(bucket.stage, bucket.number, bucket.form, bucket.group, place, incoming, outgoing, *slots_of_all)


def _elements(parcels: Sequence[Parcel]) -> dict[int, int]:
    return {parcel.peer: parcel.elements for parcel in parcels}


def _offsets(parcels: Sequence[Parcel], start: int) -> Iterator[tuple[int, Piece]]:
    """Pieces with the places where they begin in a buffer, one after another from `start` on."""
    offset = start
    for parcel in parcels:
        for piece in parcel.pieces:
            yield offset, piece
            offset += num_elements(piece.box)


def _slot(offset: int, box: Box, region: int, there: Box, common: Box) -> Slot:
    return Slot(offset, box_size(box), slices_in(common, box), region, slices_in(common, there))


@dataclass(frozen=True)
class Count:
    """Elements `box`, as `there` of this rank's held region `held`, count towards cell `cell`."""

    cell: int
    held: int
    there: Slices
    box: Box


@dataclass(frozen=True)
class Counts:
    """What is compared: `cells` cells of the model's tensors, of which this rank's trainer counts `mine`; `sums[r]` are
    the cells that make up the engine's region number r."""

    cells: int
    mine: tuple[Count, ...]
    sums: tuple[tuple[int, ...], ...]


def make_counts(plan: MovePlan, rank: int, held: Regions, keys: Sequence[tuple[str, Box]]) -> Counts:
    """Every element of the model is in one cell and counted by one of its holders, in turns; `keys` are the engine's
    regions.

    Error: `ValueError` naming a region of the engine that cuts through a cell.
    """
    cells: dict[str, list[tuple[int, Box]]] = {}
    mine: list[Count] = []
    number = 0
    for unit in plan.units:
        holders = bits(unit.holders)
        for _, tensor, box in unit.pieces():
            cells.setdefault(tensor, []).append((number, box))
            if holders[number % len(holders)] == rank:
                mine += [
                    Count(number, region, slices_in(common, there), common)
                    for region, there, common in held.once_in(tensor, box)
                ]
            number += 1
    return Counts(number, tuple(mine), tuple(_cells_of(tensor, box, cells) for tensor, box in keys))


def _cells_of(tensor: str, box: Box, cells: Mapping[str, Sequence[tuple[int, Box]]]) -> tuple[int, ...]:
    found = [(number, cell) for number, cell in cells[tensor] if intersect(cell, box) is not None]
    if sum(num_elements(cell) for _, cell in found) != num_elements(box):
        raise ValueError(f"the engine keeps {box} of {tensor} apart, which is less than a plan moves as one")
    return tuple(number for number, _ in found)
