"""The three dispatch kinds on warm processes."""

from __future__ import annotations

import time

import pytest
import torch
from roles import Circle, CircleBesideMore, Echo, Meeting

from flowrl.protocol import DataProto, Ragged
from flowrl.single_controller import WorkerGroup
from flowrl.single_controller.worker import libraries


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


def test_a_call_with_a_role_of_another_pool_runs_on_both_over_one_link(pool):
    """Ranks count over both pools; the link stays the same; on one pool the role itself arrives."""
    giver, taker = WorkerGroup.spawn(pool(1), Meeting, name="giver"), WorkerGroup.spawn(pool(2), Meeting, name="taker")
    pools = (("warm1", 1), ("warm2", 2))
    for _ in range(2):
        assert taker.take(giver) == [(1, pools, "hello", 1), (2, pools, "hello", 1)]
    neighbour = WorkerGroup.spawn(pool(2), Meeting, name="neighbour")
    assert taker.take(neighbour) == [("here", 0), ("here", 1)]
    with pytest.raises(AttributeError, match="Meeting has no method 'missing'"):
        taker.take_from_nobody(giver)
    with pytest.raises(ValueError, match="role 'giver' lives on pool 'warm1'.*registered with a partner work across"):
        WorkerGroup.spawn(pool(2), Echo).calls_other(giver)


def test_a_closed_role_is_freed_whoever_froze_it_and_its_libraries_were_there_before_it(pool, tmp_path):
    """Engines freeze what exists, so that collections pass over it. The first role is frozen by the second, the second by
    itself, the third by nobody when it is closed, and the fourth with what is left when the first is closed."""
    roles = {
        name: WorkerGroup.spawn(pool(2), Circle, str(tmp_path / name), freezes=name == "itself", name=name)
        for name in ("earlier", "itself", "later", "left")
    }
    assert roles["earlier"].imported() == [[True], [True]]
    there = {f"{name}.{rank}" for name in roles for rank in (0, 1)}
    for name in ("later", "earlier", "itself", "left"):
        assert {file.name for file in tmp_path.iterdir()} == there
        roles[name].close()
        there -= {f"{name}.0", f"{name}.1"}
    assert list(tmp_path.iterdir()) == []


def test_what_a_role_has_let_go_is_not_frozen_with_the_libraries_of_the_next(pool, tmp_path):
    first = WorkerGroup.spawn(pool(1), Circle, str(tmp_path / "first"), lets_go=True, name="first")
    assert first.imported() == [[True]]
    second = WorkerGroup.spawn(pool(1), CircleBesideMore, str(tmp_path / "second"))
    assert second.imported() == [[True]]
    assert [file.name for file in tmp_path.iterdir()] == ["second.0"]


def test_libraries_are_those_of_a_class_and_its_parents():
    assert libraries(CircleBesideMore) == ["flowrl.workers.export", "mailbox"]
    for wrong in ("json", ("json", 3), {"json"}, None):
        with pytest.raises(ValueError, match=r"Wrong.libraries=.* is no tuple of module names, such as \('json',\)"):
            libraries(type("Wrong", (Circle,), {"libraries": wrong}))


def test_calls_are_asynchronous_in_order_and_timed_by_phase(pool):
    cluster = pool(2).cluster
    echo = WorkerGroup.spawn(pool(2), Echo)
    cluster.wait()
    cluster.spans()
    start = time.monotonic()
    with cluster.phase("rest", step=7):
        echo.sleep(3.0)
        batch = echo.double(batch_of([1, 2]))
    assert time.monotonic() - start < 3.0, "nothing was read yet"
    assert len(batch) == 2 and time.monotonic() - start >= 3.0
    first, second = cluster.spans()
    assert (first.phase, first.step, first.role, first.method) == ("rest", 7, "Echo", "sleep")
    assert first.end - first.start >= 0.6 and first.end <= second.start + 0.1


def test_stored_columns_move_between_roles_without_the_driver(pool):
    echo = WorkerGroup.spawn(pool(2), Echo)
    batch = batch_of([3, 1, 2])
    batch = batch.union(echo.double(batch))
    part = batch.repeat(2).rows([5, 0, 3]).select("doubled", "tag")
    again = echo.double(
        DataProto({"x": part.columns["doubled"]}, values={"tag": part.values["tag"]}, row_ids=part.row_ids)
    )
    assert [row.tolist() for row in again["doubled"].rows()] == [[12, 12], [4, 4, 4], [8]]
    assert again.values["name"] == ["row2!", "row0!", "row1!"]


def test_wrong_calls_are_refused_before_anything_is_sent(pool):
    """BAT-01: no rows, no batch, a foreign or nested role: an error on the driver, and the pool stays usable."""
    echo = WorkerGroup.spawn(pool(2), Echo)
    other = WorkerGroup.spawn(pool(1), Echo, name="elsewhere")
    with pytest.raises(ValueError, match="batch of 0 rows"):
        echo.double(batch_of([]))
    with pytest.raises(ValueError, match="got no DataProto"):
        echo.double(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'elsewhere' lives on pool 'warm1'"):
        echo.calls_other(other)
    with pytest.raises(ValueError, match="lies inside an argument"):
        echo.calls_other([echo])  # type: ignore[arg-type]
    echo.close()
    with pytest.raises(ValueError, match="'Echo' is closed"):
        echo.facts()
    assert other.facts() == [(0, 1, "warm1")]
