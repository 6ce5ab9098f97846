"""The ranks that carry out moves together: those of the default group, or those of two pools that joined."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flowrl.resharding.process_groups import close_group, default_store, group_over, process_group
from flowrl.resharding.waiting import give_up, wait_for

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class World:
    """`names` are those of the ranks in messages. `everyone` is the group of all, `make` makes one of some of them.

    `opened`: groups that end with this world; others live as long as the process. Tensors lie on `device`.
    """

    rank: int
    names: tuple[str, ...]
    device: torch.device
    store: Any
    everyone: dist.ProcessGroup
    make: Callable[[Ranks], dist.ProcessGroup | None]
    opened: list[dist.ProcessGroup]

    @property
    def size(self) -> int:
        return len(self.names)

    def groups(self, wanted: Iterable[Ranks]) -> dict[Ranks, dist.ProcessGroup]:
        """Groups of this rank by their ranks, ascending. Collective: all ranks ask for all groups in one order."""
        found: dict[Ranks, dist.ProcessGroup | None] = {tuple(range(self.size)): self.everyone}
        for ranks in wanted:
            if ranks not in found:
                found[ranks] = self.make(ranks)
        return {ranks: group for ranks, group in found.items() if group is not None}

    def wait(self, work: Any, what: str) -> None:
        """Wait for an asynchronous collective. Error: as `broken`, on all ranks within seconds of a death."""
        try:
            wait_for(work, self.device, self.store)
        except RuntimeError as error:
            raise self.broken(what, error) from error

    def broken(self, what: str, error: RuntimeError) -> RuntimeError:
        """The error of this rank in `what`, told to the others too."""
        message = f"{self.names[self.rank]}: {what} failed, because a rank has died or given up: {error}"
        give_up(message, self.store)
        return RuntimeError(message)

    def all_reduce(self, tensor: torch.Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """`tensor`, reduced in place over all ranks. Collective. Error: as `wait`."""
        try:
            work = dist.all_reduce(tensor, op, self.everyone, async_op=True)
        except RuntimeError as error:
            raise self.broken(what, error) from error
        self.wait(work, what)
        return tensor

    def gather(self, value: object, what: str) -> list[Any]:
        """What every rank gave, by rank; it is pickled, so let it be small. Collective. Error: as `wait`."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(mine)
        stops = self.all_reduce(sizes, what).cumsum(0).tolist()
        starts = [0, *stops[:-1]]
        joined = torch.zeros(stops[-1], dtype=torch.uint8, device=self.device)
        joined[starts[self.rank] : stops[self.rank]] = mine.to(self.device)
        parts = self.all_reduce(joined, what).cpu().numpy()
        return [pickle.loads(parts[start:stop].tobytes()) for start, stop in zip(starts, stops, strict=True)]

    def close(self) -> None:
        """End the groups that this world opened."""
        while self.opened:
            close_group(self.opened.pop())


def default_world(device: torch.device) -> World:
    """The ranks of the default group."""
    everyone = dist.group.WORLD
    assert everyone is not None, "torch.distributed is initialised"
    names = tuple(f"rank {rank}" for rank in range(dist.get_world_size()))
    return World(dist.get_rank(), names, device, default_store(), everyone, process_group, [])


def join_world(
    store: Any, pools: Sequence[tuple[str, int]], rank: int, *, device: torch.device, timeout_seconds: float
) -> World:
    """The ranks of several pools, (name, number of ranks) each, one pool after another; `rank` counts over all.

    They share `store` and no default group. Collective over all of them.

    Error: `RuntimeError` with the pools' names where one of their ranks does not come within the timeout.
    """
    names = tuple(f"rank {number} of pool {name}" for name, size in pools for number in range(size))
    opened: list[dist.ProcessGroup] = []
    timeout = timedelta(seconds=timeout_seconds)

    def make(ranks: Ranks) -> dist.ProcessGroup:
        try:
            group = group_over(store, ranks, rank, device=device, timeout=timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"{names[rank]}: not all of {', '.join(names[member] for member in ranks)} joined for moving weights within "
                f"cluster.collective_timeout_seconds={timeout_seconds:g}: {error}"
            ) from error
        opened.append(group)
        return group

    everyone = make(tuple(range(len(names))))

    return World(rank, names, device, store, everyone, lambda ranks: make(ranks) if rank in ranks else None, opened)
