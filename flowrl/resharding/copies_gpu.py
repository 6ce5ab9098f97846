"""Many copies within a GPU's memory in one launch. Each alone is too small to keep the memory busy."""

from __future__ import annotations

from collections.abc import Sequence

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
"""Bytes from the beginning of target and of source, rows, words of a row, stride of target and of source in words."""


def boxes_of(target: torch.Tensor, source: torch.Tensor) -> list[Box]:
    """A copy as boxes of words; none where the kernel cannot make it: other types, shapes or alignment."""
    if target.dtype != source.dtype or target.device != source.device or not target.numel():
        return []
    if target.is_contiguous() and source.is_contiguous():
        full, rest = divmod(target.nbytes, FLAT_BYTES)
        shapes = [(0, full, FLAT_BYTES, FLAT_BYTES, FLAT_BYTES)] if full else []
        shapes += [(full * FLAT_BYTES, 1, rest, rest, rest)] if rest else []
    elif target.dim() == 2 and target.stride(1) == source.stride(1) == 1:
        size = target.element_size()
        strides = target.stride(0) * size, source.stride(0) * size
        shapes = [(0, target.shape[0], target.shape[1] * size, *strides)]
    else:
        return []
    aligned = [target.data_ptr(), source.data_ptr(), *(width for _, _, *widths in shapes for width in widths)]
    if any(number % ALIGNMENT for number in aligned):
        return []
    return [
        (start, start, rows, words // WORD_BYTES, to // WORD_BYTES, of // WORD_BYTES)
        for start, rows, words, to, of in shapes
    ]


def tiles_of(num_rows: torch.Tensor, rows_at_once: int) -> torch.Tensor:
    """[T, 2] int64: (box, its first row) of every program, for boxes of `num_rows` [N] rows."""
    counts = (num_rows + rows_at_once - 1) // rows_at_once
    box = torch.repeat_interleave(torch.arange(len(counts)), counts)
    first = torch.arange(len(box)) - (counts.cumsum(0) - counts)[box]
    return torch.stack([box, first * rows_at_once], dim=1)


class Addresses:
    """A table [N, F] int64 on the GPU whose first columns are addresses: the given bytes from the beginning of tensors.

    It follows tensors whose storage has moved.
    """

    def __init__(self, table: torch.Tensor, tensors: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        """`numbers` [N, A]: the tensors that the first A columns count from."""
        self._relative, self._tensors, self._numbers = table, list(tensors), numbers
        self._device = self._tensors[0].device
        self._memory: list[int] = []
        self._table = table

    def now(self) -> torch.Tensor:
        memory = [tensor.data_ptr() for tensor in self._tensors]
        if memory != self._memory:
            table = self._relative.clone()
            table[:, : self._numbers.shape[1]] += torch.tensor(memory)[self._numbers]
            self._table, self._memory = table.to(self._device), memory
        return self._table


class CopyLaunch:
    """Copies of `sources` into `targets` that can be made in one launch: `boxes[i]` are those of copy i."""

    def __init__(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], boxes: Sequence[Sequence[Box]]
    ) -> None:
        table = torch.tensor([box for there in boxes for box in there], dtype=torch.int64)
        copy = torch.tensor([number for number, there in enumerate(boxes) for _ in there])
        self._boxes = Addresses(table, [*targets, *sources], torch.stack([copy, copy + len(targets)], dim=1))
        self._tiles = tiles_of(table[:, 2], ROWS).to(targets[0].device)

    def run(self) -> None:
        """On the current stream."""
        _copy[(len(self._tiles),)](
            self._tiles, self._boxes.now(), fields=_FIELDS, rows_at_once=ROWS, words_at_once=WORDS, num_warps=8
        )
