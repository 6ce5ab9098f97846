"""Which elements of Hugging Face tensors a rank writes into a checkpoint, and which it reads from one.

Pure integers. A checkpoint holds whole tensors under the folder's names, so it knows no layout. Every rank adds the
boxes of them that lie on it; an optimizer that is cut over data-parallel ranks holds a run of a flattened parameter,
which is at most three boxes of each tensor in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrl.resharding.families import Box, Parameter, Piece
from flowrl.resharding.ranks import TrainPlace


@dataclass(frozen=True)
class StoredBox:
    """`box` of `tensor` is, in row-major order, elements `start` and following of the flattened local parameter."""

    tensor: str
    box: Box
    start: int

    @property
    def size(self) -> tuple[int, ...]:
        """Extent per dimension."""
        return tuple(high - low for low, high in self.box)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


def stored_boxes(pieces: Iterable[Piece], shape: tuple[int, ...], start: int, stop: int) -> list[StoredBox]:
    """What elements [start, stop) of a flattened local parameter of `shape` are in the tensors of its pieces.

    Pieces of a parameter span its rows whole. Elements in no piece, the padding of the vocabulary, are in no box.
    """
    width = math.prod(shape[1:])
    found = []
    for piece in pieces:
        assert piece.target[1:] == tuple((0, size) for size in shape[1:]), f"{piece} does not span whole rows"
        first, last = (row * width for row in piece.target[0])
        low, high = max(start, first), min(stop, last)
        if low < high:
            found += [
                StoredBox(piece.tensor, _moved(rows, columns, piece), rows[0] * width + columns[0])
                for rows, columns in _runs(low, high, width)
            ]
    return found


def _runs(low: int, high: int, width: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Elements [low, high) of rows of `width` as (rows, columns): the end of a row, whole rows, the start of a row."""
    row, column = divmod(low, width)
    if column:
        stop = min(width, column + high - low)
        yield (row, row + 1), (column, stop)
        row, low = row + 1, low + stop - column
    whole, rest = divmod(high - low, width)
    if whole:
        yield (row, row + whole), (0, width)
    if rest:
        yield (row + whole, row + whole + 1), (0, rest)


def _moved(rows: tuple[int, int], columns: tuple[int, int], piece: Piece) -> Box:
    """The same elements in the tensor of the piece."""
    shift = piece.source[0][0] - piece.target[0][0]
    moved = (rows[0] + shift, rows[1] + shift)
    if len(piece.source) == 1:
        return (moved,)
    left = piece.source[1][0]
    return moved, (columns[0] + left, columns[1] + left)


@dataclass(frozen=True)
class Origin:
    """The rank whose copy of a box counts, where several ranks hold the same."""

    rank: int
    parameter: str


def origins(stages: Iterable[tuple[int, Iterable[Parameter]]]) -> dict[tuple[str, Box], Origin]:
    """Of every box that a rank holds as a piece of a parameter, the first that does; `stages`: ranks and what they hold."""
    found: dict[tuple[str, Box], Origin] = {}
    for rank, parameters in stages:
        for parameter in parameters:
            for piece in parameter.pieces:
                found.setdefault((piece.tensor, piece.source), Origin(rank, parameter.name))
    return found


def provided(
    parameter: Parameter,
    rank: int,
    places: Sequence[TrainPlace],
    found: Mapping[tuple[str, Box], Origin],
    *,
    expert: bool,
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """Pieces of a rank's parameter whose values count: those that it provides alone, and those that it provides
    together with the other replicas of its shard, which is how a distributed optimizer holds them."""
    alone, together = [], []
    for piece in parameter.pieces:
        origin = found[piece.tensor, piece.source]
        if origin.parameter != parameter.name:
            continue
        if origin.rank == rank:
            alone.append(piece)
        if _shard(places[origin.rank], expert) == _shard(places[rank], expert):
            together.append(piece)
    return tuple(alone), tuple(together)


def _shard(at: TrainPlace, expert: bool) -> tuple[int, ...]:
    """What decides which part of a parameter a rank holds; ranks that agree in it are its replicas."""
    return (at.pp, at.ep, at.etp) if expert else (at.pp, at.tp)
