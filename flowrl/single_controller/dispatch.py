"""How rows are divided over processes and how answers come back: integers only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Broadcast:
    """Same arguments to all ranks; rank 0 answers, or all do (a list by rank)."""

    answers: Literal["first", "all"] = "first"

    def __call__(self, *, answers: Literal["first", "all"]) -> Broadcast:
        return Broadcast(answers)


@dataclass(frozen=True)
class SplitOver:
    """Rows of the first DataProto argument divided over the data-parallel ranks of a mesh."""

    mesh: str
    balance: str | None = None


@dataclass(frozen=True)
class RankZero:
    """Only rank 0 runs the method."""


Dispatch = Broadcast | SplitOver | RankZero

broadcast = Broadcast()
rank_zero = RankZero()


def split_over(mesh: str, *, balance: str | None = None) -> SplitOver:
    """Divide rows over the data-parallel ranks of ``mesh``; all ranks of a slice get the same rows, one answers.

    balance: a ragged column whose tokens are to be spread evenly; None cuts the table into neighbouring parts.
    """
    return SplitOver(mesh, balance)


@dataclass(frozen=True)
class MeshPosition:
    """Where one rank stands in a mesh: the slice it works on, and whether it answers for that slice."""

    data_parallel_rank: int
    answers: bool


@dataclass(frozen=True)
class Mesh:
    """Positions of all ranks: ``data_parallel_rank[rank]`` and ``answers[rank]``. Serves any parallel layout."""

    data_parallel_rank: tuple[int, ...]
    answers: tuple[bool, ...]

    @classmethod
    def of(cls, name: str, positions: Sequence[MeshPosition]) -> Mesh:
        """Errors: ValueError unless slices are 0..n-1 and each is answered by exactly one rank."""
        mesh = cls(tuple(p.data_parallel_rank for p in positions), tuple(p.answers for p in positions))
        slices = sorted(set(mesh.data_parallel_rank))
        if slices != list(range(len(slices))):
            raise ValueError(f"mesh {name!r} has data-parallel ranks {slices}; they must be 0..{len(slices) - 1}")
        for number in slices:
            answering = [r for r in mesh.ranks_of(number) if mesh.answers[r]]
            if len(answering) != 1:
                raise ValueError(
                    f"mesh {name!r}: slice {number} (ranks {mesh.ranks_of(number)}) is answered by {answering}, not by one rank"
                )
        return mesh

    @property
    def num_slices(self) -> int:
        return max(self.data_parallel_rank) + 1

    def ranks_of(self, number: int) -> list[int]:
        return [rank for rank, d in enumerate(self.data_parallel_rank) if d == number]

    def answering_rank(self, number: int) -> int:
        return next(rank for rank in self.ranks_of(number) if self.answers[rank])


def neighbouring_rows(num_rows: int, num_slices: int) -> list[list[int]]:
    """Rows 0..num_rows-1 cut into num_slices runs whose sizes differ by at most one (trailing ones may be empty)."""
    small, extra = divmod(num_rows, num_slices)
    bounds = [0]
    for number in range(num_slices):
        bounds.append(bounds[-1] + small + (number < extra))
    return [list(range(a, b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def balanced_rows(costs: Sequence[int], num_slices: int) -> list[list[int]]:
    """Every row in exactly one slice, costs spread evenly, rows of a slice in ascending order.

    Longest processing time first (Graham 1969): rows by falling cost, each to the cheapest slice so far; ties go to
    the slice with fewer rows, then to the lower number, so the plan depends on nothing but the costs.
    """
    slices: list[list[int]] = [[] for _ in range(num_slices)]
    heap = [(0, 0, number) for number in range(num_slices)]
    for row in sorted(range(len(costs)), key=lambda r: (-costs[r], r)):
        cost, size, number = heapq.heappop(heap)
        slices[number].append(row)
        heapq.heappush(heap, (cost + costs[row], size + 1, number))
    return [sorted(rows) for rows in slices]


def gather_order(slices: Sequence[Sequence[int]]) -> list[int]:
    """Where row i lies when the slices' answers are laid one after the other: the inverse of scattering."""
    order = [0] * sum(len(rows) for rows in slices)
    position = 0
    for rows in slices:
        for row in rows:
            order[row] = position
            position += 1
    return order
