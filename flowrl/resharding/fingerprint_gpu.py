"""Checksums of many boxes in one launch: the sums of `fingerprint` as a kernel that reads every byte once.

The sum over the sketches is taken first: r^T B C s = r^T B w with the 64-bit weights w = C s, whose halves are multiplied
apart, because GPUs multiply 32-bit integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from flowrl.resharding.copies_gpu import tiles_of

ROWS, COLUMNS = 16, 512
"""Rows and bytes of a row that a program visits at once."""
ALIGNMENT = 16
"""Bytes: what starts and strides of rows must be multiples of."""
_FIELDS = 7


@triton.jit  # type: ignore[untyped-decorator]
def _add_checksums(  # type: ignore[no-untyped-def]
    tiles, boxes, row_weights, low_weights, high_weights, cells,
    fields: tl.constexpr, rows_at_once: tl.constexpr, columns_at_once: tl.constexpr,
):  # fmt: skip
    box = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    about = boxes + box * fields
    memory = tl.multiple_of(tl.load(about).to(tl.pointer_type(tl.int8)), 16)
    num_rows, num_bytes = tl.load(about + 1), tl.multiple_of(tl.load(about + 2), 16)
    stride = tl.multiple_of(tl.load(about + 3), 16)
    first_row, first_byte, cell = tl.load(about + 4), tl.load(about + 5), tl.load(about + 6)
    rows = first + tl.arange(0, rows_at_once)
    low = tl.zeros((rows_at_once, columns_at_once), dtype=tl.int64)
    high = tl.zeros((rows_at_once, columns_at_once), dtype=tl.int32)
    for start in range(0, num_bytes, columns_at_once):
        columns = start + tl.arange(0, columns_at_once)
        inside = columns < num_bytes
        there = (rows < num_rows)[:, None] & inside[None, :]
        values = tl.load(memory + rows[:, None] * stride + columns[None, :], mask=there, other=0).to(tl.int32)
        low_here = tl.load(low_weights + first_byte + columns, mask=inside, other=0)
        high_here = tl.load(high_weights + first_byte + columns, mask=inside, other=0)
        low += values.to(tl.int64) * low_here.to(tl.int64)[None, :]
        high += values * high_here[None, :]
    sums = tl.sum(low, axis=1) + (tl.sum(high.to(tl.int64), axis=1) << 32)
    weights = tl.load(row_weights + first_row + rows, mask=rows < num_rows, other=0)
    tl.atomic_add(cells + cell, tl.sum(sums * weights, axis=0))


def fits(matrix: torch.Tensor) -> bool:
    """Whether the kernel takes an int8 matrix of this place and these strides."""
    return (
        matrix.stride(1) == 1
        and matrix.data_ptr() % ALIGNMENT == matrix.stride(0) % ALIGNMENT == matrix.shape[1] % ALIGNMENT == 0
    )


def add_checksums(
    cells: torch.Tensor,
    matrices: Sequence[tuple[torch.Tensor, int, int, int]],
    row_weights: torch.Tensor,
    column_weights: torch.Tensor,
) -> None:
    """Add to `cells` [N] int64 the sums r^T B w of int8 matrices that fit.

    `matrices`: (B, number of its first row, number of its first column, cell). `row_weights` and `column_weights` are
    int64, by number.
    """
    if not matrices:
        return
    boxes = torch.tensor(
        [[b.data_ptr(), *b.shape, b.stride(0), row, column, cell] for b, row, column, cell in matrices]
    )
    tiles = tiles_of(boxes[:, 1], ROWS)
    low = column_weights.to(torch.int32)
    high = ((column_weights - low) >> 32).to(torch.int32)
    tables = [table.to(cells.device) for table in (tiles, boxes)]
    _add_checksums[(len(tiles),)](
        *tables,
        row_weights,
        low,
        high,
        cells,
        fields=_FIELDS,
        rows_at_once=ROWS,
        columns_at_once=COLUMNS,
        num_warps=8,
    )
