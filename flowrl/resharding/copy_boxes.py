"""Copies as rows of words, which is what one launch of a kernel can make many of. Integers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

WORD_BYTES = 4
ALIGNMENT = 16
"""Bytes: what starts, lengths and strides of rows must be multiples of."""
FLAT_BYTES = 8192
"""Elements that lie together on both sides are cut into rows of so many bytes."""
Rows = tuple[int, int, int, int, int, int]
"""A copy, or a part of one: bytes from the beginning of target and of source, number of rows, words of a row, stride of target and
of source in words."""


class Place(NamedTuple):
    """Elements in memory: their strides, and the first one's bytes from the beginning of a tensor at the address `memory`.

    A buffer whose address is not known yet has 0 there, and must be aligned.
    """

    stride: tuple[int, ...]
    start: int
    memory: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Where all elements of a tensor are now."""
        return cls(tensor.stride(), 0, tensor.data_ptr())

    def is_contiguous(self, size: Sequence[int]) -> bool:
        step = 1
        for length, stride in zip(reversed(size), reversed(self.stride), strict=True):
            if length > 1 and stride != step:
                return False
            step *= length
        return True


def rows_of(size: Sequence[int], element_bytes: int, target: Place, source: Place) -> list[Rows]:
    """A copy of so many elements in each dimension; empty where the kernel cannot make it: other shapes or alignment."""
    if target.is_contiguous(size) and source.is_contiguous(size):
        full, rest = divmod(math.prod(size) * element_bytes, FLAT_BYTES)
        shapes = [(0, full, FLAT_BYTES, FLAT_BYTES, FLAT_BYTES)] if full else []
        shapes += [(full * FLAT_BYTES, 1, rest, rest, rest)] if rest else []
    elif len(size) == 2 and target.stride[1] == source.stride[1] == 1:
        strides = target.stride[0] * element_bytes, source.stride[0] * element_bytes
        shapes = [(0, size[0], size[1] * element_bytes, *strides)]
    else:
        return []
    starts = [side.start + side.memory for side in (target, source)]
    if any(number % ALIGNMENT for number in (*starts, *(width for _, _, *widths in shapes for width in widths))):
        return []
    return [
        (target.start + start, source.start + start, rows, words // WORD_BYTES, to // WORD_BYTES, of // WORD_BYTES)
        for start, rows, words, to, of in shapes
    ]


def tiles_of(numbers: torch.Tensor, at_once: int) -> torch.Tensor:
    """[T, 2] int64: (box, the first of its rows or vectors) of every tile, for boxes of `numbers` [N] of them."""
    counts = (numbers + at_once - 1) // at_once
    box = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.arange(len(box)) - (counts.cumsum(0) - counts)[box]
    return torch.stack([box, first * at_once], dim=1)
