"""What is left after a failure, and what another attempt gets."""

from __future__ import annotations

import time
from functools import partial

import psutil
import pytest
from roles import Echo, Faulty

from flowrl.session import Session
from flowrl.single_controller import Cluster, ResourcePool, WorkerError, WorkerGroup


def test_another_attempt_gets_idle_pools_with_their_processes_and_new_ones_for_the_dead(cluster: Cluster) -> None:
    start = {
        name: partial(ResourcePool, cluster, name=name, devices=1, cpus_per_device=0.1) for name in ("works", "idles")
    }
    with Session() as session:
        works, idles = (session.pool(name, make) for name, make in start.items())
        assert session.pool("idles", start["idles"]) is idles
        faulty = WorkerGroup.spawn(works, Faulty, name="actor")
        WorkerGroup.spawn(idles, Echo, name="rollout")
        cluster.wait()
        faulty.killed_in_collective(0)
        with pytest.raises(WorkerError):
            cluster.wait()
        before = {works.name: works.pids, idles.name: idles.pids}
        assert session.recover() == ["idles"]
        assert not any(map(psutil.pid_exists, before["works"])), "it holds its device until it is gone"

        again = [session.pool(name, make) for name, make in start.items()]
        assert again[0] is not works and again[1] is idles and idles.pids == before["idles"]
        echoes = [WorkerGroup.spawn(pool, Echo, name="actor") for pool in again]
        assert [echo.world_sum(2.0) for echo in echoes] == [2.0, 2.0]
    assert idles._closed and again[0]._closed, "the session ends what it has made"


def test_a_pool_that_cannot_fit_waits_where_nodes_may_come_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RAY-04: else it is refused at once."""
    make = partial(ResourcePool, cluster, name="large", devices=1, cpus_per_device=1e6, placement_timeout_seconds=2)
    with pytest.raises(ValueError, match="there is room for 0"):
        make()
    monkeypatch.setattr(cluster, "awaits_nodes", True)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="there is room for 0"):
        make()
    assert time.monotonic() - begun >= 2
