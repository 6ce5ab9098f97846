"""Blocks in Ray's object store.

Ray copies torch tensors but maps numpy arrays into every process of a node, so a block holds numpy arrays: the values
and, of a ragged column, the offsets. Ray pulls an object to a node once, whichever process asks first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, ReferenceCountingAssertionError

from flowrl.protocol import Column, DataProto, LocalBlock, Ragged, Stored
from flowrl.protocol.packing import from_numpy, to_numpy

_POLL_SECONDS = 1.0


class Liveness:
    """In a driver, looks whether a process died before stored columns are read; in a worker, does nothing."""

    def __init__(self) -> None:
        self.check: Callable[[], None] = lambda: None


liveness = Liveness()


@dataclass(frozen=True, eq=False)
class RayBlock:
    """One column that a worker returned. The process that put it owns it: it is lost when that process ends."""

    ref: Any
    num_rows: int
    dtype_name: str
    row_lengths: np.ndarray[Any, Any] | None
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        dtype = vars(torch)[self.dtype_name]
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def lengths(self) -> torch.Tensor | None:
        return None if self.row_lengths is None else torch.from_numpy(self.row_lengths.astype(np.int64))

    @staticmethod
    def load_all(blocks: Sequence[RayBlock]) -> list[Column]:
        """Errors: WorkerError when a process of the run died; ValueError when an owner has ended in order."""
        liveness.check()
        refs = list({block.ref for block in blocks})
        try:
            # Bounded waits: what lies on a node that is cut off does not come, and nobody says so.
            while len(ray.wait(refs, num_returns=len(refs), timeout=_POLL_SECONDS)[0]) < len(refs):
                liveness.check()
            stored = ray.get([block.ref for block in blocks])
        except (ObjectLostError, ReferenceCountingAssertionError) as error:
            liveness.check()
            raise ValueError(
                "a stored column is gone: the process that made it has ended (its pool was shut down)"
            ) from error
        return [block._column(*arrays) for block, arrays in zip(blocks, stored, strict=True)]

    def _column(self, values: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any] | None) -> Column:
        column = from_numpy(values, self.dtype_name)
        return column if offsets is None else Ragged(column, from_numpy(offsets, "int64"))


def put_block(column: Column) -> RayBlock:
    """Copy a column into this node's object store."""
    values, dtype_name = to_numpy(column.values if isinstance(column, Ragged) else column)
    offsets = column.offsets.numpy() if isinstance(column, Ragged) else None
    # int32 halves what the driver holds and sends; a row never has 2^31 tokens.
    lengths = np.diff(offsets).astype(np.int32) if offsets is not None else None
    return RayBlock(ray.put((values, offsets)), len(column), dtype_name, lengths, values.nbytes)


def store_columns(batch: DataProto) -> DataProto:
    """The batch with every column that lies in this process replaced by a block."""
    return batch.with_columns(**{name: _store(column) for name, column in batch.columns.items()})


def _store(column: Column | Stored) -> Stored:
    if not isinstance(column, Stored):
        return Stored.whole(put_block(column))
    if any(isinstance(block, LocalBlock) for block in column.blocks):
        return Stored.whole(put_block(column.load()))
    return column
