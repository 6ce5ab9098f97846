"""How the tensors of one kind of layer are cut on both sides at once: cells, which no shard of either side divides.

Layers of one kind are cut alike, and so are experts, so a few hundred cells describe a model of tens of thousands of
tensors. Sets of shards are bit masks. Cells also end where training's memory goes on with another tensor (a head's query
rows lie before its key's), so that pieces put in the order of that memory are one run of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from flowrl.resharding.families import Box

Interval = tuple[int, int]
Place = tuple[int, int]
"""Where training keeps something of a layer: (number of the parameter, counted down to 0 for the first; row)."""

Memory = Mapping[str, Sequence[tuple[Box, Place]]]
"""Tensor -> runs of it that lie together in training, each with the place where it begins."""


@dataclass(frozen=True)
class TensorKind:
    """Tensors that differ in layer and expert only. `name` has the fields {layer} and {expert} where they apply.

    `shape` is that of one tensor, `dim` the one dim that layouts cut. `runs` are (first index along it, place) of what
    lies together in training, ascending.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[int, Place], ...]

    def box(self, interval: Interval) -> Box:
        """The box of `interval` along the cut dim."""
        return tuple(interval if dim == self.dim else (0, size) for dim, size in enumerate(self.shape))

    def place(self, index: int) -> Place:
        """Where training keeps what is at this index of the cut dim; places ascend within every shard."""
        start, (parameter, row) = self.runs[bisect_right(self.runs, index, key=lambda run: run[0]) - 1]
        return parameter, row + index - start

    @property
    def width(self) -> int:
        """Elements at one index of the cut dim."""
        return prod(self.shape) // self.shape[self.dim]


@dataclass(frozen=True)
class Part:
    """Some of a tensor: the elements of these intervals of its cut dim."""

    kind: TensorKind
    intervals: tuple[Interval, ...]

    @property
    def elements(self) -> int:
        return self.kind.width * sum(stop - start for start, stop in self.intervals)

    @cached_property
    def placed(self) -> tuple[tuple[Place, Box], ...]:
        """Boxes of the part with their places."""
        return tuple((self.kind.place(interval[0]), self.kind.box(interval)) for interval in self.intervals)

    @cached_property
    def max_row_elements(self) -> int:
        """Elements of the longest row (index of the first dim) of a box of the part."""
        if len(self.kind.shape) == 1:
            return 1
        longest = max(stop - start for start, stop in self.intervals) if self.kind.dim else 1
        return self.kind.width // self.kind.shape[0] * longest if self.kind.dim else self.kind.width


@dataclass(frozen=True)
class Cell:
    """What exactly the training shards `train` hold and exactly the generation shards `rollout` need (bit masks)."""

    train: int
    rollout: int
    parts: tuple[Part, ...]

    @cached_property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)


Shard = Mapping[str, Sequence[Box]]
"""Tensor -> boxes that one shard holds or needs."""


def cut_cells(
    shapes: Mapping[str, tuple[int, ...]], train: Sequence[Shard], rollout: Sequence[Shard], memory: Memory
) -> list[Cell]:
    """Cells of tensors of these shapes, given what every shard of either side has of them.

    Errors: `ValueError` naming a tensor that is cut along several dims, or a box that generation needs and no
    training shard holds.
    """
    merged: dict[tuple[int, int], list[Part]] = {}
    for name, shape in shapes.items():
        dim = _cut_dim(name, shape, [*train, *rollout])
        runs = sorted((box[dim][0], place) for box, place in memory[name])
        kind = TensorKind(name, shape, dim, tuple(runs))
        seams = {start for start, _ in runs}
        pieces: dict[tuple[int, int], list[Interval]] = {}
        points = _cut_points(kind, [*train, *rollout])
        held, needed = _masks(kind, points, train), _masks(kind, points, rollout)
        for start, stop, here, there in zip(points[:-1], points[1:], held, needed, strict=True):
            if there and not here:
                raise ValueError(f"no training rank holds {kind.box((start, stop))} of {name} {list(shape)}")
            if there:
                _append(pieces.setdefault((here, there), []), (start, stop), seams)
        for key, intervals in pieces.items():
            merged.setdefault(key, []).append(Part(kind, tuple(intervals)))
    return [Cell(here, there, tuple(parts)) for (here, there), parts in merged.items()]


def _append(intervals: list[Interval], interval: Interval, seams: Collection[int]) -> None:
    """Add an interval that begins at or after the last one's end; one that begins at a seam stays apart."""
    if intervals and intervals[-1][1] == interval[0] and interval[0] not in seams:
        intervals[-1] = (intervals[-1][0], interval[1])
    else:
        intervals.append(interval)


def _cut_dim(name: str, shape: tuple[int, ...], shards: Sequence[Shard]) -> int:
    dims = {
        dim
        for shard in shards
        for box in shard.get(name, ())
        for dim, interval in enumerate(box)
        if interval != (0, shape[dim])
    }
    if len(dims) > 1:
        raise ValueError(f"{name} {list(shape)} is cut along dims {sorted(dims)}; a plan knows one per tensor")
    return dims.pop() if dims else 0


def _cut_points(kind: TensorKind, shards: Sequence[Shard]) -> list[int]:
    points = {0, kind.shape[kind.dim], *(start for start, _ in kind.runs)}
    for shard in shards:
        for box in shard.get(kind.name, ()):
            points.update(box[kind.dim])
    return sorted(points)


def _masks(kind: TensorKind, points: list[int], shards: Sequence[Shard]) -> list[int]:
    """For every interval between neighbouring points the mask of the shards that have it."""
    masks = [0] * (len(points) - 1)
    for number, shard in enumerate(shards):
        for box in shard.get(kind.name, ()):
            start, stop = box[kind.dim]
            for place in range(bisect_left(points, start), bisect_left(points, stop)):
                masks[place] |= 1 << number
    return masks
