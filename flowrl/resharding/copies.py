"""Copies between flat buffers and strided places: what lies together in both is one copy, or none at all.

Where the sent part of a bucket is one run of the trainer's memory, that memory itself is sent; where all that arrives
is one run of the engine's, it arrives there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from flowrl.resharding.steps import Slot


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
    """Copies that are made again and again: each source into its target; rounds where the target is narrower."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._targets, self._sources = list(targets), list(sources)
        self._launch: Callable[[], None] | None = None
        if self._targets and self._targets[0].device.type == "cuda":
            self._launch, rest = _one_launch(self._targets, self._sources)
            self._targets, self._sources = ([places[number] for number in rest] for places in (targets, sources))

    def run(self) -> None:
        """Make them, on a GPU on the current stream."""
        if self._launch is not None:
            self._launch()
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def _one_launch(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[Callable[[], None] | None, list[int]]:
    """What makes all copies that a GPU's kernel can make together, and the numbers of the others."""
    from flowrl.resharding import copies_gpu

    found = [copies_gpu.boxes_of(target, source) for target, source in zip(targets, sources, strict=True)]
    boxes = [box for there in found if there is not None for box in there]
    rest = [number for number, there in enumerate(found) if there is None]
    if not boxes:
        return None, rest
    tables = copies_gpu.make_tables(boxes, targets[0].device)
    return partial(copies_gpu.copy_boxes, tables), rest


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Each source into its target, once."""
    Copies(targets, sources).run()
