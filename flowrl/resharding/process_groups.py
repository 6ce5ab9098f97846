"""Process groups by their ranks, and the parts of torch.distributed that are private (read in torch 2.11 and 2.13).

Training and moves ask for many of the same groups, so each is made once per process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def process_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of these ranks, ascending. All ranks of the world must ask for all groups in one order."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks), timeout=_timeout())
    return _groups[ranks]


def _timeout() -> timedelta:
    """How long the default group waits: new groups would take the backend's default instead."""
    device = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    timeout: timedelta = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device)).options._timeout
    return timeout


def default_store() -> Any:
    """The store over which the default group met."""
    return dist.distributed_c10d._get_default_store()


def group_over(
    store: Any, ranks: Sequence[int], rank: int, *, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """A group of processes that need not share a default group, for tensors on `device`. Collective over its members.

    `ranks`, ascending, and this process' own `rank` count within all who use the store. `dist.new_group` knows the
    ranks of the default group only, and where that is bound to a GPU torch's own helper would split its communicator.

    Error: `RuntimeError` where a member does not come within the timeout.
    """
    place, size = ranks.index(rank), len(ranks)
    own = dist.PrefixStore(  # type: ignore[attr-defined]
        f"group {','.join(map(str, ranks))}", store
    )
    group = dist.ProcessGroup(own, place, size)
    backend: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.global_ranks_in_group = timeout, list(ranks)
        kind, backend = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(own, place, size, options)
    else:
        kind, backend = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(own, place, size, timeout=timeout)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    # What translates the ranks that `dist.broadcast` and its like are given.
    dist.distributed_c10d._world.pg_group_ranks[group] = {member: number for number, member in enumerate(ranks)}
    return group


def close_group(group: dist.ProcessGroup) -> None:
    """Give up the connections of a group made by `group_over`."""
    del dist.distributed_c10d._world.pg_group_ranks[group]
    group.shutdown()
