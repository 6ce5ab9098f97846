"""Process groups by their ranks, each made once per process: training and moves ask for many of the same."""

from __future__ import annotations

from datetime import timedelta

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
