"""What several attempts at one run have in common: signals, the Ray cluster, and pools of processes that still stand."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from flowrl.signals import StopRequest
from flowrl.single_controller import Cluster, ResourcePool, WorkerError, WorkerGroup

GONE_SECONDS = 60.0
"""Limit on waiting for the end of killed processes, and for Ray to know of a lost node; then it is tried as it is."""


class Session:
    """A context manager that ends the pools and the cluster. `stop`: what signals ask of the run."""

    def __init__(self) -> None:
        self.stop = StopRequest()
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._pools: dict[str, ResourcePool] = {}

    def cluster(self, make: Callable[[], Cluster]) -> Cluster:
        """The cluster, made by the first who asks."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(make())
        return self._cluster

    def pool(self, name: str, make: Callable[[], ResourcePool]) -> ResourcePool:
        """The pool of this name, made by the first who asks."""
        if name not in self._pools:
            self._pools[name] = self._stack.enter_context(make())
        return self._pools[name]

    def recover(self) -> list[str]:
        """After a failure: makes room for another attempt. Returns the names of the pools whose processes go on.

        They have lost their roles. Those that were at work are gone, since they may have waited for a dead one.
        """
        for name, pool in list(self._pools.items()):
            if not _cleared(pool):
                # Memory of a device is free when the process is gone, whatever Ray says of it before.
                pool.wait_until_gone(GONE_SECONDS)
                del self._pools[name]
        if self._cluster is not None:
            self._cluster.awaits_nodes = True
            deadline = time.monotonic() + GONE_SECONDS
            # Ray would place processes on a node that it does not know to be lost.
            while self._cluster.lost_nodes() and time.monotonic() < deadline:
                time.sleep(1)
        return list(self._pools)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _cleared(pool: ResourcePool) -> bool:
    """Whether a pool stands, now without roles."""
    try:
        WorkerGroup.close_all(pool)
    except WorkerError:
        return False
    return not pool.failed
