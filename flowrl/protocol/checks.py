"""What a batch checks and how it says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowrl.protocol.columns import Column, LocalBlock, Stored, concat_columns


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
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from error


def check_same_where_both(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Errors: ValueError for an entry that both have and that differs."""
    for name in a.keys() & b.keys():
        if a[name] is not b[name] and a[name] != b[name]:
            raise ValueError(f"{what} {name!r} differs: {a[name]!r} and {b[name]!r}")


def difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """How two lists of row ids differ, for a message."""
    if len(mine) != len(theirs):
        return f"{len(mine)} and {len(theirs)} rows"
    i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    return f"row {i} is {mine[i]!r} in one and {theirs[i]!r} in the other"
