"""What a batch checks and how it says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from flowrl.protocol.columns import Column, LocalBlock, Ragged, Stored, concat_columns
from flowrl.protocol.metric import Metric


class MissingColumnError(ValueError):
    """A column that the code asks for is not in the batch."""


class Values(dict[str, list[Any]]):
    """Per-row values by name, with an error that says what there is."""

    def __missing__(self, name: str) -> list[Any]:
        raise MissingColumnError(f"per-row values {name!r} are not in this batch; it has {sorted(self)}")


def concat_parts(parts: Iterable[Column | Stored], name: str) -> Column | Stored:
    """One column from the same column of several tables; stored parts stay where they are."""
    parts = list(parts)
    local = [part for part in parts if not isinstance(part, Stored)]
    try:
        if len(local) == len(parts):
            return concat_columns(local)
        return Stored.concat([p if isinstance(p, Stored) else Stored.whole(LocalBlock(p)) for p in parts])
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"column {name!r}: {error}") from error


def check_parts(columns: Mapping[str, Any], values: Mapping[str, Any], row_ids: Any) -> None:
    """Errors: ValueError for a column that is no tensor of rows, and for text or a table where a list is meant: Python would
    take its letters or keys for rows."""
    for name, column in columns.items():
        if not isinstance(column, (torch.Tensor, Ragged, Stored)) or (
            isinstance(column, torch.Tensor) and not column.dim()
        ):
            raise ValueError(
                f"column {name!r} must be a tensor [N, ...] or Ragged, got {type(column).__name__}; per-row Python values go into values="
            )
    for name, rows in [*((f"values {name!r}", rows) for name, rows in values.items()), ("row_ids", row_ids)]:
        if isinstance(rows, (str, bytes, Mapping, Set)):
            raise ValueError(f"{name} must be a list with one entry per row, got {type(rows).__name__}")


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, arrays elementwise; what is not equal to itself (nan) is the same as its like."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and np.array_equal(a, b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    if isinstance(a, Metric) and isinstance(b, Metric):
        return a.kind == b.kind and _same(a.total, b.total) and _same(a.weight, b.weight)
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


def check_same_where_both(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Errors: ValueError for an entry that both have and that differs."""
    for name in a.keys() & b.keys():
        if a[name] is not b[name] and not _same(a[name], b[name]):
            raise ValueError(f"{what} {name!r} differs: {a[name]!r} and {b[name]!r}")


def difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """How two lists of row ids differ, for a message."""
    if len(mine) != len(theirs):
        return f"{len(mine)} and {len(theirs)} rows"
    i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    return f"row {i} is {mine[i]!r} in one and {theirs[i]!r} in the other"
