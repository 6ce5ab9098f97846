"""What every element of every tensor must be: coded from its own index, so that no two places look alike by chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from flowrl.resharding.families import Box, HFTensor

CHUNK_ELEMENTS = 1 << 22
_BITS = {torch.bfloat16: (torch.int16, -(1 << 14) - 1), torch.float32: (torch.int32, -(1 << 30) - 1)}
"""Integers of the same size, and a mask that clears the exponent's top bit: no code is infinite or no number."""


class Truth(Protocol):
    """The values of a model's tensors."""

    def values(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Elements `box` of tensor `name` in `dtype`, best on torch's current default device."""
        ...


def _mix(values: torch.Tensor, salt: int) -> torch.Tensor:
    """A hash of non-negative integers below 2^31, int64."""
    mixed = (values + salt * 7919 + 1) * 0x2545F4914F6CDD1D
    mixed = mixed ^ ((mixed >> 29) & ((1 << 35) - 1))
    mixed = mixed * 0x1B03738712FAD5C9
    return mixed ^ ((mixed >> 32) & ((1 << 32) - 1))


class IndexCoded:
    """Element (row, column) of a tensor has the bits hash(tensor, row) + hash(tensor, column)."""

    def __init__(self, tensors: Sequence[HFTensor]) -> None:
        self._numbers = {tensor.name: number for number, tensor in enumerate(tensors)}

    def values(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        bits, mask = _BITS[dtype]
        total = torch.zeros((), dtype=bits)
        for dim, (start, stop) in enumerate(box):
            code = _mix(torch.arange(start, stop, dtype=torch.int64), 2 * self._numbers[name] + dim).to(bits)
            total = total + code.reshape(-1, *(1,) * (len(box) - 1 - dim))
        return total.bitwise_and_(mask).view(dtype)


def chunks(box: Box) -> Iterator[tuple[slice, Box]]:
    """(rows, box of these rows) in pieces of at most `CHUNK_ELEMENTS` elements, or one row."""
    (low, high), *rest = box
    width = 1
    for start, stop in rest:
        width *= stop - start
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(low, high, step):
        stop = min(start + step, high)
        yield slice(start - low, stop - low), ((start, stop), *rest)


@torch.no_grad()
def fill(target: torch.Tensor, truth: Truth, name: str, box: Box) -> None:
    """Write the box of a tensor into `target`, which has its shape."""
    for rows, part in chunks(box):
        with target.device:
            target[rows].copy_(truth.values(name, part, target.dtype))


def differs(found: torch.Tensor, truth: Truth, name: str, box: Box) -> bool:
    """Whether any bit of `found` is not that of the box of the tensor."""
    bits = _BITS[found.dtype][0]
    for rows, part in chunks(box):
        with found.device:
            expected = truth.values(name, part, found.dtype).to(found.device).contiguous()
        if not torch.equal(found[rows].contiguous().view(bits), expected.view(bits)):
            return True
    return False
