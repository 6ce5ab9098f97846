"""What a driver sees when a process dies or raises."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from roles import Echo, Faulty

from flowrl.protocol import DataProto, Ragged
from flowrl.single_controller import Cluster, ResourcePool, WorkerError, WorkerGroup
from flowrl.single_controller.blocks import liveness


@pytest.fixture()
def doomed(cluster: Cluster):
    """A pool of its own, as its processes are going to die."""
    with ResourcePool(cluster, name="doomed", devices=2, cpus_per_device=0.1) as pool:
        yield pool


def batch_of(num_rows: int) -> DataProto:
    return DataProto({"x": Ragged.from_rows([[i] for i in range(num_rows)], torch.int64)})


def test_killed_rank_is_named_within_seconds_though_its_peer_raises_first(cluster, doomed):
    """RAY-01: kill -9 in a collective: role, rank, pid, node, phase, step, signal and log; survivors are gone."""
    faulty = WorkerGroup.spawn(doomed, Faulty, name="actor")
    cluster.wait()
    start = time.monotonic()
    with cluster.phase("update", step=3):
        faulty.killed_in_collective(1)
    with pytest.raises(WorkerError) as caught:
        cluster.wait()
    assert time.monotonic() - start < 60
    error, pids = caught.value, doomed.pids
    assert (error.role, error.rank, error.pid, error.phase, error.step) == ("actor", 1, pids[1], "update", 3)
    last = str(error).splitlines()[-1]
    for part in ("actor", "rank 1", str(pids[1]), "update", "step 3", "SIGKILL", "doomed-rank1.log", error.node):
        assert part in last, last
    with pytest.raises(WorkerError) as again:
        faulty.killed_in_collective(1)
    assert again.value is error, "every further call raises the same error at once"
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_call_that_was_answered_is_not_where_a_process_died(cluster, doomed):
    """RAY-01: its answers and the death after it may be there at the same time."""
    faulty = WorkerGroup.spawn(doomed, Faulty, name="actor")
    cluster.wait()
    faulty.take_crashes(False)
    faulty.killed_in_collective(1)
    time.sleep(3)
    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        cluster.wait()
    assert (caught.value.rank, caught.value.method) == (1, "killed_in_collective")


def test_crash_is_told_from_a_kill_and_noticed_between_calls(cluster, doomed):
    """RAY-01: a segmentation fault leaves its name; a process that died between calls is noticed at the next one."""
    faulty = WorkerGroup.spawn(doomed, Faulty, name="critic")
    faulty.take_crashes(True)
    faulty.take_crashes(False)
    cluster.wait()
    os.kill(doomed.pids[0], signal.SIGSEGV)
    time.sleep(1.0)
    with pytest.raises(WorkerError, match="SIGSEGV") as caught:
        faulty.reads(batch_of(1))
        cluster.wait()
    assert (caught.value.role, caught.value.rank) == ("critic", 0)


def test_a_death_is_noticed_at_the_next_read(cluster, doomed):
    """RAY-01: reading a stored column, whoever owns it, ends with the death of any process of the run."""
    echo = WorkerGroup.spawn(doomed, Echo, name="reference")
    result = echo.double(batch_of(2).with_values(tag=["a", "b"]))
    assert result.row_ids == ("0", "1")
    os.kill(doomed.pids[1], signal.SIGKILL)
    time.sleep(1.0)
    with pytest.raises(WorkerError, match="SIGKILL"):
        result["doubled"]


@pytest.fixture()
def impatient(cluster: Cluster):
    """Two processes in which a method may run for some seconds only, a collective for more."""
    with Cluster(call_timeout_seconds=6, log_dir=cluster.log_dir) as other:
        try:
            with ResourcePool(other, name="impatient", devices=2, cpus_per_device=0.1) as pool:
                yield pool
        finally:
            liveness.check = cluster.calls.poll


def test_a_rank_that_hangs_is_named_with_the_line_it_stands_in(impatient):
    """RAY-01: not its peer, which waits for it in a collective; the logs get the stacks of all threads."""
    faulty = WorkerGroup.spawn(impatient, Faulty, name="actor")
    with impatient.cluster.phase("update", step=2):
        faulty.hangs_in_collective(1)
    with pytest.raises(
        WorkerError, match=r"no answer within cluster.call_timeout_seconds=6; ranks 1 of 2 hang"
    ) as caught:
        impatient.cluster.wait()
    error = caught.value
    assert (error.role, error.rank, error.pid, error.method, error.step) == (
        "actor", 1, impatient.pids[1], "hangs_in_collective", 2
    )  # fmt: skip
    last = str(error).splitlines()[-1]
    assert "rank 1 stands in" in last and "roles.py" in last and "in hangs_in_collective" in last
    assert "rank 0" in str(error) and "waits for its peers in" in str(error)
    assert "hangs_in_collective" in Path(impatient.process(0).log or "").read_text()


@pytest.mark.slow
def test_a_collective_that_times_out_names_the_rank_that_was_waited_for(cluster):
    """RAY-01: the waiting rank raises first; the other one is the cause."""
    with ResourcePool(cluster, name="short", devices=2, cpus_per_device=0.1, collective_timeout_seconds=5) as pool:
        faulty = WorkerGroup.spawn(pool, Faulty, name="actor")
        faulty.hangs_in_collective(0)
        with pytest.raises(WorkerError, match="rank 1 waited longer than cluster.collective_timeout_seconds") as caught:
            cluster.wait()
        assert caught.value.rank == 0 and "rank 0 stands in" in caught.value.cause


@pytest.mark.slow
def test_a_rank_whose_peers_gave_up_on_another_is_not_the_cause(cluster):
    """RAY-01: the first whose time is over closes its connections, and a peer that came later raises because of that."""
    with ResourcePool(cluster, name="late", devices=4, cpus_per_device=0.1, collective_timeout_seconds=5) as pool:
        faulty = WorkerGroup.spawn(pool, Faulty, name="actor")
        faulty.gives_up_on(3, late=1)
        with pytest.raises(WorkerError, match="waited longer than cluster.collective_timeout_seconds") as caught:
            cluster.wait()
        assert caught.value.rank == 3 and "rank 3 stands in" in caught.value.cause


def test_a_rank_that_nccl_ends_for_a_lost_peer_is_not_the_cause(cluster, doomed):
    """RAY-01: its process is aborted, and Ray tells of the peer later."""
    faulty = WorkerGroup.spawn(doomed, Faulty, name="actor")
    faulty.ended_by_nccl(1)
    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        cluster.wait()
    assert caught.value.rank == 1


def test_memory_that_one_rank_cannot_have_is_told_with_figures(doomed, cluster):
    """RAY-01: an allocation that fails: what was asked for, what the process holds, what the node has."""
    faulty = WorkerGroup.spawn(doomed, Faulty, name="actor")
    faulty.exhausts_memory(1)
    with pytest.raises(
        WorkerError, match=r"out of memory: RuntimeError: .*the process holds .* GiB.*the node has"
    ) as caught:
        cluster.wait()
    assert caught.value.rank == 1 and "68719476736 bytes" in caught.value.cause


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("reads", ["Faulty", "reads", "'advantages'", "['x']", "MissingColumnError"]),
        ("returns_none", ["Faulty.returns_none", "-> DataProto", "NoneType"]),
        ("loses_a_row", ["Faulty.loses_a_row", "expected 3 rows", "received 2 rows"]),
    ],
)
def test_wrong_method_is_named_with_what_it_lacks(pool, method, words):
    """API-02: missing column, None, wrong row count: method, column and what is there are in the message."""
    faulty = WorkerGroup.spawn(pool(1), Faulty)
    with pytest.raises(WorkerError) as caught:
        getattr(faulty, method)(batch_of(3)).row_ids  # noqa: B018
    for word in words:
        assert word in str(caught.value)


def test_unregistered_methods_and_duplicate_names_are_refused(pool):
    """API-02: refused on the driver, before anything is sent."""
    one = pool(1)
    echo = WorkerGroup.spawn(one, Echo)
    with pytest.raises(AttributeError, match="not_registered is not registered.*callable are"):
        echo.not_registered()
    with pytest.raises(AttributeError, match="no method 'missing'"):
        echo.missing()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="has a role 'Echo' already"):
        WorkerGroup.spawn(one, Echo)
    with pytest.raises(ValueError, match="there is a pool 'warm1' already"):
        ResourcePool(one.cluster, name="warm1")
    assert echo.facts() == [(0, 1, "warm1")]
