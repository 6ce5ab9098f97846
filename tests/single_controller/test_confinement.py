"""Who can reach a local cluster: its own processes, over the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import psutil
import ray

from flowrl.single_controller import Cluster, ResourcePool
from tests.sockets import listening_beyond_loopback


def test_nothing_of_a_local_cluster_listens_beyond_loopback(
    cluster: Cluster, pool: Callable[[int], ResourcePool]
) -> None:
    """Ray's servers, its agents and workers, the pool's store, gloo: with a network interface up."""
    processes = pool(2)
    mark = f"FLOWRL_CLUSTER={cluster._temp_dir}"
    assert len(processes.pids) == 2
    assert listening_beyond_loopback(mark, os.getpid()) == []


def test_a_local_cluster_refuses_who_does_not_have_its_token(
    cluster: Cluster, pool: Callable[[int], ResourcePool]
) -> None:
    """Loopback is open to every user of the machine, and who may submit work runs code as the user of the run."""
    assert "RAY_AUTH_TOKEN" not in os.environ
    address = ray.get_runtime_context().gcs_address
    environment = dict(psutil.Process(pool(1).pids[0]).environ())
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": environment["RAY_AUTH_TOKEN"]}
    knock = f"from ray._raylet import GcsClient; GcsClient(address={address!r}); print('inside')"
    for variables, enters in (
        (token, True),
        (token | {"RAY_AUTH_TOKEN": "0" * 64}, False),
        ({"RAY_AUTH_MODE": "disabled"}, False),
    ):
        stranger = subprocess.run(
            [sys.executable, "-c", knock], capture_output=True, text=True, timeout=120, env=os.environ | variables
        )
        assert (stranger.stdout == "inside\n") is enters, stranger.stderr[-2000:]
        assert enters or "uthenticat" in stranger.stderr, stranger.stderr[-2000:]
