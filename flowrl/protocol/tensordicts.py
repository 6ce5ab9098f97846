"""DataProto to and from tensordict, apart because importing tensordict takes seconds that workers need not spend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from flowrl.protocol.columns import Column, Ragged

if TYPE_CHECKING:
    from flowrl.protocol.table import DataProto

_IDS, _META, _METRICS = "row_ids", "_meta", "_metrics"


def to_tensordict(batch: DataProto) -> Any:
    """Dense columns as they are, ragged ones as nested tensors (layout jagged), the rest as non-tensor entries."""
    entries: dict[str, Any] = {}
    for name in batch.names:
        column = batch[name]
        if isinstance(column, Ragged):
            offsets = column.offsets.to(column.values.device)
            column = torch.nested.nested_tensor_from_jagged(column.values, offsets)
        entries[name] = column
    for name in batch.value_names:
        entries[name] = NonTensorStack(*batch.values[name]) if len(batch) else NonTensorData([])
    entries[_IDS] = NonTensorStack(*batch.row_ids) if len(batch) else NonTensorData([])
    entries[_META] = NonTensorData(dict(batch.meta))
    entries[_METRICS] = NonTensorData(dict(batch.metrics))
    return TensorDict(entries, batch_size=[len(batch)])


def from_tensordict(table: Any) -> DataProto:
    """Errors: ValueError when the TensorDict has no batch dimension."""
    from flowrl.protocol.table import DataProto

    if len(table.batch_size) < 1:
        raise ValueError("a TensorDict needs a batch dimension [N] to become a batch of N rows")
    columns: dict[str, Column] = {}
    values: dict[str, Any] = {}
    names = list(table.keys())
    for name in names:
        entry = table.get(name)
        if isinstance(entry, torch.Tensor):
            columns[name] = _from_nested(entry) if entry.is_nested else entry
        elif name not in (_META, _METRICS):
            values[name] = entry.tolist() if len(table) else []
    row_ids = values.pop(_IDS, None)
    return DataProto(
        columns,
        values=values,
        meta=table.get(_META).data if _META in names else None,
        metrics=table.get(_METRICS).data if _METRICS in names else None,
        row_ids=row_ids,
    )


def _from_nested(nested: Any) -> Ragged:
    if nested.layout != torch.jagged:
        return Ragged.from_rows(list(nested.unbind()))
    return Ragged(nested.values(), nested.offsets().cpu())
