"""Checksums of many boxes in one launch: the products of `fingerprint` as a kernel that reads every byte once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from flowrl.resharding.copies_gpu import Addresses
from flowrl.resharding.copy_boxes import ALIGNMENT, tiles_of

ROWS, COLUMNS = 64, 128
"""Rows and bytes of a row that a program multiplies at once."""
LONGEST = 1 << 14
"""Bytes of a row after which 32-bit sums are taken over into 64-bit ones: 2^14 x 2^7 x 2^6 stays below 2^31."""
_FIELDS = 7


@triton.jit  # type: ignore[untyped-decorator]
def _add_checksums(  # type: ignore[no-untyped-def]
    tiles, boxes, row_weights, sketches, mixer, cells, sketch_stride,
    fields: tl.constexpr, rows_at_once: tl.constexpr, columns_at_once: tl.constexpr, longest: tl.constexpr,
    num_sketches: tl.constexpr,
):  # fmt: skip
    box = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    about = boxes + box * fields
    memory = tl.multiple_of(tl.load(about).to(tl.pointer_type(tl.int8)), 16)
    num_rows, num_bytes = tl.load(about + 1), tl.multiple_of(tl.load(about + 2), 16)
    stride = tl.multiple_of(tl.load(about + 3), 16)
    first_row, first_byte, cell = tl.load(about + 4), tl.multiple_of(tl.load(about + 5), 16), tl.load(about + 6)
    rows, number = first + tl.arange(0, rows_at_once), tl.arange(0, num_sketches)
    total = tl.zeros((rows_at_once, num_sketches), dtype=tl.int64)
    for start in range(0, num_bytes, longest):
        products = tl.zeros((rows_at_once, num_sketches), dtype=tl.int32)
        for column in range(start, min(start + longest, num_bytes), columns_at_once):
            columns = column + tl.arange(0, columns_at_once)
            inside = columns < num_bytes
            there = (rows < num_rows)[:, None] & inside[None, :]
            values = tl.load(memory + rows[:, None] * stride + columns[None, :], mask=there, other=0)
            place = sketches + number[None, :] * sketch_stride + first_byte + columns[:, None]
            products = tl.dot(values, tl.load(place, mask=inside[:, None], other=0), products, out_dtype=tl.int32)
        total += products.to(tl.int64)
    sums = tl.sum(total * tl.load(mixer + number)[None, :], axis=1)
    weights = tl.load(row_weights + first_row + rows, mask=rows < num_rows, other=0)
    tl.atomic_add(cells + cell, tl.sum(sums * weights, axis=0))


def fits(matrix: torch.Tensor, first_byte: int) -> bool:
    """Whether the kernel takes an int8 matrix of this place and these strides, whose columns begin at `first_byte`."""
    numbers = matrix.data_ptr(), matrix.stride(0), matrix.shape[1], first_byte
    return matrix.stride(1) == 1 and not any(number % ALIGNMENT for number in numbers)


@dataclass(frozen=True)
class Weights:
    """`rows` [R] int64: r; `sketches` [K, C] int8: C, transposed; `mixer` [K] int64: s."""

    rows: torch.Tensor
    sketches: torch.Tensor
    mixer: torch.Tensor


Matrix = tuple[torch.Tensor, int, int, int]
"""(int8 matrix that fits, number of its first row, of its first column, cell)."""


class SumLaunch:
    """Checksums of matrices in one launch."""

    def __init__(self, matrices: Sequence[Matrix], weights: Weights) -> None:
        table = torch.tensor(
            [[0, *b.shape, b.stride(0), row, column, cell] for b, row, column, cell in matrices], dtype=torch.int64
        )
        tensors = [matrix for matrix, *_ in matrices]
        self._boxes = Addresses(table, tensors, torch.arange(len(tensors))[:, None], slice(1))
        self._tiles = tiles_of(table[:, 1], ROWS).to(tensors[0].device)
        self._weights = weights

    def add_to(self, cells: torch.Tensor) -> None:
        """Add r^T B C s of every matrix B to its cell in `cells` [N] int64, modulo 2^64; on the current stream."""
        weights = self._weights
        _add_checksums[(len(self._tiles),)](
            self._tiles,
            self._boxes.now(),
            weights.rows,
            weights.sketches,
            weights.mixer,
            cells,
            weights.sketches.stride(0),
            fields=_FIELDS,
            rows_at_once=ROWS,
            columns_at_once=COLUMNS,
            longest=LONGEST,
            num_sketches=len(weights.mixer),
            num_warps=4,
            num_stages=4,
        )
