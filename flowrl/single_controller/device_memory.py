"""What a call did to its GPU's memory: read before and after, without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. `peak`: most that torch's allocator had handed out at once during the call; `allocated` and `reserved`: what
    it hands out, and has taken from the device, at the end; `free`: of the device at the end, whoever has the rest;
    `pinned`: host memory that the process has pinned. What sleeps counts for nothing, though torch's allocator knows it."""

    peak: int
    allocated: int
    reserved: int
    free: int
    pinned: int

    @staticmethod
    def worst(found: Iterable[DeviceMemory]) -> DeviceMemory | None:
        """Largest of each over ranks or calls, and least of what is free; None of none."""
        each = list(found)
        if not each:
            return None
        return DeviceMemory(
            peak=max(one.peak for one in each),
            allocated=max(one.allocated for one in each),
            reserved=max(one.reserved for one in each),
            free=min(one.free for one in each),
            pinned=max(one.pinned for one in each),
        )


@dataclass
class _Asleep:
    """Bytes of this process that the allocator counts and the device does not hold: now, and when the call began."""

    now: int = 0
    before: int = 0


_asleep = _Asleep()


def note_asleep(num_bytes: int) -> None:
    """An engine went to sleep or woke: so many bytes of this process have no memory now."""
    _asleep.now = num_bytes


def begin(device: torch.device) -> None:
    """A call begins: its peak counts from here."""
    _asleep.before = _asleep.now
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read(device: torch.device) -> DeviceMemory | None:
    """At the end of a call; None on a CPU."""
    if device.type != "cuda":
        return None
    return DeviceMemory(
        peak=torch.cuda.max_memory_allocated(device) - min(_asleep.before, _asleep.now),
        allocated=torch.cuda.memory_allocated(device) - _asleep.now,
        reserved=torch.cuda.memory_reserved(device) - _asleep.now,
        free=torch.cuda.mem_get_info(device)[0],
        pinned=torch.cuda.host_memory_stats()["allocated_bytes.current"],
    )
