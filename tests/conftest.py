"""Fixtures that are paid once a session: one Ray, and warm pools whose processes keep their imports.

`pool(devices)` gives the warm pool of that size, with every earlier role closed. Tests that kill or break a process
use `pool(1)` where they can: a broken pool is replaced, which costs its start-up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from flowrl.single_controller import Cluster, ResourcePool, WorkerGroup

# No deadline: two cores shared with worker processes make single examples slow without meaning anything.
settings.register_profile("flowrl", deadline=None, max_examples=50)
settings.load_profile("flowrl")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        address="local", log_dir=tmp_path_factory.mktemp("worker-logs"), object_store_bytes=256 << 20
    ) as started:
        yield started


@pytest.fixture(scope="session")
def warm_pools(cluster: Cluster) -> dict[int, ResourcePool]:
    return {}


@pytest.fixture()
def pool(cluster: Cluster, warm_pools: dict[int, ResourcePool]) -> Iterator[Callable[[int], ResourcePool]]:
    """`pool(devices)`: the session's pool of 1, 2 or 4 CPU processes, without roles."""
    used: list[ResourcePool] = []

    def get(devices: int) -> ResourcePool:
        if devices not in warm_pools or warm_pools[devices].failed:
            warm_pools[devices] = ResourcePool(
                cluster,
                name=f"warm{devices}",
                devices=devices,
                # Little, so that all sizes live side by side on any machine.
                cpus_per_device=0.1,
                collective_timeout_seconds=60,
            )
        used.append(warm_pools[devices])
        return warm_pools[devices]

    yield get
    for one in used:
        if not one.failed:
            WorkerGroup.close_all(one)
