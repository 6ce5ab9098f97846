"""Checksums that prove two placements of the same tensors equal, whatever the order in which elements are visited.

The checksum of a set of elements is the sum modulo 2^64 of a mixed hash of each element's bits and its flat position
in the whole Hugging Face tensor. It is additive: disjoint parts, held by different ranks, add up to the whole.
"""

from __future__ import annotations

import torch

from flowrl.resharding.families import Box, box_size

_CHUNK_ELEMENTS = 1 << 18
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64."""
    return value - (1 << 64) if value >> 63 else value


# Multipliers and shifts of the finaliser of SplitMix64 (Steele, Lea and Flood 2014, section 5).
_POSITION = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shift_xor(x: torch.Tensor, shift: int) -> torch.Tensor:
    """x ^ (x >> shift) with a logical shift: torch's int64 shift copies the sign."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _positions(box: Box, shape: tuple[int, ...], rows: slice, device: torch.device) -> torch.Tensor:
    """Flat positions in a tensor of `shape` of the elements of `box` in these rows of its first dim; int64, box-shaped."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(box))):
        start, stop = box[dim]
        index = torch.arange(start, stop, dtype=torch.int64, device=device)
        if dim == 0:
            index = index[rows]
        total = total + (index * stride).reshape(-1, *(1,) * (len(box) - 1 - dim))
        stride *= shape[dim]
    return total


def temporary_bytes(num_elements: int, row_elements: int) -> int:
    """Bytes that `checksum` has alive at once: bits, positions, hash and its shift of the rows it visits together."""
    return 4 * 8 * min(num_elements, max(_CHUNK_ELEMENTS, row_elements))


def checksum(values: torch.Tensor, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Checksum of the elements `box` of a tensor of `shape`, as `dtype` would hold them.

    `values` is shaped like the box, in any strides. The result is an int64 scalar on the device of `values`. It takes
    `temporary_bytes` of memory meanwhile.

    Error: `ValueError` where values and box differ in shape, or the dtype is neither float32 nor bfloat16.
    """
    if tuple(values.shape) != box_size(box):
        raise ValueError(f"values of shape {list(values.shape)} are not the box {box}")
    if dtype not in _BITS:
        raise ValueError(f"no fingerprint of {dtype}; known: float32, bfloat16")
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if not values.dim():
        values, box, shape = values.reshape(1), ((0, 1),), (1,)
    step = max(1, _CHUNK_ELEMENTS * values.shape[0] // max(1, values.numel()))
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        bits = values[rows].to(dtype).contiguous().view(_BITS[dtype]).to(torch.int64)
        mixed = _shift_xor(bits + _positions(box, shape, rows, values.device) * _POSITION, 30) * _FIRST
        mixed = _shift_xor(mixed, 27) * _SECOND
        total += _shift_xor(mixed, 31).sum()
    return total
