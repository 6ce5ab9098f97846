"""The batch that a driver handles: columns, per-row Python values, meta and metrics over rows with stable ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from flowrl.protocol.checks import (
    MissingColumnError,
    Values,
    check_parts,
    check_same_where_both,
    concat_parts,
    difference,
)
from flowrl.protocol.columns import (
    Column,
    Indices,
    Picked,
    Stored,
    load_columns,
    row_index,
    select_rows,
)
from flowrl.protocol.metric import Metric, merge_metrics
from flowrl.protocol.minibatch import cut_by_prompt
from flowrl.protocol.packing import pack, unpack

PAD = "~pad/"
"""Ids of rows that ``pad_to_multiple`` added start with this."""


class DataProto:
    """A table. Row order is its identity; every method returns a new table and leaves this one as it was.

    Columns live here or in blocks stored elsewhere (``Stored``); only ``batch[name]`` brings a stored one here. A
    table may be *pending*, the result of a call that still runs: any look inside waits for it. Columns are read-only,
    as their memory may be shared with other tables and other processes.
    """

    def __init__(
        self,
        columns: Mapping[str, Column | Stored] | None = None,
        *,
        values: Mapping[str, Sequence[Any]] | None = None,
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        row_ids: Sequence[str] | None = None,
    ) -> None:
        """Row ids default to "0", "1", ...; they must be unique.

        Errors: ValueError when columns, values and row ids do not have one number of rows, or are no columns and lists.
        """
        columns = dict(columns or {})
        check_parts(columns, values or {}, row_ids)
        lists = {name: list(rows) for name, rows in (values or {}).items()}
        sizes = {name: len(rows) for name, rows in [*columns.items(), *lists.items()]}
        if row_ids is None:
            row_ids = [str(i) for i in range(next(iter(sizes.values()), 0))]
        wrong = {name: size for name, size in sizes.items() if size != len(row_ids)}
        if wrong:
            raise ValueError(f"a batch of {len(row_ids)} rows was given columns of other sizes: {wrong}")
        if len(set(row_ids)) != len(row_ids):
            twice = sorted({row for row in row_ids if row_ids.count(row) > 1})[:5]
            raise ValueError(f"row ids must be unique; {twice} occur more than once (repeat() makes ids of its own)")
        both = sorted(columns.keys() & lists.keys())
        if both:
            raise ValueError(f"{both} are given both as columns and as values")
        self._row_ids = tuple(row_ids)
        self._columns: dict[str, Column | Stored] = columns
        self._read: dict[str, Column] = {}
        self._values = lists
        self._meta = dict(meta or {})
        self._metrics = dict(metrics or {})
        self._wait: Callable[[], DataProto] | None = None

    @classmethod
    def pending(cls, wait: Callable[[], DataProto]) -> DataProto:
        """A table that ``wait()`` will deliver; called at most once successfully, at the first look inside."""
        batch = cls.__new__(cls)
        batch._wait = wait
        return batch

    def _settle(self) -> None:
        if self._wait is not None:
            ready = self._wait()
            ready._settle()
            self.__dict__.update(ready.__dict__)

    def __getattr__(self, name: str) -> Any:
        # Reached only for attributes that a pending table does not have yet.
        if name.startswith("_") and self.__dict__.get("_wait") is not None:
            self._settle()
            return self.__dict__[name]
        raise AttributeError(f"DataProto has no attribute {name!r}")

    # Looking inside

    @property
    def row_ids(self) -> tuple[str, ...]:
        return self._row_ids

    def __len__(self) -> int:
        return len(self._row_ids)

    def __bool__(self) -> bool:
        return True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def value_names(self) -> tuple[str, ...]:
        return tuple(self._values)

    @property
    def values(self) -> Mapping[str, list[Any]]:
        return Values(self._values)

    @property
    def meta(self) -> Mapping[str, Any]:
        return MappingProxyType(self._meta)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return MappingProxyType(self._metrics)

    @property
    def columns(self) -> Mapping[str, Column | Stored]:
        """The columns as they lie, stored ones unread."""
        return MappingProxyType(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Column:
        """The column, read-only; a stored one is brought here once. Error: MissingColumnError."""
        return self.read(name)[0]

    def read(self, *names: str) -> list[Column]:
        """Several columns, brought here in one trip. Error: MissingColumnError."""
        columns = {name: self._column(name) for name in names}
        far = {n: c for n, c in columns.items() if isinstance(c, Stored) and n not in self._read}
        self._read.update(zip(far, load_columns(list(far.values())), strict=True))
        return [self._read[n] if isinstance(c, Stored) else c for n, c in columns.items()]

    def lengths(self, name: str) -> torch.Tensor:
        """[N] int64 row lengths of a ragged column; moves no bytes. Error: dense column."""
        column = self._column(name)
        lengths = None if isinstance(column, torch.Tensor) else column.lengths
        if lengths is None:
            raise ValueError(f"column {name!r} is dense; only ragged columns have lengths")
        return lengths

    def _column(self, name: str) -> Column | Stored:
        if name not in self._columns:
            raise MissingColumnError(
                f"column {name!r} is not in this batch of {len(self)} rows; "
                f"it has columns {sorted(self._columns)} and values {sorted(self._values)}"
            )
        return self._columns[name]

    def __repr__(self) -> str:
        if self._wait is not None:
            return "DataProto(pending)"
        return f"DataProto({len(self)} rows, columns {list(self._columns)}, values {list(self._values)}, meta {self._meta})"

    # Adding and removing

    def _with(
        self,
        columns: Mapping[str, Column | Stored] | None = None,
        values: Mapping[str, Sequence[Any]] | None = None,
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> DataProto:
        """Same rows, some parts replaced."""
        batch = DataProto(
            self._columns if columns is None else columns,
            values=self._values if values is None else values,
            meta=self._meta if meta is None else meta,
            metrics=self._metrics if metrics is None else metrics,
            row_ids=self._row_ids,
        )
        batch._read = {n: c for n, c in self._read.items() if batch._columns.get(n) is self._columns[n]}
        return batch

    def with_columns(self, **columns: Column | Stored) -> DataProto:
        return self._with(columns={**self._columns, **columns})

    def with_values(self, **values: Sequence[Any]) -> DataProto:
        return self._with(values={**self._values, **values})

    def with_meta(self, **meta: Any) -> DataProto:
        return self._with(meta={**self._meta, **meta})

    def with_metrics(self, metrics: Mapping[str, Metric]) -> DataProto:
        return self._with(metrics={**self._metrics, **metrics})

    def select(self, *names: str) -> DataProto:
        """Only these columns and values. Error: MissingColumnError."""
        for name in names:
            if name not in self._values:
                self._column(name)
        return self._with(
            columns={n: c for n, c in self._columns.items() if n in names},
            values={n: v for n, v in self._values.items() if n in names},
        )

    def drop(self, *names: str) -> DataProto:
        """Without these columns and values. Error: MissingColumnError."""
        return self.select(*self._without(names))

    def _without(self, names: tuple[str, ...]) -> list[str]:
        for name in names:
            if name not in self._values:
                self._column(name)
        return [name for name in (*self._columns, *self._values) if name not in names]

    def union(self, *others: DataProto) -> DataProto:
        """Columns, values, meta and metrics of all, same rows in the same order.

        Errors: other row ids, a column or value that two tables have, meta or metrics of one name that differ.
        """
        batch = self
        for other in others:
            batch = batch._union(other)
        return batch

    def _union(self, other: DataProto) -> DataProto:
        if self.row_ids != other.row_ids:
            raise ValueError(f"union of different rows: {difference(self.row_ids, other.row_ids)}")
        mine, theirs = {*self._columns, *self._values}, {*other._columns, *other._values}
        if mine & theirs:
            raise ValueError(f"union would have two of each of {sorted(mine & theirs)}; drop() or select() first")
        for what, a, b in (("meta", self._meta, other._meta), ("metrics", self._metrics, other._metrics)):
            check_same_where_both(what, a, b)
        batch = self._with(
            {**self._columns, **other._columns},
            {**self._values, **other._values},
            {**self._meta, **other._meta},
            {**self._metrics, **other._metrics},
        )
        batch._read.update(other._read)
        return batch

    # Rows. Metrics describe a call, not rows: tables with other rows than the call's have none.

    def _take(
        self, index: torch.Tensor, row_ids: Sequence[str], metrics: Mapping[str, Metric] | None = None
    ) -> DataProto:
        picked = index.tolist()
        known: dict[Any, Picked] = {}
        columns: dict[str, Column | Stored] = {
            n: c.select(index, known) if isinstance(c, Stored) else select_rows(c, index)
            for n, c in self._columns.items()
        }
        values = {n: [rows[i] for i in picked] for n, rows in self._values.items()}
        return DataProto(columns, values=values, meta=self._meta, metrics=metrics, row_ids=row_ids)

    def rows(self, indices: Indices) -> DataProto:
        """The given rows (each at most once) in the given order."""
        index = row_index(indices)
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(self)):
            raise ValueError(f"rows {int(index.min())}..{int(index.max())} asked of a batch of {len(self)} rows")
        return self._take(index, [self.row_ids[i] for i in index.tolist()])

    def reorder(self, indices: Indices) -> DataProto:
        """Row i of the result is row indices[i]. Error: not a permutation."""
        index = row_index(indices)
        if not torch.equal(index.sort().values, torch.arange(len(self))):
            raise ValueError(f"reorder of {len(self)} rows needs every row once; rows() picks some")
        return self.rows(index).with_metrics(self._metrics)

    def filter(self, mask: Sequence[bool] | torch.Tensor) -> DataProto:
        """Rows where the mask [N] is true."""
        keep = torch.as_tensor(mask)
        if keep.shape != (len(self),) or (len(self) and keep.dtype != torch.bool):
            raise ValueError(
                f"filter mask of {keep.dtype} and shape {tuple(keep.shape)} for {len(self)} rows; one bool for each is needed"
            )
        return self.rows(keep.nonzero().flatten())

    def repeat(self, n: int) -> DataProto:
        """Every row n times in a row (a, a, b, b) with ids "id/0" ... "id/n-1"."""
        if n < 1:
            raise ValueError(f"repeat({n}): at least 1")
        index = torch.arange(len(self)).repeat_interleave(n)
        return self._take(index, [f"{row}/{k}" for row in self.row_ids for k in range(n)])

    def chunk(self, n: int) -> list[DataProto]:
        """n parts in order whose sizes differ by at most one (some are empty when n > N)."""
        if n < 1:
            raise ValueError(f"chunk({n}): at least 1 part")
        small, extra = divmod(len(self), n)
        return self._cut([small + (i < extra) for i in range(n)])

    def split(self, num_rows: int) -> list[DataProto]:
        """Parts of num_rows rows in order; the last may be shorter."""
        if num_rows < 1:
            raise ValueError(f"split({num_rows}): at least 1 row a part")
        return self._cut([min(num_rows, len(self) - first) for first in range(0, len(self), num_rows)])

    def _cut(self, sizes: Sequence[int]) -> list[DataProto]:
        bounds = np.cumsum([0, *sizes]).tolist()
        return [self.rows(torch.arange(a, b)) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]

    @classmethod
    def concat(cls, batches: Sequence[DataProto]) -> DataProto:
        """Rows of all tables in order; metrics are merged. Stored columns stay where they are.

        Errors: no table, different columns or values, meta of one name that differs, a row id in two tables.
        """
        if not batches:
            raise ValueError("concat of no batches")
        first = batches[0]
        for other in batches[1:]:
            if set(first.names) != set(other.names) or set(first.value_names) != set(other.value_names):
                raise ValueError(
                    f"concat of different tables: {sorted([*first.names, *first.value_names])} "
                    f"and {sorted([*other.names, *other.value_names])}"
                )
            check_same_where_both("meta", first._meta, other._meta)
        return cls(
            {name: concat_parts([batch._columns[name] for batch in batches], name) for name in first.names},
            values={name: [x for batch in batches for x in batch._values[name]] for name in first.value_names},
            meta={name: x for batch in batches for name, x in batch._meta.items()},
            metrics=merge_metrics(batch._metrics for batch in batches),
            row_ids=[row for batch in batches for row in batch._row_ids],
        )

    def pad_to_multiple(self, k: int) -> DataProto:
        """Copies of the last row until the number of rows is a multiple of k; ``unpad`` removes them again."""
        if k < 1:
            raise ValueError(f"pad_to_multiple({k}): at least 1")
        missing = -len(self) % k
        if missing and not len(self):
            raise ValueError("an empty batch has no row to pad with")
        index = torch.cat([torch.arange(len(self)), torch.full((missing,), len(self) - 1, dtype=torch.int64)])
        return self._take(
            index, [*self.row_ids, *(f"{PAD}{self.row_ids[-1]}/{i}" for i in range(missing))], self._metrics
        )

    def unpad(self) -> DataProto:
        """Without the rows that ``pad_to_multiple`` added, wherever they are now."""
        return self.filter([not row.startswith(PAD) for row in self.row_ids]).with_metrics(self._metrics)

    def minibatches(self, prompts: int, seed: tuple[int, ...], shuffle: bool = True) -> list[DataProto]:
        """Cut into parts of that many prompts (last one shorter), all samples of a prompt together.

        Prompts are told apart by values["prompt_id"]. With shuffle their order is drawn from the seed alone, whatever
        the order of rows; without, they come as in the table. Rows inside a part keep the table's order. Each part's
        meta gets num_rows_global and, where there is a column response_ids, num_tokens_global: the denominators of
        losses, which therefore do not depend on how the part is divided afterwards.
        """
        parts = []
        for rows in cut_by_prompt([str(prompt) for prompt in self.values["prompt_id"]], prompts, seed, shuffle):
            part = self.rows(rows)
            meta = {"num_rows_global": len(part)}
            if "response_ids" in part:
                meta["num_tokens_global"] = int(part.lengths("response_ids").sum())
            parts.append(part.with_meta(**meta))
        return parts

    # Other forms

    def to(self, device: torch.device | str) -> DataProto:
        """All columns read and moved to the device."""
        return self._with(columns={name: self[name].to(device) for name in self.names})

    def to_tensordict(self) -> Any:
        """A TensorDict of batch size [N]: ragged columns as jagged nested tensors; values, meta, metrics, ids as non-tensors."""
        from flowrl.protocol.tensordicts import to_tensordict

        return to_tensordict(self)

    @classmethod
    def from_tensordict(cls, table: Any) -> DataProto:
        """The inverse of ``to_tensordict``; tables made elsewhere get default row ids."""
        from flowrl.protocol.tensordicts import from_tensordict

        return from_tensordict(table)

    def __getstate__(self) -> dict[str, Any]:
        """Local columns travel as numpy arrays, which a pickle can hand over without copying. Cached reads do not."""
        self._settle()
        state = dict(self.__dict__)
        state["_columns"] = {name: pack(column) for name, column in self._columns.items()}
        state["_read"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._columns = {name: unpack(column) for name, column in state["_columns"].items()}
