"""Many copies within a GPU's memory in one launch. Each alone is too small to keep the memory busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

ROWS, WORDS = 8, 1024
"""Rows that a program copies, and words of a row that it moves at once."""
WORD_BYTES = 4
ALIGNMENT = 16
"""Bytes: what starts, lengths and strides of rows must be multiples of."""
FLAT_BYTES = 8192
"""Elements that lie together on both sides are cut into rows of so many bytes."""
_FIELDS = 6


@triton.jit  # type: ignore[untyped-decorator]
def _copy(tiles, boxes, fields: tl.constexpr, rows_at_once: tl.constexpr, words_at_once: tl.constexpr):  # type: ignore[no-untyped-def]
    box = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    about = boxes + box * fields
    target = tl.multiple_of(tl.load(about).to(tl.pointer_type(tl.int32)), 16)
    source = tl.multiple_of(tl.load(about + 1).to(tl.pointer_type(tl.int32)), 16)
    num_rows, num_words = tl.load(about + 2), tl.multiple_of(tl.load(about + 3), 4)
    target_stride, source_stride = tl.multiple_of(tl.load(about + 4), 4), tl.multiple_of(tl.load(about + 5), 4)
    rows = first + tl.arange(0, rows_at_once)
    for start in range(0, num_words, words_at_once):
        words = start + tl.arange(0, words_at_once)
        there = (rows < num_rows)[:, None] & (words < num_words)[None, :]
        values = tl.load(source + rows[:, None] * source_stride + words[None, :], mask=there)
        tl.store(target + rows[:, None] * target_stride + words[None, :], values, mask=there)


Box = tuple[int, int, int, int, int, int]
"""Target and source address, rows, words of a row, stride of target and of source in words."""


def boxes_of(target: torch.Tensor, source: torch.Tensor) -> list[Box] | None:
    """A copy as boxes of words, or None where the kernel cannot make it: other types, shapes or alignment."""
    if target.dtype != source.dtype or target.device != source.device or not target.numel():
        return None
    start = target.data_ptr(), source.data_ptr()
    if target.is_contiguous() and source.is_contiguous():
        full, rest = divmod(target.nbytes, FLAT_BYTES)
        shapes = [(*start, full, FLAT_BYTES, FLAT_BYTES, FLAT_BYTES)] if full else []
        done = full * FLAT_BYTES
        shapes += [(start[0] + done, start[1] + done, 1, rest, rest, rest)] if rest else []
    elif target.dim() == 2 and target.stride(1) == source.stride(1) == 1:
        size = target.element_size()
        strides = target.stride(0) * size, source.stride(0) * size
        shapes = [(*start, target.shape[0], target.shape[1] * size, *strides)]
    else:
        return None
    if any(number % ALIGNMENT for shape in shapes for number in (*shape[:2], *shape[3:])):
        return None
    return [(to, of, rows, *(number // WORD_BYTES for number in widths)) for to, of, rows, *widths in shapes]  # type: ignore[misc]


@dataclass(frozen=True)
class Tables:
    """`tiles` [T, 2] int64: (box, its first row) of every program; `boxes` [N, 6] int64. Both on the GPU."""

    tiles: torch.Tensor
    boxes: torch.Tensor


def make_tables(boxes: Sequence[Box], device: torch.device) -> Tables:
    """What a launch for these boxes reads."""
    table = torch.tensor(boxes, dtype=torch.int64)
    return Tables(tiles_of(table[:, 2], ROWS).to(device), table.to(device))


def tiles_of(num_rows: torch.Tensor, rows_at_once: int) -> torch.Tensor:
    """[T, 2] int64: (box, its first row) of every program, for boxes of `num_rows` [N] rows."""
    counts = (num_rows + rows_at_once - 1) // rows_at_once
    box = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.arange(len(box)) - (counts.cumsum(0) - counts)[box]
    return torch.stack([box, first * rows_at_once], dim=1)


def copy_boxes(tables: Tables) -> None:
    """Make all the copies, on the current stream."""
    _copy[(len(tables.tiles),)](
        tables.tiles, tables.boxes, fields=_FIELDS, rows_at_once=ROWS, words_at_once=WORDS, num_warps=8
    )
