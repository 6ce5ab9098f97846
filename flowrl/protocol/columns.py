"""Columns of a batch: dense tensors, ragged tensors, and columns that are stored elsewhere.

Everything here is index arithmetic; only ``load`` of a block moves bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch

Indices = Sequence[int] | torch.Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different length, stored one after the other without padding.

    values: [total, ...]; offsets: [N + 1] int64, offsets[0] == 0, row i is values[offsets[i]:offsets[i + 1]].
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() < 1 or self.offsets.dim() != 1 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"a ragged column needs values [total, ...] and offsets [N + 1] int64, got values "
                f"{tuple(self.values.shape)} and offsets {tuple(self.offsets.shape)} {self.offsets.dtype}"
            )
        if len(self.offsets) < 1 or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.values):
            raise ValueError(
                f"offsets must run from 0 to {len(self.values)} (rows of values), got {self.offsets[[0, -1]].tolist() if len(self.offsets) else 'nothing'}"
            )
        if len(self.offsets) > 1 and bool((self.offsets.diff() < 0).any()):
            raise ValueError("offsets of a ragged column must not decrease")

    @classmethod
    def from_rows(cls, rows: Sequence[torch.Tensor | Sequence[Any]], dtype: torch.dtype | None = None) -> Ragged:
        """Rows [length_i, ...] -> column of len(rows) rows. Without rows or tokens, dtype defaults to float32, else to one that
        takes what all rows have. Error: ValueError where a given dtype would lose the kind of a row's numbers."""
        tensors = [row if isinstance(row, torch.Tensor) else torch.tensor(row) for row in rows]
        # torch.tensor([]) is float32; an empty Python row must not turn a column of ids into floats.
        known = {t.dtype for t, row in zip(tensors, rows, strict=True) if isinstance(row, torch.Tensor) or len(row)}
        if dtype is None:
            dtype = reduce(torch.promote_types, known) if known else torch.float32
        lost = [each for each in known if not torch.can_cast(each, dtype)]
        if lost:
            raise ValueError(
                f"rows of {lost[0]} would lose what they are as {dtype}; convert them first, or give another dtype"
            )
        tensors = [
            t.to(dtype) if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=dtype)
            for t, row in zip(tensors, rows, strict=True)
        ]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return cls.from_lengths(values, [len(t) for t in tensors])

    @classmethod
    def from_lengths(cls, values: torch.Tensor, lengths: Indices) -> Ragged:
        """values [total, ...] cut into rows of the given lengths [N]."""
        return cls(values, offsets_of(torch.as_tensor(lengths, dtype=torch.int64)))

    @classmethod
    def from_padded(cls, values: torch.Tensor, lengths: Indices) -> Ragged:
        """values [N, T, ...], lengths [N] <= T -> the first lengths[i] entries of every row."""
        length = torch.as_tensor(lengths, dtype=torch.int64)
        if len(length) != len(values) or (len(length) and int(length.max()) > values.shape[1]):
            raise ValueError(f"lengths {length.tolist()} do not fit values of shape {tuple(values.shape)}")
        mask = torch.arange(values.shape[1]) < length[:, None]
        return cls(values[mask.to(values.device)], offsets_of(length))

    @property
    def lengths(self) -> torch.Tensor:
        """[N] int64."""
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self) -> list[torch.Tensor]:
        """N tensors [length_i, ...], views of the values."""
        return list(torch.split(self.values, self.lengths.tolist())) if len(self) else []

    def select(self, indices: Indices) -> Ragged:
        """The given rows in the given order; a run of neighbouring rows is a view."""
        index = row_index(indices)
        if is_run(index):
            first = int(index[0]) if len(index) else 0
            bounds = self.offsets[first : first + len(index) + 1]
            return Ragged(self.values[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0])
        lengths = self.lengths[index]
        offsets = offsets_of(lengths)
        shift = torch.repeat_interleave(self.offsets[:-1][index] - offsets[:-1], lengths)
        positions = torch.arange(int(offsets[-1])) + shift
        return Ragged(self.values[positions.to(self.values.device)], offsets)

    def padded(self, pad_value: float = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(values [N, T, ...], mask [N, T] bool) with T the longest row."""
        longest = int(self.lengths.max()) if len(self) else 0
        mask = (torch.arange(longest) < self.lengths[:, None]).to(self.values.device)
        shape = (len(self), longest, *self.values.shape[1:])
        values = torch.full(shape, pad_value, dtype=self.values.dtype, device=self.values.device)
        values[mask] = self.values
        return values, mask

    def to(self, device: torch.device | str) -> Ragged:
        """Values on the device; offsets stay on the CPU, where they are read."""
        return Ragged(self.values.to(device), self.offsets)


Column = torch.Tensor | Ragged
"""Dense [N, ...] or ragged."""


class Block(Protocol):
    """One stored column. Its facts are known here; only ``load_all`` moves bytes."""

    @property
    def num_rows(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def lengths(self) -> torch.Tensor | None:
        """[num_rows] int64 of a ragged column, None of a dense one."""
        ...

    @staticmethod
    def load_all(blocks: Sequence[Any]) -> list[Column]:
        """The columns of several blocks of this type in one trip, read-only (they may be shared memory)."""
        ...


@dataclass(frozen=True, eq=False)
class LocalBlock:
    """A column in this process seen as a block, so that stored and local rows can be joined without reading."""

    column: Column

    @property
    def num_rows(self) -> int:
        return len(self.column)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.column)

    @property
    def lengths(self) -> torch.Tensor | None:
        return self.column.lengths if isinstance(self.column, Ragged) else None

    @staticmethod
    def load_all(blocks: Sequence[LocalBlock]) -> list[Column]:
        return [block.column for block in blocks]


Picked = tuple[tuple[int, ...], torch.Tensor]
"""Numbers of blocks, and rows within them."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Rows of blocks: row i is row ``index[i]`` of the blocks laid one after the other. index: [N] int64."""

    blocks: tuple[Block, ...]
    index: torch.Tensor

    @classmethod
    def whole(cls, block: Block) -> Stored:
        return cls((block,), torch.arange(block.num_rows))

    def __len__(self) -> int:
        return len(self.index)

    def __getstate__(self) -> dict[str, Any]:
        # References travel with every call, so they are made small: a run of rows is two numbers.
        first = int(self.index[0]) if len(self.index) else 0
        rows = (first, len(self.index)) if is_run(self.index) else self.index.to(torch.int32).numpy()
        return {"blocks": self.blocks, "rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        index = torch.arange(rows[0], sum(rows)) if isinstance(rows, tuple) else torch.from_numpy(rows.astype(np.int64))
        self.__dict__.update(blocks=state["blocks"], index=index)

    @property
    def starts(self) -> torch.Tensor:
        """[blocks + 1] int64: first row of every block in the numbering of ``index``."""
        return offsets_of(torch.tensor([block.num_rows for block in self.blocks], dtype=torch.int64))

    @property
    def lengths(self) -> torch.Tensor | None:
        lengths = [block.lengths for block in self.blocks]
        known = [length for length in lengths if length is not None]
        if not known:
            return None
        return torch.cat(known)[self.index]

    def select(self, indices: torch.Tensor, known: dict[Any, Picked] | None = None) -> Stored:
        """Rows by position; blocks that no row needs any more are let go.

        `known` keeps the arithmetic for other columns that lie in blocks of the same sizes, as those of one call do.
        """
        if len(self.blocks) == 1:
            return Stored(self.blocks, self.index[indices])
        if known is None:
            known = {}
        key = (tuple(block.num_rows for block in self.blocks), self.index.numpy().tobytes())
        if key not in known:
            known[key] = pick(self.index[indices], self.starts)
        used, index = known[key]
        return Stored(tuple(self.blocks[b] for b in used), index)

    @staticmethod
    def concat(parts: Sequence[Stored]) -> Stored:
        """Rows of all parts in order; a block shared by several parts is kept once."""
        blocks: list[Block] = []
        start_of: dict[int, int] = {}
        total = 0
        indices = []
        for part in parts:
            new_starts = []
            for block in part.blocks:
                if id(block) not in start_of:
                    start_of[id(block)] = total
                    blocks.append(block)
                    total += block.num_rows
                new_starts.append(start_of[id(block)])
            shift = torch.tensor(new_starts, dtype=torch.int64) - part.starts[:-1]
            owner = owner_of(part.index, part.starts)
            indices.append(part.index + shift[owner] if len(part.index) else part.index)
        return Stored(tuple(blocks), torch.cat(indices))

    def load(self) -> Column:
        """Read the needed blocks and put their rows together."""
        return load_columns([self])[0]

    def assemble(self, columns: Sequence[Column]) -> Column:
        """The rows out of the loaded blocks, one column per block."""
        if len(self.blocks) == 1:
            return select_rows(columns[0], self.index)
        starts = self.starts
        owner = owner_of(self.index, starts)
        pieces: list[Column] = []
        positions: list[torch.Tensor] = []
        for number, column in enumerate(columns):
            mine = (owner == number).nonzero().flatten()
            if len(mine) or not pieces:
                pieces.append(select_rows(column, self.index[mine] - starts[number]))
                positions.append(mine)
        order = torch.cat(positions)
        joined = concat_columns(pieces)
        return joined if is_run(order) else select_rows(joined, torch.argsort(order))


def pick(index: torch.Tensor, starts: torch.Tensor) -> Picked:
    """Which blocks the rows `index` lie in, and the rows' numbers when only those blocks are laid one after the other."""
    if is_run(index):
        first, last = owner_of(index[[0, -1]], starts).tolist() if len(index) else [0, 0]
        return tuple(range(first, last + 1)), index - starts[first]
    owner = owner_of(index, starts)
    used = sorted(set(owner.tolist()))
    kept = torch.tensor(used)
    shift = torch.zeros(len(starts) - 1, dtype=torch.int64)
    shift[kept] = offsets_of(starts.diff()[kept])[:-1] - starts[kept]
    return tuple(used), index + shift[owner]


def load_columns(parts: Sequence[Stored]) -> list[Column]:
    """Read several stored columns; all blocks of one type come in one trip."""
    blocks = {id(block): block for part in parts for block in part.blocks}
    loaded: dict[int, Column] = {}
    for kind in {type(block) for block in blocks.values()}:
        same = [block for block in blocks.values() if type(block) is kind]
        loaded.update(zip((id(block) for block in same), kind.load_all(same), strict=True))
    return [part.assemble([loaded[id(block)] for block in part.blocks]) for part in parts]


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """lengths [N] int64 -> offsets [N + 1] int64."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def owner_of(index: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Which block every row lies in: [N] int64. starts: [blocks + 1]."""
    # By numpy: torch.bucketize wakes its thread pool for a few hundred numbers.
    return torch.from_numpy(np.searchsorted(starts[1:].numpy(), index.numpy(), side="right"))


def row_index(indices: Indices) -> torch.Tensor:
    """[M] int64. Error: ValueError for what is no whole number: a mask, or floats."""
    index = torch.as_tensor(indices)
    if index.dim() != 1 or (len(index) and (index.dtype == torch.bool or index.is_floating_point())):
        raise ValueError(
            f"rows are picked by a list of whole numbers, got {index.dtype} of shape {tuple(index.shape)}; filter() takes a mask"
        )
    return index.to(torch.int64)


def is_run(index: torch.Tensor) -> bool:
    """Whether the index is first, first + 1, first + 2, ... (a slice)."""
    return len(index) < 2 or bool((index.diff() == 1).all())


def dtype_of(column: Column) -> torch.dtype:
    return column.values.dtype if isinstance(column, Ragged) else column.dtype


def select_rows(column: Column, index: torch.Tensor) -> Column:
    """Rows of a column in the given order; a run of neighbouring rows is a view."""
    if isinstance(column, Ragged):
        return column.select(index)
    if is_run(index):
        first = int(index[0]) if len(index) else 0
        return column[first : first + len(index)]
    return column[index.to(column.device)]


def concat_columns(columns: Sequence[Column]) -> Column:
    """Rows of all columns in order. Errors: dense mixed with ragged, or different dtypes."""
    if len(columns) == 1:
        return columns[0]
    dtypes = {dtype_of(column) for column in columns}
    ragged = [column for column in columns if isinstance(column, Ragged)]
    dense = [column for column in columns if isinstance(column, torch.Tensor)]
    if len(dtypes) > 1 or (ragged and dense):
        kinds = sorted({f"{'ragged' if isinstance(c, Ragged) else 'dense'} {dtype_of(c)}" for c in columns})
        raise ValueError(f"cannot join parts of different kinds: {', '.join(kinds)}")
    if ragged:
        return Ragged.from_lengths(torch.cat([c.values for c in ragged]), torch.cat([c.lengths for c in ragged]))
    return torch.cat(dense)
