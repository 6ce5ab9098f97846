"""Copies between flat buffers and strided places: what lies together in both is one copy, or none at all.

Where the sent part of a bucket is one run of the trainer's memory, that memory itself is sent; where all that arrives
is one run of the engine's, it arrives there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from flowrl.resharding.copy_boxes import ALIGNMENT, Place, Rows, rows_of
from flowrl.resharding.steps import Slot

if TYPE_CHECKING:
    from flowrl.resharding.copies_gpu import CopyLaunch


class Run(NamedTuple):
    """Elements [first, first + length) of a flat buffer are elements [start, start + length) of the memory `memory`."""

    first: int
    memory: int
    start: int
    length: int

    def goes_on(self, after: Run) -> bool:
        """Whether this is the rest of the run `after`."""
        return (
            self.memory == after.memory
            and self.first == after.first + after.length
            and self.start == after.start + after.length
        )


@dataclass(frozen=True)
class Pair:
    """Elements of a flat buffer, given by size, stride and offset, and the place `view` of the same size."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    view: torch.Tensor

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The elements in this buffer."""
        return buffer.as_strided(self.size, self.stride, buffer.storage_offset() + self.offset)


def pair_up(slots: Sequence[Slot], places: Sequence[torch.Tensor]) -> tuple[Pair, ...]:
    """The copies that these slots ask for, neighbours together; slots ascend in the buffer."""
    pairs: list[Pair] = []
    run: Run | None = None
    for slot in slots:
        pair = _pair(slot, places[slot.region][slot.there])
        after, run = run, _run(pair)
        if after is not None and run is not None and run.goes_on(after) and pair.view.dtype == pairs[-1].view.dtype:
            run = Run(after.first, after.memory, after.start, after.length + run.length)
            pair = Pair((run.length,), (1,), run.first, pair.view.as_strided((run.length,), (1,), run.start))
            pairs.pop()
        pairs.append(pair)
    return tuple(pairs)


def _pair(slot: Slot, view: torch.Tensor) -> Pair:
    stride, offset, step = [], slot.offset, 1
    for length, inside in zip(reversed(slot.shape), reversed(slot.inside), strict=True):
        stride.append(step)
        offset += inside.start * step
        step *= length
    size = tuple(inside.stop - inside.start for inside in slot.inside)
    return Pair(size, tuple(reversed(stride)), offset, view)


def _run(pair: Pair) -> Run | None:
    """The pair as a run, where its elements lie together on both sides."""
    step = 1
    for length, stride in zip(reversed(pair.size), reversed(pair.stride), strict=True):
        if length > 1 and stride != step:
            return None
        step *= length
    if not pair.view.is_contiguous():
        return None
    return Run(pair.offset, pair.view.untyped_storage().data_ptr(), int(pair.view.storage_offset()), step)


def in_place(pairs: Sequence[Pair], first: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
    """The place itself, flat, where elements [first, first + count) of the buffer are one run of it in this dtype."""
    if len(pairs) != 1 or pairs[0].view.dtype != dtype or (run := _run(pairs[0])) is None:
        return None
    return pairs[0].view.reshape(-1) if (run.first, run.length) == (first, count) else None


class Copies:
    """Copies that are made again and again: each source into its target; rounds where the target is narrower.

    On a GPU those between aligned memory of one type are one launch.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`pairs`: (target, source), all targets on one device."""
        self._launch: CopyLaunch | None = None
        self._rest = list(pairs)
        self.nbytes = sum(target.nbytes for target, _ in pairs)
        if pairs and pairs[0][0].device.type == "cuda":
            self._launch, self._rest = _launch_of_copies(pairs)

    def run(self, *, beside_collectives: bool = False) -> None:
        """Make them, on a GPU on the current stream. `beside_collectives` leaves a part of it to those that are under way, except
        where copies round or are not aligned, which PyTorch makes."""
        if self._launch is not None:
            self._launch.run(beside_collectives=beside_collectives)
        copy_all([target for target, _ in self._rest], [source for _, source in self._rest])


class BufferCopies:
    """Copies between places and a flat buffer, another one each time; as `Copies` else. Into the buffer where it `fills`
    it, else out of it."""

    def __init__(self, pairs: Sequence[Pair], dtype: torch.dtype, *, fills: bool) -> None:
        """`dtype` is the buffer's."""
        self._pairs, self._fills = tuple(pairs), fills
        self._launch: CopyLaunch | None = None
        self._rest = self._pairs
        if pairs and pairs[0].view.device.type == "cuda":
            self._launch, self._rest = _launch_of_pairs(pairs, dtype, fills)

    def run(self, buffer: torch.Tensor, *, beside_collectives: bool = False) -> None:
        """As `Copies.run`. `buffer` is flat, of the given dtype."""
        rest = self._pairs
        if self._launch is not None and buffer.data_ptr() % ALIGNMENT == 0:
            self._launch.run(buffer.data_ptr(), beside_collectives=beside_collectives)
            rest = self._rest
        sides = [pair.of(buffer) for pair in rest], [pair.view for pair in rest]
        copy_all(*(sides if self._fills else reversed(sides)))


def shares(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], number: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Copies (target, source), in their order, as `number` lists with about as many bytes each; some may be empty."""
    total = sum(target.nbytes for target, _ in pairs) or 1
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(number)]
    before = 0
    for target, source in pairs:
        found[min(before * number // total, number - 1)].append((target, source))
        before += target.nbytes
    return found


def _launch_of_copies(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[CopyLaunch | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """What makes all copies (target, source) that the kernel can make, and the others."""
    # Only GPU hosts need have its compiler.
    from flowrl.resharding.copies_gpu import CopyLaunch

    def rows(target: torch.Tensor, source: torch.Tensor) -> list[Rows]:
        if (target.dtype, target.device) != (source.dtype, source.device):
            return []
        return rows_of(target.shape, target.element_size(), Place.of(target), Place.of(source))

    found = [(pair, rows(*pair)) for pair in pairs]
    done = [pair for pair, there in found if there]
    rest = [pair for pair, there in found if not there]
    if not done:
        return None, rest
    targets, sources = [target for target, _ in done], [source for _, source in done]
    return CopyLaunch(targets, sources, [there for _, there in found if there]), rest


def _launch_of_pairs(
    pairs: Sequence[Pair], dtype: torch.dtype, fills: bool
) -> tuple[CopyLaunch | None, tuple[Pair, ...]]:
    """As `_launch_of_copies`, into a buffer of this dtype or out of it."""
    from flowrl.resharding.copies_gpu import CopyLaunch

    def rows(pair: Pair) -> list[Rows]:
        if pair.view.dtype != dtype:
            return []
        sides = Place(pair.stride, pair.offset * dtype.itemsize, 0), Place.of(pair.view)
        return rows_of(pair.size, dtype.itemsize, *(sides if fills else reversed(sides)))

    found = [(pair, rows(pair)) for pair in pairs]
    places = [pair.view for pair, there in found if there]
    rest = tuple(pair for pair, there in found if not there)
    if not places:
        return None, rest
    made = [there for _, there in found if there]
    return CopyLaunch(None, places, made) if fills else CopyLaunch(places, None, made), rest


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Each source into its target, once: what one launch needs would take longer to make than these copies."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
