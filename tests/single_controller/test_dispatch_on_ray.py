"""The three dispatch kinds on warm processes."""

from __future__ import annotations

import pytest
import torch
from roles import Echo

from flowrl.protocol import DataProto, Ragged
from flowrl.single_controller import WorkerGroup


def batch_of(lengths: list[int]) -> DataProto:
    rows = [[i + 1] * length for i, length in enumerate(lengths)]
    return DataProto({"x": Ragged.from_rows(rows, torch.int64)}, values={"tag": [f"row{i}" for i in range(len(rows))]})


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
@pytest.mark.parametrize("method", ["double", "double_balanced"])
def test_any_number_of_rows_comes_back_in_input_order(pool, num_rows, method):
    """BAT-01, PAR-03: odd sizes, slices without rows, balanced or not: every output belongs to its row."""
    echo = WorkerGroup.spawn(pool(2), Echo)
    batch = batch_of([(5 * i) % 4 for i in range(num_rows)])
    result = getattr(echo, method)(batch)
    assert result.row_ids == batch.row_ids
    assert [row.tolist() for row in result["doubled"].rows()] == [(row * 2).tolist() for row in batch["x"].rows()]
    assert result.values["name"] == [f"row{i}!" for i in range(num_rows)]
    assert result.metrics["tokens"].value == len(batch["x"].values)


def test_roles_know_their_place_in_init_and_share_a_process(pool):
    pair = pool(2)
    first, second = WorkerGroup.spawn(pair, Echo, name="first"), WorkerGroup.spawn(pair, Echo, 2, name="second")
    assert first.facts() == [(0, 2, "warm2"), (1, 2, "warm2")]
    assert first.calls_other(second) == second.facts()
    assert first.same_thread() == [True, True]
    assert first.world_sum(1.0) == 3.0
    assert first.apply(lambda x: x + 1, 2) == 3
    result = second.double(batch_of([1, 2, 3]))
    assert result["rank"].tolist() == [1, 1, 1], "one slice over two ranks, the last answers"
