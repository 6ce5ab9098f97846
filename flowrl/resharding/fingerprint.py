"""Checksums that prove two placements of the same tensors equal, whatever the order in which elements are visited.

The checksum of a box of a matrix B, read as bytes, is r^T B C s modulo 2^64: C has pseudo-random small integers by column
and r, s pseudo-random odd 64-bit integers by row and by column of C. It is linear, so disjoint parts that different
ranks hold add up to the whole, and a difference D goes unseen only where r^T D C s = 0, as in Freivalds' check of matrix
products ("Probabilistic machines can use less running time", 1977). B C is an exact product of 8-bit integers, for which
processors have instructions: one pass over the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from flowrl.resharding.families import Box, box_size

if TYPE_CHECKING:
    from flowrl.resharding.fingerprint_gpu import SumLaunch

_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 14
"""Columns (in bytes) of one product: 2^14 x 2^7 x 2^6 stays below 2^31."""
_SKETCHES = 16
_MAX_WEIGHT = 63
"""Products of pairs of bytes with weights of at most 6 bits and a sign fit 16 bits, where some processors add them."""
_LEAST_ROWS, _MULTIPLE = 32, 8
"""What CUDA's product of 8-bit integers asks for: more than 16 rows, and columns in multiples of 8."""
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64."""
    return value - (1 << 64) if value >> 63 else value


# Increment, multipliers and shifts of SplitMix64 (Steele, Lea and Flood 2014, section 5).
_STEP = _signed(0x9E3779B97F4A7C15)
_COLUMNS, _MIXER = 1 << 60, 1 << 61
"""Where the sequence goes on for C and s; rows begin at 0."""
_MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _random(numbers: torch.Tensor) -> torch.Tensor:
    """Pseudo-random int64 of these numbers >= 0, one for each."""
    x = (numbers + 1) * _STEP
    for shift, factor in _MIX:
        # torch's int64 shift copies the sign; the mask makes it a logical one.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


@lru_cache(maxsize=64)
def _weights(block: int, device: torch.device) -> torch.Tensor:
    """[_BLOCK_BYTES, _SKETCHES] int8 in [-63, 63]: C for the columns of a block."""
    size = _BLOCK_BYTES * _SKETCHES
    numbers = _COLUMNS + block * size + torch.arange(size, device=device)
    small = (_random(numbers) >> 32) % (2 * _MAX_WEIGHT + 1) - _MAX_WEIGHT
    return small.to(torch.int8).view(_BLOCK_BYTES, _SKETCHES)


@lru_cache(maxsize=8)
def _mixer(device: torch.device) -> torch.Tensor:
    """[_SKETCHES] int64, odd: s."""
    return _random(_MIXER + torch.arange(_SKETCHES, device=device)) | 1


def _rows_per_chunk(row_bytes: int) -> int:
    return max(1, _CHUNK_BYTES // max(1, row_bytes))


def temporary_bytes(num_elements: int, row_elements: int) -> int:
    """Bytes that `checksum` has alive at once: a copy of the rows it visits together in the compared dtype, their sketches
    in 32 and in 64 bits, and the weights of a block."""
    rows = min(_rows_per_chunk(4 * row_elements), max(_LEAST_ROWS, -(-num_elements // max(1, row_elements))))
    rows = max(rows, _LEAST_ROWS)
    return 4 * max(rows * row_elements, rows * _MULTIPLE) + rows * _SKETCHES * (4 + 8 + 8) + _BLOCK_BYTES * _SKETCHES


def checksum(values: torch.Tensor, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Checksum of the elements `box` of a tensor of `shape`, as `dtype` would hold them.

    `values` is shaped like the box, in any strides. The result is an int64 scalar on the device of `values`. It takes
    `temporary_bytes` of memory meanwhile.

    Error: `ValueError` where values and box differ in shape, or the dtype is neither float32 nor bfloat16.
    """
    if tuple(values.shape) != box_size(box):
        raise ValueError(f"values of shape {list(values.shape)} are not the box {box}")
    if dtype not in _BYTES:
        raise ValueError(f"no fingerprint of {dtype}; known: float32, bfloat16")
    if values.dim() < 2:
        # A vector is one row.
        box, shape = ((0, 1), *(box or ((0, 1),))), (1, *(shape or (1,)))
        values = values.reshape(box_size(box))
    rows = _row_weights(box[:-1], shape[:-1], values.device)
    start, stop = (edge * _BYTES[dtype] for edge in box[-1])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = _rows_per_chunk((stop - start) * values.shape[:-1].numel() // max(1, len(values)))
    for first in range(0, len(values), step):
        part = values[first : first + step].to(dtype)
        if part.stride(-1) != 1:
            part = part.contiguous()
        sketches = _sketches(part.view(torch.int8).flatten(0, -2), start, stop)
        total += (rows[first : first + step].flatten() * sketches).sum()
    return total


Part = tuple[int, torch.Tensor, Box, tuple[int, ...]]
"""(cell, values, box, shape of the whole tensor)."""


class Checksums:
    """Checksums of the same parts of memory, again and again: by cell the sum of those of its parts.

    Errors: as of `checksum`.
    """

    def __init__(self, parts: Iterable[Part], num_cells: int, dtype: torch.dtype, device: torch.device) -> None:
        self._parts, self._dtype, self._device = list(parts), dtype, device
        self._num_cells = num_cells
        self._launch: SumLaunch | None = None
        if device.type == "cuda":
            self._launch, self._parts = _one_launch(self._parts, dtype, device)

    def run(self) -> torch.Tensor:
        """[num_cells] int64, of what is there now."""
        cells = torch.zeros(self._num_cells, dtype=torch.int64, device=self._device)
        if self._launch is not None:
            self._launch.add_to(cells)
        for cell, values, box, shape in self._parts:
            cells[cell] += checksum(values, box, shape, self._dtype)
        return cells

    @property
    def temporary_bytes(self) -> int:
        """Most bytes that `run` has alive at once, beside its result."""
        sizes = [
            temporary_bytes(values.numel(), values.numel() // max(1, len(values))) for _, values, *_ in self._parts
        ]
        return max(sizes, default=0)


def _one_launch(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> tuple[SumLaunch | None, list[Part]]:
    """What adds the checksums that one kernel finds together, and the other parts: other types, other strides."""
    # Only GPU hosts need have its compiler.
    from flowrl.resharding import fingerprint_gpu

    size, rest, matrices = _BYTES[dtype], [], []
    num_rows, num_columns = 1, 1
    for cell, values, box, shape in parts:
        if values.dtype == dtype and values.dim() in (1, 2) and values.stride(-1) == 1:
            matrix = (values if values.dim() == 2 else values[None]).view(torch.int8)
            first = (box[0][0] if values.dim() == 2 else 0), box[-1][0] * size
            if fingerprint_gpu.fits(matrix, first[1]):
                matrices.append((matrix, *first, cell))
                num_rows, num_columns = max(num_rows, first[0] + len(matrix)), max(num_columns, box[-1][1] * size)
                continue
        rest.append((cell, values, box, shape))
    if not matrices:
        return None, rest
    blocks = [_weights(block, device) for block in range(-(-num_columns // _BLOCK_BYTES))]
    weights = fingerprint_gpu.Weights(
        rows=_random(torch.arange(num_rows, device=device)) | 1,
        sketches=torch.cat(blocks).t().contiguous(),
        mixer=_mixer(device),
    )
    return fingerprint_gpu.SumLaunch(matrices, weights), rest


def _row_weights(box: Box, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[lengths of the box] int64, odd, by flat position in a tensor of `shape`: r."""
    position = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), length in zip(box, shape, strict=True):
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        position = (position * length).unsqueeze(-1) + index
    return _random(position) | 1


def _sketches(matrix: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """[rows] int64: B C s of an int8 matrix whose columns are bytes [start, stop) of the whole rows."""
    total = torch.zeros(len(matrix), dtype=torch.int64, device=matrix.device)
    for block in range(start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES)):
        low, high = max(start, block * _BLOCK_BYTES), min(stop, (block + 1) * _BLOCK_BYTES)
        weights = _weights(block, matrix.device)[low - block * _BLOCK_BYTES : high - block * _BLOCK_BYTES]
        product = _product(matrix[:, low - start : high - start], weights)
        total += (product * _mixer(matrix.device)).sum(1)
    return total


def _product(matrix: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """matrix @ weights, int8 to int32, exact."""
    rows, columns = matrix.shape
    more_rows, more_columns = max(0, _LEAST_ROWS - rows), -columns % _MULTIPLE
    if more_rows or more_columns:
        matrix = torch.nn.functional.pad(matrix, (0, more_columns, 0, more_rows))
        weights = torch.nn.functional.pad(weights, (0, 0, 0, more_columns))
    return torch._int_mm(matrix, weights)[:rows]
