"""Links: a store over which the processes of two pools meet, each pool having a process group of its own."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_CONNECT_SECONDS = 60


def open_store(host: str, num_processes: int) -> Any:
    """A store at a port of `host` that the system picks, bound from then on, so that no one can take it in between.

    It listens on that address alone: a store answers anybody who reaches it.
    """
    import torch.distributed as dist

    listening = socket.create_server((host, 0), backlog=num_processes)
    port, timeout = listening.getsockname()[1], timedelta(seconds=_CONNECT_SECONDS)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, num_processes, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def connect_store(host: str, port: int) -> Any:
    """A store that another process opened."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_SECONDS))  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Link:
    """What the methods of a paired call get in the place of the other role; the same object at every call.

    `pools`: name and number of processes of both, in one order everywhere; `rank` is this process' among all of them.
    `store` is a `torch.distributed.TCPStore` that nobody else uses.
    """

    pools: tuple[tuple[str, int], ...]
    rank: int
    store: Any
    timeout_seconds: float


@dataclass(frozen=True)
class LinkArgument:
    """Stands for a link of `roles` in a message to a pool; `first` is the rank, among all, of that pool's rank 0."""

    roles: tuple[tuple[str, str], ...]
    host: str
    port: int
    pools: tuple[tuple[str, int], ...]
    first: int


class Links:
    """The links of one process."""

    def __init__(self) -> None:
        self._hosted: dict[int, Any] = {}
        self._found: dict[LinkArgument, Link] = {}

    def host(self, host: str, num_processes: int) -> int:
        """Open a store at an address of this node; the result is its port."""
        store = open_store(host, num_processes)
        self._hosted[int(store.port)] = store
        return int(store.port)

    def find(self, argument: LinkArgument, rank: int, timeout_seconds: float) -> Link:
        """The link for process `rank` of its pool, connected at the first call."""
        if argument not in self._found:
            # Ports are told apart by pool: rank 0 of the first pool alone has opened one.
            own = self._hosted.get(argument.port) if argument.first == rank == 0 else None
            store = own or connect_store(argument.host, argument.port)
            store.set_timeout(timedelta(seconds=timeout_seconds))
            self._found[argument] = Link(argument.pools, argument.first + rank, store, timeout_seconds)
        return self._found[argument]

    def drop(self, pool: str, role: str) -> None:
        """Let go of the links of a role that is gone."""
        for argument in [each for each in self._found if (pool, role) in each.roles]:
            del self._found[argument]
            self._hosted.pop(argument.port, None)
