"""Columns as numpy arrays: the form in which they travel between processes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from flowrl.protocol.columns import Column, Ragged, Stored


def to_numpy(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], str]:
    """(array sharing the tensor's memory, dtype name). bfloat16 has no numpy type and travels as int16 bits."""
    tensor = tensor.detach().cpu().contiguous()
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy(), str(tensor.dtype).removeprefix("torch.")


def from_numpy(array: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """Tensor over the array's memory, which may be read-only and shared: never write into it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def pack(column: Column | Stored) -> Any:
    """A column in a form whose memory a pickle can hand over without copying; stored columns stay references."""
    if isinstance(column, Stored):
        return column
    if isinstance(column, Ragged):
        return "ragged", to_numpy(column.values), column.offsets.numpy()
    return "dense", to_numpy(column), None


def unpack(packed: Any) -> Column | Stored:
    """The inverse of ``pack``, over the same memory."""
    if isinstance(packed, Stored):
        return packed
    kind, (array, dtype), offsets = packed
    values = from_numpy(array, dtype)
    return Ragged(values, from_numpy(offsets, "int64")) if kind == "ragged" else values
